"""The networks of the paper, and a small one for small digits, by the names that recipes use."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from espalier.app.models.convnet import ConvNet
from espalier.app.models.linear import logreg, mlp
from espalier.app.models.resnet import resnet50
from espalier.app.models.simmim import vit_mim
from espalier.app.models.tacotron2 import Tacotron2
from espalier.app.models.transformer_xl import TransformerXL
from espalier.app.models.vgg import VGG19

MODELS: dict[str, Callable[..., nn.Module]] = {
    "logreg": logreg,
    "mlp": mlp,
    "convnet": ConvNet,
    "vgg19": VGG19,
    "resnet50": resnet50,
    "transformer-xl": TransformerXL,
    "tacotron2": Tacotron2,
    "vit-mim": vit_mim,
}
