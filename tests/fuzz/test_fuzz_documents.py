"""Attackers on names in documents: HTML, SVG, LaTeX, Mermaid, JUnit and locks stay what they are.

The judges are readers that know nothing of how we escape: Python's parsers of HTML, XML and TOML,
and a tokeniser of TeX below.  A document with a hostile name has the elements, the attributes and
the commands of the same document with a plain name, and no more.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rooftrace.costmodels.estimates.structure import WiredNode, Wiring
from rooftrace.reporting.figures import style
from rooftrace.reporting.figures.breakdown import Bar
from rooftrace.reporting.figures.inline import bar_svg, point_svg
from rooftrace.reporting.figures.parity import ParityPoint
from rooftrace.reporting.gates import lock as records, lockfile, reports
from rooftrace.reporting.gates.checking import CodeCause, GateOutcome, Shift
from rooftrace.reporting.html import result_page
from rooftrace.reporting.html.document import as_cell
from rooftrace.reporting.renderers import as_latex
from rooftrace.reporting.renderers.view import Note
from rooftrace.reporting.sections import architecture
from tests.fuzz import test_fuzz_output as output
from tests.fuzz.test_fuzz_output import UNSEEN, kinds, view_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEX = (
    *(r"\input{/etc/passwd}", r"\write18{touch x}", r"^^5cinput x", r"\catcode`\@=0 @input x"),
    *(r"$$", r"\end{document}", r"%", r"\\", "}", "{", r"\verb|x|", "#1", "&", "~", "\\\n\\"),
    *(r"\csname input\endcsname{x}", r"\openin0=x", r"\href{javascript:alert(1)}{x}"),
)
MARKUP = (
    *("]]>", "&xxe;", "<!DOCTYPE x [<!ENTITY xxe SYSTEM 'file:///etc/passwd'>]>", "<?xml x?>"),
    *(
        "javascript:alert(1)",
        "' onload='x",
        '" onload="x',
        "</text><script>x</script>",
        "<![CDATA[",
    ),
    *("</script>", "</style>", "-->", "<!--", "\x00", "\ufffe", "\uffff", "\x0b", "\x85", "&#0;"),
    *('"] --> click A call x()', "A-->B", "%%{init: {}}%%", "end\nclick", "`", "#quot;", ":::x"),
    *("]\n[targets.x]\n", "'''", '"""', "\\u0000", "@everyone", "${{ secrets.X }}"),
)


@pytest.fixture
def seconds(fuzz_seconds: float) -> float:
    """How long each of the attackers here tries: they share the time of the file."""
    return fuzz_seconds / 8


def names(seconds: float) -> Iterator[str]:
    """Names of documents' own languages first, then those that all outputs are tried with."""
    yield from TEX
    yield from MARKUP
    yield from output.names(seconds)


class Elements(HTMLParser):
    """The elements, the attributes and the links of a page, counted."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.seen: Counter[str] = Counter()
        self.links: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        self.seen.update(f"{tag} {name}" for name, _ in attrs)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]

    def handle_comment(self, data: str) -> None:
        self.seen["a comment"] += 1

    def handle_decl(self, decl: str) -> None:
        self.seen[f"a declaration {decl}"] += 1

    def unknown_decl(self, data: str) -> None:
        self.seen["a section"] += 1

    def handle_pi(self, data: str) -> None:
        self.seen["an instruction"] += 1


@pytest.mark.parametrize(
    "write",
    [lambda name: as_cell(view_of(name)), lambda name: result_page(view_of(name))],
    ids=["cell", "page"],
)
def test_no_name_is_an_element_of_a_page(write: Callable[[str], str], seconds: float) -> None:
    plain = Elements(write("name")).seen
    for name in names(seconds):
        page = write(name)
        read = Elements(page)
        more = {what: count for what, count in (read.seen - plain).items() if what not in WRAPPERS}
        assert not more, name
        assert all(link.startswith(("#", "data:image/")) for link in read.links), name
        assert not UNSEEN & set(page), name


WRAPPERS = {"code", "div", "p", "strong", "br", "em", "td title"}
"""What a text with lines, with backticks, or too long for its cell may have more of."""


def elements_of(svg: str) -> Counter[str]:
    """The elements and attributes of an XML text; a broken one raises."""
    seen: Counter[str] = Counter()
    for element in ElementTree.fromstring(svg).iter():
        seen[element.tag] += 1
        seen.update(f"{element.tag} {name}" for name in element.attrib)
        links = [value for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith("#") for link in links), links
    return seen


def bars(name: str) -> str:
    parts = {f"{name}{number}": 1.0 for number in range(3)}
    return bar_svg(name, [Bar(name, name, parts, name)])


def points(name: str) -> str:
    return point_svg(name, [ParityPoint(name, 1.0, 2.0, name, 1.0)])


@pytest.mark.parametrize("draw", [bars, points])
def test_no_name_is_an_element_of_a_small_figure(
    draw: Callable[[str], str], seconds: float
) -> None:
    plain = elements_of(draw("name"))
    for name in names(seconds / 2):
        more = elements_of(draw(name)) - plain
        assert set(more) <= set(plain), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")
def test_no_name_is_an_element_of_a_figure(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "figure.svg"

    def drawn(name: str) -> set[str]:
        style.save(lambda: style.sheet(2.0, name, name), path)
        return set(elements_of(path.read_text("utf-8")))

    plain = drawn("name")
    for number, name in enumerate(names(seconds)):
        if number % 3 == 0 or seconds > 1:  # each takes some milliseconds
            assert drawn(name) <= plain, name


WORD = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)


def acting(text: str) -> Counter[str]:
    """What of a text is no letter to TeX: commands, and characters of another category."""
    assert "^^" not in text  # would be another character before anything else is read
    seen = Counter(word.strip() for word in WORD.findall(text))
    seen.update(f"bare {c}" for c in WORD.sub("", text) if c in "$&#^_~%")
    return seen


def depth(text: str) -> int:
    """How many groups are open at the end; never fewer than none."""
    level = 0
    for brace in re.findall(r"[{}]", re.sub(r"\\[{}\\]", "", text)):
        level += 1 if brace == "{" else -1
        assert level >= 0
    return level


@pytest.mark.slow
def test_no_name_is_a_command_of_tex(seconds: float) -> None:
    from tests.reporting.test_latex import FRAMES, LAYOUT, PRINTING

    plain = acting(as_latex(view_of("name")))
    printing = {*PRINTING, *LAYOUT, "begin", "end", "-", " ", ""}
    for name in names(seconds):
        text = as_latex(view_of(name))
        seen = acting(text)
        assert set(seen - plain) <= printing | {"bare $", "bare ~"}, name  # ~ is a blank of code
        assert seen["bare $"] % 2 == 0, name
        assert seen["bare &"] == plain["bare &"], name  # cells
        assert depth(text) == 0, name
        frames = re.findall(r"\\(begin|end)\{(.*?)\}", text)
        assert {frame for _, frame in frames} <= FRAMES, name
        assert frames[-1] == ("end", "document") and len(frames) % 2 == 0, name
        assert text.isascii() and not UNSEEN & set(text), name


def outcome(name: str) -> GateOutcome:
    """A check that failed, in which everything is called so."""
    costs = records.LockedCosts(
        time="1.000000 us", flops=8, bytes=8, memory=8, params=8, kernels=1,
        modules={name: records.LockedModule(time="1.000000 us", flops=8, bytes=8, kernels=1)},
    )  # fmt: skip
    phase = records.LockedPhase(ops={name: {name: 1}}, costs={name: {name: costs}})
    target = records.LockedTarget(
        asked={"target": name}, sources={name: "0" * 16}, phases={name: phase}
    )
    made = records.MadeFrom(rooftrace=name, torch=name, chips={name: name}, rules={name: name})
    lock = records.Lock(made_from=made, targets={name: target})
    place = records.StepKey(name, name, name, name)
    shift = Shift(
        place=place, metric="flops", before=4.0, after=8.0, module=name, budget=name,
        causes=(CodeCause(name), CodeCause(name, name)),
    )  # fmt: skip
    return GateOutcome(
        lock=name, before=lock, after=lock, over=(shift,), under=(shift,), stale=(name,),
        versions=(name,), sources={name: (name,)},
    )  # fmt: skip


def test_no_name_is_an_element_of_a_check(seconds: float) -> None:
    plain = elements_of(reports.junit(outcome("name")))
    blocks = Counter(kinds(reports.comment(outcome("name"))))
    for name in names(seconds):
        result = outcome(name)
        assert elements_of(reports.junit(result)) == plain, name
        issues = json.loads(reports.code_quality(result))
        assert len(issues) == 3, name
        seen = Counter(kinds(reports.comment(result)))
        for kind in ("html_block", "html_inline", "image", "link_open", "fence", "tr_open"):
            assert seen[kind] == blocks[kind], (kind, name)


def test_a_lock_keeps_every_name(seconds: float) -> None:
    for name in names(seconds):
        table = tomllib.loads(lockfile.lock_text(outcome(name).before))
        (target,) = table["targets"]
        assert target == name.replace("\udcff", "\\udcff")
        assert set(table) == {"format", "made_from", "steps", "targets"}, name


NODE = re.compile(r'  n\d+(\(\[|\[)"(?:[^"<>`#&%\n]|#\d+;|<br/>)*"(\]\)|\])')
EDGE = re.compile(r"  n\d+ --> n\d+")


def test_no_name_is_a_line_of_a_diagram(seconds: float) -> None:
    for name in names(seconds):
        nodes = (WiredNode(path=name, kind=name, count=2), WiredNode(path=name, kind=""))
        section = architecture.diagram(
            Wiring(path=name, kind=name, count=1, nodes=nodes, edges=((0, 1),))
        )
        (note,) = (p for p in section.parts if isinstance(p, Note) and p.code == "mermaid")
        head, first, second, edge = str(note.text).split("\n")
        assert head == "flowchart TD" and EDGE.fullmatch(edge), name
        assert NODE.fullmatch(first) and NODE.fullmatch(second), name
        assert not UNSEEN & set(str(note.text)), name
