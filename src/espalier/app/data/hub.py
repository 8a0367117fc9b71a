"""The same data sets from the Hugging Face hub, for `--data hub`."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from espalier.app.data.base import Data
from espalier.app.data.folder import ImageFolder, Pictures
from espalier.app.data.idx import check_labels
from espalier.app.data.images import Labelled, SmallImages
from espalier.app.data.mel import Recording
from espalier.app.data.source import DataSet, parse
from espalier.app.data.speech import Speech
from espalier.app.data.text import Text, TextOptions, check_split
from espalier.app.data.words import tokenised
from espalier.app.errors import Problem, one_line

if TYPE_CHECKING:
    from PIL.Image import Image

# rows of text that are joined and split at once
ROWS = 50_000


@dataclass(frozen=True)
class Place:
    """Where a set is on the hub, and what its columns are called."""

    repository: str
    configuration: str | None = None
    # LJSpeech is there as a loading script, which `datasets` no longer runs; the hub keeps it as tables on this branch
    revision: str | None = None
    image: str = "image"
    label: str = "label"
    test: str = "test"

    def load(self, split: str) -> Any:
        """The rows of a split, fetched or from the cache."""
        library = _library()
        try:
            return library.load_dataset(self.repository, self.configuration, split=split, revision=self.revision)
        # the hub's client raises errors of a dozen kinds, which have only Exception in common
        except Exception as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise Problem(
                f"{self.repository} could not be fetched from the Hugging Face hub ({said}): "
                "check the network and your access to it, or give --data DIR"
            ) from None


PLACES = {
    "mnist": Place("ylecun/mnist"),
    "fashion-mnist": Place("zalando-datasets/fashion_mnist"),
    "cifar10": Place("uoft-cs/cifar10", image="img"),
    "cifar100": Place("uoft-cs/cifar100", image="img", label="fine_label"),
    "imagenet": Place("ILSVRC/imagenet-1k", test="validation"),
    "text": Place("Salesforce/wikitext", "wikitext-103-v1"),
    "speech": Place("keithito/lj_speech", revision="refs/convert/parquet"),
}


def open_hub(wanted: DataSet, device: torch.device, options: Mapping[str, Any]) -> Data:
    """The data set from the hub, as the same tensors that its files give."""
    place = PLACES[wanted.name]
    source = f"https://huggingface.co/datasets/{place.repository}"
    match wanted:
        case SmallImages():
            train, test = (_small(place, split, wanted) for split in ("train", place.test))
            return wanted.build(train, test, device, options, source)
        case ImageFolder():
            first, second = (HubPictures(place, place.load(split)) for split in ("train", place.test))
            return wanted.build(first, second, len(set(first.labels)), device, options, source)
        case Text():
            chosen = parse(TextOptions, options, wanted.name)
            other = place.load("validation" if check_split(chosen.split) == "valid" else "test")
            return wanted.build(_lines(place.load("train")), _lines(other), tokenised, device, chosen, source)
        case Speech():
            return wanted.build(_recordings(place), device, options, source)
        case _:
            raise Problem(f"data set {wanted.name} is not on the hub: give --data DIR")


class HubPictures(Pictures):
    """Images in rows, decoded when asked for."""

    def __init__(self, place: Place, rows: Any) -> None:
        self.place, self.rows = place, rows
        self.labels = list(rows[place.label])

    def load(self, number: int) -> Image:
        try:
            image: Image = self.rows[number][self.place.image].convert("RGB")
        except MemoryError:
            raise
        except Exception as error:  # of a dozen kinds, as for files
            raise Problem(
                f"{self.place.repository}: image {number} cannot be read ({one_line(error)}): clear the cache"
            ) from None
        return image


def _small(place: Place, split: str, wanted: SmallImages) -> Labelled:
    rows = place.load(split)
    images = np.stack([np.asarray(row[place.image].convert(wanted.mode)) for row in rows])
    labels = np.asarray(list(rows[place.label]))
    check_labels(f"{place.repository} ({split})", labels, wanted.classes)
    pixels = torch.from_numpy(images).view(*images.shape[:3], -1).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.from_numpy(labels).long()


def _lines(rows: Any) -> Iterator[str]:
    """The text, a row a line: the hub's rows are the lines of the official file."""
    for start in range(0, len(rows), ROWS):
        yield "".join(f"{line.rstrip(chr(10))}\n" for line in rows[start : start + ROWS]["text"])


def _recordings(place: Place) -> list[Recording]:
    rows = place.load("train").cast_column("audio", _library().Audio(decode=False))
    names, said = list(rows["id"]), list(rows["normalized_text"])
    order = sorted(range(len(names)), key=lambda number: names[number])
    return [Recording(names[number], said[number], partial(_sound, rows, number)) for number in order]


def _sound(rows: Any, number: int) -> BinaryIO:
    return io.BytesIO(rows[number]["audio"]["bytes"])


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise Problem('--data hub needs the package datasets: pip install "torch-espalier[hub]"') from None
