"""The outputs of a result: repr() as a short line, print() for a screen, rich, a notebook's cell.

Reporting, above all layers, makes the tables.  Records of lower layers reach it through `Shown`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from rooftrace._escapes import visible

_LONGEST = 240
"""Letters of a short line; the rest is cut."""


def short(result: Any, text: str) -> str:
    """ "Estimate(gpt2, decode on l4: expected 7.1 ms)": the type of a result with a few words."""
    text = visible(text)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"{type(result).__name__}({text})"


def some(texts: Iterable[str], most: int = 3) -> str:
    """The first `most` texts with "; " between them, and "..." where there are more."""
    texts = iter(texts)
    shown: Iterator[str] = islice(texts, most)
    return "; ".join([*shown, *(["..."] if next(texts, None) is not None else [])])


class Shown:
    """A result with a view: print() shows it as text, a notebook as HTML.

    repr() is one short line, which each class says for itself (`short`).
    """

    __slots__ = ()

    def __rich__(self) -> Any:
        return _render(self, "rich")

    def __str__(self) -> str:
        return str(_render(self, "text"))

    def _repr_html_(self) -> str:
        return str(_render(self, "cell"))

    def to_latex(self, *, style: str = "screen") -> str:
        """The result as a LaTeX document, each table a float with a caption and a label.

        style: "screen" is the width of a page (6.5 in), "paper" both columns of a paper, and
        "paper-column" one of them; RequestError for another one.
        """
        return str(_render(self, "tex", style=style))


def _render(result: Any, form: str, **how: Any) -> Any:
    from rooftrace.reporting.views import shown  # reporting imports the layers that use this file

    return shown(result, form, **how)
