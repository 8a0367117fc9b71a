"""Small images that live on the device whole, as bytes, and are augmented there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from espalier.app.data.base import Data, Dataset, Examples, Order
from espalier.app.data.source import DataSet

# the crop that CIFAR's results are known for: a margin of 4 black pixels, then a window of the first size
PAD = 4

# batches that are made together: a dozen small kernels for each would keep the host busy for a millisecond a step
AT_ONCE = 16

# bytes (N, C, H, W) and labels (N)
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SmallImages(DataSet):
    """A data set that fits on the device, whether its bytes come from files or from the hub."""

    classes: int
    # Pillow's name for what a pixel is: "L" grey, "RGB" coloured
    mode: str

    @abstractmethod
    def build(
        self, train: Labelled, test: Labelled, device: torch.device, options: Mapping[str, Any], source: str
    ) -> Data:
        """The data set of these two splits."""


@dataclass(frozen=True)
class Scale:
    """How bytes become numbers: (byte / top − mean) / sd for each channel, as byte · factor + shift."""

    factor: Tensor
    shift: Tensor

    @classmethod
    def of(cls, mean: tuple[float, ...], sd: tuple[float, ...], device: torch.device, top: float = 255.0) -> Scale:
        factor = torch.tensor([1 / (top * spread) for spread in sd])
        shift = torch.tensor([-middle / spread for middle, spread in zip(mean, sd, strict=True)])
        return cls(factor.view(-1, 1, 1).to(device), shift.view(-1, 1, 1).to(device))

    def __call__(self, images: Tensor) -> Tensor:
        if images.is_cuda:  # its convolutions want a pixel's channels side by side, and would otherwise copy all
            images = images.contiguous(memory_format=torch.channels_last)
        return images.float() * self.factor + self.shift


@dataclass(frozen=True)
class ImageTensors(Examples):
    """Images (N, C, H, W) as bytes and their labels, both on the device."""

    images: Tensor
    labels: Tensor
    scale: Scale
    augment: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, chosen: Tensor, *, augment: bool) -> Dataset:
        chosen = chosen.to(self.labels.device)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen], augment=self.augment and augment)

    def produce(self, spans: list[tuple[int, int]], order: Order | None) -> Iterator[tuple[Tensor, ...]]:
        if order is None:
            for start, stop in spans:
                yield self.scale(self.images[start:stop]), self.labels[start:stop]
            return
        # drawn for the whole epoch by position: any part of it can be made alone, and the device is not waited for
        device, generator = self.labels.device, order.generator()
        shuffle = torch.randperm(len(self), generator=generator).to(device)
        corners = torch.randint(0, 2 * PAD + 1, (len(self), 2), generator=generator).to(device)
        mirror = torch.randint(0, 2, (len(self),), generator=generator).bool().to(device)
        for first in range(0, len(spans), AT_ONCE):
            some = spans[first : first + AT_ONCE]
            at = torch.cat([torch.arange(start, stop) for start, stop in some]).to(device)
            chosen = shuffle[at]
            images = self.images[chosen]
            if self.augment:
                images = crop_and_flip(images, corners[at], mirror[at])
            sizes = [stop - start for start, stop in some]
            yield from zip(torch.split(self.scale(images), sizes), torch.split(self.labels[chosen], sizes), strict=True)


def crop_and_flip(images: Tensor, corners: Tensor, mirror: Tensor) -> Tensor:
    """Each image padded by black and cut at its own corner (row, column), and where `mirror` says so, mirrored."""
    count, channels, height, width = images.shape
    device = images.device
    padded = functional.pad(images, (PAD, PAD, PAD, PAD))
    rows = corners[:, :1] + torch.arange(height, device=device)
    columns = corners[:, 1:] + torch.arange(width, device=device)
    columns = torch.where(mirror[:, None], columns.flip(1), columns)
    which = torch.arange(count, device=device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(1, -1, 1, 1)
    return padded[which, channel, rows[:, None, :, None], columns[:, None, None, :]]


def image_data(
    train: Labelled, test: Labelled, scale: Scale, *, classes: int, source: str, augment: bool = False
) -> Data:
    """The data set of two splits of (bytes (N, C, H, W), labels), on the device of its scale."""
    device = scale.factor.device
    first = ImageTensors(train[0].to(device), train[1].to(device), scale, augment)
    second = ImageTensors(test[0].to(device), test[1].to(device), scale)
    _, channels, size, _ = first.images.shape
    facts = {"classes": classes, "channels": channels, "size": size, "train": len(first), "test": len(second)}
    return Data(first, second, {**facts, "source": source})
