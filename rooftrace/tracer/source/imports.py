"""Finders of modules that stand before others and change what these find."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def spec_after(
    finder: Any, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """What the finders behind `finder` on `sys.meta_path` find for a module; None: nothing.

    A finder before it may ask it too, and must not be asked back.
    """
    finders = list(sys.meta_path)
    for other in finders[finders.index(finder) + 1 :] if finder in finders else ():
        find = getattr(other, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None
