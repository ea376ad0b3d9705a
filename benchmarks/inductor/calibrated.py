"""Whether factors on bytes help: `python benchmarks/inductor/calibrated.py [MODEL ...]`.

Each model is measured through torch.compile, forward and training.  Each in turn is left out: knobs
are fitted to the others, once with factors on bytes and once without, and predict its steps.  A
line has the step's seconds as measured and as predicted by both; the last lines have their mean
errors, and the factors by all models.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import replace

import measured as steps
import torch

import rooftrace as rt
from rooftrace.measured.bench import measure_chip


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per step, and the mean errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(steps.NAMES)}; default: all")
    parser.add_argument("--scale", default="small", choices=("tiny", "small", "full"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    chip = measure_chip(options.device, 10.0)
    runs: dict[str, rt.types.Run] = {}
    for name in options.model or steps.NAMES:
        for phase, build in steps.cases(name, options.scale, options.device):
            torch._dynamo.reset()
            module, inputs = build()
            run = rt.measure(module, phase=phase, compiled=True, budget_s=3.0, name=name, **inputs)
            runs[name] = joined([runs[name], run]) if name in runs else run
    compare(runs, chip)


def compare(runs: dict[str, rt.types.Run], chip: rt.types.Chip) -> None:
    """Leave each model out, predict its steps, and print the errors."""
    off: dict[bool, list[float]] = {True: [], False: []}
    print(f"{'step':36} {'measured':>9} {'factors':>9} {'without':>9}")
    for name, own in runs.items():
        others = joined([run for other, run in runs.items() if other != name])
        predicted: dict[bool, list[float]] = {}
        for factors in (True, False):
            knobs = rt.calibrate(others, chip, "compiled", factors=factors).knobs
            model = rt.tools.execution_model("compiled", knobs=knobs)
            predicted[factors] = [
                rt.estimate(own.graphs[row.key], chip, model).t_est for row in own.models
            ]
        for number, row in enumerate(own.models):
            times = [row.median, predicted[True][number], predicted[False][number]]
            print(f"{row.key:36.36} " + " ".join(f"{1e3 * t:6.2f} ms" for t in times), flush=True)
            for factors, seconds in predicted.items():
                off[factors].append(abs(seconds[number] / row.median - 1))
    for factors, errors in off.items():
        how = "with factors" if factors else "without"
        print(f"mean error on models left out, {how}: {sum(errors) / len(errors):.1%}")
    print(rt.calibrate(joined(list(runs.values())), chip, "compiled"))


def joined(runs: Sequence[rt.types.Run]) -> rt.types.Run:
    """Several runs of one device as one."""
    return replace(
        runs[0],
        models=tuple(row for run in runs for row in run.models),
        micro=(min((row for run in runs for row in run.micro), key=lambda row: row.median),),
        graphs={key: graph for run in runs for key, graph in run.graphs.items()},
    )


if __name__ == "__main__":
    main()
