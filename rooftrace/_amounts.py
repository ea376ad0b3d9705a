"""Amounts: numbers at one point, or arrays over many; the larger and the smaller of two of them.

What is computed from amounts is written once: at one point it stays plain numbers, which are fast.
`np` is numpy, imported when something of it is first used: numbers need none.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["Amount", "Array", "Places", "larger", "np", "smaller"]

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Places = np.ndarray[Any, np.dtype[np.integer[Any]]]
    Amount = Array | float
    """An array over points, or sizes; or one number for all of them."""
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    np = _Lazy("numpy")

_NUMBERS = (float, int)


def larger(a: Any, b: Any) -> Any:
    """The larger of two amounts, at every point."""
    if isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS):
        return b if b > a else a
    return np.maximum(a, b)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two amounts, at every point."""
    if isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS):
        return b if b < a else a
    return np.minimum(a, b)
