"""Timelines for Perfetto: a step as predicted and measured, and a run of a script with loaders."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import file_part, to_json
from rooftrace._outputs import MADE_BY
from rooftrace._writing import write_packed
from rooftrace.costmodels.estimates import Folded, Playback, Played, ScriptCost, TurnCost, play
from rooftrace.costmodels.timing import streams
from rooftrace.graph import pattern_of
from rooftrace.reporting.renderers import words
from rooftrace.scripts.steps import Turns

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate, Row
    from rooftrace.costmodels.timing.queue import Communication
    from rooftrace.measured.alignment import Alignment
    from rooftrace.reporting.sections import Results


# -- runs ------------------------------------------------------------------------------------------
# The run of a script as a timeline for Perfetto, with tracks for its data loaders and the device.
#
# Turns stand in the order in which they ran.  The host loads the batch of a turn while the device
# runs the turn before; a turn begins when its batch is there and the device is free.

LIMIT_OF_A_RUN = 20_000
"""Turns shown one slice each; the remaining turns of a longer stretch share one slice."""

_RUN = 1
_LOADING, _TURNS, _PIECES = 1, 2, 3
_TRACKS = {
    _LOADING: "host: data loaders, measured here",
    _TURNS: "device: turns, expected",
    _PIECES: "device: pieces of a turn",
}

Event = dict[str, Any]


def run_timeline(result: ScriptCost, limit: int = LIMIT_OF_A_RUN) -> dict[str, Any]:
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


def write_run(path: str | os.PathLike[str], result: ScriptCost) -> Path:
    """Write `run_timeline(...)` to a path (gzip if it ends in .gz), atomically; return the path."""
    return _written(path, run_timeline(result))


def _written(path: str | os.PathLike[str], contents: Mapping[str, Any]) -> Path:
    write_packed(Path(path), to_json(contents))
    return Path(path)


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


# -- timeline --------------------------------------------------------------------------------------
# A step as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: predicted, and measured.
#
# One process of tracks shows the estimate: launches of the host, kernels of the device (a track
# for each stream), modules.  Another shows a run: its kernels by stream and its ops by thread,
# from a trace, or one track of ops from seconds by op id.  Arrows go from each predicted kernel
# to the measured one.

LIMIT = 50_000
"""Slices of a track; more launches than this are folded (see `playback`)."""

_PREDICTED, _MEASURED = 1, 2
_HOST, _DEVICE, _MODULES = 1, 2, 3
_STREAMS = 4
"""Predicted tracks: streams of the device other than the main one are numbered from here."""
_ROUNDING = 1e-6
"""A smaller share of an exchange than this counts as not exposed."""
_OPS = 100
"""Measured tracks: streams are numbered from 1, threads of the host from here."""

Target = tuple[int, int]
"""(op id, iteration)"""
Place = tuple[int, float]
"""(track, seconds since the step began)"""


def timeline(
    estimate: Estimate,
    measured: Alignment | Mapping[int, float] | None = None,
    limit: int = LIMIT,
) -> dict[str, Any]:
    """The contents of a trace file in Chrome's format; times in us from the start of the step.

    measured: an alignment of a trace with `estimate.graph`, or seconds by op id of that graph,
    all iterations together.
    """
    from rooftrace.measured.alignment import Alignment

    playback = play(estimate, limit)
    tracks = _tracks_of(playback)
    events = [*_tracks(estimate, tracks), *_predicted(estimate, playback, tracks)]
    anchors = _anchors(estimate, playback, tracks)
    if isinstance(measured, Alignment):
        shown, places = _of_trace(measured, limit)
        events += [*_measured_tracks(measured), *shown, *_arrows(anchors, places)]
    elif measured is not None:
        shown, places = _of_seconds(estimate, measured)
        events += [*_named(_MEASURED, "measured", {1: "ops"}), *shown, *_arrows(anchors, places)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            **MADE_BY,
            "model": str(estimate.graph.model.get("name") or "model"),
            "phase": estimate.phase,
            "chip": estimate.chip.name,
            "execution": estimate.execution.name,
            "t_est_s": estimate.t_est,
        },
        "traceEvents": sorted(events, key=_order),
    }


def write_timeline(
    path: str | os.PathLike[str],
    estimate: Estimate,
    measured: Alignment | Mapping[int, float] | None = None,
    limit: int = LIMIT,
) -> Path:
    """Write `timeline(...)` to a path (gzip if it ends in .gz), atomically; return the path."""
    return _written(path, timeline(estimate, measured, limit))


def write_timelines(report: Results, folder: Path) -> list[str]:
    """timeline_<phase>.json.gz of the main execution on the first chip; the names of the files."""
    names = []
    for phase in report.phases:
        names.append(f"timeline_{file_part(phase)}.json.gz")
        write_timeline(folder / names[-1], report.estimate(phase))
    return names


def write_steps(path: str | os.PathLike[str], steps: Mapping[str, Estimate]) -> Path:
    """Write the timelines of several steps, by their titles, into one file; its path.

    Steps do not share tracks, and all begin at 0.  gzip if the name ends in .gz; written
    atomically.
    """
    each = max(1_000, LIMIT // max(1, len(steps)))
    made = {title: timeline(estimate, limit=each) for title, estimate in steps.items()}
    events: list[Event] = []
    for number, (title, contents) in enumerate(made.items()):
        events += [_moved(event, 2 * number, title) for event in contents["traceEvents"]]
    told = {title: contents["otherData"] for title, contents in made.items()}
    other = next(iter(told.values())) if len(told) == 1 else {"steps": told}
    contents = {
        "displayTimeUnit": "ms",
        "otherData": {**MADE_BY, **other},
        "traceEvents": sorted(events, key=_order),
    }
    return _written(path, contents)


def _moved(event: Event, by: int, title: str) -> Event:
    """An event moved to the processes of its step, whose names begin with the step's title."""
    place = event["pid"] + by
    if event["name"] == "process_sort_index":
        return {**event, "pid": place, "args": {"sort_index": place}}
    if event["name"] == "process_name":
        return {**event, "pid": place, "args": {"name": f"{title}: {event['args']['name']}"}}
    return {**event, "pid": place}


# -- events --------------------------------------------------------------------------------------


def _step_slice(
    process: int, track: int, name: str, start: float, end: float, **facts: Any
) -> Event:
    event: Event = {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "ts": _micro(start),
        "dur": _micro(max(0.0, end - start)),
    }
    if facts:
        event["args"] = facts
    return event


def _order(event: Event) -> tuple[float, float]:
    """Sort key: names first, then by start; of slices that start together the outer comes first."""
    return event.get("ts", -math.inf), -event.get("dur", 0.0)


def _micro(seconds: float) -> float:
    """Microseconds to the picosecond, as kernels are short compared with a step."""
    return round(seconds * 1e6, 6)


def _named(process: int, name: str, tracks: Mapping[int, str]) -> Iterator[Event]:
    """The names of a process and its tracks in the viewer, and their order."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for place, (track, title) in enumerate(tracks.items()):
        where: Event = {"ph": "M", "pid": process, "tid": track}
        yield {**where, "name": "thread_name", "args": {"name": title}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": place}}


def _tracks_of(playback: Playback) -> dict[str, int]:
    """The track of each stream of the device, in the order in which they are first used."""
    names = dict.fromkeys(launch.track for launch in playback.launches if launch.start is not None)
    others = [name for name in names if name]
    return {"": _DEVICE, **{name: _STREAMS + place for place, name in enumerate(others)}}


def _tracks(estimate: Estimate, tracks: Mapping[str, int]) -> Iterator[Event]:
    name = f"predicted: {estimate.chip.name}, {estimate.execution.name}"
    titles = {_HOST: "host dispatch", _DEVICE: "device"}
    titles |= {track: _title(estimate, stream) for stream, track in tracks.items() if stream}
    return _named(_PREDICTED, name, {**titles, _MODULES: "modules"})


def _title(estimate: Estimate, stream: str) -> str:
    """The title of a stream's track; exchanges run in the queue of their group."""
    group = estimate.graph.groups.get(stream.removeprefix(streams.GROUP))
    if not stream.startswith(streams.GROUP) or group is None:
        return stream if stream.startswith("stream ") else f"stream {stream}"
    return f"exchanges over {group.axis or stream}"


# -- predicted -----------------------------------------------------------------------------------


def _predicted(
    estimate: Estimate, playback: Playback, tracks: Mapping[str, int]
) -> Iterator[Event]:
    facts = [_facts(row) for row in estimate.rows]
    exchanges = {exchange.kernel: exchange for exchange in estimate.exchanges}
    for launch in playback.launches:
        name = (
            "host only" if launch.row is None else words.kernel_name(estimate.rows[launch.row].name)
        )
        if launch.sync:
            name = "wait for the device"
        if launch.host_end > launch.host_start:
            yield _step_slice(
                _PREDICTED,
                _HOST,
                name,
                launch.host_start,
                launch.host_end,
                dispatches=launch.dispatches,
            )
        if launch.row is not None and launch.start is not None and launch.end is not None:
            more: dict[str, Any] = {"turn": launch.turn} if launch.turn else {}
            if exchange := exchanges.get(launch.row):
                more |= _exchanged(estimate, exchange, launch)
                name = f"{exchange.kind} over {exchange.axis}, {more['exposure']}"
            yield _step_slice(
                _PREDICTED, tracks[launch.track], name, launch.start, launch.end,
                module=launch.module, **facts[launch.row], **more,
            )  # fmt: skip
    for fold in playback.folded:
        name = f"{_repeat_name(estimate, fold)} x{fold.count}"
        text = f"{fold.count} more iterations, equal to the one before"
        yield _step_slice(_PREDICTED, tracks[fold.track], name, fold.start, fold.end, folded=text)
        if fold.host_end > fold.host_start:
            yield _step_slice(_PREDICTED, _HOST, name, fold.host_start, fold.host_end, folded=text)
    yield from _modules(estimate, playback.launches)


def _exchanged(estimate: Estimate, exchange: Communication, launch: Played) -> dict[str, Any]:
    """Facts of a collective: its kind, peers and bytes, and whether computing waits for it."""
    assert launch.start is not None and launch.end is not None
    exposed, seconds = launch.exposed, launch.end - launch.start
    exposure = "exposed" if exposed >= (1 - _ROUNDING) * seconds else "partly exposed"
    return {
        "collective": exchange.kind,
        "axis": exchange.axis,
        "ranks": list(estimate.graph.groups[exchange.group].ranks),
        "buffer_bytes": exchange.nbytes,
        "exposure": exposure if exposed > _ROUNDING * seconds else "hidden",
        "exposed_us": _micro(exposed),
    }


def _repeat_name(estimate: Estimate, fold: Folded) -> str:
    """The name of a folded repeat: "layers.*", or the source line of a loop."""
    repeat = estimate.graph.repeats[fold.repeat]
    if repeat.container is None:
        return repeat.source or "loop"
    return pattern_of(repeat.paths[0])


def _facts(row: Row) -> dict[str, Any]:
    """Facts of one launch of a kernel: FLOP, bytes, limit and ops."""
    n = row.count
    facts: dict[str, Any] = {
        "bound": words.LIMITS[row.timing.regime],
        "flop": row.flops_causal // n,
        "bytes": {role: size // n for role, size in row.bytes_by_role.items() if size},
        "family": row.family,
        "part": row.part,
        "kernel": row.index,
        "ops": list(row.ops),
    }
    if row.bytes_net:
        facts["bytes_net"] = row.bytes_net // n
    if row.precision:
        facts["precision"] = row.precision
    if not row.known:
        facts["rule"] = "none: only bytes are counted"
    return facts


def _modules(estimate: Estimate, launches: Sequence[Played]) -> Iterator[Event]:
    """Modules as nested slices: each from its first kernel to its last, in one go."""
    classes = estimate.graph.modules
    opened: list[tuple[str, float]] = []
    end = 0.0

    def closed(down_to: int) -> Iterator[Event]:
        while len(opened) > down_to:
            path, start = opened.pop()
            facts = {"class": classes[path]} if path in classes else {}
            yield _step_slice(_PREDICTED, _MODULES, _last(path), start, end, module=path, **facts)

    for launch in launches:
        if launch.start is None or launch.end is None or launch.track:
            continue  # modules show the main stream alone
        path = list(_levels(launch.module))
        shared = 0
        while shared < min(len(path), len(opened)) and opened[shared][0] == path[shared]:
            shared += 1
        yield from closed(shared)
        opened += [(level, launch.start) for level in path[shared:]]
        end = launch.end
    yield from closed(0)


def _levels(path: str) -> Iterator[str]:
    """ "model", "model.layers.3", "model.layers.3.mlp": a number goes with the name before it."""
    parts = path.split(".") if path else []
    for index, _ in enumerate(parts):
        if index + 1 == len(parts) or not parts[index + 1].isdigit():
            yield ".".join(parts[: index + 1])


def _last(path: str) -> str:
    """ "layers.3" of "model.layers.3"."""
    parts = path.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() and len(parts) > 1 else parts[-1]


# -- measured ------------------------------------------------------------------------------------


def _measured_tracks(run: Alignment) -> Iterator[Event]:
    trace = run.trace
    streams = _streams(run)
    tracks = {
        track: f"{trace.devices.get(device) or f'device {device}'}, stream {stream}"
        for (device, stream), track in streams.items()
    }
    threads = sorted({trace.ops.thread[op] for op in run.step.ops})
    tracks |= {_OPS + thread: f"host thread {thread}" for thread in threads}
    return _named(_MEASURED, f"measured: {run.step.name}", tracks)


def _streams(run: Alignment) -> dict[tuple[int, int], int]:
    kernels = run.trace.kernels
    pairs = sorted({(kernels.device[i], kernels.stream[i]) for i in run.step.kernels})
    return {pair: track for track, pair in enumerate(pairs, start=1)}


def _of_trace(run: Alignment, limit: int) -> tuple[list[Event], dict[Target, Place]]:
    """Slices of the step of median length; the track and time where each op first shows."""
    trace, step = run.trace, run.step
    events: list[Event] = []
    places: dict[Target, Place] = {}
    owner = run.owners
    ops = trace.ops
    shown = step.ops if len(step.ops) <= limit else [op for op in step.ops if op in run.places]
    for index in shown:
        op = ops[index]
        start = op.start - step.start
        facts: dict[str, Any] = {}
        if index in run.places:
            facts["op"] = run.places[index][0]
            if not trace.on_device:
                places.setdefault(run.places[index], (_OPS + op.thread, start))
        if op.inputs is not None:
            facts["shapes"] = [list(shape) for shape in op.inputs.shapes if shape]
        if op.modules:
            facts["modules"] = "/".join(op.modules)
        events.append(
            _step_slice(_MEASURED, _OPS + op.thread, op.name, start, start + op.duration, **facts)
        )
    streams = _streams(run)
    for index in step.kernels:
        kernel = trace.kernels[index]
        start = kernel.start - step.start
        track = streams[kernel.device, kernel.stream]
        facts = {"cpu_op": ops[kernel.op].name} if kernel.op is not None else {}
        target = owner.get(kernel.op) if kernel.op is not None else None
        if target is not None:
            facts["op"] = target[0]
            places.setdefault(target, (track, start))
        if kernel.grid:
            facts["grid"] = list(kernel.grid)
        if kernel.bytes is not None:
            facts["bytes"] = kernel.bytes
        events.append(
            _step_slice(_MEASURED, track, kernel.name, start, start + kernel.duration, **facts)
        )
    return events, places


def _of_seconds(
    estimate: Estimate, seconds: Mapping[int, float]
) -> tuple[list[Event], dict[Target, Place]]:
    """Ops one after the other, as nothing says when they ran; all iterations of one as one."""
    events: list[Event] = []
    places: dict[Target, Place] = {}
    now = 0.0
    for index in sorted(seconds):
        op = estimate.graph.ops[index]
        times = estimate.graph.times(op)
        name = words.kernel_name(op.name) + (f" x{times}" if times > 1 else "")
        end = now + seconds[index]
        events.append(_step_slice(_MEASURED, 1, name, now, end, op=index, module=op.module))
        places[index, 0] = (1, now)
        now = end
    return events, places


# -- arrows --------------------------------------------------------------------------------------


def _anchors(
    estimate: Estimate, playback: Playback, tracks: Mapping[str, int]
) -> dict[Target, Place]:
    """Where and when the device first runs each op of each iteration, as predicted."""
    anchors: dict[Target, Place] = {}
    for launch in playback.launches:
        if launch.row is not None and launch.start is not None:
            for op in estimate.rows[launch.row].ops:
                anchors.setdefault((op, launch.turn), (tracks[launch.track], launch.start))
    return anchors


def _arrows(anchors: Mapping[Target, Place], places: Mapping[Target, Place]) -> Iterable[Event]:
    """Flow events, one for each predicted kernel: from it to the first of its ops in the run."""
    by_start: dict[tuple[float, int], list[Target]] = defaultdict(list)
    for target, (track, start) in anchors.items():
        if target in places:
            by_start[start, track].append(target)
    for number, ((start, predicted), targets) in enumerate(sorted(by_start.items()), start=1):
        track, moment = min((places[target] for target in targets), key=lambda place: place[1])
        shared: Event = {"cat": "same op", "name": "same op", "id": number}
        yield {"ph": "s", "pid": _PREDICTED, "tid": predicted, "ts": _micro(start), **shared}
        yield {
            "ph": "f", "bp": "e", "pid": _MEASURED, "tid": track, "ts": _micro(moment), **shared
        }  # fmt: skip
