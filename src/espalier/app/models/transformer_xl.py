"""Transformer-XL: Dai et al., 2019, with an adaptive softmax that is tied to the embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from espalier.app.errors import Problem

# W_R learns through the gradient of the mask, and cuDNN's kernel gives NaN at lengths like 192 (pytorch issue 196678)
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def relative_shift(x: Tensor) -> Tensor:
    """y[…, i, j] = x[…, i, j + T − 1 − i] for the j that token i sees; what it gives beyond them means nothing.

    x: (…, T, K), the score of query i with the position that lies K − 1 − k behind it in column k.
    """
    *batch, t, k = x.shape
    # one more column in front moves row i by i + 1 once the rows are cut anew
    return F.pad(x, (1, 0)).view(*batch, k + 1, t).narrow(-2, 1, k).reshape(*batch, t, k)


class RelativeAttention(nn.Module):
    """Attention whose scores are (q + u)·k + (q + v)·W_R R: content, and distance."""

    def __init__(self, d_model: int, heads: int, d_head: int, dropout: float) -> None:
        super().__init__()
        self.d_head, self.dropout = d_head, dropout
        # one layer for q, k and v: the paper's groups are columns of all three
        self.qkv = nn.Linear(d_model, 3 * heads * d_head, bias=False)
        self.position = nn.Linear(d_model, heads * d_head, bias=False)  # W_R
        self.out = nn.Linear(heads * d_head, d_model, bias=False)

    def forward(self, x: Tensor, memory: Tensor, distances: Tensor, u: Tensor, v: Tensor, unseen: Tensor) -> Tensor:
        q, k, value = (self._heads(y) for y in self.qkv(torch.cat([memory, x], 1)).chunk(3, -1))
        q = q[:, :, memory.shape[1] :]
        r = self._heads(self.position(distances))
        scale = self.d_head**-0.5
        place = relative_shift((q + v.to(q.dtype)) * scale @ r.transpose(-2, -1))
        place = place.masked_fill(unseen, -math.inf)
        # the distance term as a mask lets torch's fused kernels do the rest, with a softmax in float32
        with sdpa_kernel(_KERNELS):
            y = F.scaled_dot_product_attention(
                q + u.to(q.dtype), k, value, place, self.dropout if self.training else 0.0, scale=scale
            )
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.d_head).transpose(1, 2)


class Layer(nn.Module):
    """Attention and two linear layers, each added to its input and then normalised."""

    def __init__(
        self, d_model: int, heads: int, d_head: int, d_inner: int, dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.attention = RelativeAttention(d_model, heads, d_head, attention_dropout)
        self.attention_norm = nn.LayerNorm(d_model)
        self.inner = nn.Sequential(
            nn.Linear(d_model, d_inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_inner, d_model)
        )
        self.inner_norm = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, distances: Tensor, u: Tensor, v: Tensor, unseen: Tensor) -> Tensor:
        x = self.attention_norm(x + self.drop(self.attention(x, memory, distances, u, v, unseen)))
        y: Tensor = self.inner_norm(x + self.drop(self.inner(x)))
        return y


class AdaptiveSoftmax(nn.Module):
    """Frequent words and the clusters of rare ones in a first softmax, the words of each cluster in one of its own.

    Its weights of words are those of the embedding, which is given with each call.
    """

    def __init__(self, vocab: int, d_model: int, cutoffs: Sequence[int]) -> None:
        super().__init__()
        inside = [c for c in cutoffs if c < vocab]
        if inside != sorted(set(inside)) or any(c < 1 for c in inside):
            raise Problem(f"transformer-xl: cutoffs must be above 0 and grow, such as [2000, 10000], not {[*cutoffs]}.")
        self.ends = [*inside, vocab]  # words below the first are frequent, from one to the next a cluster
        self.clusters = len(inside)
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.cluster_weight = nn.Parameter(torch.empty(self.clusters, d_model))
        self.cluster_bias = nn.Parameter(torch.zeros(self.clusters))
        nn.init.normal_(self.cluster_weight, std=0.02)

    def _head(self, x: Tensor, words: Tensor) -> Tensor:
        """Logits of the frequent words, then of the clusters."""
        short = self.ends[0]
        if not self.clusters:
            return F.linear(x, words, self.bias)
        weight, bias = (
            torch.cat([words[:short], self.cluster_weight]),
            torch.cat([self.bias[:short], self.cluster_bias]),
        )
        return F.linear(x, weight, bias)

    def nll(self, x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        """−log p of each target: x (N, d), words (vocab, d), targets (N)."""
        # 0 for a frequent word, else its cluster: the number of ends at or below it
        cluster = sum((targets >= end).long() for end in self.ends[:-1]) + torch.zeros_like(targets)
        first = torch.where(cluster == 0, targets, self.ends[0] + cluster - 1)
        nll = F.cross_entropy(self._head(x, words), first, reduction="none")
        if not self.clusters:
            return nll
        # sorted by cluster, so that one wait for the device gives the sizes of all
        order = cluster.argsort()
        sizes = torch.stack([(cluster == i).sum() for i in range(self.clusters + 1)]).tolist()
        for (low, high), rows in zip(pairwise(self.ends), torch.split(order, sizes)[1:], strict=True):
            if len(rows):
                logits = F.linear(x.index_select(0, rows), words[low:high], self.bias[low:high])
                nll = nll.index_add(0, rows, F.cross_entropy(logits, targets[rows] - low, reduction="none"))
        return nll

    def log_probabilities(self, x: Tensor, words: Tensor) -> Tensor:
        """log p of every word, (…, vocab)."""
        head = F.log_softmax(self._head(x, words), -1)
        parts = [head[..., : self.ends[0]]]
        for i, (low, high) in enumerate(pairwise(self.ends)):
            inside = F.log_softmax(F.linear(x, words[low:high], self.bias[low:high]), -1)
            parts.append(head[..., self.ends[0] + i, None] + inside)
        return torch.cat(parts, -1)


class TransformerXL(nn.Module):
    """A language model that reads a text segment by segment and remembers the states of those before."""

    frequencies: Tensor

    def __init__(
        self,
        vocab: int,
        layers: int = 16,
        d_model: int = 512,
        heads: int = 8,
        d_head: int = 64,
        d_inner: int = 2048,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        memory: int = 192,
        cutoffs: Sequence[int] = (19997, 39997, 199997),
    ) -> None:
        super().__init__()
        if d_model % 2:
            raise Problem(f"transformer-xl: d_model must be even, for sines and cosines, not {d_model}.")
        self.memory = memory
        self.embedding = nn.Embedding(vocab, d_model)
        self.u, self.v = (nn.Parameter(torch.empty(heads, 1, d_head)) for _ in range(2))
        self.layers = nn.ModuleList(
            Layer(d_model, heads, d_head, d_inner, dropout, attention_dropout) for _ in range(layers)
        )
        self.softmax = AdaptiveSoftmax(vocab, d_model, cutoffs)
        self.drop = nn.Dropout(dropout)
        exponents = torch.arange(0, d_model, 2) / d_model
        self.register_buffer("frequencies", 10000.0**-exponents, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """As the published code does: normal of deviation 0.02, the scale of layer norm around 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.normal_(self.u, std=0.02)
        nn.init.normal_(self.v, std=0.02)

    def forward(
        self, tokens: Tensor, memory: list[Tensor] | None = None, targets: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """−log p of the targets, (batch, length), or without them log p of all words, (batch, length, vocab).

        Beside it the memory for the next segment: the inputs of each layer, (batch, at most `memory`, d_model).
        """
        words = self.embedding.weight
        x = self.drop(self.embedding(tokens) * math.sqrt(words.shape[1]))
        if memory is None:
            memory = [x[:, :0]] * len(self.layers)
        length, before = tokens.shape[1], memory[0].shape[1]
        distances = self.drop(self._distances(before + length))
        unseen = torch.ones(length, before + length, dtype=torch.bool, device=x.device).triu(before + 1)
        remembered = []
        for layer, past in zip(self.layers, memory, strict=True):
            remembered.append(self._remember(past, x))
            x = layer(x, past, distances, self.u, self.v, unseen)
        x = self.drop(x)
        if targets is None:
            return self.softmax.log_probabilities(x, words), remembered
        return self.softmax.nll(x.flatten(0, 1), words, targets.flatten()).view_as(targets), remembered

    def _distances(self, n: int) -> Tensor:
        """R: sines and cosines of the distances n − 1, …, 0, (1, n, d_model)."""
        distance = torch.arange(n - 1, -1, -1, device=self.frequencies.device)
        angles = distance[:, None] * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)[None]

    def _remember(self, past: Tensor, x: Tensor) -> Tensor:
        both = torch.cat([past, x.detach()], 1)
        return both[:, max(0, both.shape[1] - self.memory) :].detach()
