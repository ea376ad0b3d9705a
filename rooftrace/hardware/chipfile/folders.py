"""Where chip files lie: in this package, and in third-party packages that name one of their own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING

from rooftrace._extensions import load

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


@functools.cache
def chip_files() -> Mapping[str, Traversable]:
    """Chip files by name.  A bundled chip keeps its name, whatever another package brings."""
    brought = (resources.files(package) for _, package in load("rooftrace.chips"))
    files: dict[str, Traversable] = {}
    for folder in (resources.files("rooftrace.hardware").joinpath("chips"), *brought):
        for item in folder.iterdir():
            if item.name.endswith(".toml"):
                files.setdefault(item.name.removesuffix(".toml"), item)
    return files
