"""Kernel times of three models that others traced with torch.profiler on one H100, predicted.

    python benchmarks/accuracy/h100_traces.py FOLDER [--points FILE.csv]

FOLDER/traces has the traces (of TraceLens, MIT), and targets.py, which builds the modules.  What
the traces show of their own ops is built here: ViT and Qwen without a head, Qwen with heads copied
apart before attention and without a cache, as transformers did then.  Each trace is predicted
without a fit, and with numbers fitted to the kernels of each other one.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from points import Point, write_points

import rooftrace as rt
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.measured.fit.fitting import FEW

CHIP = "h100-sxm"


def _vit(targets: Any) -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()).bfloat16().eval(), targets.vit()[1]


def _qwen(targets: Any) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def copied(module: Any, q: Any, k: Any, v: Any, *given: Any, **named: Any) -> Any:
        apart = (each.contiguous() for each in (q, k, v))
        return sdpa_attention_forward(module, *apart, *given, **named)

    AttentionInterface.register("copied_heads", copied)
    AttentionMaskInterface.register("copied_heads", sdpa_mask)
    model, inputs = targets.qwen()
    model.config.use_cache, model.config._attn_implementation = False, "copied_heads"
    return model.model, inputs


BUILT: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "ViT-B/16, batch 4": ("Falconsai_nsfw_image_detection__1016002.json.gz", _vit),
    "bert-small, 1 x 141": (
        "gaunernst_bert-small-uncased__1016001.json.gz",
        lambda targets: targets.bert(),
    ),
    "Qwen1.5-0.5B, 16 x 559": ("Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", _qwen),
}


@dataclass(frozen=True)
class Traced:
    """A trace and the graph of what ran."""

    name: str
    path: Path
    graph: rt.types.OpGraph


@dataclass(frozen=True)
class Kernels:
    """Kernel times of a step.  seconds: of all kernels, measured and predicted; each: of the
    groups of equal kernels that are on both sides, by module pattern."""

    measured: float
    predicted: float
    each: list[Point]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def traces(folder: Path) -> list[Traced]:
    """Those of the traces that are in the folder."""
    place = importlib.util.spec_from_file_location("targets", folder / "targets.py")
    assert place is not None and place.loader is not None
    targets = importlib.util.module_from_spec(place)
    place.loader.exec_module(targets)
    found = []
    for name, (file, build) in BUILT.items():
        if (folder / file).exists():
            model, inputs = build(targets)
            found.append(Traced(name, folder / file, rt.trace(model, *inputs)))
    return found


def kernels(one: Traced, how: ExecutionModel) -> Kernels:
    """Its kernels as they were measured and as `how` predicts them."""
    made = rt.validate(one.path, chip=CHIP, target=one.graph, execution=how)
    step = made.steps[0]
    if step.device is None or step.device_predicted is None:
        raise SystemExit(f"{one.path.name}: no kernels in it")
    each = [
        Point(f"{one.name}: {_label(check)}", check.node.predicted, seconds, one.name)
        for check in made.nodes
        if (seconds := check.node.measured)
    ]
    return Kernels(step.device, step.device_predicted, each)


def _label(check: Any) -> str:
    row = check.node.row
    return f"{row.name} of {row.module}"


def line(name: str, fitted: str, found: Kernels) -> str:
    off = [abs(p.predicted / p.measured - 1) for p in found.each]
    worst = max(found.each, key=lambda p: abs(p.predicted - p.measured))
    return (
        f"| {name} | {fitted} | {found.measured * 1e3:.3g} | {found.predicted * 1e3:.3g} "
        f"| {found.error:+.1%} | {len(off)} | {statistics.fmean(off):.1%} "
        f"| {statistics.median(off):.1%} | {np.quantile(off, 0.9):.1%} "
        f"| {worst.label.partition(': ')[2]} {worst.predicted / worst.measured - 1:+.0%} |"
    )


HEAD = (
    "| trace | fitted to | measured [ms] | predicted [ms] | error | kernels | mean | median | p90 "
    "| most seconds off |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=Path, help="write the kernels of no fit there, as CSV")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    folder = given.folder / "traces"
    if not (folder / "targets.py").exists():
        raise SystemExit(f"{folder}: no targets.py in it")
    found = traces(folder)
    typical = rt.tools.execution_model("eager")
    points: list[Point] = []
    sums: dict[str, list[float]] = {}
    print(HEAD)
    before = {one.name: kernels(one, typical) for one in found}
    for one in found:
        print(line(one.name, "nothing", before[one.name]))
        sums.setdefault("nothing", []).append(before[one.name].error)
        points += before[one.name].each
    for seen in found:
        print(f"two numbers from {seen.name}", file=sys.stderr)
        fitted = rt.calibrate(seen.path, CHIP, "eager", seen.graph, free=FEW, factors=False)
        for one in found:
            if one is not seen:
                after = kernels(one, rt.tools.execution_model("eager", knobs=fitted.knobs))
                print(line(one.name, f"two numbers, {seen.name.partition(',')[0]}", after))
                sums.setdefault("two numbers", []).append(after.error)
    for seen in found:
        for one in found:
            if one is not seen:
                factor = before[seen.name].measured / before[seen.name].predicted
                error = before[one.name].predicted * factor / before[one.name].measured - 1
                sums.setdefault("one factor", []).append(error)
    print("\n| fitted to another trace | totals | mean | worst |\n|---|---:|---:|---:|")
    for kind, off in sums.items():
        sizes = [abs(e) for e in off]
        print(f"| {kind} | {len(off)} | {statistics.fmean(sizes):.1%} | {max(sizes):.1%} |")
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
