"""Plants faults in functions of the package, one at a time, and asks which test catches each.

    python tests/faults.py choose faults.json --count 80 --seed 36   # 80 faults in 80 functions
    python tests/faults.py watch faults.json hits/                   # sources note who calls them
    python -m pytest -n 2 -m "not heavy"                             # ... while the suite runs
    git checkout rooftrace
    python tests/faults.py try faults.json hits/ outcomes.json       # the tests that call each

`watch` and `try` change the sources of the checkout that they stand in: run them in a clone.  A
fault is caught by the first test that fails with it and passes without.  Tests are tried cheapest
first, in a fork of a process that has collected them all; at last those of the same files, which
may share what the function made.  `--before OLD.json` tries first what caught a fault there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
SIGNS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"),
}  # fmt: skip
MEMORY = 14 << 30  # byte of addresses that a faulty process may ask for
HANGS = 90  # s of wall time after which a test under a fault counts as one that hangs


@dataclass(frozen=True)
class Fault:
    """One edit of a source: the text between two offsets is replaced."""

    file: str
    function: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str

    def planted(self, source: str) -> str:
        """The source with the fault in it."""
        assert source[self.start : self.end] == self.old, f"{self.file} is another one"
        return source[: self.start] + self.new + source[self.end :]


class Source:
    """A file, and offsets of its nodes (ast counts bytes of a line)."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(
            node.end_lineno, node.end_col_offset
        )

    def _at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; not those inside of others."""

    def within(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.")

    yield from within(tree.body, "")


def edits(source: Source, function: ast.FunctionDef) -> Iterator[tuple[str, int, int, str]]:
    """Every fault that this function may get: (kind, start, end, new text)."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    for statement in body[1:]:
        start, _ = source.span(statement)
        yield "returned early", start, start, "return None\n" + " " * statement.col_offset
    for statement in body:
        for node in ast.walk(statement):
            yield from _of(source, node)


def _of(source: Source, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        if type(node.value) is bool:
            yield "constant", *source.span(node), str(not node.value)
        else:
            yield "constant", *source.span(node), repr(node.value + 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        yield from _between(source, "sign", node.left, node.right, SIGNS[type(node.op)])
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        right = node.comparators[0]
        yield from _between(source, "bound", node.left, right, COMPARED[type(node.ops[0])])
    elif isinstance(node, ast.BoolOp):
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from _between(source, "condition", node.values[0], node.values[1], pair)
    elif isinstance(node, ast.If | ast.IfExp):
        start, end = source.span(node.test)
        yield "condition", start, end, f"not ({source.text[start:end]})"
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        (a, b), (c, d) = source.span(node.args[0]), source.span(node.args[1])
        first, second = source.text[a:b], source.text[c:d]
        if first != second and "*" not in (first[0], second[0]):
            yield "swapped arguments", a, d, second + source.text[b:c] + first


def _between(
    source: Source, kind: str, left: ast.AST, right: ast.AST, pair: tuple[str, str]
) -> Iterator[tuple[str, int, int, str]]:
    (_, start), (end, _) = source.span(left), source.span(right)
    gap = source.text[start:end]
    if gap.count(pair[0]) == 1:
        at = start + gap.index(pair[0])
        yield kind, at, at + len(pair[0]), pair[1]


def choose(count: int, seed: int) -> list[Fault]:
    """So many faults in as many functions: the function first, then a kind, then a place."""
    every: list[tuple[str, str, ast.FunctionDef, Source, list[tuple[str, int, int, str]]]] = []
    for path in sorted((ROOT / "rooftrace").rglob("*.py")):
        source = Source(path)
        for name, node in functions(ast.parse(source.text)):
            if found := list(edits(source, node)):
                every.append((str(path.relative_to(ROOT)), name, node, source, found))
    chance = random.Random(seed)
    faults = []
    for file, name, node, source, found in chance.sample(every, len(every)):
        kind = chance.choice(sorted({edit[0] for edit in found}))
        _, start, end, new = chance.choice([edit for edit in found if edit[0] == kind])
        fault = Fault(file, name, node.lineno, kind, start, end, source.text[start:end], new)
        try:
            changed = ast.dump(ast.parse(fault.planted(source.text)))
        except SyntaxError:
            continue
        if changed != ast.dump(ast.parse(source.text)):
            faults.append(fault)
        if len(faults) == count:
            break
    return faults


def watch(faults: Sequence[Fault], folder: Path) -> None:
    """Edits the sources: each chosen function notes the test that calls it, in any process."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in {fault.file for fault in faults}:
        path = ROOT / file
        source = Source(path)
        nodes = dict(functions(ast.parse(source.text)))
        text = source.text
        marks = []
        for number, fault in enumerate(faults):
            if fault.file == file:
                node = nodes[fault.function]
                first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                note = f"__import__('rooftrace._calls').__dict__['_calls'].called({number})"
                marks.append((source.span(first)[0], note + "\n" + " " * first.col_offset))
        for at, note in sorted(marks, reverse=True):
            text = text[:at] + note + text[at:]
        path.write_text(text, encoding="utf-8")
    (ROOT / "rooftrace" / "_calls.py").write_text(
        f"""import os
seen = set()
def called(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open({str(folder.resolve())!r} + f"/{{number}}", "a") as file:
            file.write(test + "\\n")
""",
        encoding="utf-8",
    )


# What follows is a plugin of pytest: the tests are collected once, each fault has a fork.


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in ("faults", "hits", "outcomes", "before", "costs", "share", "most"):
        parser.addoption(f"--fault-{name}")


def pytest_runtestloop(session: pytest.Session) -> bool:
    option = session.config.getoption
    faults = _load(Path(option("--fault-faults")))
    mine, of = map(int, option("--fault-share").split("/"))
    items = {item.nodeid: item for item in session.items}
    costs = json.loads(Path(option("--fault-costs")).read_text()) if option("--fault-costs") else {}
    before = {}
    if option("--fault-before"):
        for row in _rows(Path(option("--fault-before"))):
            before[row["number"]] = row["by"]
    outcomes = Path(option("--fault-outcomes"))
    done = {row["number"] for row in _rows(outcomes)}
    for number, fault in list(enumerate(faults))[mine::of]:
        if number in done:
            continue
        hits = _hits(Path(option("--fault-hits")) / str(number), items)
        order = sorted(hits, key=lambda test: costs.get(test, 1.0))
        files = {test.split("::")[0] for test in order}
        beside = [test for test in items if test.split("::")[0] in files and test not in hits]
        order += sorted(beside, key=lambda test: costs.get(test, 1.0))
        if before.get(number) in items:
            order = [before[number], *(test for test in order if test != before[number])]
        row = tried(fault, [items[test] for test in order], costs, float(option("--fault-most")))
        row = {"number": number, "hits": len(hits), **row, **asdict(fault)}
        with outcomes.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return True


def _load(path: Path) -> list[Fault]:
    return [Fault(**row) for row in json.loads(path.read_text())]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _hits(path: Path, items: dict[str, pytest.Item]) -> set[str]:
    return (
        {line for line in path.read_text().splitlines() if line in items}
        if path.exists()
        else set()
    )


def tried(
    fault: Fault, items: list[pytest.Item], costs: dict[str, float], most: float
) -> dict[str, Any]:
    """The first of these tests that fails with the fault and passes without; `most`: CPU s."""
    began, spent, few = time.time(), 0.0, []
    for item in items:
        spent += costs.get(item.nodeid, 1.0)
        if spent > most and few:
            break
        few.append(item)
    path = ROOT / fault.file
    original = path.read_text(encoding="utf-8")
    ignored: set[str] = set()
    while True:
        rest = [item for item in few if item.nodeid not in ignored]
        try:
            path.write_text(fault.planted(original), encoding="utf-8")
            by, how = _in_a_fork(rest, fault, costs)
        finally:
            path.write_text(original, encoding="utf-8")
        if by and _in_a_fork([item for item in few if item.nodeid == by], None, costs)[0]:
            ignored.add(by)  # it fails here without the fault, too
            continue
        outcome = "caught" if by else "missed" if rest else "never run"
        return {
            "outcome": outcome, "by": by, "how": how, "tests": len(rest), "of": len(items),
            "ignored": sorted(ignored), "seconds": round(time.time() - began, 1),
        }  # fmt: skip


def _in_a_fork(
    items: list[pytest.Item], fault: Fault | None, costs: dict[str, float]
) -> tuple[str | None, str]:
    """(the test that failed, how), or (None, "")."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.setsid()
        try:
            _run(items, fault, costs, theirs)
        except BaseException as error:
            os.write(theirs, f"error {error!r}\n".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        lines = said.read().splitlines()
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    last = lines[-1] if lines else ""
    if last.startswith("failed "):
        return last[7:], "failed"
    if last.startswith("error ") or not last:
        raise RuntimeError(f"{fault}: {last}")
    if last != "end":
        return last.removeprefix("begins ") or None, f"ended by {status}"
    return None, ""


def _run(items: list[pytest.Item], fault: Fault | None, costs: dict[str, float], to: int) -> None:
    void = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(void, stream)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if fault is not None:
        _replace(fault)

    class Ends:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                os.write(to, f"failed {report.nodeid}\n".encode())
                os._exit(0)

    if items:
        items[0].config.pluginmanager.register(Ends())
    for item, following in zip(items, [*items[1:], None], strict=True):
        os.write(to, f"begins {item.nodeid}\n".encode())
        signal.alarm(int(HANGS + 10 * costs.get(item.nodeid, 1.0)))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    os.write(to, b"end\n")


def _replace(fault: Fault) -> None:
    """Functions that are there get the faulty code; what is imported later reads the file."""
    path = str(ROOT / fault.file)
    new = compile((ROOT / fault.file).read_text(encoding="utf-8"), path, "exec", dont_inherit=True)
    codes = {code.co_qualname: code for code in _codes(new)}
    count = 0
    for item in gc.get_objects():
        if isinstance(item, FunctionType):
            code = item.__code__
            if code.co_filename == path and code.co_qualname == fault.function:
                item.__code__ = codes[fault.function]
                count += 1
    module = fault.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    if not count and module in sys.modules:
        raise LookupError(f"{path}: no function {fault.function} of the module that is imported")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["choose", "watch", "try"])
    parser.add_argument("faults", type=Path)
    parser.add_argument("hits", type=Path, nargs="?")
    parser.add_argument("outcomes", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, help="CPU seconds by test, as the suite writes them")
    parser.add_argument(
        "--before", type=Path, help="outcomes of another suite: its catchers are tried first"
    )
    parser.add_argument("--share", default="0/1", help="K/N: every N-th fault from the K-th on")
    parser.add_argument(
        "--most", type=float, default=600.0, help="CPU s of tests for one fault, at most"
    )
    asked = parser.parse_args(arguments)
    if asked.what == "choose":
        rows = [asdict(fault) for fault in choose(asked.count, asked.seed)]
        asked.faults.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return 0
    if asked.what == "watch":
        watch(_load(asked.faults), asked.hits)
        return 0
    options = {
        "faults": asked.faults, "hits": asked.hits, "outcomes": asked.outcomes,
        "before": asked.before, "costs": asked.costs, "share": asked.share, "most": asked.most,
    }  # fmt: skip
    given = [f"--fault-{name}={value}" for name, value in options.items() if value is not None]
    os.environ["PYTHONDONTWRITEBYTECODE"] = (
        "1"  # a fault may have the size and the second of its source
    )
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(
        ":"
    )
    sys.path.insert(0, str(ROOT))  # the package of this checkout, not an installed one
    own = sys.modules["__main__"]
    return int(
        pytest.main(
            [
                "-m",
                "not heavy",
                "-p",
                "no:benchmark",
                "-p",
                "no:xdist",
                "-q",
                *given,
                str(ROOT / "tests"),
            ],
            [own],
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
