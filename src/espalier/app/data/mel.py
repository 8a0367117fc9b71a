"""Sound to mel spectrograms, and text to symbols, as Tacotron 2 reads them."""

from __future__ import annotations

import unicodedata
import warnings
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from espalier.app.errors import Problem

PAD, END = "<pad>", "<end>"
SYMBOLS = (PAD, END, *" !\"'(),-.:;?", *"abcdefghijklmnopqrstuvwxyz", *"0123456789")
_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}

# below this the logarithm only shows the noise of the recording
FLOOR = 1e-5


@dataclass(frozen=True)
class SpeechOptions:
    """What a recipe may choose."""

    rate: int = 22050
    fft: int = 1024
    window: int = 1024
    hop: int = 256
    mels: int = 80
    fmin: float = 0.0
    # at most half the rate, where the spectrum ends
    fmax: float = 8000.0
    # longer clips are left out; 0: none
    max_frames: int = 0


@dataclass(frozen=True)
class Recording:
    """One clip: its name for messages, what is said, and how to open its WAV file."""

    name: str
    said: str
    open: Callable[[], BinaryIO]


def to_symbols(said: str) -> Tensor:
    """The numbers of a text's characters, closed by <end>; accents go, and characters that have no number."""
    plain = unicodedata.normalize("NFKD", said).lower()
    return torch.tensor([*(_NUMBERS[each] for each in plain if each in _NUMBERS), _NUMBERS[END]])


def count_samples(recording: Recording, options: SpeechOptions) -> int:
    """The samples of a recording, after checking that it can be read with these options."""
    with _open(recording) as file:
        channels, width, rate, count = file.getparams()[:4]
    if (channels, width) != (1, 2):
        raise Problem(f"{recording.name} has {channels} channels of {8 * width} bits, expected one of 16: convert it")
    if rate < 1:
        raise Problem(f"{recording.name} has {rate} samples a second: it is damaged, fetch it again")
    if rate != options.rate:
        raise Problem(
            f"{recording.name} has {rate} samples a second, expected {options.rate}: "
            f"give --set data.rate={rate}, or convert the files"
        )
    if count <= options.fft // 2:
        raise Problem(
            f"{recording.name} has {count} samples, expected more than {options.fft // 2} (half of data.fft): "
            "it is empty or too short, take its line out of metadata.csv"
        )
    return count


class Spectrogram:
    """The logarithm of the mel spectrogram of a recording, (mels, frames)."""

    def __init__(self, options: SpeechOptions) -> None:
        self.options = options
        self.window = torch.hann_window(options.window)
        self.filters = torch.from_numpy(_filters(options)).float().T

    def frames(self, samples: int) -> int:
        """The frames that so many samples have."""
        return 1 + samples // self.options.hop

    def __call__(self, recording: Recording) -> Tensor:
        with _open(recording) as file:
            promised, content = file.getnframes(), file.readframes(file.getnframes())
        if len(content) != 2 * promised:
            raise Problem(
                f"{recording.name} is truncated: it has {len(content)} bytes of sound, expected {2 * promised}: "
                "fetch it again"
            )
        samples = torch.from_numpy(np.frombuffer(content, "<i2").astype(np.float32) / 32768)
        spectrum = torch.stft(
            samples,
            self.options.fft,
            hop_length=self.options.hop,
            win_length=self.options.window,
            window=self.window,
            return_complex=True,
        ).abs()
        return (self.filters @ spectrum).clamp(min=FLOOR).log()


def _filters(options: SpeechOptions) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    try:
        from transformers.audio_utils import mel_filter_bank
    except ImportError:
        raise Problem('data set speech needs transformers: pip install "torch-espalier[app]"') from None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return mel_filter_bank(
                options.fft // 2 + 1,
                options.mels,
                options.fmin,
                min(options.fmax, options.rate / 2),
                options.rate,
                norm="slaney",
                mel_scale="slaney",
            )
        except (UserWarning, ValueError):
            raise Problem(
                f"data.mels={options.mels} bands do not fit between {options.fmin} and {options.fmax} Hz "
                f"with data.fft={options.fft}: give fewer mels or a larger fft"
            ) from None


@contextmanager
def _open(recording: Recording) -> Iterator[wave.Wave_read]:
    try:
        with recording.open() as content, wave.open(content, "rb") as file:
            yield file
    except (wave.Error, EOFError, RuntimeError) as error:  # the last for a chunk that is longer than the file
        raise Problem(
            f"{recording.name} is not a WAV file of 16-bit PCM ({error}): convert it or fetch it again"
        ) from None
