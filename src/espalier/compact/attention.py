"""Multi-head attention that has lost some of its heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import Parameter


class HeadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with the heads that are left: heads · head_dim may be less than embed_dim.

    It is called as the dense module is, with the masks of the dense module: of a mask for each head it takes those of
    `head_index`. The attention weights that it returns are those of the heads that are left, and their average is over
    these heads alone.
    """

    head_index: Tensor
    q_weight: Parameter
    k_weight: Parameter
    v_weight: Parameter
    q_bias: Parameter | None
    k_bias: Parameter | None
    v_bias: Parameter | None

    def __init__(self, mha: nn.MultiheadAttention, heads: int) -> None:
        """Uninitialised, for `heads` of the heads of `mha`."""
        nn.Module.__init__(self)  # the parent's would allocate the dense weights
        if mha.bias_k is not None or mha.bias_v is not None or mha.add_zero_attn:
            raise ValueError(
                "HeadAttention serves no MultiheadAttention with add_bias_kv or add_zero_attn. "
                "Leave this layer out by ignore=[...]."
            )
        if not 1 <= heads <= mha.num_heads:
            raise ValueError(f"of {mha.num_heads} heads 1 to {mha.num_heads} can be kept, not {heads}.")
        self.embed_dim, self.kdim, self.vdim = mha.embed_dim, mha.kdim, mha.vdim
        self.num_heads, self.head_dim = heads, mha.head_dim
        self.dense_heads: int = mha.dense_heads if isinstance(mha, HeadAttention) else mha.num_heads
        self.dropout, self.batch_first = mha.dropout, mha.batch_first
        self.bias_k = self.bias_v = None
        self.add_zero_attn = False
        self._qkv_same_embed_dim = False  # with it nn.TransformerEncoderLayer would run its fused kernel on dense heads

        (q, _, _), (bias, _, _) = _projections(mha)
        out = mha.out_proj
        width = heads * self.head_dim
        for name, columns in (("q", self.embed_dim), ("k", self.kdim), ("v", self.vdim)):
            self.register_parameter(f"{name}_weight", _like(q, width, columns))
            self.register_parameter(f"{name}_bias", None if bias is None else _like(bias, width))
        self.out_proj = NonDynamicallyQuantizableLinear(width, self.embed_dim, bias=False, device="meta")
        self.out_proj.weight = _like(out.weight, self.embed_dim, width)
        self.out_proj.bias = None if out.bias is None else _like(out.bias, self.embed_dim)
        # a buffer, so that it is saved and loaded with the weights
        self.register_buffer("head_index", torch.arange(heads, device=q.device))
        self.train(mha.training)

    @classmethod
    def empty(cls, mha: nn.MultiheadAttention, heads: int) -> HeadAttention:
        """As `mha` would be with so many heads, its parameters uninitialised."""
        return cls(mha, heads)

    @classmethod
    def from_dense(cls, mha: nn.MultiheadAttention, heads: Sequence[int]) -> HeadAttention:
        """The given heads of `mha`, which may have lost some already: they count from 0 among those it has."""
        heads = list(heads)
        if len(set(heads)) < len(heads) or not all(0 <= h < mha.num_heads for h in heads):
            raise ValueError(f"heads must be different ones of 0 to {mha.num_heads - 1}, not {heads}.")
        small = cls(mha, len(heads))
        small._take(mha, heads)
        return small

    @torch.no_grad()
    def _take(self, mha: nn.MultiheadAttention, heads: list[int]) -> None:
        index = torch.tensor(heads, device=self.head_index.device)
        rows = (index[:, None] * self.head_dim + torch.arange(self.head_dim, device=index.device)).flatten()
        for mine, theirs in zip(_projections(self), _projections(mha), strict=True):
            for target, source in zip(mine, theirs, strict=True):
                if target is not None and source is not None:
                    target.copy_(source[rows])
        self.out_proj.weight.copy_(mha.out_proj.weight[:, rows])
        if mha.out_proj.bias is not None:
            self.out_proj.bias.copy_(mha.out_proj.bias)
        self.head_index.copy_(mha.head_index[index] if isinstance(mha, HeadAttention) else index)

    def spec(self) -> dict[str, int]:
        """What `empty` needs to build it from the dense module."""
        return {"heads": self.num_heads}

    # nn.TransformerEncoder asks these whether they require gradients, before it makes a nested tensor
    @property
    def in_proj_weight(self) -> Parameter:  # type: ignore[override]
        return self.q_weight

    @property
    def in_proj_bias(self) -> Parameter | None:  # type: ignore[override]
        return self.q_bias

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        if query.dim() not in (2, 3):
            raise ValueError(f"query must have 2 dimensions, or 3 in a batch, not {query.dim()}.")
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal only says what attn_mask is: pass the mask too.")
        if query.is_nested and (need_weights or attn_mask is not None or key_padding_mask is not None):
            raise ValueError("nested tensors take no mask and give no attention weights: pass need_weights=False.")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        q = self._heads(F.linear(query, self.q_weight, self.q_bias))
        k = self._heads(F.linear(key, self.k_weight, self.k_bias))
        v = self._heads(F.linear(value, self.v_weight, self.v_bias))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, k)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
            attended = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
        out = self.out_proj(attended.transpose(1, 2).reshape(query.size(0), -1, self.num_heads * self.head_dim))
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, heads · head_dim) → (batch, heads, length, head_dim), nested tensors too."""
        heads = x.reshape(x.size(0), -1, self.num_heads, self.head_dim).transpose(1, 2)
        return heads.contiguous() if x.is_nested else heads  # torch's attention takes nested tensors in no other form

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """What is added to the scores (batch, heads, length, source length); the dense module's masks in."""
        if q.is_nested or (attn_mask is None and padding is None):
            return None
        batch, length, source = q.size(0), q.size(2), k.size(2)
        terms = []
        if attn_mask is not None:
            many = attn_mask.dim() == 3
            shape = (batch * self.dense_heads, length, source) if many else (length, source)
            if attn_mask.shape != shape:
                raise RuntimeError(f"attn_mask must be of shape {shape}, not {tuple(attn_mask.shape)}.")
            if many:
                attn_mask = attn_mask.reshape(batch, self.dense_heads, length, source)[:, self.head_index]
            terms.append(_additive(attn_mask, q.dtype))
        if padding is not None:
            if padding.shape != (batch, source):
                raise RuntimeError(f"key_padding_mask must be of shape {(batch, source)}, not {tuple(padding.shape)}.")
            terms.append(_additive(padding, q.dtype)[:, None, None, :])
        return sum(terms[1:], terms[0])


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """−∞ where a boolean mask is set; others are added as they are."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return mask.to(dtype)


def _like(source: Tensor, *shape: int) -> Parameter:
    return Parameter(source.new_empty(shape), requires_grad=source.requires_grad)


def _projections(mha: nn.MultiheadAttention) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Weights and biases of query, key and value."""
    if isinstance(mha, HeadAttention):
        return (mha.q_weight, mha.k_weight, mha.v_weight), (mha.q_bias, mha.k_bias, mha.v_bias)
    weights = (
        mha.in_proj_weight.chunk(3)
        if mha.in_proj_weight is not None
        else (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
    )
    return weights, (None, None, None) if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
