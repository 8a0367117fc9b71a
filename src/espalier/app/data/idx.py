"""MNIST and Fashion-MNIST: images and labels in IDX files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from espalier.app.data.base import Data
from espalier.app.data.images import Labelled, Scale, SmallImages, image_data
from espalier.app.data.source import NoOptions, parse
from espalier.app.errors import Problem

SIZE = 28
# MNIST's; the paper uses them for Fashion-MNIST too
MEAN, SD = 0.1307, 0.3081
CHUNK = 1 << 20  # bytes that are unpacked at once
FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


@dataclass(frozen=True)
class Idx(SmallImages):
    """A set of grey 28 × 28 images in four IDX files."""

    def missing(self, directory: Path) -> list[str]:
        return [name for name in FILES if _spelt(directory, name) is None]

    def read(self, directory: Path, device: torch.device, options: Mapping[str, Any]) -> Data:
        train, test = (read_split(directory, part, self.classes) for part in ("train", "t10k"))
        return self.build(train, test, device, options, str(directory))

    def build(
        self, train: Labelled, test: Labelled, device: torch.device, options: Mapping[str, Any], source: str
    ) -> Data:
        parse(NoOptions, options, self.name)
        return image_data(train, test, Scale.of((MEAN,), (SD,), device), classes=self.classes, source=source)


def read_split(directory: Path, part: str, classes: int) -> Labelled:
    """Images and labels of one part, checked against one another."""
    image_file, label_file = (
        _spelt(directory, f"{part}-{kind}-ubyte") or directory / f"{part}-{kind}-ubyte"
        for kind in ("images-idx3", "labels-idx1")
    )
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if images.shape[1:] != (SIZE, SIZE):
        raise Problem(f"{image_file} holds images of {images.shape[1]} × {images.shape[2]}, expected {SIZE} × {SIZE}")
    if len(images) != len(labels):
        raise Problem(
            f"{image_file} holds {len(images)} images but {label_file} {len(labels)} labels: fetch both again"
        )
    check_labels(label_file, labels, classes)
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels).long()


def read_idx(path: Path, dimensions: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of one IDX file as an array with so many dimensions."""
    try:
        with path.open("rb") as file, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file as content:
            return _array(path, content, dimensions)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Problem(
            f"{path} ({path.stat().st_size} bytes) cannot be unpacked: {error}. It is truncated or damaged, "
            "fetch it again"
        ) from None


def _array(path: Path, file: IO[bytes] | gzip.GzipFile, dimensions: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    head = 4 + 4 * dimensions
    magic = bytes([0, 0, 8, dimensions])
    begin = file.read(head)
    if begin[:4] != magic:
        raise Problem(
            f"{path} begins with {begin[:4].hex(' ')}, expected the magic number {magic.hex(' ')} "
            f"of IDX bytes in {dimensions} dimensions: it is not the file it is named after, fetch it again"
        )
    if len(begin) < head:
        raise Problem(f"{path} has {len(begin)} bytes, expected a head of {head}: it is truncated, fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(begin, ">u4", dimensions, offset=4))
    expected = head + math.prod(shape)
    content = _read(file, expected - head + 1)
    if head + len(content) != expected:
        word = "truncated" if head + len(content) < expected else "oversized"
        there = head + len(content) if word == "truncated" else path.stat().st_size
        has = f"{there} bytes" if word == "truncated" or path.suffix != ".gz" else "more"
        raise Problem(
            f"{path} is {word}: it has {has}, expected {expected} "
            f"by its head ({' × '.join(map(str, shape))}): fetch it again"
        )
    if shape[0] == 0:
        raise Problem(f"{path} holds no examples: fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read(file: IO[bytes] | gzip.GzipFile, most: int) -> bytearray:
    """So many bytes, or all there are: a few kB may unpack to a disk full, and a head may promise one."""
    content = bytearray()
    while len(content) < most and (part := file.read(min(CHUNK, most - len(content)))):
        content += part
    return content


def check_labels(path: object, labels: np.ndarray[Any, Any], classes: int) -> None:
    """Refuse labels that are no class, naming the first."""
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        raise Problem(
            f"{path}: the label of example {wrong[0]} is {labels[wrong[0]]}, expected 0 to {classes - 1}: "
            "it is damaged or another data set"
        )


def _spelt(directory: Path, name: str) -> Path | None:
    """The file of this name in one of the spellings that are about."""
    for base in (name, name.replace("-idx", ".idx")):
        for path in (directory / base, directory / f"{base}.gz"):
            if path.is_file():
                return path
    return None
