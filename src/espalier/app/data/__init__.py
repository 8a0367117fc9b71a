"""Data sets by name, in their official forms on disk or from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from espalier.app.data.base import Data, Dataset, Order
from espalier.app.data.catalogue import SETS
from espalier.app.data.find import Described, describe, locate
from espalier.app.data.source import DataSet
from espalier.app.errors import Problem

__all__ = ["SETS", "Data", "DataSet", "Dataset", "Described", "Order", "describe", "open_data"]


def open_data(
    name: str,
    root: Path | None,
    *,
    device: torch.device,
    hub: bool = False,
    holdout: float = 0.0,
    options: Mapping[str, Any],
) -> Data:
    """The data set of this name, read from `root` (or the hub), with its tensors on the device."""
    if name not in SETS:
        raise Problem(f"there is no data set '{name}': take one of {', '.join(SETS)}")
    wanted = SETS[name]
    if hub and wanted.folders:
        from espalier.app.data.hub import open_hub

        data = open_hub(wanted, device, options)
    else:
        directory = locate(wanted, root) if wanted.folders else Path()
        data = wanted.read(directory, device, options)
    return data if holdout == 0 else _hold_out(data, holdout)


def _hold_out(data: Data, share: float) -> Data:
    """A part of the training set in place of the test set, which stays unseen while settings are tuned."""
    train, test = data.train.hold_out(share)
    facts = {**data.facts, "train": len(train), "test": len(test), "holdout": share}
    return replace(data, train=train, test=test, facts=facts)
