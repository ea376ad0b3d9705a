"""Attackers on names: whatever a module, a class or a chip is called, outputs stay what they are.

The judge of pages is a parser of CommonMark that knows nothing of how we escape.
"""

from __future__ import annotations

import csv
import io
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rooftrace._escapes import file_part, from_cell, to_cell, to_json, to_toml, visible
from rooftrace.reporting.renderers import as_page, as_screen, units
from rooftrace.reporting.renderers.view import Column, Note, Section, Table, View

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAMES = (Path(__file__).parents[1] / "corpus/names/names.txt").read_text().splitlines()
PIECES = (
    *"`<>\\|[]()!#~*_&;=-:'@+$ \n\r\t\x00\x1b\x07\x7f\x9b\u202e\u2028\udcffaé",
    "``",
    "<b>",
    "</b>",
    "<img src=x onerror=y>",
    "<!--",
    "\\`",
    "\\|",
    "](",
    "![",
    "~~~",
    "```",
    "\n# ",
    "\n<div>\n",
    "\n|",
    "[/]",
)
UNSEEN = {chr(n) for n in (*range(32), *range(127, 160), 0x202E, 0x2028, 0xDCFF)} - {"\n"}


@pytest.fixture
def seconds(fuzz_seconds: float) -> float:
    """How long each of the attackers here tries: they share the time of the file."""
    return fuzz_seconds / 6


def names(seconds: float) -> Iterator[str]:
    """Those of the corpus, then some of seeded random pieces, until the time has passed."""
    yield from NAMES
    rng, end = random.Random(0), time.monotonic() + seconds
    for _ in range(20):
        yield "".join(rng.choices(PIECES, k=rng.randint(1, 9)))
    while time.monotonic() < end:
        yield "".join(rng.choices(PIECES, k=rng.randint(1, 9)))


def view_of(name: str) -> View:
    columns = (Column("a", units.TEXT, name), Column("b", units.CODE, "b"))
    columns += (Column("c", units.MODULE, "c"), Column("d", units.KERNEL, "d"))
    cells = {"a": name, "b": name, "c": name, "d": name}
    group = {"group": lambda row: name}
    parts = (
        Note("begin"),
        Note(name),
        Note(f"`{name}` is told of {name}."),
        Note(f"{name}\n{name}", lines=True) if "\n" not in name else Note(name),
        Note(f"item {name}", bullet=1),
        Note(name, "strong"),
        Note(name, label=name),
        Note(f"x = 1  # {name}", code="python"),
        Table(columns=columns, rows=[cells, cells], **group),
        Table(columns=columns, rows=[cells], padded=False),
        Note("end"),
    )
    return View((Section(title=name or "x", parts=parts),), f"Report of {name}")


def kinds(page: str) -> list[str]:
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    return [t.type for token in tokens for t in (token, *(token.children or ()))]


def test_no_name_becomes_html_a_link_or_another_block(seconds: float) -> None:
    plain = kinds(as_page(view_of("name")))
    for name in names(seconds):
        page = as_page(view_of(name))
        found = kinds(page)
        for kind in ("html_block", "html_inline", "image", "link_open"):
            assert kind not in found, (kind, name)
        for kind in ("table_open", "tr_open", "td_open", "th_open", "fence"):
            assert found.count(kind) == plain.count(kind), (kind, name)
        assert not UNSEEN & set(page), name
        page.encode()


def test_no_name_reaches_the_terminal_as_a_command(seconds: float) -> None:
    for name in names(seconds):
        out = io.StringIO()
        console = Console(file=out, width=300, color_system=None, legacy_windows=False)
        console.print(as_screen(view_of(name)))
        assert not UNSEEN & set(out.getvalue()), name
        lines = [line.rstrip() for line in out.getvalue().split("\n")]
        assert lines[0] == "begin" and lines[-2:] == ["end", ""], name


def test_no_cell_is_a_formula(seconds: float) -> None:
    for name in names(seconds):
        out = io.StringIO()
        csv.writer(out).writerow([to_cell(name), to_cell(-1.5), to_cell(None)])
        text, number, nothing = next(csv.reader(io.StringIO(out.getvalue(), newline="")))
        assert text[:1] not in tuple("=+-@\t\r＝") and (number, nothing) == ("-1.5", "")
        assert not UNSEEN & set(text.strip())
        if name == visible(name):  # nothing in it had to be made visible
            assert from_cell(text) == name


def test_json_keeps_every_name(seconds: float) -> None:
    for name in names(seconds):
        text = to_json({name: [name]}, indent=1)
        assert json.loads(text) == {name: [name]}
        assert not UNSEEN & set(text.decode())


def test_toml_keeps_every_name(seconds: float) -> None:
    for name in names(seconds / 4):
        text = f"title = {to_toml(name)}\n"
        assert tomllib.loads(text)["title"] == name.replace("\udcff", "\\udcff")
        assert not UNSEEN & set(text)


def test_a_name_of_a_file_stays_in_its_folder(seconds: float) -> None:
    for name in (*names(seconds / 4), "../../x", "/etc/passwd", "a" * 500):
        part = file_part(name)
        assert "/" not in part and "\x00" not in part and len(part) <= 60
