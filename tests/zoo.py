"""The models that `espalier.shrink` is tested on: a new architecture is one more row of ZOO.

Each row is called in one way, `model(*case.inputs(batch))`: positional tensors only, in the order of `forward`, which
for those of transformers means `input_ids` or `pixel_values` alone. `logits` takes the tensor out of what they return.
Layers are registered so that the first is the one that reads the model's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from espalier.app.models.resnet import ResNet, bottleneck, conv_bn, resnet18, resnet50
from espalier.app.models.vgg import VGG19
from espalier.compact.report import ShrinkReport


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...] = (20, 32, 24, 10)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class LeNet(nn.Module):
    """Convolution, pooling, flatten, Linear: each channel of `conv2` is 16 columns of `fc1`."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d = (max(2, int(n * width)) for n in (6, 16, 120, 84))
        self.conv1, self.conv2 = nn.Conv2d(1, a, 5), nn.Conv2d(a, b, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * b, c), nn.Linear(c, d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class InvertedResidual(nn.Module):
    """1×1 expand, 3×3 depthwise, 1×1 project; the input is added where the shape stays."""

    def __init__(self, channels: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = channels * expand
        self.residual = (channels, stride) == (out, 1)
        self.body = nn.Sequential(
            conv_bn(channels, hidden, 1),
            nn.ReLU6(inplace=True),
            conv_bn(hidden, hidden, 3, stride, groups=hidden),
            nn.ReLU6(inplace=True),
            conv_bn(hidden, out, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNet(nn.Module):
    """MobileNetV2, cut short; the mean over space stands for its pooling."""

    def __init__(self, width: int = 8, expand: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, width, 3, 2), nn.ReLU6(inplace=True))
        plan = ((width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 2 * width, 1))
        self.blocks = nn.Sequential(*(InvertedResidual(a, b, stride, expand) for a, b, stride in plan))
        self.last = nn.Sequential(conv_bn(2 * width, 8 * width, 1), nn.ReLU6(inplace=True))
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.last(self.blocks(self.stem(x))).mean((2, 3)))


class DenseLayer(nn.Module):
    """BN, ReLU, 1×1, BN, ReLU, 3×3, concatenated to the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, new], 1)


class DenseNet(nn.Module):
    """Dense blocks with a halving transition between them."""

    def __init__(self, growth: int = 8, blocks: tuple[int, ...] = (3, 3)) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for i, number in enumerate(blocks):
            if i:
                half = channels // 2
                transition = nn.Conv2d(channels, half, 1, bias=False)
                layers += [nn.BatchNorm2d(channels), nn.ReLU(), transition, nn.AvgPool2d(2)]
                channels = half
            for _ in range(number):
                layers.append(DenseLayer(channels, growth))
                channels += growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())
        self.fc = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class UNet(nn.Module):
    """Two levels down by max pooling and up by transposed convolution, with skips concatenated."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()

        def double(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(conv_bn(a, b, 3), nn.ReLU(), conv_bn(b, b, 3), nn.ReLU())

        self.down1, self.down2, self.middle = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.merge2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), double(4 * width, 2 * width)
        self.up1, self.merge1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2), double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = self.up2(self.middle(F.max_pool2d(coarse, 2)))
        x = self.up1(self.merge2(torch.cat([x, coarse], 1)))
        return self.head(self.merge1(torch.cat([x, fine], 1)))


class Tagger(nn.Module):
    """Embedding, two recurrent layers, a label for each token."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], width: int = 24, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.rnn = cell(width, width, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(width * (2 if bidirectional else 1), 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


class CellTagger(nn.Module):
    """The same with a cell, step by step, which begins by itself or with a state that the model gives it."""

    def __init__(self, cell: type[nn.RNNCellBase], begins: bool = True, width: int = 24, units: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.cell = cell(width, units)
        self.head = nn.Linear(units, 5)
        self.begins, self.two = begins, cell is nn.LSTMCell

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        state = None
        if not self.begins:
            zeros = x.new_zeros(x.shape[0], self.cell.hidden_size)
            state = (zeros, zeros) if self.two else zeros
        seen = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            seen.append(state[0] if self.two else state)
        return self.head(torch.stack(seen, 1))


class Encoder(nn.Module):
    """torch's own TransformerEncoder, which in eval mode without gradients calls one fused kernel a layer."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, norm_first: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True, norm_first=norm_first)
        # nested tensors serve padding masks, and torch warns where it cannot use them
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class AttentionBlock(nn.Module):
    """One pre-norm block around nn.MultiheadAttention, written out."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(12, width)
        self.norm1, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x.mean(1))


def vit() -> nn.Module:
    """The ViT of transformers, tiny."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            initializer_range=0.2,  # its own 0.02 makes attention uniform and hides mistakes
            num_labels=5,
        )
    )


def bert() -> nn.Module:
    """The BERT of transformers, tiny."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
            initializer_range=0.2,
            num_labels=5,
        )
    )


def _normal(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    """A batch of normal entries, in the default dtype."""
    return lambda batch: (torch.randn(batch, *shape),)


def _tokens(batch: int) -> tuple[Tensor, ...]:
    """A batch of sequences of 12 tokens out of 50."""
    return (torch.randint(1, 50, (batch, 12)),)


@dataclass(frozen=True)
class ModelCase:
    """A model, what it is called with, and the layers that read a flattened map: columns to the channel."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    blocks: Mapping[str, int] = field(default_factory=dict)


ZOO = (
    ModelCase("mlp", MLP, _normal(20)),
    ModelCase("lenet", LeNet, _normal(1, 28, 28), {"fc1": 16}),
    ModelCase("vgg19", partial(VGG19, width=0.125), _normal(3, 32, 32)),
    ModelCase("resnet18", partial(resnet18, width=8), _normal(3, 16, 16)),
    ModelCase("resnet18-imagenet", partial(resnet18, width=8, imagenet=True), _normal(3, 64, 64)),
    ModelCase("resnet50", partial(resnet50, width=8), _normal(3, 16, 16)),
    ModelCase("resnet50-imagenet", partial(resnet50, width=8, imagenet=True), _normal(3, 64, 64)),
    ModelCase("resnext", partial(ResNet, bottleneck, (1, 1, 1), width=16, groups=4), _normal(3, 16, 16)),
    ModelCase("mobilenet", MobileNet, _normal(3, 32, 32)),
    ModelCase("densenet", DenseNet, _normal(3, 16, 16)),
    ModelCase("unet", UNet, _normal(3, 16, 16)),
    ModelCase("lstm", partial(Tagger, nn.LSTM), _tokens),
    ModelCase("lstm-bidirectional", partial(Tagger, nn.LSTM, bidirectional=True), _tokens),
    ModelCase("gru", partial(Tagger, nn.GRU), _tokens),
    ModelCase("lstm-cell", partial(CellTagger, nn.LSTMCell), _tokens),
    ModelCase("lstm-cell-state", partial(CellTagger, nn.LSTMCell, begins=False), _tokens),
    ModelCase("gru-cell", partial(CellTagger, nn.GRUCell), _tokens),
    ModelCase("rnn-cell", partial(CellTagger, nn.RNNCell), _tokens),
    ModelCase("encoder", Encoder, _tokens),
    ModelCase("encoder-prenorm", partial(Encoder, norm_first=True), _tokens),
    ModelCase("attention", AttentionBlock, _normal(6, 12)),
    ModelCase("vit", vit, _normal(3, 16, 16)),
    ModelCase("bert", bert, _tokens),
)


def logits(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The model's output as one tensor."""
    out = model(*inputs)
    return out if isinstance(out, Tensor) else out.logits


def unforced(report: ShrinkReport) -> bool:
    """Nothing had to stay because the smaller model failed without it."""
    return not any("for without them" in line or "for otherwise" in line for line in report.kept)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Norms with random statistics, weights and biases, and a model whose output depends on its input.

    Biases begin at zero in attention and transformers, which would hide mistakes about them. Convolutions are drawn
    with He's variance: of an input, torch's own leaves 4e-10 after the 16 of VGG19 with such norms, half of them zero.
    """
    rng = torch.Generator().manual_seed(seed)

    def fill(x: Tensor, low: float, high: float) -> None:
        x.copy_(low + (high - low) * torch.rand(x.shape, generator=rng))

    for parameter in model.parameters():
        if parameter.ndim == 1:
            fill(parameter, -0.5, 0.5)
    for module in model.modules():
        if isinstance(module, _ConvNd):
            fan_in = module.kernel_size[0] ** (module.weight.ndim - 2) * module.in_channels // module.groups
            module.weight.copy_((2 / fan_in) ** 0.5 * torch.randn(module.weight.shape, generator=rng))
        elif isinstance(module, (_BatchNorm, nn.LayerNorm, nn.GroupNorm)):
            fill(module.weight, 0.5, 1.5)
        if isinstance(module, _BatchNorm):
            fill(module.running_mean, -0.5, 0.5)
            fill(module.running_var, 0.5, 1.5)


def _weights(module: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The weights of one layer that zero_inputs works on, each with the dimension that its groups index."""
    if isinstance(module, _ConvNd):
        yield module.weight, 0 if module.groups > 1 or isinstance(module, _ConvTransposeNd) else 1
    elif isinstance(module, nn.Linear):
        yield module.weight, 1
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        yield from ((weight, 1) for weight in module.parameters(recurse=False) if weight.ndim == 2)
    elif isinstance(module, nn.MultiheadAttention):
        yield module.in_proj_weight, 1


@torch.no_grad()
def zero_inputs(model: nn.Module, rate: float, seed: int, blocks: Mapping[str, int] | None = None) -> None:
    """Set random groups of each layer to exactly zero, but for the first layer, and never all of a layer.

    Groups are inputs: columns of Linear, recurrent and attention weights, input channels of convolutions, and filters
    of grouped ones, where an input channel is not one index. Of a layer in `blocks`, columns go so many at a time.
    """
    rng = torch.Generator().manual_seed(seed)
    readers = (nn.Embedding, _ConvNd, nn.Linear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, readers)]
    for name, module in layers[1:]:
        block = (blocks or {}).get(name, 1)
        for weight, dim in _weights(module):
            groups = weight.shape[dim] // block
            zero = torch.rand(groups, generator=rng) < rate
            zero[torch.randint(groups, (1,), generator=rng)] = False
            weight.index_fill_(dim, zero.repeat_interleave(block).nonzero().flatten(), 0.0)
