"""Small modules that torch.compile breaks, each in one way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 16


class Layer(nn.Module):
    """A product, something that breaks, a product and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def between(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x)) * 2
        y = self.between(y)
        return self.norm(self.down(torch.tanh(y)) + x)


class Whole(Layer):
    """Nothing breaks it."""


class Printing(Layer):
    def between(self, y: Tensor) -> Tensor:
        print(end="")
        return y + 1


class Item(Layer):
    def between(self, y: Tensor) -> Tensor:
        return y * y.mean().item()


class Branch(Layer):
    def between(self, y: Tensor) -> Tensor:
        if y.sum() > 1e9:
            y = y + 1
        return y


class Asked(Layer):
    def between(self, y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return y


class InC(Layer):
    """A function of C that Dynamo does not know."""

    def between(self, y: Tensor) -> Tensor:
        found = np.random.default_rng(0).integers(1, 2)
        return y * int(found)


class Property(Layer):
    """What breaks is in a property, behind which Dynamo cannot go on in the same function."""

    @property
    def doubled(self) -> Any:
        print(end="")
        return lambda y: y * 2

    def between(self, y: Tensor) -> Tensor:
        return self.doubled(y)


class Disabled(Layer):
    @torch.compiler.disable
    def between(self, y: Tensor) -> Tensor:
        return torch.sin(y) * 2


class Stack(nn.Module):
    """Layers in a loop, an op before it and a product behind it."""

    def __init__(self, kind: type[Layer], count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * math.sqrt(WIDTH)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Numbered(nn.Module):
    """A layer with a number of its own, by which Dynamo compiles each one apart."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.up = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.number
        torch._dynamo.graph_break()
        return y + self.number


class Numbers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Numbered, range(count)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Refuses(nn.Module):
    """Dynamo raises an error; eager code does not."""

    def forward(self, x: Tensor) -> Any:
        with torch._dynamo.error_on_graph_break(True):
            y = x + 1
            print(end="")
            return y * 2


BREAKING = (Printing, Item, Branch, Asked, InC, Property, Disabled)
