"""Training of MPT by llm-foundry with FSDP, predicted.

    python benchmarks/accuracy/foundry.py FOLDER [--every N] [--cache DIR] [--points FILE.csv]

FOLDER/llm has llm_foundry_*.csv (throughput tables of llm-foundry, Apache-2.0), of any GPU.  What
ran there, by the sources of llm-foundry and Composer of that year: weights and gradients in bf16
while computing (both modes gather and reduce in bf16), layer norms in bf16, FlashAttention's cross
entropy, two metrics of each microbatch, and attention by a Triton kernel, the default of the script
that made the tables.  That kernel is taken to be as much slower than FlashAttention 2 as the paper
of the latter says (Dao, 2023: 1.3 to 1.5 times forward, twice backward); like that one it uses the
matrix instructions of sm_80.  Rows in fp8 ran the linear layers of TransformerEngine.

Runs on 128 and more H100 were made by another script (scripts/train/benchmarking/sweep.py, January
2024): four models with FlashAttention 2.4.2, for which every layer takes rows of padding out and
puts them back; gathering ahead both ways; and gradients reduced in fp32, as Composer does since
0.16.4.

A microbatch of one GPU is traced.  Added to its kernels are
- what FSDP exchanges in backward: Composer's default is BACKWARD_POST, which gathers a layer's
  weights when the layer before is done, after its gradients on the same stream of NCCL; gathering
  in forward is taken to hide behind computing.  On 128 and more H100 all of it should hide, and
  counts in full: rows of 7b to 70b are slower than their kernels by 0.7 to 1.1 times the exchange
  (beside what rows on 8 are), so it seems to take from products what it takes itself.  Times are
  those of the DGX system of the GPU;
- copies of gradients into the flat parameter of each layer, and casts of those reduced in fp32;
- the optimizer, over the microbatches of a step.

Two numbers, what the GPUs sustain of their arithmetic and of their bandwidth, and one factor, are
fitted to rows on one node of all other models.  The usual numbers, from which a fit begins, hold
what A100 and H100 sustain under their limit on power: that of A100 was chosen with the rows of 80
GB in sight, that of H100 with products alone, steps of torchtitan and the rows of H100 in sight.
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from kept import kept
from points import Point, parser_of, write_points
from scores import HEAD, left_out, line, one_factor, with_numbers

import rooftrace as rt
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.attention_rows import attention_knobs
from rooftrace.costmodels.kernels.intervals import StepCell
from rooftrace.costmodels.timing.collectives import collective_seconds
from rooftrace.hardware.systems import System, load_system
from rooftrace.measured.fit.cases import Case, predict, step_case
from rooftrace.measured.fit.fitting import FEW

CHIPS = {"a100_80gb": "a100-sxm-80", "a100_40gb": "a100-sxm-40"}
"""By the names of the tables; others are aliases of chips, with other dashes."""
SYSTEMS = {"sm_80": "dgx-a100", "sm_90": "dgx-h100", "sm_100": "dgx-b200"}
"""By architecture; a chip of another one is alone with its links."""
NODE = 8
"""GPUs that share one switch."""
UPDATE = 110
"""Bytes that an update moves for each parameter of a GPU: the norm of gradients, and about nine
kernels over fp32 numbers in Composer's DecoupledAdamW."""
LARGE = 128
"""GPUs from which on H100 ran as sweep.py says."""
WITH_FLASH = ("1b", "3b", "7b", "70b")
"""Models that it ran with FlashAttention 2; the others kept Triton."""
ATTENTION = 32768
"""From sequences of so many tokens on attention takes most of the time."""
SLOWER = {"forward": 1.4, "backward": 2.0}
"""Times that attention in Triton takes of FlashAttention 2."""

EAGER = rt.tools.execution_model("eager", attention_library="flash2")


@dataclass(frozen=True)
class Row:
    """One published run.  seconds: of one microbatch, which every GPU computes at once.

    gathered: whether backward gathers weights again (FULL_SHARD).
    """

    chip: str
    model: str
    seq: int
    gpus: int
    batch: int
    checkpoint: bool
    seconds: float
    source: str
    fp8: bool
    gathered: bool
    parameters: float
    accumulated: int  # microbatches of a step

    @property
    def large(self) -> bool:
        """Whether sweep.py made it."""
        return self.gpus >= LARGE and rt.load_chip(self.chip).architecture == "sm_90"

    @property
    def flash(self) -> bool:
        return self.large and self.model in WITH_FLASH

    @property
    def name(self) -> str:
        kept = ", checkpointed" if self.checkpoint else ""
        kept += ", fp8" if self.fp8 else ""
        return f"{self.model} {self.batch}x{self.seq}{kept} on {self.gpus} {self.chip}"

    @property
    def trace(self) -> str:
        """The name of its trace."""
        kept = "-checkpoint" if self.checkpoint else ""
        kept += "-fp8" if self.fp8 else ""
        kept += "-unpads" if self.flash else ""
        return f"mpt-metrics-{self.model}-{self.batch}x{self.seq}{kept}"


def chip_named(name: str) -> str | None:
    """The chip of a name in the tables; None for an unknown one."""
    try:
        return rt.load_chip(CHIPS.get(name, name.replace("_", "-"))).name
    except rt.types.UnknownChipError:
        return None


def read(path: Path) -> list[Row]:
    """Rows with their seconds: tokens of a microbatch by the tokens that a GPU does in a second.

    Rows of unknown GPUs and models are listed on stderr and left out.
    """
    from mpt import SIZES

    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for told in csv.DictReader(file):
            seq, batch = int(told["SeqLen (T)"]), int(told["MicroBatchSize"])
            gpus, chip = int(told["# GPUs"]), chip_named(told["GPU"])
            if chip is None or told["Model"] not in SIZES:
                print(f"{path.name}: left out {told['Model']} on {told['GPU']}", file=sys.stderr)
                continue
            rows.append(
                Row(
                    chip=chip,
                    model=told["Model"],
                    seq=seq,
                    gpus=gpus,
                    batch=batch,
                    checkpoint=told["Activation Checkpointing"] == "True",
                    seconds=batch * seq * gpus / float(told["Throughput (T/s)"]),
                    source=path.stem,
                    fp8="fp8" in told["Precision"],
                    gathered=told["Sharding Strategy"] == "FULL_SHARD",
                    parameters=float(told["NumParams"]),
                    accumulated=int(told["GradAccum"]),
                )
            )
    return rows


def traced(row: Row, cache: Path) -> rt.types.OpGraph:
    """The graph of a microbatch: forward, loss, backward and metrics."""

    def make() -> rt.types.OpGraph:
        import torch
        from mpt import Mpt, microbatch

        with torch.device("meta"):
            model = Mpt(row.model, row.seq, row.checkpoint, row.fp8, row.flash)
            model = model.train().bfloat16()
        ids = torch.zeros(row.batch, row.seq, dtype=torch.long, device="meta")
        return rt.trace(microbatch, model, ids)

    return kept(cache / f"{row.trace}.json.gz", make)


def beside(row: Row, on: rt.types.Chip, knobs: Knobs) -> float:
    """Seconds of a microbatch beside its kernels: exchange, copies of gradients, the update."""
    from mpt import SIZES

    system = load_system(SYSTEMS[on.architecture]) if on.architecture in SYSTEMS else None
    system = System.of_chip(on) if system is None else system.with_chip(on)
    layers = SIZES[row.model][2]
    of_layer = 2 * row.parameters / layers
    exchanges = [("reduce_scatter", of_layer * (1 + row.large))]  # in fp32, or in bf16
    exchanges += [("all_gather", of_layer)] * (row.gathered + row.large)
    exchanged = sum(
        layers * collective_seconds(system, kind, nbytes, range(row.gpus)).seconds
        for kind, nbytes in exchanges
    )
    moved = (4 + 6 * row.large) * row.parameters
    moved += UPDATE * row.parameters / row.gpus / row.accumulated
    return float(exchanged + moved / (on.memory_bandwidth.value * knobs.memory))


def start_on(chip: str, flash: bool = False) -> Knobs:
    """Typical shares, with attention at the pace of Triton or of FlashAttention 2."""
    on = rt.load_chip(chip)
    usual = Knobs.typical(on, compiled=False)
    attention = attention_knobs(usual.attention, on, "flash2")
    if flash:
        return replace(usual, attention=attention)
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
    on, starts = rt.load_chip(chip), [start_on(chip, row.flash) for row in rows]
    kernels = [predict([case], start)[0] for case, start in zip(cases, starts, strict=True)]
    others = [beside(row, on, start) for row, start in zip(rows, starts, strict=True)]
    inside = [
        replace(case, seconds=max(row.seconds - other, row.seconds / 2))
        for row, case, other in zip(rows, cases, others, strict=True)
        if row.gpus == NODE
    ]
    numbers = left_out(inside, start_on(chip), (row.model for row in rows))
    before = [k + other for k, other in zip(kernels, others, strict=True)]
    after = [
        predict([case], with_numbers(start, FEW, numbers[row.model]))[0] + other
        for row, case, start, other in zip(rows, cases, starts, others, strict=True)
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
        (f"{chip}, {'8 GPUs' if small else 'more GPUs'}", chip, small)
        for chip in dict.fromkeys(row.chip for row, _ in everything)
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
    parser = parser_of(__doc__, cached=True)
    parser.add_argument("--every", type=int, default=1, help="every n-th row only")
    given = parser.parse_args()
    paths = sorted((given.folder / "llm").glob("llm_foundry_*.csv"))
    if not paths:
        raise SystemExit(f"{given.folder / 'llm'}: there is no file llm_foundry_*.csv")
    warnings.filterwarnings("ignore")

    found, points = [], []
    rows = [row for path in paths for row in read(path)[:: given.every]]
    for chip in dict.fromkeys(row.chip for row in rows):
        here, cases = [row for row in rows if row.chip == chip], []
        print(f"{chip}: {len(here)} rows", file=sys.stderr)
        on = rt.load_chip(chip)
        for row in here:
            graph = traced(row, given.cache)
            cases.append(step_case(row.name, graph, on, EAGER, row.seconds, row.model))
        found.append(predicted(here, cases, chip))
        for row, seconds in zip(here, found[-1].by["nothing"], strict=True):
            cell = StepCell(
                generation=StepCell.generation_of(on),
                precision="fp8" if row.fp8 else "half",
                phase="training",
                execution="eager",
                work="attention" if row.seq >= ATTENTION else "product",
                limit="compute",
            )
            points.append(Point(row.name, seconds, row.seconds, row.chip).of(row.source, cell))
    print(lines(found))
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
