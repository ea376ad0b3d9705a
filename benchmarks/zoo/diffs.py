"""Compare every model of the zoo with itself: no row, whether equal layers stand once or not.

    make zoo-diff [ZOO=folder] [GROUP=hf,timm] [N=50]

The second side is the graph after a way through its file.  Where it is not too long, it is compared
with all repeats written out, too; that is told, and no failure.  A tool to run by hand, as
`run.py` is.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import PHASES, Result, main

_LONGEST = 20_000
"""The most ops of a graph whose repeats are written out."""


def compare_one(name: str, depth: int | None = None) -> Result:
    """Each phase of one entry compared with itself; `failure` names the phase that differs."""
    from models import load

    from rooftrace.errors import RequestError, TraceError

    result: Result = {"name": name, "failure": "", "error": "", "phases": {}}
    try:
        entry = load(name, depth)
    except Exception as error:  # `run.py` says more of what cannot be built
        return {**result, "failure": "build", "error": str(error)}
    for inputs in entry.inputs:
        result["phases"] = {}
        for phase in PHASES:
            if phase == "decode" and inputs.decode is None:
                continue
            try:
                differing = _differing(entry.module, inputs, phase, result["phases"])
            except (RequestError, TraceError) as error:
                result["phases"][phase] = {"refused": str(error)}
                continue
            if differing:
                result |= {"failure": phase, "error": differing}
        if any("ops" in phase for phase in result["phases"].values()):
            break
    return result


def _differing(module: Any, inputs: Any, phase: str, phases: dict[str, Any]) -> str:
    """What differs between a graph and itself, in words; "" where nothing does."""
    import rooftrace as rt
    from rooftrace.tracer.phases import collector_paused
    from rooftrace.tracer.phases.running import trace_phases

    with collector_paused():
        graph = trace_phases(module, inputs, (phase,))[phase]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.json"
            rt.save({phase: graph}, path)
            others = [rt.load(path)]
        length = sum(map(graph.times, graph.ops))
        if graph.repeats and length <= _LONGEST:
            others.append(graph.expand())
        estimate = rt.estimate(graph, "h200-sxm")
        found = [_words(estimate, rt.estimate(other, "h200-sxm")) for other in others]
    phases[phase] = {
        "ops": length,
        "diff_seconds": [seconds for seconds, _ in found],
        "written_out": found[1][1] if len(found) > 1 else None,
    }
    return found[0][1]


def _words(estimate: Any, other: Any) -> tuple[float, str]:
    """How long a comparison takes, and what differs in words; "" where nothing does."""
    from rooftrace.diffs.costs.differences import diff_estimates

    started = time.perf_counter()
    diff = diff_estimates({estimate.phase: estimate}, {estimate.phase: other})
    seconds = round(time.perf_counter() - started, 3)
    if diff.unchanged:
        return seconds, ""
    (phase,) = diff.phases
    totals = {name: change.delta for name, change in phase.totals.items() if change.delta}
    causes = [f"{row.cause} ({row.time.delta:+.3g} s)" for row in phase.rows[:3]]
    return seconds, f"{totals} {causes}"


def summary(results: Sequence[Result]) -> str:
    """How many phases were compared, how many with repeats written out, and which differ."""
    compared = [phase for result in results for phase in result["phases"].values()]
    done = [phase for phase in compared if "ops" in phase]
    flat = [phase["written_out"] for phase in done if phase["written_out"] is not None]
    failures = Counter(result["failure"] for result in results if result["failure"])
    lines = [
        f"{len(results)} models, {len(done)} phases compared with themselves; {failures.total()} "
        f"models fail: {dict(failures)}",
        f"with repeats written out {flat.count('')} of {len(flat)} phases are equal too; "
        "fusion prices the others a little otherwise",
        f"phases that the models refuse: {len(compared) - len(done)}",
    ]
    slowest = max((max(phase["diff_seconds"]) for phase in done), default=0.0)
    lines.append(f"the longest comparison took {slowest:.2f} s")
    lines += [f"  {r['name']}: {r['failure']}: {r['error'][:300]}" for r in results if r["failure"]]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(task="diffs:compare_one", summarise=summary))
