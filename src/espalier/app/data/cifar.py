"""CIFAR-10 and CIFAR-100 in their official binary form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.app.data.base import Data
from espalier.app.data.idx import check_labels
from espalier.app.data.images import Labelled, Scale, SmallImages, image_data
from espalier.app.data.source import parse
from espalier.app.errors import Problem

SIZE = 32
PIXELS = 3 * SIZE * SIZE


@dataclass(frozen=True)
class CifarOptions:
    """What a recipe may choose: random crop and flip in training."""

    augment: bool = True


@dataclass(frozen=True)
class Cifar(SmallImages):
    """A set of coloured 32 × 32 images; a record is its label bytes, the last of which counts, and its pixels."""

    label_bytes: int
    train_files: tuple[str, ...]
    test_file: str
    mean: tuple[float, float, float]
    sd: tuple[float, float, float]

    def missing(self, directory: Path) -> list[str]:
        return [name for name in (*self.train_files, self.test_file) if not (directory / name).is_file()]

    def read(self, directory: Path, device: torch.device, options: Mapping[str, Any]) -> Data:
        train = [self.read_file(directory / name) for name in self.train_files]
        images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
        return self.build((images, labels), self.read_file(directory / self.test_file), device, options, str(directory))

    def build(
        self, train: Labelled, test: Labelled, device: torch.device, options: Mapping[str, Any], source: str
    ) -> Data:
        augment = parse(CifarOptions, options, self.name).augment
        scale = Scale.of(self.mean, self.sd, device)
        return image_data(train, test, scale, classes=self.classes, source=source, augment=augment)

    def read_file(self, path: Path) -> Labelled:
        """Images and labels of one file."""
        content = np.fromfile(path, np.uint8)
        record = self.label_bytes + PIXELS
        if len(content) == 0 or len(content) % record:
            whole = max(1, round(len(content) / record)) * record
            official = (50_000 // len(self.train_files) if path.name in self.train_files else 10_000) * record
            raise Problem(
                f"{path} is truncated or oversized: it has {len(content)} bytes, expected {official} as published "
                f"or whole records of {record} bytes (the nearest is {whole}): fetch it again"
            )
        records = content.reshape(-1, record)
        labels = records[:, self.label_bytes - 1]
        check_labels(path, labels, self.classes)
        images = torch.from_numpy(records[:, self.label_bytes :].copy()).view(-1, 3, SIZE, SIZE)
        return images, torch.from_numpy(labels.copy()).long()
