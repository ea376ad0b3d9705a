"""ResNet-50 (He et al., 2015; stride in the 3x3 convolution, as in torchvision), plain PyTorch."""

import torch
from torch import Tensor, nn


def conv_norm(
    in_channels: int, out_channels: int, kernel: int, *, stride: int = 1
) -> nn.Sequential:
    """A convolution that keeps the image's size up to its stride, then batch normalisation."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, and the input added back."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.reduce = conv_norm(in_channels, width, 1)
        self.spatial = conv_norm(width, width, 3, stride=stride)
        self.expand = conv_norm(width, out_channels, 1)
        self.relu = nn.ReLU(inplace=True)
        if stride == 1 and in_channels == out_channels:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = conv_norm(in_channels, out_channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.reduce(x))
        y = self.relu(self.spatial(y))
        return self.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four stages of bottleneck blocks, average pooling and a linear classifier."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv_norm(3, 64, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        channels, stages = 64, []
        for index, depth in enumerate(depths):
            width, blocks = 64 * 2**index, []
            for block in range(depth):
                stride = 2 if index > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = width * Bottleneck.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images))
        return self.head(self.pool(features).flatten(1))


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-50 (25,557,032 parameters) and a batch of eight 224x224 images."""
    return ResNet(), (torch.randn(8, 3, 224, 224),)
