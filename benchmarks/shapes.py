"""The penalised weights of four networks, as shapes: what a step's cost depends on."""

from __future__ import annotations

import math

Shape = tuple[int, ...]


def vgg19() -> list[Shape]:
    """The 16 convolutions of VGG19 as it is used on CIFAR."""
    widths = [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8
    return [(out, into, 3, 3) for into, out in zip([3, *widths], widths, strict=False)]


def resnet50() -> list[Shape]:
    """The stem and the bottlenecks of ResNet50, with their projections."""
    shapes: list[Shape] = [(64, 3, 7, 7)]
    into = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        out = 4 * width
        for block in range(blocks):
            shapes += [(width, into, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
            if block == 0:
                shapes.append((out, into, 1, 1))
            into = out
    return shapes


def transformer_xl() -> list[Shape]:
    """The linear layers of Transformer-XL base: 16 layers, width 512, 8 heads of 64, inner width 2048."""
    layer: list[Shape] = [(1536, 512), (512, 512), (512, 512), (2048, 512), (512, 2048)]  # qkv, r, o, ff
    return layer * 16


def gpt_350m() -> list[Shape]:
    """The linear layers of a GPT of 24 layers, width 1024."""
    layer: list[Shape] = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)]  # qkv, out, mlp
    return layer * 24


NETWORKS: dict[str, list[Shape]] = {
    "vgg19": vgg19(),
    "resnet50": resnet50(),
    "transformer-xl": transformer_xl(),
    "gpt-350m": gpt_350m(),
}


def weights(shapes: list[Shape]) -> int:
    """How many weights that is."""
    return sum(math.prod(shape) for shape in shapes)


assert [f"{weights(shapes) / 1e6:.1f}" for shapes in NETWORKS.values()] == ["20.0", "23.5", "54.5", "302.0"]
