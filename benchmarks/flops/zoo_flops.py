"""Our FLOPs beside torch's over a whole zoo: `make flops [ZOO=folder] [GROUP=hf,timm] [N=50]`.

Every model is traced forward and in training, priced, and run once more under FlopCounterMode on
meta tensors (see `counted`).  Prints the models where something is left of the difference, by op
what the two count differently or torch does not count at all, the ops on floats that are priced at
no work, and the share of bytes that stands on an explicit rule.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "zoo")]

PHASES = ("forward", "training")
Result = dict[str, Any]


def count_entry(name: str, depth: int | None = None) -> Result:
    """Both phases of one entry of the zoo; `failure` says why there is none."""
    from models import load

    from rooftrace.errors import RequestError, TargetError

    result: Result = {"name": name, "failure": "", "error": "", "phases": {}}
    try:
        entry = load(name, depth)
    except (RequestError, TargetError) as error:
        return {**result, "failure": "build", "error": str(error)}
    except Exception as error:  # whatever a package raises
        return {**result, "failure": "build", "error": f"{type(error).__name__}: {error}"}
    for inputs in entry.inputs:
        result = {"name": name, **count_inputs(entry.module, inputs)}
        if result["phases"]:
            break
    return result


def count_inputs(module: Any, inputs: Any) -> Result:
    """Both phases of a module; what it refuses (training without parameters) is left out."""
    from counted import compared

    from rooftrace.errors import RequestError, TraceError
    from rooftrace.tracer.phases import collector_paused

    phases: dict[str, Any] = {}
    failure = error_text = ""
    for phase in PHASES:
        try:
            with collector_paused():
                phases[phase] = compared(module, inputs, phase)
        except RequestError:
            continue
        except TraceError as error:
            failure, error_text = phase, str(error)
            break
    return {"failure": failure, "error": error_text, "phases": phases}


def count_call(module: Any, args: Any, kwargs: Any) -> Result:
    """The same for a harness of your own: a module and its arguments in, a record for JSON out.

    Meta tensors among the arguments may carry what they stand for in `_value`.
    """
    from models import given

    result = count_inputs(module, given(args, kwargs))
    if not result["phases"]:
        raise RuntimeError(result["error"])
    return result


# -- the summary -----------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> str:
    """What `compared` found over all entries, by kind of finding."""
    counts = [
        (f"{result['name']} {phase}", count)
        for result in results
        for phase, count in result.get("phases", {}).items()
    ]
    compared = [(where, c) for where, c in counts if c["torch"] is not None]
    left = [(where, c) for where, c in compared if c["rest"]]
    lines = [
        f"{len(results)} models, {len(counts)} steps, {len(compared)} of them run by torch too",
        f"totals equal in {len(compared) - len(left)}, but for what is listed below",
    ]
    lines += [f"  {where}: {c['ours']:,} - {c['torch']:,}: {c['rest']:+,}" for where, c in left]
    lines += ["", "ops that torch's formula counts differently (ours, torch's, steps):"]
    lines += _sums(counts, "differs")
    lines += ["", "ops that torch has no formula for (ours, steps):"]
    lines += _sums(counts, "uncounted")
    lines += ["", "ops on floats without work: " + _names(counts, "zero")]
    lines += ["", "ops without a rule: " + _names(counts, "missing")]
    moved = sum(c["bytes"] for _, c in counts)
    ruled = sum(c["bytes_with_rule"] for _, c in counts)
    below = [where for where, c in counts if c["bytes_with_rule"] < c["bytes"]]
    share = 100 * ruled / moved if moved else 100
    lines.append(f"bytes that stand on a rule: {share:.6f} % of {moved:,}")
    lines.append(f"less than all of them in: {', '.join(below) or 'none'}")
    not_run = [(where, c) for where, c in counts if c["torch"] is None]
    lines += ["", f"not run by torch: {len(not_run)}"]
    lines += [f"  {where}: {c['error'][:160]}" for where, c in not_run]
    failed = [r for r in results if r.get("failure") or not r.get("phases")]
    lines += ["", f"not traced: {len(failed)}"]
    for r in failed:
        why = " ".join(str(r.get("error") or r.get("err", "")).split())[:160]
        lines.append(f"  {r['name']}: {r.get('failure') or r.get('stage')}: {why}")
    return "\n".join(lines)


def _sums(counts: Sequence[tuple[str, Any]], key: str) -> list[str]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    steps: Counter[str] = Counter()
    for _, count in counts:
        for name, found in count[key].items():
            both = found if isinstance(found, list) else [found, 0]
            sums[name] = [a + b for a, b in zip(sums[name], both, strict=True)]
            steps[name] += 1
    return [
        f"  {name}: {mine:,}" + (f" {theirs:,}" if key == "differs" else "") + f" {steps[name]}"
        for name, (mine, theirs) in sorted(sums.items())
    ] or ["  none"]


def _names(counts: Sequence[tuple[str, Any]], key: str) -> str:
    found: Counter[str] = Counter()
    for _, count in counts:
        found.update(dict.fromkeys(count[key], 1))
    return ", ".join(f"{name} ({steps})" for name, steps in sorted(found.items())) or "none"


def main(arguments: Sequence[str] | None = None) -> int:
    import run

    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--read"]:  # results of a run, or of a harness that called `count_call`
        lines = [line for name in given[1:] for line in Path(name).read_text().splitlines()]
        print(summary([json.loads(line) for line in lines]))
        return 0
    return int(run.main(given, task="zoo_flops:count_entry", summarise=summary))


if __name__ == "__main__":
    raise SystemExit(main())
