"""VGG19 as the paper has it on CIFAR: batch norm, no average pooling, one linear layer."""

from __future__ import annotations

from torch import Tensor, nn


class VGG19(nn.Module):
    """VGG19 with batch norm, for images of 32 × 32."""

    def __init__(self, width: float = 1.0, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for planes, convs in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
            out = int(planes * width)
            for _ in range(convs):
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.features(x).flatten(1))
        return y
