"""Batches depend on (seed, epoch) alone, tensors hold what the files hold, and each mistake gets its one line."""

from __future__ import annotations

import gzip
import math
import os
import shutil
import struct
import sys
import tracemalloc
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torch import Tensor

from espalier.app.data import SETS, Data, Order, describe, open_data
from espalier.app.data.base import split
from espalier.app.data.folder import centre_crop, resized_crop
from espalier.app.data.idx import read_idx
from espalier.app.data.images import PAD, ImageTensors, Scale, crop_and_flip
from espalier.app.data.mel import SYMBOLS, to_symbols
from espalier.app.data.text import Stream
from espalier.app.data.words import plain
from espalier.app.errors import Problem

CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {"imagenet": {"workers": 0, "size": 16}, "text": {"length": 8}}
# examples that are shuffled, that is all but text
SHUFFLED = [name for name in SETS if name != "text"]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for name in SETS:
        tiny.make(name, made)
    return made


def opened(name: str, root: Path | None, holdout: float = 0.0, hub: bool = False, **options: Any) -> Data:
    return open_data(name, root, device=CPU, hub=hub, holdout=holdout, options={**OPTIONS.get(name, {}), **options})


def same(left: list[tuple[Tensor, ...]], right: list[tuple[Tensor, ...]]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(one, other) for pair in zip(left, right, strict=True) for one, other in zip(*pair, strict=True)
    )


# --- every data set ---


@pytest.mark.parametrize("name", SETS)
def test_an_epoch_is_a_function_of_seed_and_epoch(name: str, root: Path) -> None:
    train, again = opened(name, root).train, opened(name, root).train
    state = torch.get_rng_state()
    batches = list(train.batches(4, order=Order(3, 1)))
    assert len(batches) == train.steps(4)
    assert same(batches, list(again.batches(4, order=Order(3, 1))))
    assert same(batches[2:], list(again.batches(4, order=Order(3, 1), first=2)))
    assert list(train.batches(4, order=Order(3, 1), first=train.steps(4))) == []
    assert torch.equal(state, torch.get_rng_state()), "torch's own generator must not be drawn from"
    for other in (Order(3, 2), Order(4, 1), None):
        assert same(batches, list(train.batches(4, order=other))) == (name == "text")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SETS)
def test_processes_share_each_batch(name: str, world: int, root: Path) -> None:
    train = opened(name, root).train
    order = Order(0, 0)
    whole = list(train.batches(4, order=order))[: train.steps(4, world)]
    parts = [list(train.batches(4, order=order, rank=rank, world=world)) for rank in range(world)]
    for batch, *slices in zip(whole, *parts, strict=True):
        assert all(len(each[0]) for each in slices)
        if name == "speech":  # sorted by length within each process, so the whole is a rearrangement
            joined = [sorted(torch.cat([each[which] for each in slices]).tolist()) for which in (1, 3)]
            assert joined == [sorted(batch[which].tolist()) for which in (1, 3)]
        else:
            assert same([batch], [tuple(torch.cat(each) for each in zip(*slices, strict=True))])


def test_a_last_batch_that_is_too_small_is_dropped_in_all(root: Path) -> None:
    train = opened("mnist", root).train
    # 64 = 3 · 21 + 1
    assert [train.steps(21), train.steps(21, 2), train.steps(16), train.steps(100), train.steps(62, 2)] == [
        4,
        3,
        4,
        1,
        2,
    ]
    for rank in range(2):
        sizes = [len(labels) for _, labels in train.batches(21, rank=rank, world=2)]
        assert sizes == [10 + rank] * 3
    with pytest.raises(Problem, match="batch is 2, but each of 3 processes"):
        train.steps(2, 3)


@pytest.mark.parametrize("name", SHUFFLED)
def test_an_epoch_holds_each_example_once(name: str, root: Path) -> None:
    train = opened(name, root).train
    which = 3 if name == "speech" else 1

    def seen(order: Order | None) -> list[float]:
        return [value for batch in train.batches(3, order=order) for value in batch[which].tolist()]

    assert seen(Order(0, 0)) != seen(None)
    assert sorted(seen(Order(0, 0))) == sorted(seen(None))
    assert len(seen(None)) == len(train)


@pytest.mark.parametrize("name", SHUFFLED)
def test_holdout_is_a_fixed_part_of_training(name: str, root: Path) -> None:
    data, full = opened(name, root, holdout=0.25), opened(name, root)
    count = len(full.train)
    assert len(data.test) == data.facts["test"] == round(count / 4)
    assert len(data.train) == data.facts["train"] == count - round(count / 4)
    kept, held = split(count, 0.25)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(count))
    which = 3 if name == "speech" else 1

    def values(part: Any) -> list[float]:
        return [value for batch in part.batches(1) for value in batch[which].tolist()]

    everything = values(full.train)
    assert values(data.test) == [everything[number] for number in held]
    assert values(data.train) == [everything[number] for number in kept]
    # no augmentation of what is tested on, whatever the order
    if name in ("cifar10", "imagenet"):
        plain_pixels = sorted(batch[0].sum().item() for batch in data.test.batches(1))
        assert sorted(batch[0].sum().item() for batch in data.test.batches(1, order=Order(0, 0))) == plain_pixels


def test_what_is_held_out_never_changes() -> None:
    # results tuned on it would no longer compare
    assert split(10, 0.3)[1].tolist() == [0, 1, 9]


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_holdout_out_of_range(share: float, root: Path) -> None:
    with pytest.raises(Problem, match=f"holdout is {share}"):
        opened("mnist", root, holdout=share)


def test_unknown_names_and_options(root: Path) -> None:
    with pytest.raises(Problem, match="no data set 'minst': take one of digits, mnist"):
        opened("minst", root)
    with pytest.raises(Problem, match="cifar10 has no option 'augmnt': it takes augment"):
        opened("cifar10", root, augmnt=False)
    with pytest.raises(Problem, match="mnist has no option 'augment': it takes none"):
        opened("mnist", root, augment=False)
    with pytest.raises(Problem, match=r"data.length is '8': data set text expects int"):
        opened("text", root, length="8")
    with pytest.raises(Problem, match=r"data.length is 0: data set text expects at least 1"):
        opened("text", root, length=0)


# --- small images ---


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_values(name: str, root: Path) -> None:
    data = opened(name, root)
    assert data.facts == {
        "classes": 10, "channels": 1, "size": 28, "train": 64, "test": 32, "source": str(root / name)
    }  # fmt: skip
    for part, count, seed in ((data.train, 64, 0), (data.test, 32, 1)):
        pixels, labels = tiny.images(count, (28, 28), 10, seed)
        images, classes = next(part.batches(count))
        expected = (pixels[:, None].astype(np.float64) / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(images, torch.from_numpy(expected).float(), rtol=1e-5, atol=1e-6)
        assert classes.tolist() == labels.tolist()
        assert classes.dtype == torch.int64


def test_idx_spellings(tmp_path: Path, root: Path) -> None:
    shutil.copytree(root / "mnist", tmp_path / "mnist")
    for number, path in enumerate(sorted((tmp_path / "mnist").iterdir())):
        dotted = path.rename(path.with_name(path.name.replace("-idx", ".idx")))
        if number % 2:
            dotted.with_name(f"{dotted.name}.gz").write_bytes(gzip.compress(dotted.read_bytes()))
            dotted.unlink()
    assert same(list(opened("mnist", tmp_path).test.batches(8)), list(opened("mnist", root).test.batches(8)))


@pytest.mark.parametrize(
    ("name", "classes", "mean", "sd"),
    [
        ("cifar10", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ("cifar100", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ],
)
def test_cifar_values(name: str, classes: int, mean: tuple[float, ...], sd: tuple[float, ...], root: Path) -> None:
    data = opened(name, root)
    assert (data.facts["classes"], data.facts["channels"], data.facts["size"]) == (classes, 3, 32)
    for part, count, seed in ((data.train, 64, 0), (data.test, 32, 1)):
        pixels, labels = tiny.images(count, (3, 32, 32), classes, seed)
        images, found = next(part.batches(count))
        assert found.tolist() == labels.tolist()
        for channel in range(3):
            expected = (pixels[:, channel] / 255 - mean[channel]) / sd[channel]
            torch.testing.assert_close(images[:, channel], torch.from_numpy(expected).float(), rtol=1e-5, atol=1e-6)


def test_crop_and_flip_is_what_pillow_does() -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (9, 3, 32, 32), dtype=np.uint8)
    corners = generator.integers(0, 2 * PAD + 1, (9, 2))
    corners[:2] = [[0, 0], [8, 8]]
    mirror = generator.integers(0, 2, 9).astype(bool)
    made = crop_and_flip(torch.from_numpy(images), torch.from_numpy(corners), torch.from_numpy(mirror))
    for number in range(9):
        padded = Image.new("RGB", (40, 40))
        padded.paste(Image.fromarray(images[number].transpose(1, 2, 0)), (4, 4))
        top, left = corners[number].tolist()
        cut = padded.crop((left, top, left + 32, top + 32))
        if mirror[number]:
            cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert np.array_equal(np.asarray(cut).transpose(2, 0, 1), made[number].numpy())


def test_cifar_augments_in_training_only(root: Path) -> None:
    data, plainly = opened("cifar10", root), opened("cifar10", root, augment=False)
    order = Order(0, 0)
    augmented, kept = next(data.train.batches(64, order=order)), next(plainly.train.batches(64, order=order))
    assert torch.equal(augmented[1], kept[1])
    # an image comes through untouched once in 2 · 9 · 9 times
    untouched = (augmented[0] == kept[0]).flatten(1).all(1).sum()
    assert untouched <= 4
    ordered = next(plainly.train.batches(64))
    assert torch.equal(kept[0].sum((1, 2, 3)).sort().values, ordered[0].sum((1, 2, 3)).sort().values)


def test_augmentation_uses_every_place_and_both_sides() -> None:
    # one bright pixel shows where the crop was taken
    images = torch.zeros(4000, 1, 32, 32, dtype=torch.uint8)
    images[:, :, 10, 12] = 255
    seen = an_augmented_epoch(images)
    rows, columns = seen.flatten(1).argmax(1) // 32, seen.flatten(1).argmax(1) % 32
    assert set(rows.tolist()) == set(range(6, 15))
    # column 12 + 4 − left, or mirrored 31 − that
    assert set(columns.tolist()) == {*range(8, 17), *range(31 - 16, 31 - 7)}


def an_augmented_epoch(images: Tensor) -> Tensor:
    train = ImageTensors(images, torch.zeros(len(images)).long(), Scale.of((0.0,), (1.0,), CPU), augment=True)
    return torch.cat([batch[0] for batch in train.batches(512, order=Order(0, 0))])


def test_digits_are_scikit_learns(root: Path) -> None:
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    data = opened("digits", None)
    (first, first_labels), (second, second_labels) = next(data.train.batches(1500)), next(data.test.batches(297))
    assert first.shape == (1500, 1, 8, 8)
    assert second.shape == (297, 1, 8, 8)

    def rows(images: Any, classes: Any) -> list[tuple[float, ...]]:
        return sorted((*image, label) for image, label in zip(images.tolist(), classes.tolist(), strict=True))

    together = torch.cat([first, second]).flatten(1), torch.cat([first_labels, second_labels])
    assert rows(*together) == rows(values / 16, labels)
    # mixed: the file goes through the classes in turn, the split does not
    assert not np.array_equal(first_labels.numpy(), labels[:1500])


# --- images in folders ---


def test_image_folder(root: Path) -> None:
    data = opened("imagenet", root)
    assert {key: data.facts[key] for key in ("classes", "channels", "size", "train", "test")} == {
        "classes": 4, "channels": 3, "size": 16, "train": 16, "test": 8
    }  # fmt: skip
    images, labels = next(data.test.batches(8))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    file = root / "imagenet" / "val" / "n00000002" / "n00000002_1.JPEG"
    pixels = np.asarray(centre_crop(Image.open(file), 16)) / 255
    expected = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    torch.testing.assert_close(images[5], torch.from_numpy(expected.transpose(2, 0, 1)).float(), rtol=1e-5, atol=1e-5)


def test_each_image_has_its_own_crop(root: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        folder = tmp_path / "imagenet" / part / "class"
        folder.mkdir(parents=True)
        for number in range(4):
            shutil.copy(root / "imagenet/train/n00000000/n00000000_0.JPEG", folder / f"{number}.JPEG")
    data = opened("imagenet", tmp_path)
    crops, middles = next(data.train.batches(4, order=Order(0, 0)))[0], next(data.test.batches(4))[0]
    assert len({crop.sum().item() for crop in crops}) == 4
    assert len({crop.sum().item() for crop in middles}) == 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than a small machine has cores
def test_workers_change_nothing(root: Path) -> None:
    alone, helped = opened("imagenet", root).train, opened("imagenet", root, workers=2).train
    assert same(list(alone.batches(6, order=Order(1, 1))), list(helped.batches(6, order=Order(1, 1))))


def test_crops() -> None:
    wide = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (100, 1, 3)))
    # short side 100 → 256, scale 2.56: columns 144 to 368 of 512, that is 56.25 to 143.75 of the original
    middle = np.asarray(centre_crop(wide, 224))
    assert middle.shape == (224, 224, 3)
    assert abs(int(middle[0, 0, 0]) - 56) <= 1
    assert abs(int(middle[0, -1, 0]) - 143) <= 1
    shares, mirrored = [], 0
    for seed in range(200):
        cut = np.asarray(resized_crop(wide, 32, np.random.default_rng(seed))).astype(int)
        first, last = cut[0, 0, 0], cut[0, -1, 0]
        mirrored += first > last
        shares.append(abs(last - first) / 200)
    assert 60 < mirrored < 140
    # the width of a crop: at least √(0.08 · 3/4 · 2) of the height 100, at most √(2 · 4/3) of it
    assert 0.09 < min(shares) < 0.25
    assert 0.6 < max(shares) <= math.sqrt(8 / 3) / 2
    # too narrow for any draw: the middle, as much of it as the shape allows
    narrow = Image.fromarray(np.tile(np.arange(250, dtype=np.uint8)[:, None, None], (1, 4, 3)))
    fallback = np.asarray(resized_crop(narrow, 8, np.random.default_rng(0)))
    assert 118 < fallback.mean() < 131


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(workers: int, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "imagenet", tmp_path / "imagenet")
    bad = tmp_path / "imagenet" / "val" / "n00000001" / "n00000001_0.JPEG"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(Problem) as caught:
        list(opened("imagenet", tmp_path, workers=workers).test.batches(4))
    assert str(caught.value).startswith(f"{bad} cannot be read as an image (")
    assert "\n" not in str(caught.value)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"


PIXELS = struct.pack(">I", 10) + b"IDAT" + bytes(14)


def bomb() -> bytes:
    """A PNG that says it has 4·10⁸ pixels."""
    head = struct.pack(">II5B", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + PIXELS


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "content", [POSTSCRIPT, bomb(), b"GIF89a", b"P6 10 10 99999999 "], ids=["ps", "bomb", "gif", "ppm"]
)
def test_hostile_images_are_one_line_and_run_nothing(
    content: bytes, workers: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow gives PostScript to Ghostscript, whatever the file is called."""
    ran = tmp_path / "ran"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\ntouch '{ran}'\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # to be searched for anew
    shutil.copytree(root / "imagenet", tmp_path / "imagenet")
    bad = tmp_path / "imagenet/val/n00000001/n00000001_0.JPEG"
    bad.write_bytes(content)
    with pytest.raises(Problem, match=r"n00000001_0.JPEG cannot be read as an image \(") as caught:
        list(opened("imagenet", tmp_path, workers=workers).test.batches(4))
    assert "\n" not in str(caught.value)
    assert not ran.exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_is_no_image(root: Path, tmp_path: Path) -> None:
    """It would be waited for without end."""
    shutil.copytree(root / "imagenet", tmp_path / "imagenet")
    os.mkfifo(tmp_path / "imagenet/val/n00000001/x.png")
    assert len(opened("imagenet", tmp_path).test) == len(opened("imagenet", root).test)


def test_a_gzip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    with gzip.open(path, "wb") as file:
        file.write(tiny.idx(np.zeros(9, np.uint8)))
        for _ in range(64):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(Problem, match="oversized"):
        read_idx(path, 1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# --- text ---


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return directory.parent


def test_text_is_numbered_by_frequency(tmp_path: Path) -> None:
    write(
        tmp_path / "text",
        wiki__train__tokens=" a b a \n \n b c b b \n",
        wiki__test__tokens="d a\nc",
        wiki__valid__tokens="b\n",
    )
    data = opened("text", tmp_path)
    assert data.words == ("b", "<eos>", "a", "c", "<unk>")
    assert data.facts["vocab"] == 5
    assert isinstance(data.train, Stream)
    assert isinstance(data.test, Stream)
    assert [data.words[word] for word in data.train.tokens] == [
        "a",
        "b",
        "a",
        "<eos>",
        "<eos>",
        "b",
        "c",
        "b",
        "b",
        "<eos>",
    ]
    assert [data.words[word] for word in data.test.tokens] == ["<unk>", "a", "<eos>", "c"]
    few = opened("text", tmp_path, max_words=3)
    assert isinstance(few.train, Stream)
    # <unk> now stands for a and c, three words, and ties with <eos>, which was there before
    assert few.words == ("b", "<eos>", "<unk>")
    assert [few.words[word] for word in few.train.tokens[:3]] == ["<unk>", "b", "<unk>"]
    # and here for <eos> too: six words, which makes it the most frequent
    assert opened("text", tmp_path, max_words=2).words == ("<unk>", "b")
    valid = opened("text", tmp_path, split="valid").test
    assert isinstance(valid, Stream)
    assert [data.words[word] for word in valid.tokens] == ["b", "<eos>"]
    with pytest.raises(Problem, match=r"data.split is 'train'"):
        opened("text", tmp_path, split="train")


def test_text_goes_on_in_each_column() -> None:
    stream = Stream(torch.arange(100), 8)
    # 3 columns of (100 − 1) // 3 = 33 words: 4 steps of 8 and one of 1
    assert stream.steps(3) == 5
    batches = list(stream.batches(3))
    assert [tuple(words.shape) for words, _ in batches] == [(3, 8)] * 4 + [(3, 1)]
    words = torch.cat([words for words, _ in batches], 1)
    nexts = torch.cat([nexts for _, nexts in batches], 1)
    assert words.tolist() == [list(range(33 * column, 33 * column + 33)) for column in range(3)]
    assert torch.equal(nexts, words + 1)
    assert words.dtype == torch.int64
    kept, held = stream.hold_out(0.1)
    assert isinstance(held, Stream)
    assert held.tokens.tolist() == list(range(90, 100))
    assert len(kept) == 90
    with pytest.raises(Problem, match="100 words cannot be cut into a batch of 100"):
        stream.steps(100)


def test_loose_text(tmp_path: Path) -> None:
    write(tmp_path / "text", b__txt="Two, two.\n" * 10, a__txt="One isn't\r\n_One_!\r\n\r\nEnd")
    data, lower = opened("text", tmp_path), opened("text", tmp_path, lower=True)
    assert isinstance(data.train, Stream)
    assert isinstance(data.test, Stream)
    first = ["One", "isn't", "_", "One", "_", "!", "<eos>", "End"]
    everything = [*first, *["Two", ",", "two", "."] * 10]
    # the last 5 % of 48 words: 2
    found = [data.words[word] for word in torch.cat([data.train.tokens, data.test.tokens])]
    assert found == everything
    assert (len(data.train), len(data.test)) == (46, 2)
    assert "Two" not in lower.words
    assert lower.words[0] == "two"
    assert plain("a<unk>b") == ["a", "<unk>", "b"]


def test_text_reads_a_long_file_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.app.data.words.CHUNK", 7)
    text = "".join(f"word{number % 7} and\nword{number % 3}\n\n" for number in range(40))
    write(tmp_path / "text", train__txt=text, test__txt=text)
    data = opened("text", tmp_path)
    assert isinstance(data.train, Stream)
    assert [data.words[word] for word in data.train.tokens] == text.replace("\n", " <eos> ").split()


# --- speech ---


def slaney_filters(rate: int, fft: int, mels: int, top: float) -> np.ndarray[Any, Any]:
    """Slaney's mel scale from its definition: 200/3 Hz a mel up to 1000 Hz, then 27 mels for a factor of 6.4."""
    step = math.log(6.4) / 27

    def to_hertz(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1000 * math.exp(step * (mel - 15))

    highest = 15 + math.log(top / 1000) / step
    edges = [to_hertz(highest * number / (mels + 1)) for number in range(mels + 2)]
    bins = np.arange(fft // 2 + 1) * rate / fft
    rows = []
    for low, centre, high in zip(edges, edges[1:], edges[2:], strict=False):
        triangle = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clip(0)
        rows.append(triangle * 2 / (high - low))
    return np.stack(rows)


def test_mel_spectrogram_is_what_numpy_computes(root: Path) -> None:
    data = opened("speech", root)
    text, text_lengths, mel, lengths = next(data.test.batches(1))
    assert (data.facts["mels"], data.facts["train"], data.facts["test"]) == (80, 9, 1)
    number = split(10, 0.05)[1].item()
    count = int(tiny.RATE * (0.3 + 0.02 * number))
    samples = 0.3 * np.sin(2 * math.pi * 200 * (1 + number % 4) * np.arange(count) / tiny.RATE)
    samples = (samples * 32767).round() / 32768
    padded = np.pad(samples, 512, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * math.pi * np.arange(1024) / 1024)
    frames = [padded[start : start + 1024] * window for start in range(0, count + 1, 256)]
    spectrum = np.abs(np.fft.rfft(np.stack(frames), axis=1)).T
    expected = np.log((slaney_filters(tiny.RATE, 1024, 80, 8000) @ spectrum).clip(1e-5))
    assert lengths.tolist() == [1 + count // 256] == [mel.shape[2]]
    # far from the tone a float32 spectrum is its own rounding: compare where there is sound
    loud = expected > -7
    assert loud.mean() > 0.2
    assert np.abs(mel[0].numpy() - expected)[loud].max() < 0.02
    said = (root / "speech" / "metadata.csv").read_text().splitlines()[number].split("|")[2]
    assert [SYMBOLS[symbol] for symbol in text[0]] == [*said.lower(), "<end>"]
    assert text_lengths.tolist() == [len(said) + 1]


def test_speech_batches_are_padded_and_sorted(root: Path) -> None:
    train = opened("speech", root).train
    for text, text_lengths, mel, mel_lengths in train.batches(4, order=Order(0, 0)):
        assert text_lengths.tolist() == sorted(text_lengths.tolist(), reverse=True)
        assert text.shape == (len(text_lengths), text_lengths.max())
        assert mel.shape == (len(mel_lengths), 80, mel_lengths.max())
        for row, length in zip(text, text_lengths, strict=True):
            assert row[length - 1] == SYMBOLS.index("<end>")
            assert not row[length:].any()
        for clip, length in zip(mel, mel_lengths, strict=True):
            assert clip[:, :length].any(0).all()
            assert not clip[:, length:].any()


def test_symbols() -> None:
    assert [SYMBOLS[symbol] for symbol in to_symbols("Café @9!")] == [*"cafe 9!", "<end>"]
    assert SYMBOLS[0] == "<pad>"
    assert len(set(SYMBOLS)) == len(SYMBOLS) == 2 + 12 + 26 + 10


def test_long_clips_can_be_left_out(root: Path) -> None:
    # clip n has 1 + ⌊22050 (0.3 + 0.02 n) / 256⌋ frames: 26 to 41
    data = opened("speech", root, max_frames=33)
    assert data.facts["left_out"] == sum(1 + int(22050 * (0.3 + 0.02 * n)) // 256 > 33 for n in range(10)) > 0
    assert len(data.train) + len(data.test) == 10 - data.facts["left_out"]
    with pytest.raises(Problem, match=r"0 clips of at most data.max_frames=5 frames.*the longest clip has 42"):
        opened("speech", root, max_frames=5)


# --- finding ---


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("cifar10", "cifar-10-batches-bin"),
        ("cifar100", "cifar-100-binary"),
        ("text", "wikitext-103"),
        ("speech", "LJSpeech-1.1"),
        ("imagenet", "imagenet"),
    ],
)
def test_a_set_is_found_by_its_folder_or_given_itself(name: str, folder: str, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / name, tmp_path / "all" / folder)
    shutil.copytree(root / name, tmp_path / "any-name")
    # a stray text file in the parent changes nothing
    (tmp_path / "all" / "train.txt").write_text("some words")
    assert opened(name, tmp_path / "all").facts["source"] == str(tmp_path / "all" / folder)
    assert opened(name, tmp_path / "all" / folder).facts["source"] == str(tmp_path / "all" / folder)
    assert opened(name, tmp_path / "any-name").facts["source"] == str(tmp_path / "any-name")


def test_describe(root: Path, tmp_path: Path) -> None:
    assert {each.name: each.found for each in describe(root)} == {
        name: None if name == "digits" else root / name for name in SETS
    }
    assert all(not each.missing for each in describe(root))
    nothing = {each.name: each for each in describe(None)}
    assert all(each.found is None and each.missing == "" and each.layout and each.page for each in nothing.values())
    assert [name for name, each in nothing.items() if not each.needs_directory] == ["digits"]
    absent = {each.name: each.missing for each in describe(tmp_path)}
    assert absent["digits"] == ""
    assert f"{tmp_path} has no train.bin, test.bin of data set cifar100" in absent["cifar100"]


# --- what can be wrong ---

Breaker = Callable[[Path], object]


def cut(path: str, size: int) -> Breaker:
    return lambda root: (root / path).write_bytes((root / path).read_bytes()[:size])


def add(path: str, more: bytes) -> Breaker:
    return lambda root: (root / path).write_bytes((root / path).read_bytes() + more)


def put(path: str, content: bytes) -> Breaker:
    return lambda root: (root / path).write_bytes(content)


def patch(path: Path, at: int, content: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + content + old[at + len(content) :])


def drop(path: str) -> Breaker:
    return lambda root: (root / path).unlink()


def move(source: str, target: str) -> Breaker:
    return lambda root: (root / source).rename(root / target)


def swap(directory: str, other: str) -> Breaker:
    """Another set's files in the directory of this one."""

    def act(root: Path) -> None:
        shutil.rmtree(root / directory)
        tiny.make(other, root / "elsewhere")
        (root / "elsewhere" / other).rename(root / directory)

    return act


WRONG: dict[str, tuple[str, Breaker, str]] = {
    "idx file missing": (
        "mnist",
        drop("mnist/t10k-labels-idx1-ubyte"),
        "DIR/mnist has no t10k-labels-idx1-ubyte of data set mnist; get it from http",
    ),
    "idx truncated": (
        "mnist",
        cut("mnist/train-images-idx3-ubyte", 1000),
        "DIR/mnist/train-images-idx3-ubyte is truncated: it has 1000 bytes, expected 50192 by its head (64 × 28 × 28)",
    ),
    "idx oversized": (
        "mnist",
        add("mnist/train-labels-idx1-ubyte", b"abc"),
        "DIR/mnist/train-labels-idx1-ubyte is oversized: it has 75 bytes, expected 72",
    ),
    "idx head": ("mnist", cut("mnist/train-labels-idx1-ubyte", 6), "has 6 bytes, expected a head of 8"),
    "idx empty": ("mnist", cut("mnist/train-labels-idx1-ubyte", 0), "expected the magic number 00 00 08 01"),
    "idx magic": (
        "mnist",
        put("mnist/train-labels-idx1-ubyte", b"<html>not found</html>"),
        "train-labels-idx1-ubyte begins with 3c 68 74 6d, expected the magic number 00 00 08 01",
    ),
    "idx images for labels": (
        "mnist",
        move("mnist/train-images-idx3-ubyte", "mnist/train-labels-idx1-ubyte"),
        "has no train-images-idx3-ubyte",
    ),
    "idx counts": (
        "mnist",
        put("mnist/train-labels-idx1-ubyte", tiny.idx(np.zeros(63, np.uint8))),
        "train-images-idx3-ubyte holds 64 images but DIR/mnist/train-labels-idx1-ubyte 63 labels",
    ),
    "idx sizes": (
        "mnist",
        put("mnist/train-images-idx3-ubyte", tiny.idx(np.zeros((64, 32, 32), np.uint8))),
        "holds images of 32 × 32, expected 28 × 28",
    ),
    "idx labels": (
        "mnist",
        put("mnist/train-labels-idx1-ubyte", tiny.idx(np.full(64, 10, np.uint8))),
        "train-labels-idx1-ubyte: the label of example 0 is 10, expected 0 to 9",
    ),
    "idx gzip": (
        "fashion-mnist",
        cut("fashion-mnist/train-images-idx3-ubyte.gz", 500),
        "DIR/fashion-mnist/train-images-idx3-ubyte.gz (500 bytes) cannot be unpacked",
    ),
    "idx not gzip": (
        "fashion-mnist",
        put("fashion-mnist/train-images-idx3-ubyte.gz", b"<html>"),
        "(6 bytes) cannot be unpacked",
    ),
    "gzip that holds more than it says": (
        "fashion-mnist",
        put("fashion-mnist/train-labels-idx1-ubyte.gz", gzip.compress(tiny.idx(np.zeros(64, np.uint8)) + b"more")),
        "train-labels-idx1-ubyte.gz is oversized: it has more, expected 72 by its head (64)",
    ),
    "idx that promises a disk full": (
        "mnist",
        put("mnist/train-images-idx3-ubyte", bytes([0, 0, 8, 3]) + b"\xff" * 12),
        "train-images-idx3-ubyte is truncated: it has 16 bytes, expected 79228162458924105385300197391",
    ),
    "cifar file missing": (
        "cifar10",
        drop("cifar10/data_batch_3.bin"),
        "DIR/cifar10 has no data_batch_3.bin of data set cifar10; get it from https://www.cs.toronto.edu",
    ),
    "cifar truncated": (
        "cifar10",
        cut("cifar10/test_batch.bin", 3073 * 31 + 5),
        "test_batch.bin is truncated or oversized: it has 95268 bytes, expected 30730000 as published "
        "or whole records of 3073 bytes (the nearest is 95263)",
    ),
    "cifar100 oversized": (
        "cifar100",
        add("cifar100/train.bin", b"x"),
        "it has 196737 bytes, expected 153700000 as published",
    ),
    "cifar empty": ("cifar100", cut("cifar100/train.bin", 0), "it has 0 bytes, expected 153700000"),
    "cifar labels": (
        "cifar10",
        put("cifar10/data_batch_2.bin", bytes([11]) + bytes(3072)),
        "data_batch_2.bin: the label of example 0 is 11, expected 0 to 9",
    ),
    "another set": ("cifar10", swap("cifar10", "mnist"), "DIR/cifar10 holds mnist or fashion-mnist, not cifar10"),
    "cifar100 for cifar10": ("cifar10", swap("cifar10", "cifar100"), "DIR/cifar10 holds cifar100, not cifar10"),
    "text in cifar": ("cifar10", swap("cifar10", "text"), "DIR/cifar10 holds text, not cifar10"),
    "one class in train only": (
        "imagenet",
        move("imagenet/val/n00000003", "imagenet/val/other"),
        "different class folders (n00000003, other in one only)",
    ),
    "no validation images": (
        "imagenet",
        lambda root: shutil.rmtree(root / "imagenet/val"),
        "DIR/imagenet has no val/<class>/*.JPEG",
    ),
    "a class without images": (
        "imagenet",
        lambda root: [path.unlink() for path in (root / "imagenet/train/n00000001").iterdir()],
        "DIR/imagenet/train/n00000001 holds no image",
    ),
    "no training text": ("text", put("text/wiki.train.tokens", b" "), "DIR/text has no training text"),
    "no text at all": (
        "text",
        lambda root: [path.unlink() for path in (root / "text").iterdir()],
        "DIR/text has no wiki.train.tokens, train.txt or any *.txt of data set text",
    ),
    "no test text": ("text", drop("text/wiki.test.tokens"), "has wiki.train.tokens but no wiki.test.tokens to test on"),
    "text of another encoding": (
        "text",
        put("text/wiki.train.tokens", b"caf\xe9 "),
        "wiki.train.tokens is not UTF-8 text",
    ),
    "no wavs": (
        "speech",
        lambda root: [path.unlink() for path in (root / "speech/wavs").iterdir()],
        "DIR/speech/wavs holds no *.wav file",
    ),
    "no metadata": ("speech", drop("speech/metadata.csv"), "DIR/speech has no metadata.csv of data set speech"),
    "empty metadata": ("speech", put("speech/metadata.csv", b"\n"), "metadata.csv lists no recordings"),
    "a line of metadata without a wav": (
        "speech",
        drop("speech/wavs/LJ001-0004.wav"),
        "DIR/speech/metadata.csv, line 5: there is no DIR/speech/wavs/LJ001-0004.wav",
    ),
    "a line without text": (
        "speech",
        put("speech/metadata.csv", b"LJ001-0000"),
        "line 1: expected `id|as written|as spoken`, found 'LJ001-0000'",
    ),
    "an empty wav": (
        "speech",
        lambda root: tiny.tone(root / "speech/wavs/LJ001-0001.wav", np.zeros(0)),
        "LJ001-0001.wav has 0 samples, expected more than 512",
    ),
    "a wav of rate 0": (
        "speech",
        lambda root: patch(root / "speech/wavs/LJ001-0002.wav", 24, bytes(4)),
        "LJ001-0002.wav has 0 samples a second: it is damaged, fetch it again",
    ),
    "a wav whose first chunk is longer than any file": (
        "speech",
        lambda root: patch(root / "speech/wavs/LJ001-0002.wav", 12, b"JUNK" + b"\xff" * 4),
        "LJ001-0002.wav is not a WAV file of 16-bit PCM",
    ),
    "a line of metadata that leads out": (
        "speech",
        put("speech/metadata.csv", b"../../x|a|b"),
        "metadata.csv, line 1: '../../x' is not in DIR/speech/wavs: take the line out",
    ),
    "a line of metadata from the root": (
        "speech",
        put("speech/metadata.csv", b"/etc/x|a|b"),
        "metadata.csv, line 1: '/etc/x' is not in DIR/speech/wavs: take the line out",
    ),
    "another rate": (
        "speech",
        lambda root: tiny.tone(root / "speech/wavs/LJ001-0002.wav", np.zeros(9000), rate=8000),
        "LJ001-0002.wav has 8000 samples a second, expected 22050: give --set data.rate=8000",
    ),
    "not a wav": (
        "speech",
        put("speech/wavs/LJ001-0003.wav", b"ID3"),
        "LJ001-0003.wav is not a WAV file of 16-bit PCM",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_problems(case: str, tmp_path: Path) -> None:
    name, breaker, expected = WRONG[case]
    breaker(tiny.make(name, tmp_path))
    with pytest.raises(Problem) as caught:
        opened(name, tmp_path)
    message = str(caught.value)
    assert expected in message.replace(str(tmp_path), "DIR")
    assert "\n" not in message


def test_a_truncated_wav_is_named(tmp_path: Path) -> None:
    wav = tiny.make("speech", tmp_path) / "speech/wavs/LJ001-0000.wav"
    wav.write_bytes(wav.read_bytes()[:-1000])
    with pytest.raises(Problem, match=r"LJ001-0000.wav is truncated: it has 12230 bytes of sound, expected 13230"):
        list(opened("speech", tmp_path).train.batches(9))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mels": 600}, r"data.mels=600 bands do not fit"),
        ({"fmin": 9000.0}, "bands do not fit between 9000.0 and 8000.0 Hz"),
        ({"window": 2048}, r"data.window is 2048: it can be at most data.fft, 1024"),
        ({"hop": 0}, r"data.hop is 0: data set speech expects at least 1"),
    ],
)
def test_speech_options_out_of_range(options: dict[str, Any], expected: str, root: Path) -> None:
    with pytest.raises(Problem, match=expected):
        opened("speech", root, **options)


def test_no_directory(root: Path, tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"cifar10 needs its files: give --data DIR \(`espalier data`"):
        opened("cifar10", None)
    with pytest.raises(Problem, match=r"nowhere: there is no such directory; get it from https"):
        opened("cifar10", tmp_path / "nowhere")
    with pytest.raises(Problem, match=r"mnist holds mnist, not fashion-mnist"):
        opened("fashion-mnist", root / "mnist")
    (tiny.make("cifar10", tmp_path) / "cifar10" / "batches.meta.txt").write_text("airplane")
    with pytest.raises(Problem, match=r"cifar10 holds cifar10, not text"):
        opened("text", tmp_path / "cifar10")


# --- the hub ---


class Rows(list[dict[str, Any]]):
    """As much of a table of the package `datasets` as is used: rows, columns and slices."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self]
        if isinstance(key, slice):
            return {column: [row[column] for row in list(self)[key]] for column in self[0]}
        return super().__getitem__(key)

    def cast_column(self, column: str, feature: Any) -> Rows:
        assert (column, feature) == ("audio", "undecoded")
        return self


def fake_load_dataset(files: Path) -> Callable[..., Rows]:
    def load_dataset(path: str, name: str | None = None, *, split: str, revision: str | None = None) -> Rows:
        count, seed = (64, 0) if split == "train" else (32, 1)
        if path in ("ylecun/mnist", "zalando-datasets/fashion_mnist"):
            pixels, labels = tiny.images(count, (28, 28), 10, seed)
            return Rows(
                {"image": Image.fromarray(each), "label": int(label)}
                for each, label in zip(pixels, labels, strict=True)
            )
        if path in ("uoft-cs/cifar10", "uoft-cs/cifar100"):
            column, classes = ("label", 10) if path.endswith("10") else ("fine_label", 100)
            pixels, labels = tiny.images(count, (3, 32, 32), classes, seed)
            pictures = [Image.fromarray(each.transpose(1, 2, 0)) for each in pixels]
            return Rows({"img": each, column: int(label)} for each, label in zip(pictures, labels, strict=True))
        if path == "ILSVRC/imagenet-1k":
            paths = sorted((files / "imagenet" / {"train": "train", "validation": "val"}[split]).rglob("*.JPEG"))
            return Rows({"image": Image.open(each), "label": int(each.parent.name[-1])} for each in paths)
        if (path, name) == ("Salesforce/wikitext", "wikitext-103-v1"):
            part = {"train": "train", "test": "test", "validation": "valid"}[split]
            lines = (files / "text" / f"wiki.{part}.tokens").read_text().split("\n")[:-1]
            return Rows({"text": f"{line}\n" if line.strip() else ""} for line in lines)
        assert (path, split) == ("keithito/lj_speech", "train")
        rows = [line.split("|") for line in (files / "speech" / "metadata.csv").read_text().splitlines()]
        return Rows(
            {
                "id": row[0],
                "audio": {"bytes": (files / f"speech/wavs/{row[0]}.wav").read_bytes()},
                "normalized_text": row[2],
            }
            for row in reversed(rows)
        )

    return load_dataset


def use(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any]) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.Audio = lambda decode: "decoded" if decode else "undecoded"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize("name", SETS)
def test_the_hub_gives_the_same_tensors(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_load_dataset(root))
    there, here = opened(name, None, hub=True), opened(name, root)
    ignored = {"source"}
    assert {k: v for k, v in there.facts.items() if k not in ignored} == {
        k: v for k, v in here.facts.items() if k not in ignored
    }
    assert there.words == here.words
    assert same(list(there.train.batches(4, order=Order(0, 0))), list(here.train.batches(4, order=Order(0, 0))))
    assert same(list(there.test.batches(4)), list(here.test.batches(4)))


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Problem, match=r'--data hub needs the package datasets: pip install "torch-espalier\[hub\]"'):
        opened("mnist", None, hub=True)

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub\nwith a long story")

    use(monkeypatch, unreachable)
    with pytest.raises(Problem) as caught:
        opened("mnist", None, hub=True)
    assert str(caught.value).startswith(
        "ylecun/mnist could not be fetched from the Hugging Face hub (Couldn't reach the hub)"
    )
    assert "\n" not in str(caught.value)
