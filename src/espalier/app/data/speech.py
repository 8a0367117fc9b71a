"""Speech with its text in LJSpeech's layout, as symbols and mel spectrograms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from espalier.app.data.base import Data, Examples, Order
from espalier.app.data.mel import SYMBOLS, Recording, Spectrogram, SpeechOptions, count_samples, to_symbols
from espalier.app.data.source import DataSet, at_least, parse
from espalier.app.errors import Problem, short

TEST_SHARE = 0.05


@dataclass(frozen=True)
class Clips(Examples):
    """Recordings; a batch is (text, text lengths, mel, mel lengths), longest text first, padded with 0."""

    recordings: Sequence[Recording]
    spectrogram: Spectrogram
    device: torch.device
    # by name, in the host's memory: 2.3 GB for all of LJSpeech, and every epoch after the first is quick
    cache: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.recordings)

    def select(self, chosen: Tensor, *, augment: bool) -> Clips:
        return replace(self, recordings=[self.recordings[number] for number in chosen.tolist()])

    def produce(self, spans: list[tuple[int, int]], order: Order | None) -> Iterator[tuple[Tensor, ...]]:
        numbers = list(range(len(self)))
        if order is not None:
            numbers = torch.randperm(len(self), generator=order.generator()).tolist()
        for start, stop in spans:
            pairs = sorted((self._pair(number) for number in numbers[start:stop]), key=lambda pair: -len(pair[0]))
            texts, mels = zip(*pairs, strict=True)
            text = pad_sequence(list(texts), batch_first=True)
            mel = pad_sequence([each.T for each in mels], batch_first=True).transpose(1, 2).contiguous()
            lengths = torch.tensor([len(each) for each in texts]), torch.tensor([each.shape[1] for each in mels])
            yield tuple(part.to(self.device) for part in (text, lengths[0], mel, lengths[1]))

    def _pair(self, number: int) -> tuple[Tensor, Tensor]:
        recording = self.recordings[number]
        if recording.name not in self.cache:
            self.cache[recording.name] = to_symbols(recording.said), self.spectrogram(recording)
        return self.cache[recording.name]


@dataclass(frozen=True)
class Speech(DataSet):
    """metadata.csv with lines `id|as written|as spoken`, and wavs/id.wav; a fixed random 5 % is the test."""

    def missing(self, directory: Path) -> list[str]:
        wanted = {"metadata.csv": (directory / "metadata.csv").is_file(), "wavs/": (directory / "wavs").is_dir()}
        return [name for name, there in wanted.items() if not there]

    def read(self, directory: Path, device: torch.device, options: Mapping[str, Any]) -> Data:
        if not any((directory / "wavs").glob("*.wav")):
            raise Problem(f"{directory / 'wavs'} holds no *.wav file; {self.way_out}")
        recordings = _recordings(directory / "metadata.csv", directory / "wavs")
        return self.build(recordings, device, options, str(directory))

    def build(
        self, recordings: Sequence[Recording], device: torch.device, options: Mapping[str, Any], source: str
    ) -> Data:
        """The data set of these recordings."""
        chosen = _checked(parse(SpeechOptions, options, self.name), self.name)
        spectrogram = Spectrogram(chosen)
        frames = [spectrogram.frames(count_samples(each, chosen)) for each in recordings]
        short = [
            each
            for each, length in zip(recordings, frames, strict=True)
            if not chosen.max_frames or length <= chosen.max_frames
        ]
        if len(short) < 2:
            raise Problem(
                f"{source} has {len(short)} clips of at most data.max_frames={chosen.max_frames} frames, expected "
                f"at least 2, to train and to test on: give a larger max_frames (the longest clip has {max(frames)})"
            )
        clips = Clips(short, spectrogram, device)
        train, test = clips.hold_out(TEST_SHARE)
        facts = {"symbols": len(SYMBOLS), "mels": chosen.mels, "rate": chosen.rate, "hop": chosen.hop}
        counts = {"train": len(train), "test": len(test), "left_out": len(recordings) - len(short)}
        return Data(train, test, {**facts, **counts, "source": source}, SYMBOLS)


def _checked(options: SpeechOptions, name: str) -> SpeechOptions:
    for key in ("rate", "fft", "window", "hop", "mels"):
        at_least(name, key, getattr(options, key), 1)
    if options.window > options.fft:
        raise Problem(f"data.window is {options.window}: it can be at most data.fft, {options.fft}")
    return options


def _recordings(metadata: Path, wavs: Path) -> list[Recording]:
    """The recordings that metadata.csv lists, by name."""
    found = {}
    for number, line in enumerate(_lines(metadata), start=1):
        if not line.strip():
            continue
        identity, *said = line.split("|")
        if not said:
            raise Problem(f"{metadata}, line {number}: expected `id|as written|as spoken`, found '{line[:60]}'")
        if Path(identity).is_absolute() or ".." in Path(identity).parts:
            raise Problem(f"{metadata}, line {number}: {short(identity, 60)!r} is not in {wavs}: take the line out")
        wav = wavs / f"{identity}.wav"
        if not wav.is_file():
            raise Problem(f"{metadata}, line {number}: there is no {wav}: add the file or take the line out")
        found[identity] = Recording(str(wav), said[-1], partial(_binary, wav))
    if not found:
        raise Problem(f"{metadata} lists no recordings: expected lines of `id|as written|as spoken`")
    return [found[identity] for identity in sorted(found)]


def _lines(metadata: Path) -> list[str]:
    try:
        # at "\n" alone: the text may hold any other line break
        return metadata.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise Problem(f"{metadata} is not UTF-8 text ({error.reason} at byte {error.start}): convert it") from None


def _binary(path: Path) -> BinaryIO:
    return path.open("rb")
