"""scikit-learn's handwritten digits, which come with the package: no directory is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from espalier.app.data.base import Data
from espalier.app.data.images import Scale, image_data
from espalier.app.data.source import DataSet, NoOptions, parse
from espalier.app.errors import Problem

TRAIN = 1500
SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits(DataSet):
    """1797 grey 8 × 8 images with values 0 to 16, read as 0 to 1; 1500 of them are for training."""

    def missing(self, directory: Path) -> list[str]:
        return []

    def read(self, directory: Path, device: torch.device, options: Mapping[str, Any]) -> Data:
        parse(NoOptions, options, self.name)
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise Problem('data set digits comes with scikit-learn: pip install "torch-espalier[app]"') from None
        values, labels = load_digits(return_X_y=True)
        images = torch.as_tensor(values).to(torch.uint8).view(-1, 1, 8, 8)
        classes = torch.as_tensor(labels).long()
        mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        train, test = ((images[chosen], classes[chosen]) for chosen in (mixed[:TRAIN], mixed[TRAIN:]))
        scale = Scale.of((0.0,), (1.0,), device, top=16.0)
        return image_data(train, test, scale, classes=10, source="scikit-learn")
