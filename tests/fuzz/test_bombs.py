"""Small files that would grow large: each is refused by its bound, in bounded memory and time."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

import rooftrace as rt
from rooftrace import _reading
from rooftrace._reading import FileKind, JsonStream
from rooftrace.costmodels.estimates import play
from rooftrace.graph import GraphError, OpGraph, load_graphs, save_graphs
from rooftrace.graph.file import bounded
from tests.costmodels.repeat_support import nests
from tests.fuzz.test_fuzz_files import CORPUS

BILLION = 10**9

# Each makes a file in a folder: a bomb, whose reader must end in one message that has these words.
BOMBS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "brackets in a trace": (
        lambda: b'{"traceEvents": [{"ph": "X", "args": ' + b"[" * 200_000,
        "trace",
        "more than 64 deep",
    ),
    "tables in a trace": (lambda: b'{"a": ' * 200_000, "trace", "more than 64 deep"),
    "a gzip of one long text": (
        lambda: packed(b'{"traceEvents": [{"name": "', b"a" * (1 << 20), 600),
        "trace",
        "more than 32 MiB",
    ),
    "a gzip of blanks": (
        lambda: packed(b'{"traceEvents": [', b" " * (1 << 20), 600),
        "trace",
        "more than 32 MiB",
    ),
    "a gzip of small events": (
        lambda: packed(b'{"traceEvents": [', b'{"ph": "M"},' * 80_000, 400),
        "trace",
        "times its size",
    ),
    "a graph in a gzip": (lambda: packed(b"[", b"0," * (1 << 20), 160), "graph", "256 MiB"),
    "a run in a gzip": (lambda: packed(b"[", b" " * (1 << 20), 300), "run", "256 MiB"),
    "many values in a gzip": (lambda: packed(b"[", b"[]," * (1 << 18), 80), "graph", "values"),
    "deep knobs": (lambda: b"title = " + b"[" * 100_000, "knobs", "64 deep"),
    "a deep chip": (lambda: b"a." * 50_000 + b"a = 1", "chip", "256 parts"),
    "a deep table of a chip": (lambda: b"[" + b"a . " * 50_000 + b"a]", "chip", "256 parts"),
    "a large chip": (lambda: b"# " + b"a" * (1 << 20), "chip", "1 MiB"),
}

READ = """
import resource, sys, time
from pathlib import Path
import msgspec, ijson, numpy
import rooftrace
from rooftrace.costmodels.kernels.knobs import load_knobs
from rooftrace.hardware.chipfile import load_chip
from rooftrace.measured.bench import Run
from rooftrace.measured.profiles import read_trace
from rooftrace.graph import load_graphs

readers = {"trace": read_trace, "graph": load_graphs, "run": Run.load, "knobs": load_knobs,
           "chip": load_chip}
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for line in sys.stdin.read().splitlines():
    kind, path = line.split(maxsplit=1)
    begin = time.process_time()
    try:
        readers[kind](path)
    except ValueError as error:
        seconds = time.process_time() - begin
        print(f"{seconds:.1f} {type(error).__module__} {error}")
"""


def packed(head: bytes, piece: bytes, times: int) -> bytes:
    """A gzip of a piece that comes very often."""
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(times):
            file.write(piece)
    return made.getvalue()


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_bomb_is_refused_within_two_gibibytes(tmp_path: Path) -> None:
    lines = []
    for number, (make, kind, _) in enumerate(BOMBS.values()):
        path = tmp_path / f"{number}.{'toml' if kind in ('knobs', 'chip') else 'json'}"
        path.write_bytes(make())
        assert path.stat().st_size < 3_000_000
        lines.append(f"{kind} {path}")
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(BOMBS), done.stdout
    for (name, (_, _, words)), line in zip(BOMBS.items(), said, strict=True):
        seconds, module, message = line.split(maxsplit=2)
        assert module.startswith("rooftrace.") and words in message, (name, line)
        assert float(seconds) < 60, (name, line)  # of a processor; the dearest takes 5


# -- the depth of a stream ----------------------------------------------------------------------


def depth_of(text: str) -> tuple[int, int]:
    """The depth at the end of a text and the greatest one, character by character."""
    depth = deepest = 0
    quoted = escaped = False
    for letter in text:
        if quoted:
            quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
        elif letter == '"':
            quoted = True
        elif letter in "[{":
            depth, deepest = depth + 1, max(deepest, depth + 1)
        elif letter in "]}":
            depth -= 1
    return depth, deepest


def texts(rng: random.Random) -> Iterator[str]:
    """Pieces of JSON, with escapes and brackets inside of texts."""
    for _ in range(rng.randint(0, 12)):
        if rng.random() < 0.5:
            yield rng.choice("[]{},")
        else:
            inside = rng.choices(("a", "[", "}", '\\"', "\\\\", "\\n", "é"), k=rng.randint(0, 5))
            yield f'"{"".join(inside)}"'


def test_a_stream_knows_its_depth_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuzz_seconds: float
) -> None:
    monkeypatch.setattr(_reading, "DEEPEST", 3)
    path = tmp_path / "file"
    path.write_bytes(b"")
    rng, end = random.Random(0), time.monotonic() + fuzz_seconds / 4
    for number in range(10**9):
        if number > 500 and time.monotonic() > end:
            break
        text = "".join(texts(rng))
        stream = JsonStream(io.BytesIO(text.encode()), path, FileKind("text", ValueError))
        try:
            while stream.read(rng.randint(1, 4)):
                pass
            assert (stream.depth, True) == (depth_of(text)[0], depth_of(text)[1] <= 3), text
        except ValueError:
            assert depth_of(text)[1] > 3, text


# -- counts of repeats -----------------------------------------------------------------------------


def with_counts(graph: OpGraph, count: int) -> OpGraph:
    repeats = (structs.replace(r, count=count, names={}, assumptions={}) for r in graph.repeats)
    return graph.replace(repeats=tuple(repeats))


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(nests())
def test_pricing_does_not_grow_with_counts(graph: OpGraph) -> None:
    begin = time.process_time()
    try:
        huge = bounded(with_counts(graph, BILLION).verify())
    except GraphError as error:
        assert "expected" in str(error)
        return
    estimate = rt.estimate(huge, "h100-sxm", execution="eager")
    assert play(estimate).end == pytest.approx(estimate.t_est, rel=1e-6)
    json.dumps(rt.report(huge, chip="h100-sxm").to_dict())
    str(rt.diff(huge, huge, chip="h100-sxm"))
    if any(op.repeats for op in huge.ops):
        with pytest.raises(GraphError, match="they can be listed up to 10,000,000"):
            huge.expand()
    assert time.process_time() - begin < 60


def loop_with(changes: Callable[[dict[str, Any]], None], path: Path) -> Path:
    """The loop of the corpus, changed, as a file."""
    data = json.loads((CORPUS / "good" / "loop.json").read_text())
    changes(data["graphs"]["forward"])
    path.write_text(json.dumps(data))
    return path


def test_a_loop_of_a_billion_turns_takes_a_billion_times_as_long(tmp_path: Path) -> None:
    def longer(graph: dict[str, Any]) -> None:
        graph["repeats"][0][1] = BILLION

    long = load_graphs(loop_with(longer, tmp_path / "long.json"))["forward"]
    short = load_graphs(CORPUS / "good" / "loop.json")["forward"]
    turns, ran = short.repeats[0].count, []
    for graph in (short, long):
        estimate = rt.estimate(graph, "h100-sxm", execution="eager")
        ran.append((sum(row.count for row in estimate.rows), estimate.t_est))
    inside = len([op for op in short.kernels() if op.repeats])
    assert ran[1][0] - ran[0][0] == (BILLION - turns) * inside
    assert ran[1][1] == pytest.approx(ran[0][1] * BILLION / turns, rel=0.2)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("repeats", 0, 1), 2**63, "expected 9.22e+18 at most"),
        (("repeats", 0, 2), "layers", "1,000 iterations of the modules in 'layers'"),
        (("values", 0, 0), [2**63], "elements"),
        (("values", 0, 0), [-1], "negative"),
        (("values", 0, 6), [0, 0], "in one repeat twice"),
        (("ops", 3, 10), "many", "expected a whole number or nothing"),
        (("ops", 3, 13), [0, 0], "in one repeat twice"),
        (("words",), [], "there is no word"),
        (("inputs",), "0", "inputs='0': expected a list"),
        (("values", 0), [1], "expected a list of length 8"),
        (("model", "params"), "many", "model.params='many': expected a whole number"),
        (("repeats", 0, 6), [[0, ["a", "b"]]], "its lists have fewer or more"),
    ],
)
def test_a_graph_that_no_trace_has_is_refused_by_its_place(
    place: tuple[Any, ...], value: Any, words: str, tmp_path: Path
) -> None:
    def changed(graph: dict[str, Any]) -> None:
        if value == "layers":
            graph["repeats"][0][1] = 1000
        holder: Any = graph
        for step in place[:-1]:
            holder = holder[step]
        holder[place[-1]] = value

    path = loop_with(changed, tmp_path / "graph.json")
    with pytest.raises(GraphError) as refused:
        load_graphs(path)
    assert str(path) in str(refused.value) and "graphs.forward" in str(refused.value)
    assert words in str(refused.value)


def test_a_graph_in_which_an_op_lists_a_billion_copies_is_refused() -> None:
    short = load_graphs(CORPUS / "good" / "graph.json")["forward"]
    with pytest.raises(GraphError, match=r"priced copy by copy|modules in"):
        bounded(with_counts(short, BILLION))


def test_a_saved_graph_is_within_the_bounds(tmp_path: Path) -> None:
    for name in ("graph.json", "loop.json"):
        graphs = load_graphs(CORPUS / "good" / name)
        save_graphs(graphs, tmp_path / name)
        assert load_graphs(tmp_path / name) == graphs
