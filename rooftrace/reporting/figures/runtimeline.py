"""A whole run of a script as a timeline for Perfetto: its data loaders beside the device.

Turns stand in the order in which they ran.  The host loads the batch of a turn while the device
runs the turn before; a turn begins when its batch is there and the device is free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooftrace._escapes import to_json
from rooftrace._outputs import MADE_BY
from rooftrace._writing import write_packed
from rooftrace.costmodels.scripting import ScriptCost, TurnCost
from rooftrace.tracer.scripts import Turns

LIMIT = 20_000
"""Turns that have slices of their own; of a longer stretch, the last turns are one slice."""

_RUN = 1
_LOADING, _TURNS, _PIECES = 1, 2, 3
_TRACKS = {
    _LOADING: "host: data loaders, measured here",
    _TURNS: "device: turns, expected",
    _PIECES: "device: pieces of a turn",
}

Event = dict[str, Any]


def run_timeline(result: ScriptCost, limit: int = LIMIT) -> dict[str, Any]:
    """The contents of a trace file in Chrome's format; times in us from the first turn."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            **MADE_BY,
            "script": result.script.name,
            "chip": result.chip.name,
            "execution": result.execution.name,
            "device_s": result.device_seconds,
            "loading_s": result.loading_seconds,
        },
        "traceEvents": [*_names(), *_turns(result, limit)],
    }


def write_run(path: str | os.PathLike[str], result: ScriptCost, limit: int = LIMIT) -> Path:
    """Write `run_timeline(...)` (gzip if the name ends in .gz), whole or not at all; its path."""
    path = Path(path)
    write_packed(path, to_json(run_timeline(result, limit)))
    return path


def _names() -> Iterator[Event]:
    yield {"ph": "M", "pid": _RUN, "name": "process_name", "args": {"name": "the run"}}
    for track, name in _TRACKS.items():
        yield {
            "ph": "M", "pid": _RUN, "tid": track, "name": "thread_name", "args": {"name": name},
        }  # fmt: skip


def _turns(result: ScriptCost, limit: int) -> Iterator[Event]:
    rows = {row.stretch.key: row for row in result.rows}
    host = device = 0.0
    for stretch in result.script.stretches:
        row = rows[stretch.key]
        loading = stretch.loading / stretch.turns
        alone = min(stretch.turns, max(limit, 1))
        limit -= alone
        for number, times in _slices(stretch, alone):
            loaded = host + loading * times
            if loading:
                yield _slice(_LOADING, "load", host, loading * times, batches=stretch.batches)
            begin = max(device, loaded)
            device = begin + row.t_est * times
            yield _slice(
                _TURNS, f"{stretch.kind} {number}", begin, row.t_est * times,
                called=stretch.label, turns=times, flops=row.flops * times, limit=row.limit,
            )  # fmt: skip
            if times == 1 and len(row.parts) > 1:
                yield from _pieces(row, begin)
            host = begin


def _slices(stretch: Turns, alone: int) -> Iterator[tuple[str, int]]:
    """Numbers of turns, and how many each slice has."""
    for place in range(alone):
        yield str(stretch.first + place), 1
    rest = stretch.turns - alone
    if rest:
        yield f"{stretch.first + alone} to {stretch.last}", rest


def _pieces(row: TurnCost, begin: float) -> Iterator[Event]:
    for number, (step, times) in enumerate(row.parts, 1):
        for _ in range(times):
            yield _slice(_PIECES, f"piece {number}", begin, step.t_est, kernels=step.kernels)
            begin += step.t_est


def _slice(track: int, name: str, begin: float, seconds: float, **facts: Any) -> Event:
    return {
        "ph": "X", "pid": _RUN, "tid": track, "name": name, "ts": begin * 1e6,
        "dur": seconds * 1e6, "args": facts,
    }  # fmt: skip
