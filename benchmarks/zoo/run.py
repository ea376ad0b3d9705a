"""Trace every model of the installed packages, or of a folder, and say which fail and why.

    make zoo [ZOO=folder] [GROUP=hf,timm] [N=50]

Each model is traced in a worker process with a time limit: forward, decode where it keeps a cache,
and training.  This is a tool to run by hand: it is no part of the package, nor of its tests.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `models`, when a worker imports this

Result = dict[str, Any]
"""name, failure ("" or its class), error, seconds, and by phase ops, assumptions, unsupported."""
PHASES = ("forward", "decode", "training")


# -- one model -------------------------------------------------------------------------------------


def trace_one(name: str, depth: int | None = None) -> Result:
    """Every phase of one entry; `failure` is the class of the first thing that failed.

    build: the package's own code.  no model: a config of something smaller.  inputs: nothing is
    known of them.  forward, decode, training: the trace.  internal: an error that is neither the
    model's nor a request's.
    """
    from models import load

    from rooftrace.errors import RequestError, TargetError

    result: Result = {"name": name, "failure": "", "error": "", "phases": {}}
    try:
        entry = load(name, depth)
    except RequestError as error:
        result |= {"failure": "inputs", "error": str(error)}
    except TargetError as error:
        part = "has no model class" in str(error)  # a config of a part of a model
        result |= {"failure": "no model" if part else "build", "error": str(error)}
    except Exception as error:  # whatever a package raises
        result |= {"failure": "build", "error": f"{type(error).__name__}: {error}"}
    else:
        failures = []
        for inputs in entry.inputs:
            phases: dict[str, Any] = {}
            failure = _phases(entry.module, inputs, phases, entry.phases)
            if phases or not failure:
                result |= {"phases": phases, **failure}
                break
            failures.append(failure)
        else:
            result |= failures[0]
    return result


def _phases(module: Any, inputs: Any, phases: dict[str, Any], asked: Sequence[str]) -> Result:
    """Fill in `phases`, up to the first of those asked that fails; returns that failure."""
    for phase in asked:
        if phase == "decode" and inputs.decode is None:
            continue
        failure = _phase(module, inputs, phase, phases)
        if failure:
            return failure
    return {}


def _phase(module: Any, inputs: Any, phase: str, phases: dict[str, Any]) -> Result:
    from rooftrace.costmodels.fusion.plans import plan
    from rooftrace.errors import RequestError, TraceError
    from rooftrace.tracer.phases import collector_paused
    from rooftrace.tracer.phases.running import trace_phases

    started = time.perf_counter()
    try:
        with collector_paused():
            graph = trace_phases(module, inputs, (phase,))[phase]
        missing = plan(graph, "eager").coverage.unsupported
    except RequestError as error:  # no parameter, no differentiable output, no cache after all
        phases[phase] = {"refused": str(error)}
        return {}
    except TraceError as error:
        return {"failure": phase, "error": str(error)}
    except Exception as error:  # a bug of ours
        return {"failure": "internal", "error": f"{phase}: {type(error).__name__}: {error}"}
    phases[phase] = {
        "ops": sum(map(graph.times, graph.ops)),
        "seconds": _since(started),
        "assumptions": dict(Counter(a.kind for a in graph.assumptions)),
        "unsupported": {one.target: one.count for one in missing},
    }
    return {}


# -- many models -----------------------------------------------------------------------------------


def _work(pipe: Connection, depth: int | None, task: str) -> None:
    import torch

    torch.set_num_threads(1)
    module, _, function = task.partition(":")
    run = getattr(importlib.import_module(module), function)
    while (name := pipe.recv()) is not None:
        started = time.perf_counter()
        pipe.send({**run(name, depth), "seconds": _since(started)})


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 2)


class _Worker:
    """A process that traces one model after the other, and can be killed while it does."""

    def __init__(self, depth: int | None, task: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, depth, task), daemon=True)
        self.process.start()
        theirs.close()
        self.name, self.started = "", 0.0

    def give(self, name: str) -> None:
        self.name, self.started = name, time.perf_counter()
        self.pipe.send(name)

    def lost(self, failure: str, error: str) -> Result:
        """End the process; what it was doing has failed."""
        self.process.kill()
        self.process.join()
        failed = {"name": self.name, "failure": failure, "error": error, "phases": {}}
        return {**failed, "seconds": _since(self.started)}


def trace_all(
    names: Sequence[str],
    tell: Callable[[Result], None],
    *,
    workers: int = 1,
    limit: float = 90.0,  # seconds per model
    depth: int | None = None,
    task: str = "run:trace_one",
) -> list[Result]:
    """Every entry's result, in the order in which they end; `tell` hears of each.

    task: "module:function" of what a worker does with a name and a depth.
    """
    left = list(reversed(names))
    busy = [_Worker(depth, task) for _ in range(min(workers, len(left)))]
    for worker in busy:
        worker.give(left.pop())
    results: list[Result] = []
    while busy:
        ready = wait([worker.pipe for worker in busy], timeout=1.0)
        for index, worker in reversed(list(enumerate(busy))):
            if worker.pipe in ready:
                try:
                    result = worker.pipe.recv()
                except EOFError:
                    worker.process.join()
                    result = worker.lost("crash", f"exit code {worker.process.exitcode}")
            elif time.perf_counter() - worker.started > limit:
                result = worker.lost("timeout", f"more than {limit:g} s")
            else:
                continue
            results.append(result)
            tell(result)
            if not left:
                worker.process.kill()
                del busy[index]
                continue
            if not worker.process.is_alive():
                busy[index] = worker = _Worker(depth, task)
            worker.give(left.pop())
    return results


# -- the summary -----------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> str:
    """Coverage by group, failures by class, assumptions, ops without a rule, times."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        name = result["name"]
        groups["folder" if ":" in name else name.partition("/")[0]].append(result)
    lines = ["group         models  forward  decode  training  refused"]
    for group, members in [*groups.items(), ("all", list(results))]:
        done = [sum("ops" in r["phases"].get(p, {}) for r in members) for p in PHASES]
        refused = sum("refused" in r["phases"].get("training", {}) for r in members)
        counts = zip((len(members), *done, refused), (7, 8, 7, 9, 8), strict=True)
        lines.append(f"{group:<12} " + " ".join(f"{count:>{width}}" for count, width in counts))
    lines += _heads([r for r in results if r["name"].startswith("heads/")])
    failed = [r for r in results if r["failure"]]
    for kind, count in Counter(r["failure"] for r in failed).most_common():
        lines += ["", f"{kind}: {count}"]
        lines += [
            f"  {r['name']}: {' '.join(r['error'].split())[:200]}"
            for r in failed
            if r["failure"] == kind
        ]
    traced = [phase for r in results for phase in r["phases"].values() if "ops" in phase]
    kinds = Counter(kind for phase in traced for kind in phase["assumptions"])
    lines += ["", "traces with an assumption: " + _counted(kinds.most_common())]
    missing: Counter[str] = Counter()
    for phase in traced:
        missing.update(phase["unsupported"])
    lines.append("ops without a rule: " + _counted(missing.most_common()))
    seconds = sorted(r["seconds"] for r in results)
    if seconds:
        at = {f"p{p}": seconds[min(len(seconds) * p // 100, len(seconds) - 1)] for p in (50, 90)}
        lines.append(
            "seconds per model: "
            + ", ".join(f"{name} {value:g}" for name, value in {**at, "max": seconds[-1]}.items())
        )
    return "\n".join(lines)


def _heads(results: Sequence[Result]) -> list[str]:
    """How many heads train, and how many say what they need instead."""
    if not results:
        return []
    kinds: Counter[str] = Counter()
    for result in results:
        training = result["phases"].get("training", {})
        if result["failure"] in ("build", "inputs") or "refused" in training:
            kinds["says what it needs"] += 1
        elif result["failure"]:
            kinds["timeout" if result["failure"] == "timeout" else "wrong error"] += 1
        else:
            own = "loss" not in training["assumptions"]
            kinds["traced with its loss" if own else "traced, has no loss"] += 1
    return ["", f"heads: {len(results)}", *(f"  {n:>4} {kind}" for kind, n in kinds.most_common())]


def _counted(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in items) or "none"


# -- command line ----------------------------------------------------------------------------------


def main(
    arguments: Sequence[str] | None = None,
    task: str = "run:trace_one",
    summarise: Callable[[Sequence[Result]], str] = summary,
) -> int:
    from models import GROUPS, MODELS, names, of_folder

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--zoo", type=Path, help="trace the build* functions of this folder's files instead")
    add("--group", default=",".join(MODELS), help="packages, by commas (default: %(default)s)")
    add("--filter", default="", help="only names that match this regular expression")
    add("--n", type=int, help="a sample of so many models, always the same")
    add("--depth", type=int, help="at most so many layers (hf)")
    add("--limit", type=float, default=90.0, help="seconds per model (default: %(default)s)")
    add("--workers", type=int, default=1)
    add("--out", type=Path, default=Path("out/zoo.jsonl"), help="results (default: %(default)s)")
    add("--list", action="store_true", help="only say which models there are")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.group.split(",")) - set(GROUPS))
    if unknown:
        parser.error(f"--group {','.join(unknown)}: expected some of {', '.join(GROUPS)}")
    if given.zoo:
        entries = list(of_folder(given.zoo))
    else:
        entries = [name for group in given.group.split(",") for name in names(group)]
    entries = [name for name in entries if re.search(given.filter, name)]
    if given.n is not None and given.n < len(entries):
        entries = sorted(random.Random(0).sample(entries, given.n))
    if given.list:
        print("\n".join(entries))
        return 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", encoding="utf-8") as file:

        def tell(result: Result) -> None:
            print(json.dumps(result), file=file, flush=True)
            print(
                f"{result['seconds']:>7.2f} s  {result['name']}  {result['failure'] or 'ok'}",
                file=sys.stderr,
            )

        results = trace_all(
            entries,
            tell,
            workers=given.workers,
            limit=given.limit,
            depth=given.depth,
            task=task,
        )
    print(summarise(results))
    print(f"\n{given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
