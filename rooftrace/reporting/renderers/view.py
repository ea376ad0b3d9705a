"""A result before it is printed: sections of tables and sentences, as numbers.

A builder turns a result into a `View`; a renderer prints any view.  Numbers stay numbers, in SI
units, until a renderer asks the unit of their column for text.  A page is long and a screen is
narrow, so each part names its outputs, and a column may have a name for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from rooftrace.reporting.renderers.units import Unit

Output: TypeAlias = Literal["both", "page", "screen"]
"""Where a part stands.  report.json has the numbers under keys and asks for none of this."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of a table with a mark, or with a word before or after its number."""

    value: Any
    mark: str = ""  # how it stands out: a key of terminal.STYLES; "strong" and "bad" on pages too
    before: str = ""
    after: str = ""
    unit: Unit | None = None  # where it differs from that of the column


BLANK = Cell("", "plain")


@dataclass(frozen=True, slots=True)
class Column:
    """One quantity: where its values come from, their unit, and its name on each output."""

    key: str  # of the values in rows, and in report.json
    unit: Unit
    head: str | None = None  # its name on a page; None: it stands in report.json alone
    _: KW_ONLY
    short: str | None = None  # its name on a screen, where that is another
    on: Output = "both"
    of: Callable[[Any], Any] | None = None  # reads the value from a row; None: by the key
    left: Output | Literal[""] | None = None  # where it is flush left; None: as its unit says
    mark: str = ""  # of every cell without a mark
    drop: int = 0  # narrow screens: 0 stays, columns of the highest number go first, all at once
    flexible: bool = False  # narrow screens: cut from the left to fit
    clipped: int = 0  # narrow screens: cut from the right, down to so many characters
    folded: bool = False  # narrow screens: continued on further lines, in place of being cut

    def read(self, row: Any) -> Any:
        """The value in a row, which is a mapping by column keys or a record; BLANK where a mapping
        has no such key."""
        if isinstance(row, Mapping):
            return row.get(self.key, BLANK)
        return getattr(row, self.key) if self.of is None else self.of(row)

    def written(self, row: Any, *, page: bool) -> tuple[str, str]:
        """The text of the cell in a row, and how it is marked."""
        value = self.read(row)
        cell = value if isinstance(value, Cell) else Cell(value)
        mark, unit = cell.mark or self.mark, cell.unit or self.unit
        text = str(cell.value) if mark == "plain" else unit.written(cell.value, page=page)
        return f"{cell.before}{text}{cell.after}", mark

    def shown_on(self, output: Output) -> bool:
        """Whether it is shown on an output."""
        return self.head is not None and self.on in ("both", output)

    def name(self, output: Output) -> str:
        """Its head on an output."""
        return (self.head or "") if output == "page" or self.short is None else self.short

    def is_left(self, output: Output) -> bool:
        """Whether it is flush left on an output."""
        return (self.unit.left if self.left is None else self.left) in ("both", output)

    def value(self, row: Any) -> Any:
        """The bare value in a row: a number in SI units, text, or None."""
        cell = self.read(row)
        return cell.value if isinstance(cell, Cell) else cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of numbers under columns with units.

    A row is a record, or a mapping by column keys; a key that is absent leaves its cell blank.
    """

    columns: Sequence[Column]
    rows: Sequence[Any]
    key: str = ""  # in report.json, of a table in a section that has a key
    # On a page, a table of more columns than fit is cut: each piece begins with the `leading` ones,
    # and `sets` columns that belong together stay together.
    leading: int = 1
    sets: int = 1
    group: Callable[[Any], str] | None = None  # a heading on a screen above rows that share it
    axes: int = 0  # on a page of HTML, choices over so many first columns pick the row to show
    padded: bool = True  # on a page, cells are padded so that the source reads as a table
    on: Output = "both"


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence, several lines of text, or a block of code."""

    text: str
    mark: str = ""
    on: Output = "both"
    bullet: int = 0  # a page: the depth of the list that it is an item of; 0: a paragraph
    label: str = ""  # a screen: words in bold before it
    _: KW_ONLY
    # Each newline begins a line; otherwise it came with a name, and is shown as an escape.
    lines: bool = False
    code: str = ""  # the language of a block of code, which may have several lines
    number: int = 0  # a page: its number in a numbered list; 0: none

    @property
    def text_lines(self) -> list[str]:
        """The lines that it shows."""
        return self.text.split("\n") if self.lines else [self.text]


@dataclass(frozen=True, slots=True)
class Image:
    """A figure that a page shows where its file was written."""

    name: str  # of the file
    about: str = ""
    on: Output = field(default="page", init=False)

    def file(self, endings: Sequence[str], written: Collection[str]) -> str | None:
        """The first of its files, by their endings, that was written; None without any."""
        stem = self.name.removesuffix(".png")
        return next((f"{stem}{end}" for end in endings if f"{stem}{end}" in written), None)

    @property
    def caption(self) -> str:
        """The words below it."""
        return self.about or self.name.removesuffix(".png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Parts under a title.  Sections inside it have titles one level lower.

    A section with a key stands in report.json under `sections`, tables and notes; one without a
    key has its numbers there under other keys.
    """

    title: str = ""  # on a page
    parts: Sequence[Part] = ()
    key: str = ""
    place: int = 9  # on a screen: lower ones come first, a blank line between different ones
    contents: bool = False  # on a page: it is the list of the sections after it, as links


Part: TypeAlias = Table | Note | Image | Section


@dataclass(frozen=True, slots=True)
class View:
    """A result ready to be printed.  On a page its title is a heading of `level`."""

    sections: tuple[Section, ...]
    title: str = ""
    level: int = field(default=2, kw_only=True)
