"""Attackers on files: good files with something wrong in them are read, or refused in one message.

What is read is used: graphs are priced, chips and knobs price one, traces are validated.  Every
attack is made from its number alone; one that broke something once stands in tests/corpus/files.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.costmodels.estimates import play
from rooftrace.costmodels.fusion import execution_model
from rooftrace.costmodels.kernels.knobs import dump_knobs, load_knobs
from rooftrace.errors import is_ours
from rooftrace.graph import load_graphs
from rooftrace.hardware.chipfile import dump_chip, lint_chip, load_chip
from rooftrace.measured.bench import Run
from rooftrace.measured.profiles import (
    read_counters,
    read_likwid,
    read_perf_stat,
    read_rocprof,
    read_steps,
    read_trace,
    records_of,
    source_of,
)
from rooftrace.tracer.api import trace_target

pytestmark = pytest.mark.quick

CORPUS = Path(__file__).parents[1] / "corpus" / "files"
GOOD = {path.name: path.read_bytes() for path in sorted((CORPUS / "good").iterdir())}

# -- attacks ---------------------------------------------------------------------------------------

NUMBERS = ("0", "-1", "1", "7", "1e9", "1000000000", "3037000500", "9" * 19, "9" * 25, "9" * 400)
NUMBERS += ("9" * 5000, "1e308", "-1e308", "1e400", "5e-324", "0.5", "NaN", "Infinity", "-Infinity")
TEXTS = ("", "x", "0", "a.b", "\\ud800", "\\u0000", "\\u001b[31m", "é", "A" * 3000, "forward")
TEXTS += ("aten.mm.default", "fp8", "bf16", "weights", "kernel", "view", "1e99999 GB/s", "=1")
DEEP = tuple("[" * n + "]" * n for n in (3, 100, 500, 5000))
WRONG = (*NUMBERS, *(f'"{text}"' for text in TEXTS), *DEEP, "null", "true", "false", "[]", "{}")
WRONG += ("[0]", "[null]", '{"a": 1}', '{"ref": 0}', '{"ref": -1}', "[0, 0, 1]", "[[[1]]]")


def spots(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a tree."""
    if place:
        yield place
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from spots(tree[key], (*place, key))


def attacked_json(raw: bytes, rng: random.Random) -> bytes:
    """A JSON text with some of its values replaced, moved or left out."""
    tree = json.loads(raw)
    marks = {}
    for number in range(rng.choice((1, 1, 1, 2, 5))):
        # Half of the values stand deep inside lists: go down from the top, so that all are met.
        holder, key = None, None
        inner = tree
        while isinstance(inner, dict | list) and inner and (holder is None or rng.random() < 0.85):
            key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            holder, inner = inner, inner[key]
        if holder is None:
            continue
        kind = rng.random()
        if kind < 0.12:
            del holder[key]
        elif kind < 0.2 and isinstance(holder, list):
            holder.insert(key, inner)
        elif kind < 0.25 and isinstance(holder, dict):
            holder[rng.choice(("x", "", "a.b", key + "s"))] = holder.pop(key)
        elif kind < 0.45:
            path = rng.choice(list(spots(tree)))
            other = tree
            for step in path:
                other = other[step]
            holder[key] = json.loads(json.dumps(other))
        elif kind < 0.6 and isinstance(inner, int):
            holder[key] = rng.choice((inner + 1, inner - 1, -inner, 2 * inner, inner * 10**9))
        else:
            marks[f'"@{number}@"'] = rng.choice(WRONG)
            holder[key] = f"@{number}@"
    text = json.dumps(tree)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.encode()


def attacked_lines(raw: bytes, rng: random.Random) -> bytes:
    """A TOML or CSV text with some of its lines and values changed."""
    lines = raw.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        number = rng.randrange(len(lines))
        kind = rng.random()
        if kind < 0.15:
            del lines[number]
        elif kind < 0.25:
            lines.insert(number, rng.choice(lines))
        elif "=" in lines[number]:
            key, _, value = lines[number].partition("=")
            unit = re.search(r'"[\d.]+ ?(.*)"', value)
            wrong = rng.choice(WRONG)
            if unit and rng.random() < 0.5:
                wrong = f'"{rng.choice(NUMBERS)} {unit[1]}"'
            lines[number] = f"{key}= {wrong}".replace("Infinity", "inf").replace("NaN", "nan")
        else:
            cells = lines[number].split(",")
            cells[rng.randrange(len(cells))] = rng.choice(WRONG)
            lines[number] = ",".join(cells)
        if not lines:
            break
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def attacked_bytes(raw: bytes, rng: random.Random) -> bytes:
    """A file cut, with bytes changed, or packed and then so."""
    data = bytearray(gzip.compress(raw, mtime=0) if rng.random() < 0.5 else raw)
    if rng.random() < 0.5:
        del data[rng.randrange(len(data)) :]
    for _ in range(rng.choice((0, 1, 3))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def attack(name: str, number: int) -> bytes:
    """Attack `number` on a good file."""
    rng = random.Random(f"{name} {number}")
    change = attacked_json if name.endswith(".json") else attacked_lines
    return (attacked_bytes if rng.random() < 0.1 else change)(GOOD[name], rng)


# -- what is done with a file ----------------------------------------------------------------------


def use_graph(path: Path) -> None:
    for graph in load_graphs(path).values():
        use_in_an_estimate(graph, "h100-sxm", "compiled", None)
        str(graph)


def use_in_an_estimate(graph: Any, chip: Any, execution: str, knobs: Any) -> None:
    model: Any = execution if knobs is None else execution_model(execution, knobs=knobs)
    estimate = rt.estimate(graph, chip, execution=model)
    str(estimate)
    estimate.to_frame()
    json.dumps(rt.report(graph, chip=chip, execution=model).to_dict())
    play(estimate)


def small_graph() -> Any:
    return load_graphs(CORPUS / "good" / "loop.json")["forward"]


def use_knobs(path: Path) -> None:
    knobs = load_knobs(path)
    dump_knobs(knobs)
    use_in_an_estimate(small_graph(), "h100-sxm", "compiled", knobs)


def use_chip(path: Path) -> None:
    chip = load_chip(path)
    dump_chip(chip)
    lint_chip(path)
    use_in_an_estimate(small_graph(), chip, "eager", None)


def use_measured(path: Path) -> None:
    kind = source_of(path)
    if kind.place(str(path)):
        kind.read(str(path))
    else:
        records_of(kind, str(path))


def use_trace(path: Path) -> None:
    trace = read_trace(path)
    str(trace)
    trace.by_op()
    str(rt.validate(path, "h100-sxm", target=small_graph()))


def use_run(path: Path) -> None:
    Run.load(path)
    rt.calibrate(path, "h100-sxm", free=["compute"])


def use_config(path: Path) -> None:
    trace_target(path, ["prefill"], batch=1, seq=8)


USES: dict[str, Callable[[Path], Any]] = {
    "graph.json": use_graph,
    "loop.json": use_graph,
    "run.json": use_run,
    "trace.json": use_trace,
    "config.json": use_config,
    "knobs.toml": use_knobs,
    "factors.toml": use_knobs,
    "chip.toml": use_chip,
    "steps.csv": read_steps,
    "rates.csv": read_steps,
    "counters.csv": read_counters,
    "dispatches.csv": read_rocprof,
    "passes.csv": read_rocprof,
    "perf.csv": read_perf_stat,
    "likwid.csv": read_likwid,
}


def judged(use: Callable[[Path], Any], path: Path) -> str:
    """What is wrong with how a file is taken; "" where it is read, or refused in one message."""
    begin = time.process_time()
    try:
        use(path)
    except OSError:
        pass
    except Exception as error:
        if not is_ours(error):
            return f"{type(error).__name__}: {error!s:.200}"
        if len(str(error)) > 4000:
            return f"a message of {len(str(error))} characters: {error!s:.80}"
    seconds = time.process_time() - begin
    return f"took {seconds:.1f} s of a processor" if seconds > 60 else ""


def sizes(graphs: Any) -> dict[str, tuple[int, int]]:
    """Ops and repeats of each phase."""
    return {phase: (len(graph.ops), len(graph.repeats)) for phase, graph in graphs.items()}


def kernel_bytes(path: Path) -> list[tuple[int, int]]:
    """Bytes that each kernel read and wrote."""
    read = read_counters if path.name == "counters.csv" else read_rocprof
    return [(kernel.read, kernel.written) for kernel in read(path)]


def memory_bytes(path: Path) -> list[tuple[int, int]]:
    read = read_likwid if path.name == "likwid.csv" else read_perf_stat
    return [(count.read, count.written) for count in read(path)]


def step_seconds(path: Path) -> list[tuple[str, float]]:
    return [(step.target, round(step.seconds, 6)) for step in read_steps(path)]


# What stands in each good file.
HELD: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "graph.json": (lambda p: sizes(load_graphs(p)), {"forward": (55, 1), "training": (254, 0)}),
    "loop.json": (lambda p: sizes(load_graphs(p)), {"forward": (23, 1)}),
    "run.json": (lambda p: [(r.model, r.phase) for r in Run.load(p).models], [("lstm", "forward")]),
    "trace.json": (lambda p: [a.name for a in read_trace(p).annotations], ["ProfilerStep#0"]),
    "config.json": (lambda p: [*trace_target(p, ["prefill"], batch=1, seq=8)], ["prefill"]),
    "knobs.toml": (lambda p: (load_knobs(p).compute, load_knobs(p).memory), (1, 1)),
    "factors.toml": (lambda p: (load_knobs(p).compute, load_knobs(p).memory), (0.9, 0.8)),
    "chip.toml": (lambda p: load_chip(p).name, "h200-sxm"),
    "steps.csv": (step_seconds, [("here:build", 0.0125), ("here:build", 0.00325)]),
    "rates.csv": (step_seconds, [("resnet50", 0.05118), ("vit", 0.045714)]),
    "counters.csv": (kernel_bytes, [(1050500000, 4250), (0, 0)]),
    "dispatches.csv": (kernel_bytes, [(9655488, 8060928), (0, 512)]),
    "passes.csv": (kernel_bytes, [(2097408, 44), (16384, 32768)]),
    "perf.csv": (memory_bytes, [(20971520, 3145728)]),
    "likwid.csv": (memory_bytes, [(2005300000, 500000000)]),
}


@pytest.mark.parametrize("name", USES)
def test_a_good_file_is_read_and_used(name: str) -> None:
    path = CORPUS / "good" / name
    read, expected = HELD[name]
    assert read(path) == expected
    if name != "run.json":  # a fit of all its rows takes seconds
        USES[name](path)


@pytest.mark.parametrize("name", USES)
def test_an_attacked_file_is_read_or_refused(
    name: str, tmp_path: Path, fuzz_seconds: float
) -> None:
    path = tmp_path / name
    end = time.monotonic() + fuzz_seconds / len(USES)
    for number in count():
        if number and time.monotonic() > end:
            break
        path.write_bytes(attack(name, number))
        problem = judged(USES[name], path)
        assert not problem, f"attack({name!r}, {number}): {problem}"


CRASHERS = sorted(path for path in CORPUS.glob("*/*") if path.parent.name != "good")


@pytest.mark.parametrize("path", CRASHERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_that_broke_something_once_is_refused(path: Path) -> None:
    (use,) = {use for name, use in USES.items() if name.startswith(path.parent.name)}
    assert not judged(use, path)
