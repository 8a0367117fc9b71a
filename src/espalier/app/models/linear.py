"""Linear layers: logistic regression and the multilayer perceptron of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from espalier.app.errors import Problem


def logreg(inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """Multinomial logistic regression that starts at zero; it returns logits."""
    linear = nn.Linear(inputs, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(sizes: Sequence[int] = (784, 512, 256, 128, 64, 32, 16, 10)) -> nn.Sequential:
    """Linear layers between these sizes, with ReLU between them; it returns logits."""
    if len(sizes) < 2:
        raise Problem(f"mlp: sizes must hold the inputs and the classes at least, such as [784, 10], not {[*sizes]}.")
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
