"""Residual networks, with the stem of CIFAR or of ImageNet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(a: int, b: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, and batch norm."""
    conv = nn.Conv2d(a, b, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(b))


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)), the shortcut a 1×1 convolution where the shape changes."""

    def __init__(self, body: nn.Module, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut = nn.Identity() if (channels, stride) == (out, 1) else conv_bn(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def basic(channels: int, planes: int, stride: int, groups: int) -> tuple[Residual, int]:
    """The block of ResNet18, and its number of output channels."""
    body = nn.Sequential(
        conv_bn(channels, planes, 3, stride, groups), nn.ReLU(inplace=True), conv_bn(planes, planes, 3, 1, groups)
    )
    return Residual(body, channels, planes, stride), planes


def bottleneck(channels: int, planes: int, stride: int, groups: int) -> tuple[Residual, int]:
    """The block of ResNet50, of ResNeXt where groups > 1, and its number of output channels."""
    body = nn.Sequential(
        conv_bn(channels, planes, 1),
        nn.ReLU(inplace=True),
        conv_bn(planes, planes, 3, stride, groups),
        nn.ReLU(inplace=True),
        conv_bn(planes, 4 * planes, 1),
    )
    return Residual(body, channels, 4 * planes, stride), 4 * planes


class ResNet(nn.Module):
    """ResNet with the stem of CIFAR (3×3) or of ImageNet (7×7 of stride 2, max pooling)."""

    def __init__(
        self,
        block: Callable[[int, int, int, int], tuple[Residual, int]],
        blocks: tuple[int, ...],
        width: int = 64,
        groups: int = 1,
        imagenet: bool = False,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, width, *((7, 2) if imagenet else (3, 1))), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, padding=1) if imagenet else nn.Identity()
        channels, layers = width, []
        for stage, number in enumerate(blocks):
            for i in range(number):
                layer, channels = block(channels, width * 2**stage, 2 if stage and not i else 1, groups)
                layers.append(layer)
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.pool(self.stem(x)))
        y: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return y


resnet18 = partial(ResNet, basic, (2, 2, 2, 2))


def resnet50(width: int = 64, classes: int = 10, imagenet: bool = False) -> ResNet:
    """ResNet50, with the stem of CIFAR or of ImageNet."""
    return ResNet(bottleneck, (3, 4, 6, 3), width=width, classes=classes, imagenet=imagenet)
