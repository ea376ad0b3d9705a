"""A script on the device at hand: the times of its steady turns, as rows of a run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.errors import RequestError, TargetError
from rooftrace.hardware.units import format_time
from rooftrace.measured.bench import Bench
from rooftrace.measured.runs import ModelRow
from rooftrace.tracer.asking import names

if TYPE_CHECKING:
    from rooftrace.tracer.scripts import RealTurn

_WARMUPS = 3
"""Turns of a row that are left out, if there are more."""
_MOST = 50
"""Turns after which a script is ended, if nobody says."""
_PHASES = {"training": "training", "inference": "forward"}


def script_rows(target: str, bench: Bench) -> list[ModelRow]:
    """Run a script for the seconds of `bench`, on its device; its steady turns have a row each.

    What it prints goes to stderr.  A row's seconds are of whole turns, from idle device to idle
    device, without what the script waited for data loaders.  Raises TargetError where the script
    fails, or runs nothing on the device.
    """
    from rooftrace.tracer.scripts import real_turns

    asked = names.ScriptCommand.of(target)
    if asked.boundary != names.BOUNDARIES[0]:
        raise RequestError(f"{target}: --boundary {asked.boundary}: measured turns begin as found")
    most = asked.steps or _MOST
    ran = real_turns(asked.words, bench.device, most, bench.budget_s, stdout=sys.stderr)
    if ran.failure is not None:
        raise TargetError(f"{target}: it failed on {bench.device}: {ran.failure}")
    if ran.code:
        raise TargetError(f"{target}: it exited with code {ran.code} on {bench.device}")
    if not ran.turns:
        raise TargetError(
            f"{target}: none of its modules ran on {bench.device}, the device that is measured: "
            "say --device, or tell the script which device to take"
        )
    mode = "compiled" if ran.compiled else "eager"
    trained = len(_of("training", ran.turns))
    if trained < len(ran.turns) and not target.startswith(names.RUN):
        target = f"{names.RUN}--steps {trained or len(ran.turns)} {target}"  # as far as it ran
    return [_row(target, kind, mode, ran.turns) for kind in _PHASES if _of(kind, ran.turns)]


def _of(kind: str, turns: Sequence[RealTurn]) -> list[RealTurn]:
    return [turn for turn in turns if turn.kind == kind]


def _row(target: str, kind: str, mode: str, turns: Sequence[RealTurn]) -> ModelRow:
    """The row of the turns of a kind that are most frequent: equal calls of modules."""
    own = _of(kind, turns)
    counts = Counter(turn.calls for turn in own)
    most = max(reversed(counts), key=lambda calls: counts[calls])
    alike = [turn for turn in own if turn.calls == most]
    kept = alike[min(_WARMUPS, len(alike) - 1) :]
    peaks = [turn.peak for turn in kept if turn.peak is not None]
    waited = sum(turn.loading for turn in kept) / len(kept)
    phase = _PHASES[kind]
    return ModelRow(
        key=ModelRow.key_of(target, phase, mode, {}),
        model=target,
        phase=phase,
        mode=mode,
        sizes={},
        seconds=tuple(turn.seconds for turn in kept),
        peak_bytes=max(peaks, default=None),
        note=f"{kept[0].label}; {format_time(waited)} of data loaders each, which are left out",
    )
