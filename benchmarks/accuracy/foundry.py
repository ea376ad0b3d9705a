"""Training of MPT by llm-foundry on A100 with FSDP, predicted.

    python benchmarks/accuracy/foundry.py FOLDER [--every N] [--cache DIR] [--points FILE.csv]
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rooftrace as rt

CHIPS = {"a100_80gb": "a100-sxm-80", "a100_40gb": "a100-sxm-40"}


@dataclass(frozen=True)
class Row:
    """One published run.  seconds: of one microbatch of every GPU."""

    chip: str
    model: str
    seq: int
    gpus: int
    batch: int
    checkpoint: bool
    pure: bool
    seconds: float
    accum: int = 1

    @property
    def name(self) -> str:
        kept = " checkpoint" if self.checkpoint else ""
        return f"{self.model} {self.batch}x{self.seq}{kept} on {self.gpus} {self.chip}"

    @property
    def trace(self) -> str:
        kept = "-checkpoint" if self.checkpoint else ""
        return f"mpt-{self.model}-{self.batch}x{self.seq}{kept}"


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                CHIPS[line["GPU"]],
                line["Model"],
                int(line["SeqLen (T)"]),
                int(line["# GPUs"]),
                int(line["MicroBatchSize"]),
                line["Activation Checkpointing"] == "True",
                line["MP Mode"] == "PURE",
                int(line["MicroBatchSize"])
                * int(line["SeqLen (T)"])
                / (float(line["Throughput (T/s)"]) / int(line["# GPUs"])),
                int(line["GradAccum"]),
            )
            for line in csv.DictReader(file)
        ]


def traced(row: Row, cache: Path) -> rt.OpGraph:
    path = cache / f"{row.trace}.json.gz"
    if path.exists():
        return rt.load(path)
    import torch
    from mpt import Mpt, microbatch

    with torch.device("meta"):
        model = Mpt(row.model, row.seq, row.checkpoint).train().bfloat16()
    ids = torch.zeros(row.batch, row.seq, dtype=torch.long, device="meta")
    graph = rt.trace(microbatch, model, ids)
    rt.save(graph, path)
    return graph
