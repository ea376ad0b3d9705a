"""Forms beside traces at sizes that no form has seen: FLOPs, bytes, peak memory and time.

Each row is one model in one phase.  Its form is made over the named sizes; then sizes are drawn,
traced by themselves and priced by `rooftrace.estimate`, and the form's numbers are set beside:
whole numbers must be equal to the last digit, seconds to 1e-9.  Exits 1 where one is not.

    python benchmarks/exact/exact.py --count 40 --only llama-3.1-8b
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("ROOFTRACE_CACHE", "off")

import numpy as np

import rooftrace as rt
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import Form, evaluated

CHIPS = ("h200-sxm", "l4")
NEAR = 1e-9


@dataclass(frozen=True)
class Row:
    """One model in one phase: how it is traced, and over which sizes."""

    title: str
    phase: str
    over: Mapping[str, range]
    source: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]  # arguments of rt.tools.form
    at: Callable[..., rt.types.OpGraph]  # the trace at sizes
    executions: tuple[str, ...] = ("efficient",)


def _target(title: str, phase: str, config: Callable[[], str] | None = None, **over: range) -> Row:
    """A model by its name, or by the path of its config."""
    executions = ("efficient", "serving") if phase == "decode" else ("efficient",)

    def target() -> str:
        return title if config is None else config()

    def at(**sizes: int) -> rt.types.OpGraph:
        return rt.trace(target(), phase=phase, **sizes)

    return Row(title, phase, over, lambda: ((target(),), {"phase": phase}), at, executions)


def _module(
    title: str,
    phase: str,
    build: Callable[[], Any],
    inputs: Callable[..., tuple[Any, ...]],
    **over: range,
) -> Row:
    """A module whose argument has the sizes "0.0" (batch) and so on: dimensions of a call."""
    names = {name.replace("_", "."): values for name, values in over.items()}
    low = {name: values[0] for name, values in names.items()}

    def at(**sizes: int) -> rt.types.OpGraph:
        return rt.trace(build(), *inputs(**sizes), phase=phase)

    return Row(title, phase, names, lambda: ((build(), *inputs(**low)), {"phase": phase}), at)


def rows() -> Iterator[Row]:
    """The models of the floors, each in its phases."""
    batch, seq = range(1, 257), range(16, 4097)
    for name in ("llama-3.1-8b", "mixtral-8x22b", "deepseek-v3"):
        yield _target(name, "decode", batch=batch, kv=range(16, 32_769))
        yield _target(name, "prefill", batch=range(1, 17), seq=seq)
        yield _target(name, "training", batch=range(1, 17), seq=seq)
    yield _target("gpt2", "decode", batch=batch, kv=range(16, 1000))
    yield _target("gpt2", "prefill", batch=range(1, 65), seq=range(16, 1025))
    yield _target("gpt2", "training", batch=range(1, 65), seq=range(16, 1025))
    for phase in ("forward", "training"):
        yield _module("vit-base", phase, _vit, _pictures, **{"0_0": range(1, 257)})
        yield _module("resnet-50", phase, _resnet, _pictures, **{"0_0": range(1, 257)})
        yield _module("mamba-130m", phase, _mamba, _tokens, **{"0_0": range(1, 65)})
    lengths = range(16, 401)
    yield _target("whisper-small", "decode", _whisper, batch=range(1, 65), kv=lengths)
    for phase in ("prefill", "forward", "training"):
        yield _target("whisper-small", phase, _whisper, batch=range(1, 65), seq=lengths)


def _from(config: Any, kind: str) -> Any:
    import torch
    import transformers

    with torch.device("meta"):
        return getattr(transformers, kind)(config).eval()


def _vit() -> Any:
    import transformers

    return _from(transformers.ViTConfig(), "ViTForImageClassification")


def _resnet() -> Any:
    import transformers

    return _from(transformers.ResNetConfig(), "ResNetForImageClassification")


def _mamba() -> Any:
    import transformers

    config = transformers.MambaConfig(hidden_size=768, num_hidden_layers=24, use_cache=False)
    return _from(config, "MambaForCausalLM")


@cache
def _whisper() -> str:
    import transformers

    config = transformers.WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
        architectures=["WhisperForConditionalGeneration"],
    )  # fmt: skip
    folder = tempfile.TemporaryDirectory(prefix="rooftrace-exact-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "config.json"
    config.to_json_file(str(path), use_diff=False)
    return str(path)


def _size(sizes: Mapping[str, int]) -> int:
    return next(iter(sizes.values()))


def _pictures(**sizes: int) -> tuple[Any, ...]:
    import torch

    return (torch.empty(_size(sizes), 3, 224, 224, device="meta"),)


def _tokens(**sizes: int) -> tuple[Any, ...]:
    import torch

    return (torch.zeros(_size(sizes), 512, dtype=torch.int64, device="meta"),)


@dataclass
class Outcome:
    """What one row came to."""

    regimes: int = 0
    traces: int = 0
    inside: int = 0
    alone: int = 0
    unequal: int = 0
    farthest: float = 0.0  # relative, of seconds
    seconds: float = 0.0


def compared(row: Row, count: int, seed: int) -> Outcome:
    """The form of a row beside `count` traces."""
    began, outcome = time.perf_counter(), Outcome()
    args, named = row.source()
    form = rt.tools.form(*args, over=dict(row.over), **named)
    outcome.regimes = len(form.regimes)
    outcome.traces = sum(len(r.form.samples) + len(r.proven) for r in form.regimes)
    known = {n for r in form.regimes for n in (*r.form.samples, *r.proven)}
    draw = random.Random(f"{row.title} {row.phase} {seed}")
    chips = [rt.load_chip(name) for name in CHIPS]
    done = 0
    while done < count:
        sizes = {name: _drawn(draw, values) for name, values in row.over.items()}
        numbers = form.numbers(sizes)
        if numbers in known:
            continue
        done += 1
        if not any(regime.holds(numbers) for regime in form.regimes):
            outcome.alone += 1  # it would be traced by itself
            continue
        outcome.inside += 1
        graph = row.at(**sizes)
        for execution in row.executions:
            equal, off = _beside(form, sizes, graph, execution, chips)
            outcome.unequal += not equal
            outcome.farthest = max(outcome.farthest, off)
    outcome.seconds = time.perf_counter() - began
    return outcome


def _drawn(draw: random.Random, values: range) -> int:
    """A size, small ones as often as large ones."""
    return round(values[0] * (values[-1] / values[0]) ** draw.random())


def _beside(
    form: Form,
    sizes: Mapping[str, int],
    graph: rt.types.OpGraph,
    execution: str,
    chips: list[rt.types.Chip],
) -> tuple[bool, float]:
    """Whether whole numbers are equal, and how far seconds are apart."""
    points = Points({name: np.array([size]) for name, size in sizes.items()})
    table = evaluated(form, points, chips, Conditions.of(execution))
    equal, off = True, 0.0
    for place, chip in enumerate(chips):
        told = rt.estimate(graph, chip=chip, execution=execution)
        whole = (told.flops, told.bytes.total, told.memory.peak)
        names = ("flops", "bytes_hbm", "peak_memory")
        equal &= whole == tuple(int(table[name][place]) for name in names)
        off = max(off, abs(float(table["t_est"][place]) / told.t_est - 1))
    return equal, off


def asked_of(page: str, option: str, count: int, what: str) -> argparse.Namespace:
    """What the command line asks for: which rows, the seed, and a count that has its own option."""
    parser = argparse.ArgumentParser(description=page.splitlines()[0])
    parser.add_argument(option, dest="count", type=int, default=count, help=what)
    parser.add_argument("--only", default="", help="part of the name of a model")
    parser.add_argument("--phase", default="", help="only this phase")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def rows_of(asked: argparse.Namespace) -> Iterator[Row]:
    """The rows that are asked for."""
    for row in rows():
        if asked.only in row.title and asked.phase in row.phase:
            yield row


def main() -> int:
    """Print the table; 1 where a form is not exact."""
    asked = asked_of(__doc__, "--count", 40, "sizes for each row")
    print("| model | phase | sizes | regimes | traces | held out | of them proven | unequal | "
          "time off by | s |")  # fmt: skip
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    wrong = 0
    for row in rows_of(asked):
        result = compared(row, asked.count, asked.seed)
        wrong += bool(result.unequal) or result.farthest > NEAR
        sizes = ", ".join(f"{n} {v[0]:,} to {v[-1]:,}" for n, v in row.over.items())
        print(f"| {row.title} | {row.phase} | {sizes} | {result.regimes} | {result.traces} | "
              f"{result.inside + result.alone} | {result.inside} | {result.unequal} | "
              f"{result.farthest:.1e} | {result.seconds:.0f} |", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
