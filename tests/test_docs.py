"""The pages in docs/: their code runs and prints what they say, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from torch.utils.flop_counter import flop_registry

from rooftrace.costmodels.fusion.executions import ExecutionModel
from rooftrace.costmodels.fusion.joins import JOINS
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.ops.opview import own_rules

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("benchmarks/*/README.md"))]
CODE = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def no_compiler() -> str:
    """Why nothing can be compiled and told apart here; empty where it can."""
    from rooftrace.measured.bench.replay import Compilations

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "Inductor needs a C++ compiler"
    return Compilations().trouble


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_runs_from_top_to_bottom_and_prints_what_stands_below_it(
    page: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_accelerator_stays: None,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(ROOT)
    text, names = page.read_text(), {"__name__": page.stem}
    compiles = any("compiled=True" in block["code"] for block in CODE.finditer(text))
    if compiles and (trouble := no_compiler()):
        pytest.skip(trouble)
    before = dict(flop_registry)
    try:
        with own_rules():
            for block in CODE.finditer(text):
                lines_above = "\n" * text.count("\n", 0, block.start("code"))
                capsys.readouterr()
                exec(compile(lines_above + block["code"], str(page), "exec"), names)
                if block["output"] is not None:
                    printed = capsys.readouterr().out.splitlines()
                    assert block["output"].splitlines() == [line.rstrip() for line in printed]
    finally:
        flop_registry.clear()
        flop_registry.update(before)


def boxes(picture: str) -> dict[str, set[str]]:
    """The words in each box "| name: words |" of a picture; a box ends at a border below it."""
    result: dict[str, set[str]] = {}
    name_at: dict[int, str] = {}
    for line in picture.splitlines():
        for border in re.finditer(r"\+", line):
            name_at.pop(border.start(), None)
        for cell in re.finditer(r"\|(?= )([^|+]*)(?=\|)", line):
            if name := re.match(r" (\w+):", cell[1]):
                name_at[cell.start()] = name[1]
            if owner := name_at.get(cell.start()):
                words = re.findall(r"[a-z_]+", cell[1].partition(":")[2] or cell[1])
                result.setdefault(owner, set()).update(words)
    return result


def test_the_picture_has_a_box_for_each_package_with_its_rooms() -> None:
    package = ROOT / "rooftrace"
    rooms: dict[str, set[str]] = {
        path.parent.name: set()
        for path in package.glob("*/__init__.py")
    }  # fmt: skip
    for path in package.glob("*/*/__init__.py"):
        rooms[path.parents[1].name].add(path.parent.name)
    rooms["hardware"] -= {"chips"}  # files of data, no code
    picture = (ROOT / "docs" / "how-it-works.md").read_text().split("```")[1]
    assert boxes(picture) == rooms


def test_a_task_opens_at_most_three_files_and_each_has_the_name_that_is_said() -> None:
    page = ROOT / "docs" / "where.md"
    rows = [line.split("|")[2:-1] for line in page.read_text().splitlines() if line[:2] == "| "]
    rows = [[cell for cell in row if "](" in cell] for row in rows[1:]]
    assert len(rows) == 11
    for row in rows:
        assert 1 <= len(row) <= 3
        for cell in row:
            link = re.search(r"\]\(([^)#]+)(?:#[^)]*)?\) `([^`]+)`", cell)
            assert link, cell
            assert link[2] in (page.parent / link[1]).read_text(), f"{link[1]} has no {link[2]!r}"


def test_a_knob_acts_where_the_page_says() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| `(execution|knobs)\.(\w+)` \| `([\w/.]+)` \|", page, re.MULTILINE)
    fields = {"execution": dataclasses.fields(ExecutionModel), "knobs": dataclasses.fields(Knobs)}
    texts = {"name", "title", "source", "shares", "knobs"}  # shown only, or the knobs themselves
    for record, columns in fields.items():
        listed = {name for owner, name, _ in rows if owner == record}
        assert listed == {column.name for column in columns} - texts
    by_method = {
        "launch": r"\bknobs\.launch_on\(",
        "attention_library": r"\bexecution\.attention_kernels\b",
    }
    by_method |= dict.fromkeys(("residuals", "use"), r"\bknobs\.errors_of\(")
    for record, name, file in rows:
        source = (ROOT / "rooftrace" / "costmodels" / file).read_text()
        reads = by_method.get(name, rf"\b{record}\.{name}\b")
        assert re.search(reads, source), f"{file} does not read {record}.{name}"


def test_the_page_on_fusion_has_every_join_with_its_limit() -> None:
    lines = (ROOT / "docs" / "fusion.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    table = {row[0].removesuffix(" (off)"): row for row in rows[2:]}
    assert list(table) == [join.name for join in JOINS]
    for join in JOINS:
        name, _, limit, inductor = table[join.name]
        assert name.endswith("(off)") != join.on
        assert limit.partition(" ")[0] == ("" if join.constant is None else str(join.constant))
        assert inductor.strip("`") in join.inductor or inductor == "inlining"


def test_the_glossary_has_each_word_once() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\| ([^|]+?) \| ", page, re.MULTILINE)
    words = [word for word in words if word != "Word"]
    assert len(words) > 50
    assert sorted({word for word in words if words.count(word) > 1}) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_file_of_rooftrace_that_a_page_names_is_there(page: Path) -> None:
    if page.stem == "scripts-tried":
        return  # its scripts/ are folders of other repositories
    packages = "|".join(sorted({path.parent.name for path in ROOT.glob("rooftrace/*/__init__.py")}))
    names = re.findall(rf"`((?:rooftrace|{packages})/[\w/.-]+\.py)`", page.read_text())
    missing = [name for name in names if not any(
        (folder / name).exists() for folder in (ROOT, ROOT / "rooftrace"))]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=name_of
)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
