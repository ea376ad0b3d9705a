"""Paths of modules, and the numbers in them."""

from __future__ import annotations

import re

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(path: str) -> str:
    """A module path with its indices starred: "layers.3.mlp" -> "layers.*.mlp"."""
    return _INDEX.sub("*", path)


def split(path: str, container: str) -> tuple[int, str] | None:
    """(3, ".mlp") for "layers.3.mlp" in "layers"; None for what is not in the container."""
    prefix = below(container, "")
    if not path.startswith(prefix):
        return None
    index, dot, rest = path[len(prefix) :].partition(".")
    return (int(index), dot + rest) if index.isdigit() else None


def below(container: str, name: str) -> str:
    """The path of `name` in a container, "" being the root."""
    return f"{container}.{name}" if container else name
