"""The inputs of a program: which sizes are fixed, and which may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """An input of a program.  sizes: a number where the dimension is fixed, else its name."""

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a program's inputs that may change: sizes as exported, and ranges."""

    usual: Mapping[str, int | None]  # None: nothing says
    ranges: Mapping[str, tuple[int, int]]
