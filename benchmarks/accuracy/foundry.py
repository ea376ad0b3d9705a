"""Training of MPT by llm-foundry on A100 with FSDP, predicted.

    python benchmarks/accuracy/foundry.py FOLDER [--every N] [--cache DIR] [--points FILE.csv]

FOLDER/llm has llm_foundry_a100.csv (throughput tables of llm-foundry, Apache-2.0).  What ran there:
weights and gradients in bf16 while computing (both of its modes gather and reduce in bf16), layer
norms in bf16, FlashAttention's cross entropy, and attention by a Triton kernel, the default of the
script that made the tables.  That kernel is taken to be as much slower than FlashAttention 2 as the
paper of the latter says (Dao, 2023: 1.3 to 1.5 times forward, twice backward).

A microbatch of one GPU is traced, without the optimizer, and without what GPUs exchange: that is
taken to hide behind computing.  Two numbers, what the GPUs sustain of their arithmetic and of their
bandwidth, are fitted to the rows on 8 GPUs of all other models.  The usual numbers, from which a
fit begins, hold what an A100 sustains in such training, which was chosen with these rows in sight.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from kept import kept
from points import Point, write_points
from scores import HEAD, left_out, line, one_factor, with_numbers

import rooftrace as rt
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.attention_rows import attention_knobs
from rooftrace.measured.fit.cases import Case, predict, step_case
from rooftrace.measured.fit.fitting import FEW

CHIPS = {"a100_80gb": "a100-sxm-80", "a100_40gb": "a100-sxm-40"}
NODE = 8
"""GPUs that share one switch."""
SLOWER = {"forward": 1.4, "backward": 2.0}
"""Times that attention in Triton takes of FlashAttention 2."""


@dataclass(frozen=True)
class Row:
    """One published run.  seconds: of one microbatch, which every GPU computes at once."""

    chip: str
    model: str
    seq: int
    gpus: int
    batch: int
    checkpoint: bool
    seconds: float

    @property
    def name(self) -> str:
        kept = ", checkpointed" if self.checkpoint else ""
        return f"{self.model} {self.batch}x{self.seq}{kept} on {self.gpus} {self.chip}"

    @property
    def trace(self) -> str:
        """The name of its trace."""
        kept = "-checkpoint" if self.checkpoint else ""
        return f"mpt-{self.model}-{self.batch}x{self.seq}{kept}"


def read(path: Path) -> list[Row]:
    """Rows with their seconds: tokens of a microbatch by the tokens that a GPU does in a second."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for told in csv.DictReader(file):
            seq, batch = int(told["SeqLen (T)"]), int(told["MicroBatchSize"])
            gpus = int(told["# GPUs"])
            rows.append(
                Row(
                    chip=CHIPS[told["GPU"]],
                    model=told["Model"],
                    seq=seq,
                    gpus=gpus,
                    batch=batch,
                    checkpoint=told["Activation Checkpointing"] == "True",
                    seconds=batch * seq * gpus / float(told["Throughput (T/s)"]),
                )
            )
    return rows


def traced(row: Row, cache: Path) -> rt.types.OpGraph:
    """The graph of a microbatch: forward, loss and backward."""

    def make() -> rt.types.OpGraph:
        import torch
        from mpt import Mpt, microbatch

        with torch.device("meta"):
            model = Mpt(row.model, row.seq, row.checkpoint).train().bfloat16()
        ids = torch.zeros(row.batch, row.seq, dtype=torch.long, device="meta")
        return rt.trace(microbatch, model, ids)

    return kept(cache / f"{row.trace}.json.gz", make)


def start_on(chip: str) -> Knobs:
    """Typical shares, with attention at the pace of Triton."""
    on = rt.load_chip(chip)
    usual = Knobs.typical(on, compiled=False)
    attention = attention_knobs(usual.attention, on, "flash2")
    slow = replace(attention, products=attention.products / SLOWER["forward"])
    share = usual.share("attention").compute / SLOWER["backward"]
    return replace(usual.with_shares(compute={"attention": share}), attention=slow)


@dataclass(frozen=True)
class Found:
    """Rows of one kind of GPU, with their seconds by three predictions."""

    rows: list[Row]
    by: dict[str, list[float]]
    numbers: dict[str, float]  # the median of each fitted number


def predicted(rows: list[Row], cases: list[Case], chip: str) -> Found:
    start = start_on(chip)
    inside = [case for row, case in zip(rows, cases, strict=True) if row.gpus == NODE]
    numbers = left_out(inside, start, (row.model for row in rows))
    before = predict(cases, start)
    after = [
        predict([case], with_numbers(start, FEW, numbers[row.model]))[0]
        for row, case in zip(rows, cases, strict=True)
    ]
    factor = one_factor(
        before,
        [row.seconds for row in rows],
        [row.model for row in rows],
        [row.gpus == NODE for row in rows],
    )
    by = {"nothing": before, "one factor": factor, "two numbers": after}
    median = {
        name: float(np.median([values[i] for values in numbers.values()]))
        for i, name in enumerate(FEW)
    }
    return Found(rows, by, median)


def lines(found: Sequence[Found]) -> str:
    """A table: each kind of GPU on one node, on several, and all rows."""
    everything = [
        (row, {k: v[i] for k, v in one.by.items()})
        for one in found
        for i, row in enumerate(one.rows)
    ]
    kinds = [
        (f"{chip}, {'8 GPUs' if small else '16 to 128 GPUs'}", chip, small)
        for chip in CHIPS.values()
        for small in (True, False)
    ]
    told = [HEAD]
    for name, chip, small in [*kinds, ("all", "", None)]:
        chosen = [
            (row, by)
            for row, by in everything
            if small is None or (row.chip == chip and (row.gpus == NODE) == small)
        ]
        for fitted in ("nothing", "one factor", "two numbers") if chosen else ():
            told.append(
                line(
                    name,
                    fitted,
                    [row.name for row, _ in chosen],
                    [by[fitted] for _, by in chosen],
                    [row.seconds for row, _ in chosen],
                )
            )
    for one in found:
        values = ", ".join(f"{name} {value:.3g}" for name, value in one.numbers.items())
        told.append(f"\nFitted on {one.rows[0].chip} (median over the models left out): {values}")
    return "\n".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--cache", type=Path, default=Path("out/accuracy"), help="where traces are kept"
    )
    parser.add_argument("--every", type=int, default=1, help="every n-th row only")
    parser.add_argument("--points", type=Path, help="write every prediction there, as CSV")
    given = parser.parse_args()
    path = given.folder / "llm" / "llm_foundry_a100.csv"
    if not path.exists():
        raise SystemExit(f"{path}: there is no such file")
    warnings.filterwarnings("ignore")
    import mpt  # noqa: F401  (its ops have rules)

    found = []
    rows = read(path)[:: given.every]
    for chip in CHIPS.values():
        here = [row for row in rows if row.chip == chip]
        cases = []
        for number, row in enumerate(here):
            if number % 10 == 0:
                print(f"{chip}: {number} of {len(here)}", file=sys.stderr)
            on = rt.load_chip(chip)
            graph = traced(row, given.cache)
            cases.append(step_case(row.name, graph, on, "eager", row.seconds, row.model))
        found.append(predicted(here, cases, chip))
    print(lines(found))
    if given.points:
        write_points(
            given.points,
            [
                Point(row.name, seconds, row.seconds, row.chip)
                for one in found
                for row, seconds in zip(one.rows, one.by["two numbers"], strict=True)
            ],
        )


if __name__ == "__main__":
    main()
