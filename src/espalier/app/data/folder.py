"""ImageNet: a folder of images for each class, decoded and cropped by worker processes."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from espalier.app.data.base import Data, Dataset, Examples, Order
from espalier.app.data.images import Scale
from espalier.app.data.source import DataSet, at_least, parse
from espalier.app.errors import Problem, one_line
from espalier.app.signals import deaf_to_stop, held_back

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm"}
# what these are. Pillow goes by the content and not by the name, and runs Ghostscript on what it takes for PostScript
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM")
# the share of an image's area that a training crop has, and its width over its height
AREA, SHAPE = (0.08, 1.0), (3 / 4, 4 / 3)
# a test image's short side, over the size of what is cut from its middle
MARGIN = 256 / 224


@dataclass(frozen=True)
class FolderOptions:
    """What a recipe may choose."""

    size: int = 224
    # processes that decode images; 0: none but the training process
    workers: int = min(8, os.cpu_count() or 1)


class Pictures(ABC):
    """Images that are read when asked for, with their labels."""

    labels: Sequence[int]

    @abstractmethod
    def load(self, number: int) -> Image:
        """The image of this number, in colour; a Problem where it cannot be read."""


@dataclass(frozen=True)
class Files(Pictures):
    """Images in files."""

    paths: Sequence[Path]
    labels: Sequence[int]

    def load(self, number: int) -> Image:
        from PIL import Image

        path = self.paths[number]
        try:
            with Image.open(path, formats=FORMATS) as image:
                return image.convert("RGB")
        except MemoryError:
            raise
        # Pillow's decoders raise errors of a dozen kinds on damaged files, and one of its own on too many pixels
        except Exception as error:
            raise Problem(
                f"{path} cannot be read as an image ({one_line(error)}): fetch it again or delete it"
            ) from None


@dataclass(frozen=True)
class Decoder(TorchDataset[tuple[Tensor, Tensor] | str]):
    """Makes whole batches in a worker; a problem goes back as its text, since a traceback would bury it."""

    pictures: Pictures
    size: int
    order: Order | None

    def __getitem__(self, numbers: list[int]) -> tuple[Tensor, Tensor] | str:
        try:
            images = [self._pixels(number) for number in numbers]
        except Problem as problem:
            return str(problem)
        return torch.from_numpy(np.stack(images)), torch.tensor([self.pictures.labels[number] for number in numbers])

    def _pixels(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        image = self.pictures.load(number)
        if self.order is None:
            cut = centre_crop(image, self.size)
        else:
            chance = np.random.default_rng([self.order.seed & (2**63 - 1), self.order.epoch, number])
            cut = resized_crop(image, self.size, chance)
        return np.asarray(cut).transpose(2, 0, 1)


@dataclass(frozen=True)
class ImageFiles(Examples):
    """Images decoded anew in every epoch, since all of them do not fit in memory; normalised on the device."""

    pictures: Pictures
    # the pictures that belong to this split
    numbers: Tensor
    options: FolderOptions
    scale: Scale
    augment: bool

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, chosen: Tensor, *, augment: bool) -> Dataset:
        return replace(self, numbers=self.numbers[chosen], augment=self.augment and augment)

    def produce(self, spans: list[tuple[int, int]], order: Order | None) -> Iterator[tuple[Tensor, ...]]:
        numbers = self.numbers
        if order is not None:
            numbers = numbers[torch.randperm(len(numbers), generator=order.generator())]
        device = self.scale.factor.device
        loader = DataLoader(
            Decoder(self.pictures, self.options.size, order if self.augment else None),
            batch_size=None,
            sampler=[numbers[start:stop].tolist() for start, stop in spans],
            num_workers=self.options.workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=deaf_to_stop,
            # its own: the loader would otherwise draw from torch's, and training would depend on how often it did
            generator=torch.Generator(),
        )
        with held_back():
            batches = iter(loader)
        for made in batches:
            if isinstance(made, str):
                raise Problem(made)
            images, labels = (part.to(device, non_blocking=True) for part in made)
            yield self.scale(images), labels


@dataclass(frozen=True)
class ImageFolder(DataSet):
    """train/<class>/ and val/<class>/, the classes numbered by name."""

    def missing(self, directory: Path) -> list[str]:
        return [f"{part}/<class>/*.JPEG" for part in ("train", "val") if not _classes(directory / part)]

    def read(self, directory: Path, device: torch.device, options: Mapping[str, Any]) -> Data:
        names = _classes(directory / "train")
        others = set(names) ^ set(_classes(directory / "val"))
        if others:
            raise Problem(
                f"{directory}: train/ and val/ have different class folders "
                f"({', '.join(sorted(others)[:3])} in one only); sort the images into a folder for each class"
            )
        train, test = (_files(directory / part, names) for part in ("train", "val"))
        return self.build(train, test, len(names), device, options, str(directory))

    def build(
        self,
        train: Pictures,
        test: Pictures,
        classes: int,
        device: torch.device,
        options: Mapping[str, Any],
        source: str,
    ) -> Data:
        """The data set of two splits of pictures."""
        chosen = parse(FolderOptions, options, self.name)
        at_least(self.name, "size", chosen.size, 1)
        at_least(self.name, "workers", chosen.workers, 0)
        scale = Scale.of(MEAN, SD, device)
        first, second = (
            ImageFiles(pictures, torch.arange(len(pictures.labels)), chosen, scale, augment)
            for pictures, augment in ((train, True), (test, False))
        )
        facts = {"classes": classes, "channels": 3, "size": chosen.size, "train": len(first), "test": len(second)}
        return Data(first, second, {**facts, "source": source})


def resized_crop(image: Image, size: int, chance: np.random.Generator) -> Image:
    """A random part of the image, brought to size × size, and every second time mirrored."""
    from PIL import Image as pillow

    width, height = image.size
    box = None
    # a shape that does not fit is drawn again; after ten times the middle is taken
    for _ in range(10):
        area = width * height * chance.uniform(*AREA)
        shape = math.exp(chance.uniform(math.log(SHAPE[0]), math.log(SHAPE[1])))
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(chance.integers(width - across + 1)), int(chance.integers(height - down + 1))
            box = (left, top, left + across, top + down)
            break
    if box is None:
        across, down = min(width, round(height * SHAPE[1])), min(height, round(width / SHAPE[0]))
        left, top = (width - across) // 2, (height - down) // 2
        box = (left, top, left + across, top + down)
    cut = image.resize((size, size), pillow.Resampling.BILINEAR, box=box)
    return cut.transpose(pillow.Transpose.FLIP_LEFT_RIGHT) if chance.integers(2) else cut


def centre_crop(image: Image, size: int) -> Image:
    """The middle of the image, size × size, after its short side became 256 / 224 of that."""
    from PIL import Image as pillow

    short = round(size * MARGIN)
    width, height = (round(side * short / min(image.size)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), pillow.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


def _classes(directory: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir()) if directory.is_dir() else []


def _files(directory: Path, names: list[str]) -> Files:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        files = ((directory / name) / each for each in os.listdir(directory / name))
        # regular ones: a pipe would be waited for
        here = sorted(path for path in files if path.suffix.lower() in ENDINGS and path.is_file())
        if not here:
            raise Problem(
                f"{directory / name} holds no image: expected *.JPEG, *.jpg or *.png files of the class {name}"
            )
        paths += here
        labels += [label] * len(here)
    return Files(paths, labels)
