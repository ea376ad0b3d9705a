"""How mkdocstrings reads a docstring of ours: as prose with `code`, in which no sign is markup."""

from __future__ import annotations

import re
from typing import Any

import griffe

CODE = re.compile(r"(`+.+?`+)", re.DOTALL)


class Prose(griffe.Extension):
    """`timeline_<phase>.json.gz` and `*args` stand on the page as they stand in the docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = literal(obj.docstring.value)


def literal(text: str) -> str:
    """Prose in which `<`, `*` and `_` are themselves; code and indented blocks are left alone."""
    blocks = text.split("\n\n")
    return "\n\n".join(block if block.startswith("    ") else _escaped(block) for block in blocks)


def _escaped(block: str) -> str:
    parts = CODE.split(block)
    parts[::2] = [re.sub(r"([*_<\[])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
