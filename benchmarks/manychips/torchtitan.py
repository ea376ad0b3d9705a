"""Published training steps of torchtitan beside our prediction: python torchtitan.py FOLDER

FOLDER/torchtitan.csv: model, gpus, dp, tp, pp, cp, seq, local_batch, ac, precision, compile,
tps_per_gpu, gib (reserved by the allocator, with expandable segments), async_tp.

As torchtitan of December 2024 does, each layer is compiled by itself, the loss runs eagerly, and
the logits are dropped before backward.  Kernels and exchanges have the constants that come with
dgx-h100; a chip held to 500 W sustains less by `GROWTH`.  What H100 sustains at 700 W lies between
what the rows of 8B say and what those of MPT say (h100-sxm.toml); nothing else was chosen with
these rows in sight.
"""

from __future__ import annotations

import contextlib
import csv
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from llama import llama, over_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.kernels.seconds import GROWTH
from rooftrace.hardware.systems import load_system
from rooftrace.tracer.sharding import fake_mesh, huggingface

WATTS, BANDWIDTH = 500, 2.4e12
"""Of the chips of these runs: 96 GB of HBM2e."""


def chip() -> rt.types.Chip:
    """An H100 with HBM2e and a lower limit on power."""
    usual = rt.load_chip("h100-sxm")
    slower = (WATTS / usual.power.value) ** (1 / GROWTH)
    sustained = usual.sustained_compute.value * slower
    facts = {"power": WATTS, "memory_bandwidth": BANDWIDTH, "sustained_compute": sustained}
    return usual.with_facts({**facts, "memory_capacity": 95 * 2**30})


def step(model: Any, ids: Any, optimizer: Any, places: Any, parallel: bool) -> None:
    """A training step; over "tp" the logits stay sharded, and so does the loss."""
    with loss_parallel() if parallel else contextlib.nullcontext():
        logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(0, 1))
        del logits  # as torchtitan does, before backward
        loss.backward()
    optimizer.step()


def estimate_of(row: dict[str, str]) -> Any:
    """The prediction of one published row."""
    dp, tp, seq, batch = (int(row[name]) for name in ("dp", "tp", "seq", "local_batch"))
    mesh = {"dp": dp, "tp": tp} if tp > 1 else {"dp": dp}
    with fake_mesh(mesh) as devices:
        model = llama(row["model"].removeprefix("llama3.1-"), fp8=row["precision"] != "bf16")
        huggingface.keep_less(model, row["ac"])
        over_mesh(model, devices, row["compile"] == "True")
        ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        graph = rt.trace(step, model, ids, optimizer, torch.arange(seq)[None], tp > 1)
    system = load_system("dgx-h100").with_chip(chip())
    older = rt.tools.execution_model("mixed", attention_library="flash2")  # than torch 2.11
    return rt.estimate(graph, execution=older, system=system)


def main(folder: Path) -> None:
    """Print every row, and the mean errors."""
    errors, sizes = [], []
    with (folder / "torchtitan.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["pp"] == row["cp"] == "1"]
    for row in rows:
        made = estimate_of(row)
        told = float(row["tps_per_gpu"])
        tokens = int(row["local_batch"]) * int(row["seq"])
        rate = tokens / (made.t_est * int(row["tp"]))
        errors.append(rate / told - 1)
        reserved = made.reserved.reserved_expandable / 2**30
        sizes.append(reserved / float(row["gib"]) - 1)
        print(
            f"{row['model']} dp={row['dp']} tp={row['tp']} seq={row['seq']} {row['ac']} "
            f"{row['precision']} compile={row['compile']} async={row['async_tp']}: "
            f"{rate:,.0f} tokens/s per GPU, published {told:,.0f}: {errors[-1]:+.1%}; "
            f"{made.memory.peak / 2**30:.1f} GiB alive, "
            f"{reserved:.1f} reserved, published {row['gib']}: {sizes[-1]:+.1%}; exposed "
            f"{made.times.t_exposed / made.t_est:.0%}"
        )
    for name, off in (("rate", errors), ("memory", sizes)):
        if off:
            mean = sum(map(abs, off)) / len(off)
            print(f"mean absolute error of {name} {mean:.1%} of {len(off)} rows")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(Path(sys.argv[1]))
