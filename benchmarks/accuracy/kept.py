"""Traces that are kept in a folder, since they take longer than what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import rooftrace as rt


def kept(path: Path, make: Callable[[], rt.types.OpGraph]) -> rt.types.OpGraph:
    """The graph in this file, or the one that `make` makes, which is written there."""
    if path.exists():
        return rt.load(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    graph = make()
    rt.save(graph, path)
    return graph
