"""Attackers on every value of a file: each is replaced by each of a list of wrong ones, or gone.

Where `test_fuzz_files` draws, this goes through: places of one kind (the fifth value of each op)
are one place, tried in the first and the last of them.  A file is read, or refused by one error of
ours that names it.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import re
import resource
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.kernels.knobs import load_knobs
from rooftrace.errors import is_ours
from rooftrace.graph import load_graphs, save_graphs
from rooftrace.graph.assumptions import policy_of
from rooftrace.hardware.chipfile import load_chip
from rooftrace.hardware.systems import load_system
from rooftrace.measured.bench import Run
from rooftrace.measured.profiles import (
    read_counters,
    read_likwid,
    read_perf_stat,
    read_rocprof,
    read_steps,
    read_trace,
)
from rooftrace.reporting.cli import cli
from rooftrace.reporting.commands.fleet_tasks import load_fleet, part_bytes, read_part
from rooftrace.reporting.commands.sensitivity import number_of_config
from rooftrace.reporting.gates.lockfile import load_lock, load_settings
from rooftrace.tracer import Job
from rooftrace.tracer.api import trace_target
from rooftrace.tracer.phases.sizing import TraceCache
from rooftrace.tracer.targets import open_checkpoint
from rooftrace.tracer.targets.programs import read_onnx
from rooftrace.tracer.targets.ptfile import read_program
from tests.fuzz.test_fuzz_files import GOOD, spots
from tests.tracer.test_onnx import cnn
from tests.tracer.test_sharded import sharded

SYSTEMS = Path(rt.__file__).parent / "hardware" / "systems"

WRONG = (
    *("{}", "[]", "null", '""', "-1", "0", "7", "0.5", "1e400", str(2**70), "9" * 5000, "NaN"),
    *("-Infinity", "true", "1000000000", str(2**63 - 1), '"\\ud800"', '"x"', '"\\u0000"', '"\xff"'),
    *("[0]", "[null]", '["x"]', "[[1]]", '[{"a": 1}]', '{"a": 1}', '{"": null}', '{"ref": 0}'),
    *("[" * 100 + "]" * 100, "[" * 100_000, '{"a":' * 300 + "1" + "}" * 300),
)
"""Raw JSON that stands where a value stood; `\\xff` is no UTF-8."""
OUT, TWICE, TWICE_WRONG = "out", "twice", "twice, the first wrong"
_TIMES = 10.0
"""Seconds of a processor that one file may take."""
_MOST = 1 << 30
"""Bytes by which reading all of them may let the process grow."""


def kinds_of(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """A place without the numbers of items."""
    return tuple("*" if isinstance(step, int) else step for step in place)


def places(tree: Any) -> list[tuple[Any, ...]]:
    """The first and the last of each kind of place of a tree; of names in tables, all."""
    first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    last: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for place in spots(tree):
        kind = (*kinds_of(place[:-1]), place[-1])  # items of one list are told apart ...
        if isinstance(place[-1], int) and place[-1] > 20:  # ... as they are a record in many files
            kind = kinds_of(place)
        first.setdefault(kind, place)
        last[kind] = place
    return list(dict.fromkeys((*first.values(), *last.values())))


def damaged(tree: Any, place: tuple[Any, ...], wrong: str) -> bytes:
    """The JSON text of a tree with something wrong in one place."""
    holder = tree
    for step in place[:-1]:
        holder = holder[step]
    key, good = place[-1], holder[place[-1]]
    if wrong == OUT:
        del holder[key]
    elif wrong in (TWICE, TWICE_WRONG) and isinstance(holder, dict):
        holder["@twice@"] = good
    elif wrong in (TWICE, TWICE_WRONG):
        holder.insert(key, good)
    else:
        holder[key] = "@wrong@"
    text = json.dumps(tree)
    if wrong == OUT and isinstance(holder, list):
        holder.insert(key, good)
    elif wrong in (TWICE, TWICE_WRONG):
        if isinstance(holder, dict):
            del holder["@twice@"]
            text = text.replace('"@twice@"', json.dumps(key))
        else:
            del holder[key]
    else:
        holder[key] = good
    if wrong == TWICE_WRONG and isinstance(holder, dict):
        text = text.replace(
            f"{json.dumps(key)}: ", f'{json.dumps(key)}: "first", {json.dumps(key)}: ', 1
        )
    return text.replace('"@wrong@"', wrong).encode("latin-1" if "\xff" in wrong else "utf-8")


Attack = tuple[str, Callable[[], bytes]]
"""What is wrong, and how the file is made: all of them together take gigabytes."""


def cuts(raw: bytes, rng: random.Random) -> Iterator[Attack]:
    """A file that ends too early in many places, and one in which bytes were flipped."""
    ends = {0, 1, 2, 10, 18, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(30))}
    for end in sorted(ends):
        yield f"cut at {end}", partial(raw.__getitem__, slice(end))
    for _ in range(60):
        at, bit = rng.randrange(len(raw)), rng.randrange(8)
        yield f"bit {bit} of byte {at}", partial(flipped, raw, at, bit)


def flipped(raw: bytes, at: int, bit: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


# -- good files ------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))


class Experts(nn.Module):
    """Blocks with attention and a mixture of experts, in a loop that rolls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)
        )
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        flat = x.flatten(0, 1)
        out = torch.zeros_like(flat)
        weight, chosen = self.router(flat).softmax(-1).topk(2)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, expert(flat[rows]) * weight[rows, slot, None])
        return out


def saved(folder: Path, graphs: dict[str, Any]) -> bytes:
    save_graphs(graphs, folder / "made.json")
    return (folder / "made.json").read_bytes()


def graph_of(model: Any, inputs: Any, **how: Any) -> Callable[[Path], bytes]:
    def made(folder: Path) -> bytes:
        graph = rt.trace(model(), inputs, **how)
        return saved(folder, {graph.phase: graph})

    return made


def a_sharded_graph(folder: Path) -> bytes:
    graph = sharded("tp")
    return saved(folder, {graph.phase: graph})


def a_form(folder: Path) -> bytes:
    form = rt.tools.form(nn.Linear(8, 8), torch.empty(2, 8), over={"batch": range(1, 9)})
    return form.save(folder / "made.json").read_bytes()


def a_project(folder: Path, file: str) -> bytes:
    """The lock, or the settings, of a project that was locked."""
    (folder / "here.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.ones(2, 8),)\n"
    )
    settings = '[tool.rooftrace]\ntargets = ["here.py:build"]\nchips = ["l4"]\ndepth = 2\n'
    settings += '[tool.rooftrace.budgets]\ntime = "5%"\n'
    (folder / "pyproject.toml").write_text(settings)
    with contextlib.chdir(folder):
        assert CliRunner().invoke(cli, ["lock"], catch_exceptions=False).exit_code == 0
    return (folder / file).read_bytes()


def a_checkpoint(folder: Path) -> bytes:
    save_file(nn.Linear(4, 4).state_dict(), folder / "model.safetensors")
    return (folder / "model.safetensors").read_bytes()


def an_index(folder: Path) -> bytes:
    (folder / "part.safetensors").write_bytes(a_checkpoint(folder))
    parts = {"weight": "part.safetensors", "bias": "part.safetensors"}
    return json.dumps({"metadata": {"total_size": 80}, "weight_map": parts}).encode()


def a_torch_file(folder: Path) -> bytes:
    torch.save(nn.Linear(4, 4).state_dict(), folder / "made.pt")
    return (folder / "made.pt").read_bytes()


def a_program(folder: Path) -> bytes:
    program = torch.export.export(nn.Linear(8, 8), (torch.ones(2, 8),))
    torch.export.save(program, folder / "made.pt2")
    return (folder / "made.pt2").read_bytes()


def a_fleet(folder: Path) -> bytes:
    tasks = {"a": "first", "b": "second"}
    table = {"form": 1, "releases": {"torch": "2"}, "tasks": tasks, "failures": {"b": "Error: x"}}
    return json.dumps(table).encode()


def good(name: str) -> Callable[[Path], bytes]:
    return lambda folder: GOOD[name]


def text_of_trace(folder: Path) -> bytes:
    """A trace with a few events of each category: the first of each."""
    data = json.loads(GOOD["trace.json"])
    kept: dict[Any, list[Any]] = {}
    for event in data["traceEvents"]:
        kept.setdefault((event.get("ph"), event.get("cat")), []).append(event)
    data["traceEvents"] = [event for events in kept.values() for event in events[:3]]
    return json.dumps(data).encode()


# -- what is done with them ------------------------------------------------------------------------


def use_graphs(path: Path) -> None:
    for graph in load_graphs(path).values():
        rt.estimate(graph, "h100-sxm", execution="compiled").to_frame()


def use_sharded(path: Path) -> None:
    for graph in load_graphs(path).values():
        rt.estimate(graph, system="dgx-h100").to_frame()


def use_form(path: Path) -> None:
    rt.types.Form.load(path).graph(batch=2)


def use_kept(path: Path) -> None:
    """A file of digests beside a kept trace says nothing wrong, and never stops a trace."""
    cache = TraceCache(path.parent)
    job = Job.of(rt.trace, "json:loads", (), {})
    cache._place = lambda job: path  # type: ignore[method-assign, assignment]
    assert cache.look_up(job) is None


def use_part(path: Path) -> None:
    read_part(path, "a")


class Kind(NamedTuple):
    """A kind of file: how a good one is made, and what reads it."""

    make: Callable[[Path], bytes]
    use: Callable[[Path], Any]
    loads: bool = True  # whether an error has to name the file, as nothing is done with it but read


KINDS: dict[str, Kind] = {
    "conv.graph.json": Kind(graph_of(Conv, torch.ones(2, 3, 8, 8)), use_graphs),
    "training.graph.json": Kind(
        graph_of(Conv, torch.ones(2, 3, 8, 8), phase="training"), use_graphs
    ),
    "experts.graph.json": Kind(graph_of(Experts, torch.ones(2, 4, 16)), use_graphs),
    "loop.graph.json": Kind(good("loop.json"), use_graphs),
    "sharded.graph.json": Kind(a_sharded_graph, use_sharded),
    "form.json": Kind(a_form, use_form),
    "run.json": Kind(good("run.json"), Run.load),
    "trace.json": Kind(text_of_trace, read_trace),
    "config.json": Kind(good("config.json"), lambda p: trace_target(p, ["prefill"], batch=1)),
    "number.json": Kind(
        lambda _: b'{"n": {"inside": 3}}',
        lambda p: number_of_config(Job.of(rt.trace, str(p), (), {}), "config.n.inside"),
    ),
    "histogram.json": Kind(lambda _: b'{"0": 3, "1": 5}', lambda p: policy_of(f"histogram:{p}")),
    "counts.json": Kind(lambda _: b"[3, 5, 0.5]", lambda p: policy_of(f"histogram:{p}")),
    "_fleet.json": Kind(a_fleet, lambda p: load_fleet(p.parent)),
    "model.safetensors.index.json": Kind(an_index, open_checkpoint),
    "model.safetensors": Kind(a_checkpoint, open_checkpoint),
    "kept.files": Kind(
        lambda _: b'{"digests": {"/a": "digest", "/b": "digest"}, "sources": ["/a"]}', use_kept
    ),
    "model.pt": Kind(a_torch_file, open_checkpoint),
    "program.pt2": Kind(a_program, read_program),
    "model.onnx": Kind(lambda folder: cnn(folder)[1].read_bytes(), read_onnx),
    "a.parquet": Kind(lambda _: part_bytes([{"x": 1, "y": "a"}], "a")[0], use_part),
    "costs.lock": Kind(lambda folder: a_project(folder, "costs.lock"), load_lock),
    "pyproject.toml": Kind(
        lambda folder: a_project(folder, "pyproject.toml"), lambda p: load_settings(p.parent)
    ),
    "knobs.toml": Kind(good("knobs.toml"), load_knobs),
    "chip.toml": Kind(good("chip.toml"), load_chip),
    "system.toml": Kind(
        lambda _: (SYSTEMS / "dgx-h100.toml").read_bytes(), lambda p: load_system(str(p))
    ),
    "steps.csv": Kind(good("steps.csv"), read_steps),
    "counters.csv": Kind(good("counters.csv"), read_counters),
    "dispatches.csv": Kind(good("dispatches.csv"), read_rocprof),
    "perf.csv": Kind(good("perf.csv"), read_perf_stat),
    "likwid.csv": Kind(good("likwid.csv"), read_likwid),
}


# -- attacks ---------------------------------------------------------------------------------------


def in_json(raw: bytes) -> Iterator[Attack]:
    tree = json.loads(raw)
    for place in places(tree):
        for wrong in (*WRONG, OUT, TWICE, TWICE_WRONG):
            yield f"{place} = {wrong:.20}", partial(damaged, tree, place, wrong)
    for wrong in WRONG:
        yield f"all of it = {wrong:.20}", partial(wrong.encode, "latin-1")


def in_header(raw: bytes) -> Iterator[Attack]:
    """Attacks on the header of a file of safetensors, whose length is said rightly."""
    end = 8 + int.from_bytes(raw[:8], "little")

    def whole(make: Callable[[], bytes]) -> bytes:
        header = make()
        return len(header).to_bytes(8, "little") + header + raw[end:]

    for name, make in in_json(raw[8:end]):
        yield name, partial(whole, make)


def in_program(raw: bytes) -> Iterator[Attack]:
    """Attacks on the graph inside of an exported program."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        entries = {entry: archive.read(entry) for entry in archive.infolist()}
    (graph,) = (entry for entry in entries if entry.filename.endswith("models/model.json"))

    def whole(make: Callable[[], bytes]) -> bytes:
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for entry, content in entries.items():
                archive.writestr(entry.filename, make() if entry is graph else content)
        return made.getvalue()

    for name, make in in_json(entries[graph]):
        yield name, partial(whole, make)


TOML = tuple(wrong.replace("NaN", "nan").replace("Infinity", "inf") for wrong in WRONG[:-3])
TOML += ("[" * 100 + "]" * 100, "[" * 5000, "1979-05-27", "'x'", "{a.b.c = 1}")


def in_lines(raw: bytes) -> Iterator[Attack]:
    """A TOML or CSV text with one value replaced, one line out, or twice."""
    lines = raw.decode().split("\n")
    for number, line in enumerate(lines):
        name, equals, _ = line.partition(" = ")
        cells = line.split(",")
        others = [(f"{number} {wrong:.20}", f"{name} = {wrong}") for wrong in TOML if equals]
        if not equals:
            others = [
                (
                    f"{number}.{place} {wrong:.20}",
                    ",".join((*cells[:place], wrong, *cells[place + 1 :])),
                )
                for place in range(len(cells))
                for wrong in (*TOML, "")
            ]
        others += [(f"{number} twice", f"{line}\n{line}")]
        for told, other in others:
            text = "\n".join((*lines[:number], other, *lines[number + 1 :]))
            yield told, partial(text.encode, "latin-1" if "\xff" in other else "utf-8")
        text = "\n".join((*lines[:number], *lines[number + 1 :]))
        yield f"{number} out", text.encode


def attacks(name: str, raw: bytes) -> Iterator[Attack]:
    """All attacks on a good file."""
    rng = random.Random(name)
    inside = {
        ".json": in_json, ".files": in_json, ".safetensors": in_header, ".pt2": in_program,
        ".toml": in_lines, ".lock": in_lines, ".csv": in_lines,
    }.get(Path(name).suffix)  # fmt: skip
    yield from cuts(raw, rng)
    if inside in (in_json, in_lines):
        yield from cuts(gzip.compress(raw, mtime=0), rng)
    yield from inside(raw) if inside else cuts(raw, rng)


def problem_of(kind: Kind, path: Path) -> str:
    """What is wrong with how a file is taken; "" where it is read, or refused in one message."""
    begin = time.process_time()
    try:
        kind.use(path)
    except Exception as error:
        if not is_ours(error):
            return f"{type(error).__name__}: {error!s:.300}"
        if path.name not in str(error) and not any(
            map(is_priced, traceback.extract_tb(error.__traceback__))
        ):
            return f"does not name the file: {type(error).__name__}: {error!s:.300}"
        if len(str(error)) > 4000:
            return f"a message of {len(str(error))} characters: {error!s:.80}"
    seconds = time.process_time() - begin
    return f"took {seconds:.1f} s of a processor" if seconds > _TIMES else ""


def is_priced(frame: traceback.FrameSummary) -> bool:
    """Whether an error comes from the use of what was read."""
    return frame.name in ("estimate", "trace_target")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, bytes]]:
    """The folder and the bytes of a good file of a kind; each is made once."""

    @cache
    def make(name: str) -> tuple[Path, bytes]:
        folder = tmp_path_factory.mktemp("good")
        return folder, KINDS[name].make(folder)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_any_value_of_a_file_may_be_wrong(name: str, made: Any, fuzz_seconds: float) -> None:
    """As many attacks as there is time for, evenly over all of them."""
    folder, raw = made(name)
    kind, path = KINDS[name], folder / name
    path.write_bytes(raw)
    kind.use(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    listed = list(attacks(name, raw))
    random.Random(0).shuffle(listed)
    end = time.monotonic() + max(2.0, fuzz_seconds / len(KINDS))
    problems: dict[str, str] = {}
    for told, make in listed:
        if time.monotonic() > end:
            break
        path.write_bytes(make())
        problem = problem_of(kind, path)
        if problem:
            problems.setdefault(re.sub(r"\d+", "0", problem)[:60], f"{told}: {problem}")
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert not problems, "\n".join(problems.values())
    assert grown < _MOST, f"{grown:,} bytes"
