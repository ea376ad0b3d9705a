"""Measured steps of Megatron-LM on 8 x B200 beside our prediction: python simumax.py FOLDER

FOLDER/simumax_b200.csv: model, layers, tp, pp, ep, cp, seq (4096 where it is empty), gpus,
micro_batches, real_ms, real_alloc_gib.  Each microbatch has one sequence.

What B200 sustains (b200-sxm.toml) was chosen with the rows of Llama 3 70B in sight, nothing else:
collectives are those of dgx-b200, kernels have the typical constants of the chip.  Megatron-LM
hands its kernels to the device one by one; its own turn heads, gate, sum what experts made and take
the loss (`_cef`: fused) in one pass each, as compiled code does (`torch.compile` of
megatron_ops.py).  What a process keeps and its peak are those of a compiled step.

Not in it: waits of the host for the loss and between steps, which Megatron-LM has, and its two
kernels for the turn of MLA's heads, for which eager copies stand here, about 0.5 ms a layer more.
"""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron import MODELS, Groups, Stage, Update, microbatch, update
from torch.distributed.device_mesh import init_device_mesh

import rooftrace as rt
from rooftrace.costmodels.timing import StageCost, pipelined
from rooftrace.hardware.systems import load_system

SYSTEM = load_system("dgx-b200")


def group_of(mesh: Any, axis: str) -> Any:
    """A group of more than one process; None for one."""
    return mesh[axis].get_group() if mesh[axis].size() > 1 else None


def stage_cost(row: dict[str, str], number: int) -> tuple[StageCost, int]:
    """What one stage of a row costs, and the bytes that it hands to the next."""
    tp, pp, ep, cp = (int(row[name]) for name in ("tp", "pp", "ep", "cp"))
    dp = int(row["gpus"]) // (tp * pp * cp)
    sizes, seq = MODELS[row["model"]], int(float(row["seq"] or 4096))
    least, more = divmod(int(row["layers"]), pp)
    start = number * least + min(number, more)
    layers = range(start, start + least + (number < more))
    with rt.tools.fake_mesh({"dp": dp, "cp": cp, "tp": tp}) as mesh:
        routed = init_device_mesh("cpu", (dp * cp * tp // ep, ep), mesh_dim_names=("edp", "ep"))
        replicas = init_device_mesh("cpu", (dp * cp, tp), mesh_dim_names=("dpcp", "tp"))
        everybody = init_device_mesh("cpu", (dp * cp * tp,), mesh_dim_names=("all",))
        groups = Groups(tp=group_of(mesh, "tp"), cp=group_of(mesh, "cp"), ep=group_of(routed, "ep"))
        first, last = number == 0, number == pp - 1
        stage = Stage(sizes, groups, layers, first, last)
        rows, inner = seq // cp, sizes.rope or sizes.head
        with torch.device("meta"):
            ids = torch.zeros(rows, dtype=torch.long)
            hidden = torch.zeros(rows // tp, sizes.width, dtype=torch.bfloat16, requires_grad=True)
            angles = torch.zeros(rows, 1, inner, dtype=torch.bfloat16)
        graph = rt.trace(microbatch, stage, ids if first else hidden, ids, angles, angles)
        work, kept = (
            rt.estimate(graph, execution=name, system=SYSTEM) for name in ("mixed", "compiled")
        )
        parts = Update(
            stage,
            group_of(replicas, "dpcp"),
            group_of(routed, "edp"),
            group_of(everybody, "all"),
        )
        optimizer = torch.optim.AdamW(parts.masters.parameters(), fused=True)
        graph = rt.trace(update, parts, optimizer)
        once = rt.estimate(graph, execution="mixed", system=SYSTEM)
    cost = StageCost.of(work)
    whole = StageCost(
        forward=cost.forward,
        backward=work.t_est - cost.forward,
        weights=cost.weights,
        once=once.t_est,
        saved=StageCost.of(kept).saved,
        peak=kept.memory.peak + parts.states + stage.stand_ins,
    )
    return whole, 0 if last else hidden.nbytes


def predicted(row: dict[str, str]) -> tuple[float, float]:
    """Seconds of a step, and bytes of the process that needs most."""
    pp = int(row["pp"])
    made = [stage_cost(row, number) for number in range(pp)]
    stages = {number: cost for number, (cost, _) in enumerate(made)}
    pipe = pipelined(stages, "1f1b", int(row["micro_batches"]), made[0][1], SYSTEM)
    return pipe.seconds, max(pipe.peaks)


def main(folder: Path) -> None:
    """Print every row, and the mean errors."""
    times, sizes = [], []
    with (folder / "simumax_b200.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        seconds, peak = predicted(row)
        times.append(seconds * 1e3 / float(row["real_ms"]) - 1)
        sizes.append(peak / 2**30 / float(row["real_alloc_gib"]) - 1)
        print(
            f"{row['model']} tp={row['tp']} pp={row['pp']} ep={row['ep']} cp={row['cp']} "
            f"x {row['micro_batches']}: {seconds * 1e3:.1f} ms, measured {row['real_ms']}: "
            f"{times[-1]:+.1%}; {peak / 2**30:.2f} GiB, measured {row['real_alloc_gib']}: "
            f"{sizes[-1]:+.1%}",
            flush=True,
        )
    for name, errors in (("time", times), ("memory", sizes)):
        if errors:
            mean = sum(map(abs, errors)) / len(errors)
            print(f"mean absolute error of {name} {mean:.1%} of {len(errors)} rows")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]))
