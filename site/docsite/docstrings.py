"""How mkdocstrings reads a docstring of ours: as prose with `code`, in which no sign is markup."""

from __future__ import annotations

import contextlib
import io
import re
import tokenize
from pathlib import Path
from typing import Any

import griffe

CODE = re.compile(r"(`+.+?`+)", re.DOTALL)


class Prose(griffe.Extension):
    """`timeline_<phase>.json.gz` and `*args` stand on the page as they stand in the docstring.

    A field of a record is described by the comment beside it, if it has no docstring.
    """

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """A stub may hold a function as overloads alone: the last one, with its docstring."""
        for name, overloads in mod.overloads.items():
            if overloads and name not in mod.members:
                mod.set_member(name, overloads[-1])
                overloads[-1].overloads = overloads

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute that was read."""
        if obj.docstring is None and obj.is_attribute and (text := comment_of(obj)):
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = literal(obj.docstring.value)


def comment_of(field: griffe.Object) -> str:
    """The comment at the end of a field's line, "" without one: "byte/s"."""
    if not isinstance(field.filepath, Path) or field.lineno is None:
        return ""
    lines = "\n".join(field.lines_collection[field.filepath][field.lineno - 1 : field.endlineno])
    with contextlib.suppress(tokenize.TokenError, IndentationError):
        for token in tokenize.generate_tokens(io.StringIO(lines.strip()).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith(
                ("# type:", "# noqa")
            ):
                return token.string.lstrip("# ")
    return ""


def literal(text: str) -> str:
    """Prose in which `<`, `*` and `_` are themselves; code and indented blocks are left alone."""
    blocks = text.split("\n\n")
    return "\n\n".join(block if block.startswith("    ") else _escaped(block) for block in blocks)


def _escaped(block: str) -> str:
    parts = CODE.split(block)
    parts[::2] = [re.sub(r"([*_<\[])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
