"""Tiny data sets in their official forms; their classes can be told apart, so a few steps of training get somewhere."""

from __future__ import annotations

import gzip
import math
import struct
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, TEST = 64, 32
RATE = 22050
TEXT = "the cat sat on a mat and then it saw some very small birds in two old trees"
WORDS = TEXT.split()

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def make(name: str, root: Path) -> Path:
    """Write the set of this name to root/<name> and return root; `digits` has no files."""
    directory = root / name
    if name != "digits" and not directory.exists():
        directory.mkdir(parents=True)
        MAKERS[name](directory)
    return root


def images(count: int, shape: tuple[int, ...], classes: int, seed: int) -> tuple[Bytes, Bytes]:
    """Noise with a bright row whose place is the class."""
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % classes).astype(np.uint8)
    pixels = generator.integers(0, 64, (count, *shape), dtype=np.uint8)
    pixels[np.arange(count), ..., labels % shape[-2], :] = 255
    return pixels, labels


def idx(array: Bytes) -> bytes:
    """An array as the content of an IDX file."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def _mnist(directory: Path) -> None:
    for part, count, seed in (("train", TRAIN, 0), ("t10k", TEST, 1)):
        pixels, labels = images(count, (28, 28), 10, seed)
        (directory / f"{part}-images-idx3-ubyte").write_bytes(idx(pixels))
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


def _fashion_mnist(directory: Path) -> None:
    _mnist(directory)
    for path in list(directory.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def _cifar10(directory: Path) -> None:
    pixels, labels = images(TRAIN, (3, 32, 32), 10, 0)
    records = np.concatenate([labels[:, None], pixels.reshape(TRAIN, -1)], axis=1)
    for number, part in enumerate(np.array_split(records, 5), start=1):
        (directory / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    pixels, labels = images(TEST, (3, 32, 32), 10, 1)
    records = np.concatenate([labels[:, None], pixels.reshape(TEST, -1)], axis=1)
    (directory / "test_batch.bin").write_bytes(records.tobytes())


def _cifar100(directory: Path) -> None:
    for part, count, seed in (("train", TRAIN, 0), ("test", TEST, 1)):
        pixels, fine = images(count, (3, 32, 32), 100, seed)
        records = np.concatenate([(fine // 5)[:, None], fine[:, None], pixels.reshape(count, -1)], axis=1)
        (directory / f"{part}.bin").write_bytes(records.tobytes())


def _imagenet(directory: Path) -> None:
    generator = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for number in range(4):
            folder = directory / part / f"n0000000{number}"
            folder.mkdir(parents=True)
            for which in range(count):
                pixels = generator.integers(0, 64, (40 + 8 * which, 56, 3), dtype=np.uint8)
                pixels[:, :, number % 3] += np.uint8(150 if number < 3 else 0)
                Image.fromarray(pixels).save(folder / f"{folder.name}_{which}.JPEG", quality=95)


def _text(directory: Path) -> None:
    for part, lines, seed in (("train", 400, 0), ("valid", 80, 1), ("test", 80, 2)):
        generator = np.random.default_rng(seed)
        # a walk: the next word is near the one before, which a model can learn
        walks = (generator.integers(0, 3, 12).cumsum() + generator.integers(len(WORDS)) for _ in range(lines))
        text = "".join(f" {' '.join(WORDS[step % len(WORDS)] for step in walk)} \n" for walk in walks)
        (directory / f"wiki.{part}.tokens").write_text(text, encoding="utf-8")


def _speech(directory: Path) -> None:
    (directory / "wavs").mkdir(exist_ok=True)
    rows = []
    for number in range(10):
        seconds = 0.3 + 0.02 * number
        times = np.arange(int(RATE * seconds)) / RATE
        tone(directory / "wavs" / f"LJ001-{number:04}.wav", 0.3 * np.sin(2 * math.pi * 200 * (1 + number % 4) * times))
        said = " ".join(WORDS[number : number + 2 + number % 3])
        rows.append(f"LJ001-{number:04}|{said} No. {number}|{said} number {number}.")
    (directory / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def tone(path: Path, samples: np.ndarray[tuple[int, ...], np.dtype[np.float64]], rate: int = RATE) -> None:
    """Samples between −1 and 1 as a WAV file of 16 bits, one channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).round().astype("<i2").tobytes())


MAKERS: dict[str, Callable[[Path], None]] = {
    "mnist": _mnist,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "imagenet": _imagenet,
    "text": _text,
    "speech": _speech,
}
