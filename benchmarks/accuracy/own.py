"""Steps of this project's own runs: fitted on half of the models, predicted for the others.

    python benchmarks/accuracy/own.py [FOLDER] [--points FILE.csv]

FOLDER holds run files of `rooftrace measure` (default: benchmarks/measurements/), each with the
chip that `rooftrace measure --chip-only` made on the same machine.  The models of a run are sorted
by name and dealt into two halves; a fit sees one half, the other is predicted, both ways.  Points
hold the kernels of a step on a GPU beside it, which the run has timed alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from points import Point, write_points

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.kernels.intervals import Behind
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.hardware.chip import Chip
from rooftrace.measured.alignment.pairing import steps_of_run
from rooftrace.measured.fit.calibrating import usual_start
from rooftrace.measured.fit.cases import Case, Errors, errors, predict, step_case
from rooftrace.measured.fit.fitting import FEW, fit

MEASUREMENTS = Path(__file__).parents[1] / "measurements"
MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Half:
    """A fit on half of the models, and how the other half came out: without a fit, with two numbers
    fitted, and with as many as `rooftrace calibrate` chose (`free`)."""

    run: str
    mode: str
    fitted: int
    tested: int
    before: Errors
    two: Errors
    after: Errors
    knobs: Knobs
    free: tuple[str, ...]


def runs(folder: Path) -> list[tuple[str, rt.types.Run, Chip]]:
    """Every run with its chip."""
    found = []
    for path in sorted(folder.glob("*.json.gz")):
        chip = path.with_name(path.name.removesuffix(".json.gz") + ".toml")
        if chip.exists():
            name = path.name.removesuffix(".json.gz")
            found.append((name, rt.types.Run.load(path), rt.load_chip(chip)))
    return found


def cases_of(run: rt.types.Run, chip: Chip, mode: str) -> tuple[list[Case], list[Case]]:
    """The steps of a run that ran so, traced; and the kernels alone of those on a GPU."""
    if not any(row.mode == mode for row in run.models):
        return [], []
    model, steps = execution_model(mode), steps_of_run(run, mode)
    cases = [
        step_case(one.label, plan(one.graph(), model), chip, model, one.seconds, one.group)
        for one in steps
    ]
    kernels = [
        replace(case, seconds=took, dispatches=0, host=0.0, behind=Behind())
        for one, case in zip(steps, cases, strict=True)
        if not chip.host_waits and (took := one.row.device_seconds if one.row else None)
    ]
    return cases, kernels


def halves(
    name: str, run: rt.types.Run, chip: Chip, tell: Callable[[str], None]
) -> tuple[list[Half], list[Point]]:
    """Both ways, for every way in which the models ran."""
    found: list[Half] = []
    points: list[Point] = []
    for mode in MODES:
        tell(f"{name}: {mode}")
        cases, kernels = cases_of(run, chip, mode)
        models = sorted({case.group for case in cases})
        if len(models) < 4:
            continue
        start = usual_start(chip, execution_model(mode))
        alone = {case.name: case.seconds for case in kernels}
        for kept in (set(models[::2]), set(models[1::2])):
            inside = [case for case in cases if case.group in kept]
            outside = [case for case in cases if case.group not in kept]
            two = fit(inside, start, FEW, check=False).knobs
            rows = tuple(row for row in run.models if row.model in kept)
            chosen = rt.calibrate(replace(run, models=rows), chip, mode).fit
            after = predict(outside, chosen.knobs)
            found.append(
                Half(
                    name,
                    mode,
                    len(kept),
                    len(models) - len(kept),
                    _errors(outside, predict(outside, Knobs("datasheet"))),
                    _errors(outside, predict(outside, two)),
                    _errors(outside, after),
                    chosen.knobs,
                    tuple(p.name for p in chosen.parameters if p.identified),
                )
            )
            points += points_of(name, mode, outside, predict(outside, start), alone)
        if kernels:
            points += points_of(name, f"{mode} kernels of", kernels, predict(kernels, start))
    return found, points


def points_of(
    name: str,
    how: str,
    cases: Sequence[Case],
    predicted: Sequence[float],
    alone: Mapping[str, float] | None = None,
) -> list[Point]:
    """A point for each case.  alone: seconds of the kernels of those that have a point of these."""
    found = []
    for case, seconds in zip(cases, predicted, strict=True):
        kernels = (alone or {}).get(case.name, 0.0)
        point = Point(
            case.name, seconds, case.seconds, f"{how} {_phase(case.name)}", kernels=kernels
        )
        found.append(point.of(f"rooftrace {name}", case))
    return found


def _errors(cases: Sequence[Case], predicted: Sequence[float]) -> Errors:
    return errors([case.name for case in cases], predicted, [case.seconds for case in cases])


def _phase(label: str) -> str:
    phases = ("prefill", "decode", "training", "forward")
    return next((phase for phase in phases if f" {phase} " in label), "")


def table(found: Sequence[Half]) -> str:
    """A line a fit, and the spread over all of one way to run."""
    lines = [
        "| run | ran | models fitted, tested | steps | without a fit | two numbers | chosen "
        "| median | p90 | bias | worst | fitted |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for one in found:
        e = one.after
        lines.append(
            f"| {one.run} | {one.mode} | {one.fitted}, {one.tested} | {e.count} "
            f"| {one.before.mean:.1%} | {one.two.mean:.1%} | {e.mean:.1%} | {e.median:.1%} "
            f"| {e.p90:.1%} | {e.bias:+.1%} | {e.worst_case} {e.worst:+.0%} | {_fitted(one)} |"
        )
    for mode in MODES:
        of_mode = [one for one in found if one.mode == mode]
        if len(of_mode) > 1:
            numbers = (
                [getattr(one, name).mean for one in of_mode] for name in ("before", "two", "after")
            )
            spread = " | ".join(
                f"{statistics.mean(v):.1%} ± {statistics.stdev(v):.1%}" for v in numbers
            )
            lines.append(f"| mean ± std. dev. | {mode} | | | {spread} | | | | | |")
    return "\n".join(lines)


def _fitted(one: Half) -> str:
    """The numbers that were kept; many are counted."""
    knobs = [name for name in one.free if "." not in name]
    values = [f"{name} {getattr(one.knobs, name):.3g}" for name in knobs]
    others = len(one.free) - len(knobs)
    return ", ".join([*values, *([f"{others} shares"] if others else [])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=MEASUREMENTS)
    parser.add_argument("--points", type=Path, help="write every prediction there, as CSV")
    given = parser.parse_args()
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    found: list[Half] = []
    points: list[Point] = []
    for name, run, chip in runs(given.folder):
        more, others = halves(name, run, chip, tell)
        found, points = found + more, points + others
    if not found:
        raise SystemExit(f"{given.folder}: no run file with its chip beside it")
    print(table(found))
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
