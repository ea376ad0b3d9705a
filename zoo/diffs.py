"""Compare every model of the zoo with itself: no row, whether equal layers stand once or not.

    make zoo-diff [ZOO=folder] [GROUP=hf,timm] [N=50]

The second side is the graph after a way through its file, and, where it is not too long, with all
repeats written out.  A tool to run by hand, as `run.py` is.
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

    from rooftrace.errors import RequestError
    from rooftrace.tracer.source.lines import TraceError

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
    from rooftrace.costmodels.findings.comparing import diff_estimates
    from rooftrace.tracer.phases.running import trace_phases
    from rooftrace.tracer.sources.tracing import collector_paused

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
        seconds = []
        for other in others:
            second = rt.estimate(other, "h200-sxm")
            started = time.perf_counter()
            diff = diff_estimates({phase: estimate}, {phase: second})
            seconds.append(round(time.perf_counter() - started, 3))
            if not diff.unchanged:
                (found,) = diff.phases
                totals = {
                    name: change.delta for name, change in found.totals.items() if change.delta
                }
                causes = [f"{row.cause} ({row.time.delta:+.3g} s)" for row in found.rows[:3]]
                return f"{totals} {causes} {len(found.modules)} modules {len(found.held)} held"
    phases[phase] = {"ops": length, "written_out": len(others) > 1, "diff_seconds": seconds}
    return ""


def summary(results: Sequence[Result]) -> str:
    """How many phases were compared, how many with repeats written out, and which differ."""
    compared = [phase for result in results for phase in result["phases"].values()]
    done = [phase for phase in compared if "ops" in phase]
    lines = [
        f"{len(results)} models: {len(done)} phases are equal to themselves, "
        f"{sum(phase['written_out'] for phase in done)} of them also with repeats written out",
        f"failures: {dict(Counter(r['failure'] for r in results if r['failure']))}",
        f"phases that could not be traced: {len(compared) - len(done)}",
    ]
    slowest = max((max(phase["diff_seconds"]) for phase in done), default=0.0)
    lines.append(f"the longest comparison took {slowest:.2f} s")
    lines += [f"  {r['name']}: {r['failure']}: {r['error'][:300]}" for r in results if r["failure"]]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(task="diffs:compare_one", summarise=summary))
