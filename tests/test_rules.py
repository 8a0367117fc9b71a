"""Every form in which torch takes an operation is understood, or left alone: no rule fails on one."""

from __future__ import annotations

from types import CodeType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.compact.trace import Tracer

# s has parameters w (8), W (8 × 8) and k (3 × 8 × 1), a buffer b (8) and an integer n = 2; h is 3 × 5 × 8
ON_VECTORS = """
h.view(-1)
h.view(torch.int32)
h.view_as(h)
h.reshape_as(h)
torch.reshape(h, (-1,))
torch.reshape(input=h, shape=(15, 8))
h.squeeze()
h.squeeze((0, 1))
h.unsqueeze(dim=-1)
torch.unsqueeze(h, 0)
h.flatten()
h.flatten(start_dim=-2)
h.unflatten(2, (s.n, -1))
nn.Unflatten(-1, (2, 4))(h)
h.mT
h[0].t()
h.permute(2, 0, 1)
h.permute((2, 0, 1))
torch.permute(h, (0, 2, 1))
h.movedim(0, -1)
torch.movedim(h, source=0, destination=2)
h.moveaxis((0, 1), (1, 0))
h.swapaxes(0, 1)
torch.transpose(input=h, dim0=0, dim1=1)
h.expand(2, -1, -1, -1)
h.expand(size=(2, 3, 5, 8))
h.expand_as(h)
torch.broadcast_to(h, (2, 3, 5, 8))
h.repeat(2, 1, 1)
h.repeat((1, 1, 2))
h.repeat(1, 1, s.n)
torch.cat([h, h], -1)
torch.cat([h, h], dim=0)
torch.concat((h, h), axis=1)
torch.stack([h, h])
torch.stack([h, h], dim=-1)
torch.cat([h, s.W[None].expand(3, 8, 8)], 1)
torch.cat([h, torch.zeros(3, 5, 2)], -1)
torch.cat([torch.tensor([]), h])
torch.stack((h, torch.zeros_like(h)), -2)
torch.cat([h.mT, h.mT], -1)
torch.cat([h[0].mT, torch.ones(8, 2)], 1)
h.chunk(2, -1)
h.chunk(3, dim=-1)
torch.chunk(input=h, chunks=2, dim=1)
h.chunk(2)
h.split(3)
h.split(3, -1)
h.split([1, 4], 1)
torch.split(tensor=h, split_size_or_sections=4, dim=2)
h.split_with_sizes([2, 6], -1)
torch.split_with_sizes(h, [1, 2])
h.tensor_split(2, dim=1)
h.tensor_split((1, 2), dim=1)
torch.tensor_split(h, torch.tensor([1, 2]), dim=1)
h.unbind(1)
h.unbind()
torch.unbind(h, dim=-1)
h.select(1, 0)
h.select(dim=-1, index=0)
h.narrow(1, 0, 2)
h.narrow(dim=-1, start=0, length=2)
h.narrow(1, torch.tensor(0), 2)
h[0]
h[..., 0]
h[:, None]
h[..., None]
h[None, ..., :2]
h[torch.tensor([0, 1])]
h[:, [0, 1]]
h[h > 0]
h[True]
h[()]
h[-1, -1]
h[:, s.n]
h[:, :s.n]
h[..., :s.n]
h[torch.tensor(1)]
h[:, torch.tensor([0]), 1:]
h[list([0])]
h.mean()
h.mean(-1)
h.mean((0, 1))
h.mean(dim=[0, 1], keepdim=True)
torch.sum(h, 1, True)
h.sum(dtype=torch.float64)
h.sum(axis=1, keepdims=True)
h.amax()
h.amax(1)
torch.amin(h, (0, 1))
h.sum(dim=())
h.sum(None)
h.sum(1).sum(0)
h.mean(s.n)
h.softmax(1)
F.softmax(h, dim=-1)
F.softmax(h, -1, 3, torch.float64)
torch.softmax(h, dim=1, dtype=torch.float64)
F.normalize(h)
F.normalize(h, 2.0, 1)
F.normalize(h, p=1, dim=1)
F.log_softmax(h, 1)
F.softmin(h, dim=1)
h.cumsum(1)
torch.cumsum(input=h, dim=0)
F.normalize(h, dim=(0, 1))
h.cumsum(s.n - 1)
F.layer_norm(h, (8,))
F.layer_norm(h, [5, 8])
F.layer_norm(input=h, normalized_shape=(8,))
F.group_norm(h.mT, 2)
F.rms_norm(h, (8,))
F.layer_norm(h.mT, (5,))
torch.layer_norm(h, (8,))
F.layer_norm(h, torch.Size([8]), s.w)
F.batch_norm(h.mT, None, None, training=True)
F.batch_norm(h.mT, torch.zeros(8), torch.ones(8))
F.batch_norm(h.mT, s.b, s.b.abs())
F.instance_norm(h.mT)
F.batch_norm(h.reshape(15, 8), torch.zeros(8), torch.ones(8))
F.instance_norm(h.mT, use_input_stats=True)
torch.batch_norm(h.mT, s.w, s.b, s.b, s.b.abs(), False, 0.1, 1e-05, False)
F.linear(h, s.W)
F.linear(h, s.W, s.w)
F.linear(h, s.w)
F.linear(h, torch.randn(3, 8))
F.linear(h[0, 0], s.W)
F.linear(s.w, s.W) + h
F.linear(input=h, weight=s.W)
h @ s.W
s.W @ h.mT
h @ s.w
torch.matmul(h, s.W)
torch.matmul(input=h, other=s.W)
torch.mm(h[0], s.W)
torch.mm(input=h[0], mat2=s.W)
h.matmul(h.mT)
h[0, 0] @ h[0, 0]
h[0, 0] @ s.W
s.w @ s.W + h
torch.addmm(s.w, h[0], s.W)
torch.addmm(input=s.w, mat1=h[0], mat2=s.W)
torch.addmm(s.w, h[0], s.W, beta=2)
s.w.addmm(h[0], s.W)
torch.addmm(s.W[:5], h[0], s.W)
h[0].addmm(h[0], s.W)
F.embedding(torch.tensor([1, 2]), s.W) + h[:, :2]
F.embedding(torch.tensor([1, 2]), h[0])
F.prelu(h, s.w[:1])
F.prelu(h.mT, s.w)
F.prelu(h, torch.tensor(0.1))
F.prelu(h[0, 0], s.w[:1])
F.scaled_dot_product_attention(h, h, h)
F.scaled_dot_product_attention(h[0], h[0], h[0])
F.scaled_dot_product_attention(h, h, h, is_causal=True)
F.scaled_dot_product_attention(h, h, h, torch.ones(5, 5))
F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], torch.ones(3, 1, 1, 5).bool())
F.scaled_dot_product_attention(h.mT, h.mT, h.mT)
F.scaled_dot_product_attention(query=h, key=h, value=h, scale=1.0)
F.scaled_dot_product_attention(torch.randn(3, 5, 8), h, h)
F.scaled_dot_product_attention(h[:1], h, h)
F.scaled_dot_product_attention(*[h.view(3, 5, 2, 4).transpose(1, 2)] * 3, torch.zeros(2, 5, 5))
F.pad(h, (1, 1))
F.pad(h, (0, 0, 1, 1))
F.pad(input=h, pad=[0, 0, 1, 0], value=2.0)
F.pad(h.mT, (1, 1), 'reflect')
F.pad(h, (0, 0, 1, 1), mode='constant')
F.pad(h, (0, 0))
F.pad(h, (0, 0, s.n, 0))
F.pad(h, ())
h + 1
1 - h
h * s.w
s.w * h
h + s.W[:5]
h * h.mean()
h + h.mean(-1, keepdim=True)
h / h.mT.mean(1)[..., None]
torch.where(h > 0, 1.0, 0.0)
torch.where(h > 0)
torch.where(h > 0, h, torch.tensor(0.0))
torch.clamp(h, min=0)
h.clamp(min=torch.tensor(0.0))
torch.lerp(h, h, 0.5)
torch.addcmul(h, h, h, value=2)
torch.pow(2, h)
2 ** h
h ** h
torch.maximum(h, s.w)
h.add(h, alpha=2)
torch.sub(h, 1, alpha=2)
torch.rsub(h, 1)
h.type(torch.float64)
h.to('cpu')
h.to(dtype=torch.float64)
h.type()
h.type_as(s.w)
h.clone(memory_format=torch.contiguous_format)
h.data
h.masked_fill(h > 0, 0.0)
h.masked_fill(mask=h > 0, value=torch.tensor(0.0))
(h > 0) & (h < 1)
h.eq(0)
h == s.w
h == None
h != h
~(h > 0)
h.isnan()
torch.zeros_like(h)
torch.randn_like(input=h)
torch.ones_like(h, dtype=torch.bool)
h.new_zeros(3)
h.new_zeros(h.shape)
h.new_full((2,), 1.0)
h.new_tensor([1.0])
h.new_zeros(s.n, 3)
F.dropout(h, 0.1, False)
F.gelu(h, approximate='tanh')
h.mul_(2).add_(1)
torch.relu_(h)
h.copy_(torch.zeros(3, 5, 8))
h.zero_()
h.fill_(1.0)
h.unsqueeze_(0)
h.transpose_(0, 1)
h.squeeze_()
h.resize_(2)
h.masked_fill_(h > 0, 1.0)
h.clamp_(0, 1)
h.__iadd__(1)
h.__setitem__(0, 1.0) or h
h.set_(torch.zeros(2))
h.normal_()
h.exponential_().mean()
h.cumsum_(1)
h.relu_().view(-1)
torch.add(input=h, other=1)
torch.mul(h, other=s.w)
h.reciprocal()
h.sum().expand(3)
h.flatten().expand(2, 120)
h[:, :0].sum()
h[:0]
h.new_empty(0)
h.sum(1, keepdim=True) * h
h.abs().max()
h.max(1)
h.std(1)
h.norm(dim=1)
h.topk(2, 1)
h.gather(1, torch.zeros(3, 1, 8, dtype=torch.long))
h.repeat_interleave(2, 1)
h.tolist() and h
h.numpy() is not None and h
(h.sum().item() > 0) * h
float(h.sum()) * h
h.to_sparse().to_dense()
torch.fft.rfft(h, dim=1).abs()
torch.complex(h, h).abs()
h.bool()
h.half()
h.int().sum(1)
h.is_contiguous() and h
len(h) * h
sum(h)
[t for t in h]
h.__len__() * h
reversed(h)
torch.atleast_3d(h[0])
h.ravel()
torch.meshgrid(h[0, 0], h[0, 1], indexing='ij')
torch.broadcast_tensors(h, s.w)
h
"""
# h is 2 × 8 × 6 × 6
ON_IMAGES = """
F.max_pool2d(h, 2)
F.max_pool2d(h, kernel_size=2, return_indices=True)
F.avg_pool2d(h, 2, padding=1)
F.adaptive_avg_pool2d(h, 1)
F.adaptive_max_pool2d(h, (1, None))
F.max_pool1d(h.flatten(2), 2)
F.interpolate(h, scale_factor=2)
F.interpolate(input=h, size=(4, 4), mode='bilinear')
F.max_pool3d(h[:, None], 1)
F.avg_pool2d(h[0], 2)
F.max_pool2d(input=h, kernel_size=2)
F.avg_pool1d(h.mean(-1), 2)
F.conv2d(h, s.W[:, :, None, None])
F.conv2d(h, s.W[:, :1, None, None], groups=8)
F.conv2d(h, torch.randn(8, 1, 3, 3), groups=8, padding='same')
F.conv2d(h[0], torch.randn(4, 8, 1, 1))
F.conv1d(h.flatten(2), s.k.permute(0, 1, 2))
F.conv1d(h.flatten(2)[0], s.k)
F.conv_transpose1d(h.flatten(2)[:, :3], s.k)
F.conv1d(input=h.flatten(2), weight=s.k, padding=1)
F.conv1d(h.flatten(2), s.k, None, 1, 'valid')
F.conv1d(h.flatten(2)[:, :2], s.k[:2, :1], groups=2)
F.pixel_shuffle(h, 2)
F.local_response_norm(h, 2)
F.instance_norm(h, weight=s.w, bias=s.w)
F.batch_norm(h, s.b, s.b.abs(), s.w, s.w)
F.prelu(h, s.w)
F.unfold(h, 2)
h.flip(-1)
F.pad(h, (1, 1, 1, 1), 'replicate')
F.pad(h, (1, 1, 1, 1), 'circular')
h.roll(1, -1)
F.grid_sample(h, torch.zeros(2, 4, 4, 2))
F.glu(h, 1)
h.to(memory_format=torch.channels_last)
h.contiguous(memory_format=torch.channels_last)
F.dropout2d(h)
F.adaptive_avg_pool2d(h[0], 2)
F.conv2d(h, torch.randn(4, 8, 3, 3), padding=(1, 0), dilation=2) if h.shape[-1] > 4 else h
"""


class Net(nn.Module):
    def __init__(self, images: bool, code: CodeType) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1) if images else nn.Linear(4, 8)
        self.n, self.code = 2, code
        self.w, self.W = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))
        self.k = nn.Parameter(torch.randn(3, 8, 1))
        self.register_buffer("b", torch.rand(8) + 1)
        with torch.no_grad():
            self.a.weight[1], self.a.bias[1] = 0, 0.5

    def forward(self, x: Tensor) -> Any:
        return eval(self.code, {"torch": torch, "F": F, "nn": nn, "s": self, "h": self.a(x)})


@pytest.mark.parametrize(
    ("forms", "shape"), [(ON_VECTORS, (3, 5, 4)), (ON_IMAGES, (2, 3, 6, 6))], ids=["vectors", "images"]
)
@pytest.mark.filterwarnings("ignore")
def test_no_rule_fails_on_a_form_that_torch_takes(forms: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, failed = torch.randn(shape), []
    for form in filter(None, forms.split("\n")):
        model = Net(len(shape) == 4, compile(form, form, "eval")).eval()
        with torch.no_grad():
            model(x.clone())
        try:
            Tracer(model, []).run((x.clone(),), {})
        except Exception as error:
            failed.append(f"{form}: {error}")
    assert not failed, failed
