"""Masked image modelling (SimMIM) with a small vision transformer: Xie et al., 2022."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.app.errors import Problem

PATCH = 4  # pixels wide and high


class MaskedImageModel(nn.Module):
    """Images and which of their patches are hidden → the images as the network paints them, everywhere."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        painted: Tensor = self.network(pixel_values=images, bool_masked_pos=mask).reconstruction
        return painted


def vit_mim(
    image: int = 32, patch: int = PATCH, hidden: int = 192, layers: int = 4, heads: int = 4, inner: int = 768
) -> MaskedImageModel:
    """The vision transformer of transformers, with a mask token and one linear layer that paints pixels."""
    if image % patch:
        raise Problem(f"vit-mim: image ({image}) must be a multiple of patch ({patch}).")
    if hidden % heads:
        raise Problem(f"vit-mim: hidden ({hidden}) must be a multiple of heads ({heads}).")
    from transformers import ViTConfig, ViTForMaskedImageModeling  # slow to import

    config = ViTConfig(
        image_size=image,
        patch_size=patch,
        encoder_stride=patch,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
    )
    return MaskedImageModel(ViTForMaskedImageModeling(config))


def random_mask(
    batch: int, patches: int, ratio: float, generator: torch.Generator, device: torch.device | str
) -> Tensor:
    """⌈ratio · patches⌉ hidden patches in each image, bool (batch, patches); drawn where the generator is."""
    if not 0 < ratio <= 1:
        raise Problem(f"the mask ratio must be above 0 and at most 1, not {ratio}.")
    order = torch.rand(batch, patches, generator=generator, device=generator.device).argsort(1)
    return (order < math.ceil(ratio * patches)).to(device, non_blocking=True)


def simmim_loss(painted: Tensor, images: Tensor, mask: Tensor) -> Tensor:
    """Mean |painted − image| over the hidden pixels and the channels, in float32."""
    side = math.isqrt(mask.shape[1])
    hidden = mask.reshape(-1, 1, side, side).to(torch.float32)
    hidden = F.interpolate(hidden, size=images.shape[-2:], mode="nearest")
    wrong = (painted.float() - images.float()).abs() * hidden
    return wrong.sum() / (hidden.sum() * images.shape[1]).clamp(min=1)
