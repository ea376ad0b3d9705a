"""LaTeX: a second reader finds the tables, no name in them acts, and points stand in line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import rooftrace as rt
from rooftrace._escapes import visible
from rooftrace.reporting.renderers import as_latex, table_files, units
from rooftrace.reporting.renderers.latex_columns import aligned, columns_of, pieces
from rooftrace.reporting.renderers.units import code_span
from rooftrace.reporting.renderers.view import Cell, Column, Note, Section, Table, View
from rooftrace.reporting.views import latex_tables, shown
from tests.conftest import in_turn
from tests.reporting.conftest import Run
from tests.reporting.report_support import made_report
from tests.reporting.test_pages import RESULTS

pylatexenc = pytest.importorskip("pylatexenc")

STYLES = ("screen", "paper-column")
HOSTILE = (
    r"\input{/etc/passwd}",
    r"\immediate\write18{touch /tmp/x}",
    r"^^5cinput{x}",
    "100% of $x_1^2$ & #3 ~ {a}",
    "}} \\end{tabular} {{",
    "[2cm] * a",
    "a--b---c ,,d'' ``e <<f>> ?`g !`h",
    "\x1b[2J\x00\x7f nul",
    "lone\udcffsurrogate",
    "2 × 3 – 4 — 5… µs ≤ é ñ ø Å α Ω ² ₂ ∞",
    "名前 🚀 \u202e",
    "\\",
    "_",
    "",
)
# What the escapes of a name may be: each prints something, none takes a file or defines.
PRINTING = {
    *("textbackslash", "textasciicircum", "textasciitilde", "textless", "textgreater", "textbar"),
    *("char", "dots", "S", "ss", "ae", "AE", "oe", "OE", "o", "O", "l", "L", "i", "j"),
    *(
        "{",
        "}",
        "$",
        "&",
        "#",
        "%",
        "_",
        "`",
        "'",
        "^",
        "~",
        "=",
        "u",
        ".",
        '"',
        "r",
        "H",
        "v",
        "c",
    ),
    *("times", "div", "cdot", "bullet", "pm", "leq", "geq", "neq", "approx", "infty", "surd"),
    *("sum", "partial", "rightarrow", "leftarrow", "uparrow", "downarrow", "circ", "mu"),
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"),
    *("lambda", "nu", "xi", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
    *("Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega"),
}
LAYOUT = {
    *("documentclass", "usepackage", "renewcommand", "labelitemi", "setlength", "emergencystretch"),
    *("parindent", "parskip", "centering", "caption", "label", "footnotesize", "tabcolsep"),
    *("belowcaptionskip", "toprule", "midrule", "bottomrule", "\\", "raggedright", "hangindent"),
    *("arraybackslash", "allowbreak", "textbf", "texttt", "phantom", "item", "section"),
    *("subsection", "subsubsection", "paragraph"),
}
FRAMES = {"document", "table", "table*", "tabular", "itemize", "enumerate", "flushleft"}


def nodes(text: str) -> Iterator[Any]:
    """Every node of a text, as pylatexenc reads it; a parse error fails."""
    from pylatexenc.latexwalker import LatexWalker

    waiting = list(LatexWalker(text, tolerant_parsing=False).get_latex_nodes()[0])
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        waiting += getattr(node, "nodelist", None) or []
        arguments = getattr(node, "nodeargd", None)
        waiting += (arguments.argnlist or []) if arguments is not None else []


def commands(text: str) -> tuple[set[str], set[str]]:
    """The macros and the environments of a text."""
    macros, frames = set(), set()
    for node in nodes(text):
        macros |= {node.macroname} if hasattr(node, "macroname") else set()
        frames |= {node.environmentname} if hasattr(node, "environmentname") else set()
    return macros, frames


READ_BY_US = {
    r"\allowbreak{}": "",
    r"\char34{}": "\x01",
    r"\`{}": "\x02",
    "-{}": "\x03",
    "'{}": "\x04",
    r"\textless{}": "\x05",
    r"\textgreater{}": "\x06",
    ",{}": ",",
}
"""What pylatexenc would take for a dash or an accent, or does not know."""
SAID = str.maketrans("\x01\x02\x03\x04\x05\x06\u02c6", "\"`-'<>^")


def read(text: str) -> str:
    """What a piece of LaTeX says, as pylatexenc reads it."""
    from pylatexenc.latex2text import LatexNodes2Text

    for written, mark in READ_BY_US.items():
        text = text.replace(written, mark)
    text = re.sub(r"(?<!\\)\{([\[\]*])\}", r"\1", text)
    said: str = LatexNodes2Text(math_mode="text").latex_to_text(text)
    return said.translate(SAID)


def hostile(names: tuple[str, ...]) -> View:
    columns = (
        Column("name", units.CODE, "Name"),
        Column("text", units.TEXT, names[0] or "x"),
        Column("time", units.SECOND, "Time"),
    )
    rows = [{"name": name, "text": name, "time": 1.5e-3} for name in names]
    notes = [Note(name, bullet=1) for name in names]
    table = Table(columns=columns, rows=rows)
    code = Note("\n".join(names), code="python", lines=True)
    return View((Section(title=names[0], parts=[table, *notes, code]),), title=names[-2])


def test_hostile_names_print_and_nothing_else() -> None:
    text = as_latex(hostile(HOSTILE))
    assert text.isascii() and all(c == "\n" or c.isprintable() for c in text)
    macros, frames = commands(text)
    assert macros <= PRINTING | LAYOUT and frames <= FRAMES
    assert not macros & {"input", "write", "immediate", "csname", "def", "verb", "openin"}
    assert text.count(r"\end{document}") == 1


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_any_name_prints_and_nothing_else(name: str) -> None:
    text = as_latex(hostile((name, "t", "u")))
    macros, frames = commands(text)
    assert macros <= PRINTING | LAYOUT and frames <= FRAMES and text.isascii()
    row = text.partition("\\midrule\n")[2].splitlines()[0]
    assert row.endswith(r"1.50 \\") and row.replace(r"\&", "").count("&") == 2


@pytest.mark.parametrize("name", HOSTILE[:7])
def test_a_name_says_what_it_said(name: str) -> None:
    (text,) = table_files(hostile((name, "t", "u"))).values()
    row = text.partition("\\midrule\n")[2].splitlines()[0]
    first = row.partition(" & ")[0]
    assert first.startswith(r"\texttt{")
    assert read(first[len(r"\texttt{") : -1]) == visible(name)


def test_letters_of_the_field_are_set_and_others_are_escapes() -> None:
    (text,) = table_files(hostile((HOSTILE[9], HOSTILE[10], "u"))).values()
    assert r"2 $\times$ 3 --{} 4 ---{} 5\dots{} $\mu$s $\leq$ \'{e} \~{n} \o{} \r{A}" in text
    assert r"$\alpha$ $\Omega$ $^{2}$ $_{2}$ $\infty$" in text
    assert r"\textbackslash{}" in text and "u540d" in text and "U0001f680" in text


def decimals(cell: str) -> int:
    """Places behind the point that a cell takes, with those that are left blank."""
    plain = re.sub(r"\\phantom\{([^}]*)\}", r"\1", cell.replace("{}", ""))
    return len(plain.partition(".")[2].strip("}"))


def test_points_of_a_column_stand_in_line_and_its_unit_in_the_head() -> None:
    times = (5.16e-4, 6.1e-3, 20.4e-3, 13.8, None)
    column = Column("t", units.SECOND, "Expected")
    table = Table(
        columns=[Column("n", units.TEXT, "Phase"), column], rows=[{"n": "x", "t": t} for t in times]
    )
    (text,) = table_files(View((Section(parts=[table]),))).values()
    assert "Expected (ms)" in re.sub(
        r"\\\\|\\begin\{tabular\}\[b\]\{[^&]*?\}\}?", " ", text
    ).replace("  ", " ")
    cells = [
        line.split(" & ")[1].removesuffix(r" \\")
        for line in text.splitlines()
        if line.startswith("x &")
    ]
    assert [float(re.sub(r"\\phantom.*|[,{}]", "", cell)) for cell in cells[:4]] == [
        0.516,
        6.1,
        20.4,
        13800,
    ]
    assert len({decimals(cell) for cell in cells[:4]}) == 1 and cells[4] == "--{}"


@pytest.mark.parametrize(
    ("texts", "unit", "cells"),
    [
        (["498.1 MB", "4.08 GB", "0 B"], "GB", ["0.4981", "4.08", "0"]),
        (["3.87–7.28 ms", "342.0–778.4 us"], "ms", ["3.87–7.28", "0.3420–0.7784"]),
        (["212.2 K", "2.79 K"], "$10^3$", ["212.2", "2.79"]),
        (["≥ 1.50 TiB", "512.0 GiB"], "TiB", ["≥ 1.50", "0.5000"]),
        (["+1.2%", "-0.3%"], r"\%", ["+1.2", "-0.3"]),
        (["1,108", "12"], "", ["1,108", "12"]),
    ],
)
def test_one_unit(texts: list[str], unit: str, cells: list[str]) -> None:
    found = aligned(texts)
    assert found is not None and found.unit == unit
    assert [text for text, _ in found.cells] == cells


@pytest.mark.parametrize(
    "texts", [["4 B", "7.32 TiB"], ["5 ms", "3 GB"], ["fits", "12"], ["2.0 us", "900.0 s"], [""]]
)
def test_no_one_unit(texts: list[str]) -> None:
    assert aligned(texts) is None


def test_bytes_are_not_billions() -> None:
    for symbol, unit in (("byte", "B"), ("", "$10^9$")):
        found = aligned(["4 B", "8 B"], symbol)
        assert found is not None and found.unit == unit


def test_a_unit_of_a_cell_counts() -> None:
    cell = Cell(4, unit=units.CAPACITY)
    table = Table(columns=[Column("n", units.NUMBER, "Held")], rows=[{"n": cell}])
    assert "(B)" in next(iter(table_files(View((Section(parts=[table]),))).values()))


@pytest.mark.parametrize(
    ("name", "style"),
    in_turn((n for n in RESULTS if n != "six executions on eight chips"), STYLES),
)
def test_every_result_is_a_document_whose_tables_stand_alone(name: str, style: str) -> None:
    result = RESULTS[name]()
    text = shown(result, "tex", style=style)
    macros, frames = commands(text)
    assert macros <= PRINTING | LAYOUT and frames <= FRAMES and text.isascii()
    files = latex_tables(result, style)
    labels = re.findall(r"\\label\{(.*?)\}", text)
    assert len(labels) == len(set(labels)) == sum(t.count(r"\label{") for t in files.values())
    assert len(set(re.findall(r"\\caption\{(.*?)(?: \(\d.*)?\}\n", text))) <= len(files)
    for file, table in files.items():
        assert rf"\label{{tab:{file.removeprefix('table-').removesuffix('.tex')}}}" in table
        assert table.split("\n", 1)[1].replace("[htbp]", "[H]") in text.replace("\n\n\n", "\n\n")
        for part in table.split("\\midrule\n")[1:]:
            rows = part.partition("\\bottomrule")[0].splitlines()
            counts = {row.replace(r"\&", "").count("&") for row in rows}
            assert len(counts) == 1 and len(rows) <= 46


def test_no_row_of_a_long_table_is_lost() -> None:
    rows = [{"n": f"row{i}x", "v": i} for i in range(500)]
    table = Table(columns=[Column("n", units.TEXT, "N"), Column("v", units.COUNT, "V")], rows=rows)
    files = table_files(View((Section(title="Long", parts=[table]),)))
    (text,) = files.values()  # one table is one file
    assert re.findall(r"row\d+x", text) == [row["n"] for row in rows]
    assert [*files] == ["table-long.tex"] and text.count(r"\begin{table}") == 11


def test_a_column_of_a_wide_table_is_there_once() -> None:
    columns = [
        Column("n", units.TEXT, "first"),
        *(Column(f"c{i}", units.TEXT, f"head{i}z") for i in range(40)),
    ]
    row = {"n": "x", **{f"c{i}": f"cell{i}" for i in range(40)}}
    text = "".join(
        table_files(
            View((Section(parts=[Table(columns=columns, rows=[row])]),)), "paper-column"
        ).values()
    )
    assert re.findall(r"head(\d+)z", text) == [str(i) for i in range(40)]


def test_a_report_is_written_with_a_file_for_each_table(tmp_path: Path) -> None:
    report = made_report(phases=("decode",))
    paths = report.write(tmp_path / "out", ["tex"], style="paper")
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {path.name for path in paths} | {"_report.json"}
    text = (tmp_path / "out" / "report.tex").read_text()
    assert r"\begin{table*}" in text and r"\begin{table}" not in text
    assert r"\includegraphics" not in text
    report.write(tmp_path / "two", ["tex", "pdf"])
    drawn = re.findall(
        r"\\includegraphics\[.*?\]\{(.*?)\}", (tmp_path / "two" / "report.tex").read_text()
    )
    assert drawn and all((tmp_path / "two" / name).is_file() for name in drawn)


def test_a_result_has_its_latex_and_refuses_another_style() -> None:
    estimate = RESULTS["an estimate"]()
    assert estimate.to_latex(style="paper-column") == shown(estimate, "tex", style="paper-column")
    with pytest.raises(rt.types.RequestError, match="'papr': expected one of screen, paper"):
        estimate.to_latex(style="papr")


NET = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), (torch.ones(2, 8),)
"""
COMMANDS = (
    ("report", "--out", "one.tex"),
    ("report", "--out", "-", "--format", "tex", "--style", "paper"),
    ("report", "--table", "census", "--format", "tex"),
    ("compare", "--with", "flopcounter", "--out", "one.tex"),
)


@pytest.mark.parametrize("asked", COMMANDS, ids=" ".join)
def test_commands_write_latex(
    asked: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # after `run`, which goes to the repository
    Path("net.py").write_text(NET)
    target = "net.py:build"
    command, *how = asked
    ran = run(command, target, "--phase", "forward", *how)
    assert ran.code == 0, ran.err
    text = (tmp_path / "one.tex").read_text() if "one.tex" in how else ran.out
    assert r"\begin{document}" in text and (command == "compare" or r"\toprule" in text)
    assert (r"\begin{table*}" in text) == ("paper" in how)


def test_a_code_span_with_backticks_is_one_name() -> None:
    table = Table(columns=[Column("n", units.TEXT, "N")], rows=[{"n": code_span("a`b")}])
    assert r"\texttt{a\`{}b}" in next(iter(table_files(View((Section(parts=[table]),))).values()))


def test_pieces_of_a_table_that_is_cut_repeat_the_words_that_tell_rows_apart() -> None:
    names = [f"number {i}" for i in range(9)]
    columns = [Column(name, units.TEXT, name) for name in ("phase", "chip", "note")]
    columns += [Column(name, units.COUNT, name) for name in names]
    rows = [
        {"phase": phase, "chip": chip, "note": "same", **dict.fromkeys(names, 123456)}
        for phase in ("forward", "training")
        for chip in ("l4", "h100")
    ]
    table = Table(columns=columns, rows=rows)
    made = pieces(columns_of(table), table, 252.0)
    assert len(made) > 1
    heads = [[column.head for column in piece] for piece in made]
    assert all(head[:2] == [("phase",), ("chip",)] for head in heads)
    assert [head for piece in heads for head in piece].count(("note",)) == 1
