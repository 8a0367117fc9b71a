"""Tacotron 2: Shen et al., 2018, from symbols to mel spectrograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from espalier.app.errors import Problem

Activation: TypeAlias = Literal["linear", "relu", "tanh", "sigmoid"]
# the logit of "this frame is the last" beyond the end, where there is no doubt
OVER = 1000.0


def inside(lengths: Tensor, size: int) -> Tensor:
    """Which positions lie within the lengths, bool (batch, size)."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _linear(a: int, b: int, bias: bool = False, gain: Activation = "linear") -> nn.Linear:
    layer = nn.Linear(a, b, bias)
    nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain(gain))
    return layer


class ConvStack(nn.Module):
    """Convolutions of 5 with batch norm, an activation and dropout of one half, blind to what is beyond the lengths."""

    def __init__(self, channels: Sequence[int], activations: Sequence[Activation]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(a, b, 5, padding=2) for a, b in pairwise(channels))
        self.norms = nn.ModuleList(nn.BatchNorm1d(b) for b in channels[1:])
        self.activations = activations
        for conv, activation in zip(self.convs, activations, strict=True):
            assert isinstance(conv, nn.Conv1d)
            nn.init.xavier_uniform_(conv.weight, nn.init.calculate_gain(activation))

    def forward(self, x: Tensor, within: Tensor) -> Tensor:
        within = within[:, None].to(x.dtype)
        x = x * within
        for conv, norm, activation in zip(self.convs, self.norms, self.activations, strict=True):
            x = norm(conv(x))
            x = x if activation == "linear" else torch.relu(x) if activation == "relu" else torch.tanh(x)
            # without the product the borders would see what the padding has become
            x = F.dropout(x, 0.5, self.training) * within
        return x


class Encoder(nn.Module):
    """Symbols → one vector each: embedding, three convolutions, an LSTM in both directions."""

    def __init__(self, symbols: int, embedding: int, channels: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding)
        nn.init.xavier_uniform_(self.embedding.weight)
        self.convs = ConvStack((embedding, channels, channels, channels), ("relu", "relu", "relu"))
        self.lstm = nn.LSTM(channels, channels // 2, batch_first=True, bidirectional=True)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        within = inside(lengths, text.shape[1])
        x = self.convs(self.embedding(text).transpose(1, 2), within).transpose(1, 2)
        cpu = lengths.cpu()
        y: Tensor
        if int(cpu.min()) == text.shape[1]:  # nothing to pack; espalier.shrink sees through a plain LSTM only
            y, _ = self.lstm(x)
            return y
        packed = pack_padded_sequence(x, cpu, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=text.shape[1])
        return y


class Prenet(nn.Module):
    """Two layers with dropout of one half, through which the decoder sees the frame before."""

    def __init__(self, mels: int, width: int) -> None:
        super().__init__()
        self.first, self.second = _linear(mels, width, gain="relu"), _linear(width, width, gain="relu")

    def forward(self, frames: Tensor, drop: bool) -> Tensor:
        x = F.dropout(torch.relu(self.first(frames)), 0.5, drop)
        return F.dropout(torch.relu(self.second(x)), 0.5, drop)


class LocationAttention(nn.Module):
    """Attention that sees where it has been: softmax of w·tanh(W s + V h + U f), f from the weights so far."""

    def __init__(self, query: int, memory: int, width: int, filters: int, kernel: int) -> None:
        super().__init__()
        self.query, self.keys = _linear(query, width, gain="tanh"), _linear(memory, width, gain="tanh")
        self.location_conv = nn.Conv1d(2, filters, kernel, padding=(kernel - 1) // 2, bias=False)
        nn.init.xavier_uniform_(self.location_conv.weight)
        self.location = _linear(filters, width, gain="tanh")
        self.score = _linear(width, 1)

    def forward(self, query: Tensor, keys: Tensor, weights: Tensor, total: Tensor, padding: Tensor) -> Tensor:
        """New weights, (batch, symbols), from the last ones and the sum of all."""
        seen = self.location_conv(torch.stack([weights, total], 1)).transpose(1, 2)
        energy = self.score(torch.tanh(self.query(query)[:, None] + keys + self.location(seen))).squeeze(-1)
        exact = torch.promote_types(energy.dtype, torch.float32)  # the sum over a thousand frames needs it
        return F.softmax(energy.masked_fill(padding, -torch.inf), -1, dtype=exact)


@dataclass(frozen=True)
class State:
    """What the decoder carries from one frame to the next."""

    attention: tuple[Tensor, Tensor]  # h and c of the attention's LSTM
    decoder: tuple[Tensor, Tensor]  # and of the decoder's
    weights: Tensor  # of the attention
    total: Tensor  # their sum over all frames so far
    context: Tensor

    @property
    def seen(self) -> Tensor:
        """What the frame and the gate are made of."""
        return torch.cat([self.decoder[0], self.context], -1)


def _alignments(states: list[State]) -> Tensor:
    """The weights of every frame, (batch, frames, symbols); the first state has none yet."""
    return torch.stack([state.weights for state in states[1:]], 1)


class Decoder(nn.Module):
    """The frame before, through the prenet, and the encoded text → the next state."""

    def __init__(
        self, memory: int, prenet: int, attention_rnn: int, decoder_rnn: int, attention: LocationAttention,
        p_attention: float, p_decoder: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention_rnn = nn.LSTMCell(prenet + memory, attention_rnn)
        self.attention = attention
        self.decoder_rnn = nn.LSTMCell(attention_rnn + memory, decoder_rnn)
        self.p_attention, self.p_decoder = p_attention, p_decoder

    def start(self, memory: Tensor) -> State:
        batch, length, width = memory.shape
        a, d = (memory.new_zeros(batch, rnn.hidden_size) for rnn in (self.attention_rnn, self.decoder_rnn))
        nothing = memory.new_zeros(batch, length)
        return State((a, a), (d, d), nothing, nothing, memory.new_zeros(batch, width))

    def forward(self, frame: Tensor, state: State, memory: Tensor, keys: Tensor, padding: Tensor) -> State:
        h, c = self.attention_rnn(torch.cat([frame, state.context], -1), state.attention)
        h = F.dropout(h, self.p_attention, self.training)
        weights = self.attention(h, keys, state.weights, state.total, padding)
        context = torch.bmm(weights[:, None].to(memory.dtype), memory).squeeze(1)
        out, cell = self.decoder_rnn(torch.cat([h, context], -1), state.decoder)
        out = F.dropout(out, self.p_decoder, self.training)
        return State((h, c), (out, cell), weights, state.total + weights, context)


class Tacotron2(nn.Module):
    """Text → mel spectrogram, frame by frame."""

    def __init__(
        self,
        symbols: int,
        mels: int = 80,
        embedding: int = 512,
        encoder_channels: int = 512,
        prenet: int = 256,
        attention_rnn: int = 1024,
        decoder_rnn: int = 1024,
        attention: int = 128,
        location_filters: int = 32,
        location_kernel: int = 31,
        postnet_channels: int = 512,
        p_attention: float = 0.1,
        p_decoder: float = 0.1,
    ) -> None:
        super().__init__()
        if encoder_channels % 2:
            raise Problem(f"tacotron2: encoder_channels must be even, for two directions, not {encoder_channels}.")
        if location_kernel % 2 == 0:
            raise Problem(f"tacotron2: location_kernel must be odd, to keep the length, not {location_kernel}.")
        self.mels = mels
        self.encoder = Encoder(symbols, embedding, encoder_channels)
        self.prenet = Prenet(mels, prenet)
        attend = LocationAttention(attention_rnn, encoder_channels, attention, location_filters, location_kernel)
        self.decoder = Decoder(encoder_channels, prenet, attention_rnn, decoder_rnn, attend, p_attention, p_decoder)
        self.frame = _linear(decoder_rnn + encoder_channels, mels, bias=True)
        self.gate = _linear(decoder_rnn + encoder_channels, 1, bias=True, gain="sigmoid")
        self.postnet = ConvStack((mels, *[postnet_channels] * 4, mels), ("tanh", "tanh", "tanh", "tanh", "linear"))

    def forward(
        self, text: Tensor, text_lengths: Tensor, mel: Tensor, mel_lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With the true frames as those before: mel and mel after the postnet (batch, mels, frames), the logits of the
        gate (batch, frames) and the alignments (batch, frames, symbols). Beyond the lengths mel is 0, the gate OVER.
        """
        memory, keys, padding = self._read(text, text_lengths)
        before = F.pad(mel.transpose(1, 2), (0, 0, 1, -1))  # a frame of zeros begins
        before = self.prenet(before, self.prenet.training)  # a mode of its own: the task's loss has it on
        states = [self.decoder.start(memory)]
        for frame in before.unbind(1):
            states.append(self.decoder(frame, states[-1], memory, keys, padding))
        seen = torch.stack([state.seen for state in states[1:]], 1)
        within = inside(mel_lengths, mel.shape[2])
        first = self.frame(seen).transpose(1, 2) * within[:, None]
        gate = self.gate(seen).squeeze(-1).masked_fill(~within, OVER)
        return first, first + self.postnet(first, within), gate, _alignments(states)

    @torch.no_grad()
    def generate(
        self, text: Tensor, text_lengths: Tensor, max_frames: int, threshold: float = 0.5
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mel after the postnet, (batch, mels, frames), how many frames each has, and the alignments.

        A sentence ends with the first frame whose gate is above the threshold. The prenet's dropout stays on, as in
        the paper: it makes frames differ from draw to draw.
        """
        memory, keys, padding = self._read(text, text_lengths)
        frame = memory.new_zeros(len(text), self.mels)
        lengths = torch.full_like(text_lengths, max_frames)
        states, frames = [self.decoder.start(memory)], []
        for i in range(1, max_frames + 1):
            states.append(self.decoder(self.prenet(frame, True), states[-1], memory, keys, padding))
            frame = self.frame(states[-1].seen)
            frames.append(frame)
            over = torch.sigmoid(self.gate(states[-1].seen).squeeze(-1)) > threshold
            lengths = torch.where(over, lengths.clamp(max=i), lengths)
            if int(lengths.max()) <= i:
                break
        within = inside(lengths, len(frames))
        first = torch.stack(frames, 2) * within[:, None]
        return first + self.postnet(first, within), lengths, _alignments(states)

    def _read(self, text: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What no frame changes: the encoded text, its keys, and where there is none."""
        memory = self.encoder(text, lengths)
        return memory, self.decoder.attention.keys(memory), ~inside(lengths, text.shape[1])
