"""Arguments that one call alone takes, by call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rooftrace.reporting.commands import options
from rooftrace.reporting.commands.options import option

if TYPE_CHECKING:
    from rooftrace.studies.solving import workloads


@dataclass(frozen=True, kw_only=True)
class SweepArguments:
    """The ranges of a sweep."""

    over: Mapping[str, Any] | Sequence[str] = option(
        help="A size and its values.  Repeatable.",
        metavar="NAME[=VALUES]", repeats=True, read=options.ranges, required=True,
    )  # fmt: skip
    vary: Mapping[str, Sequence[Any]] | None = option(
        help="Several values of a field of the config (config.num_experts_per_tok=2,4,8) or of a "
        "keyword; each is traced by itself.  Repeatable.",
        metavar="NAME=VALUES", repeats=True, read=options.variants,
    )  # fmt: skip
    most: int = option(100, help="Traces of one form at most.", kind=int, shown="100")


@dataclass(frozen=True, kw_only=True)
class ExplainArguments:
    """The kernels that are explained."""

    op: str | int | None = option(
        help="Explain the kernels of a module (its path or the end of it, * as in file names), of "
        "this name, or with this number in the plan; default: all of the step.",
        metavar="PATTERN",
    )


@dataclass(frozen=True, kw_only=True)
class ExploreArguments:
    """The points of a search for decode steps that computing limits."""

    over: Mapping[str, Any] | None = option(
        help="devices=1,2,64 (default: 1..64:x2), kv=2048..16384:x2, or batch=... (of one "
        "device).  Repeatable.",
        metavar="NAME=VALUES", repeats=True, read=options.levels,
    )  # fmt: skip
    link: str | float | None = option(
        help="With --find critical-batch: bandwidth of a link, as '50 GB/s'; default: that of the "
        "fastest link of the chip.",
        metavar="BANDWIDTH",
    )
    alpha: float = option(
        0.9,
        help="With --find critical-batch: computing is the limit where it takes at least this "
        "share of the time of HBM and of the link.",
        kind=float,
        shown="0.9",
    )


@dataclass(frozen=True, kw_only=True)
class SensitivityArguments:
    """The numbers that vary around a step: one by one, or the factors of a grid."""

    over: Mapping[str, int | None] | Sequence[str] | None = option(
        help="A size to look at, and its value; default: batch, and kv or seq.  Repeatable.",
        metavar="NAME[=VALUE]", repeats=True, read=options.sizes,
    )  # fmt: skip
    grid: Mapping[str, Any] | None = option(
        help="A factor and its levels: every combination is priced.  Repeatable.",
        metavar="NAME=V1,V2,...", repeats=True, read=options.grid,
    )  # fmt: skip
    response: str = option(
        "t_est",
        help="With --grid, the response of effects: t_est (default), t_bound, t_comp, t_hbm, "
        "t_net, flops, bytes_hbm, peak_memory, items_per_s.",
        flag="--of", metavar="RESPONSE",
    )  # fmt: skip
    log: bool = option(False, help="With --grid: effects in factors, not in sums.", kind=bool)


@dataclass(frozen=True, kw_only=True)
class SolveArguments:
    """The question, and its limits."""

    find: str = option(
        "batch",
        help="A size, cheapest, energy, throughput, latency, rates, passing, chips, mesh, scaling, "
        "run, critical-batch.",
        metavar="WHAT", shown="batch",
    )  # fmt: skip
    tpot: float | str | None = option(
        help="Limit: time per output token, for example 30ms.", metavar="TIME"
    )
    ttft: float | str | None = option(
        help="Limit: time to the first token of the longest prompt of --mix.", metavar="TIME"
    )
    step: float | str | None = option(help="Limit: time of one step, of any phase.", metavar="TIME")
    mix: str | workloads.Mix | None = option(
        help="Requests: tokens of prompt and output, with shares, for example "
        "2048:256@3,8192:1024.",
        metavar="IN:OUT[@SHARE],...",
    )
    apart: bool = option(False, help="Prefills run on separate chips.", kind=bool)
    prefill_chip: Any = option(
        help="Chip of prefills that run --apart, or system of such chips; default: that of the "
        "decode steps.",
        metavar="CHIP",
    )
    over: Any = option(
        help="Values of the open size, for example 1..16384.  With --find mesh: of "
        "--global-batch.  With --find critical-batch: of devices, kv or batch, as "
        "devices=1,2,64.  Repeatable.",
        metavar="[NAME=]VALUES", repeats=True, read=options.open_values,
    )  # fmt: skip
    chips: int | Sequence[int] | None = option(
        help="Number of chips together; default: as few as meet the limits; for scaling 1 to "
        "1,024.",
        metavar="N,...", read=options.counts,
    )  # fmt: skip
    price: float | Mapping[str, float] | None = option(
        help="Dollars per hour of a chip, in place of that of its file.  Repeatable.",
        metavar="[CHIP=]DOLLARS,...", repeats=True, read=partial(options.by_chip, "--price"),
    )  # fmt: skip
    power: float | Mapping[str, float] | None = option(
        help="Watts of a chip and its share of the node, in place of those of the files.  "
        "Repeatable.",
        metavar="[CHIP=]WATTS,...", repeats=True, read=partial(options.by_chip, "--power"),
    )  # fmt: skip
    pue: float | None = option(
        help="Energy of the building over that of its computers, a factor on watts and joules; "
        "default: computers alone.",
        kind=float,
    )
    kept_free: float = option(
        0.0, help="The share of the memory that stays free.", kind=float, shown="0.0"
    )


@dataclass(frozen=True, kw_only=True)
class MeshArguments:
    """The work that meshes are compared on."""

    global_batch: int | None = option(
        help="With --find mesh or run: requests, or samples of training, in one step over all "
        "chips, the same for every mesh; each replica takes its part.  Default: --batch for each "
        "chip.",
        kind=int, least=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """The length of a training, and what interrupts it."""

    tokens: float | str | None = option(
        help="With --find run: tokens (or samples) of the whole training, as 15T.", metavar="N"
    )
    mtbf: float | str | None = option(
        help="With --find run: mean time between interruptions of all chips together, as '3 h'; "
        "default: that of H100 in the training of Llama 3 405B.",
        metavar="TIME",
    )
    restart: float | str | None = option(
        help="With --find run: time from an interruption until training goes on; default: 10 min, "
        "as MegaScale says.",
        metavar="TIME",
    )
    storage: float | str | None = option(
        help="With --find run: bandwidth at which all chips write a checkpoint; default: 122 MB/s "
        "of each, as in the training of Llama 3 405B.",
        metavar="BANDWIDTH",
    )
    save_time: float | str | None = option(
        help="With --find run: time for which a checkpoint stops training; default: its bytes over "
        "--storage.",
        metavar="TIME",
    )
    interval: float | str | None = option(
        help="With --find run: training between two checkpoints; default: sqrt(2 x --save-time x "
        "--mtbf).",
        metavar="TIME",
    )


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The run of a script."""

    steps: int | None = option(
        3,
        help="End the script after so many training steps; after so many calls, if it trains "
        "nothing.",
        kind=int,
        least=1,
        shown="3",
    )
    ranks: int | None = option(
        help="Number of processes, where no launcher says it.", kind=int, least=1
    )
    rank: int = option(0, help="Number of the process that runs.", kind=int, least=0, shown="0")
    boundary: str = option(
        "auto",
        help="Begin of a turn: auto (the training steps and calls that are found), a batch of a "
        "data loader, a call of a module, optimizer (the end of its step), or mark=NAME, a range "
        "of torch.profiler or NVTX (step: the step() of a profiler).",
        metavar="auto|batch|call|optimizer|mark=NAME",
        shown="auto",
    )
    clock: str = option(
        "real",
        help="The time that the script reads: of this machine, or of its steps on the chip.",
        words=("real", "simulated"),
        shown="real",
    )
    scratch: str | os.PathLike[str] | None = option(
        help="Folder for the files that the script writes.", metavar="DIR"
    )
    assume: Mapping[str, Any] | None = option(
        help="Values in place of unknown ones, as value=2.5.  Repeatable.",
        metavar="KIND[@MODULE|@FILE:LINE]=VALUE", repeats=True, read=options.assumptions,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeasuredArguments:
    """The target of measurements."""

    target: Any = option(
        help="The target that was measured.  With a trace: a TARGET.  With a table: a template "
        "that makes a TARGET of each name in it, for example models.py:{target}.  A run of the "
        "suite needs none.",
        metavar="TARGET|TEMPLATE",
    )
    trust_targets: bool = option(
        False,
        help="Import and call the code that the file of measurements names: only for a file that "
        "you trust as you trust code.",
        kind=bool,
    )
    counters: str | None = option(
        help="DRAM bytes of a trace's kernels: a CSV of Nsight Compute (ncu) or of rocprof.",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class CalibrateArguments:
    """The constants of a fit."""

    counted_steps: int | None = option(
        help="Number of steps in the totals of perf or LIKWID.", kind=int
    )
    by_layer: bool = option(False, help="Also show the weight residency of each layer.", kind=bool)
    start: Any = option(help="Knobs to begin with; default: typical ones.", metavar="FILE")
    free: Sequence[str] | None = option(
        help="Knobs to fit: pace (one factor on all), compute, memory, cache, overlap, launch, "
        'dispatch, layout, tiling.split and its like, or the share of a class, such as '
        '"mm.compute".  Default: as many as lower the error on held-out steps by more than chance.',
        metavar="LIST", read=options.words,
    )  # fmt: skip
    title: str = option("", help="Title of the result.")


@dataclass(frozen=True, kw_only=True)
class MeasureArguments:
    """The measurements of this machine, and their time."""

    chip_only: bool = option(
        False, help="Measure this machine's rates and write them as a chip.", kind=bool
    )
    device: str | None = option(help="cpu or cuda; default: cuda where there is one.")
    budget_s: float | None = option(
        help="Seconds to spend; default 480, --quick 90, --chip-only 20.",
        flag="--budget", kind=float,
    )  # fmt: skip
    quick: bool = option(False, help="Try all of the suite, in about a minute.", kind=bool)
    collectives: bool = option(
        False, help="Time collectives of gloo between processes instead.", kind=bool
    )
    ranks: int | None = option(help="Number of processes, for --collectives; default 2.", kind=int)


@dataclass(frozen=True, kw_only=True)
class InventoryArguments:
    """The values of an inventory."""

    weights: bool | None = option(
        help="Read the values too: statistics and histograms.  Code is built with its weights.",
        kind=bool,
    )


@dataclass(frozen=True, kw_only=True)
class GateArguments:
    """Arguments of lock and check."""

    dry_run: bool = option(
        False, help="List the code that would run, and the lock; run nothing.", kind=bool
    )


@dataclass(frozen=True, kw_only=True)
class LockArguments(GateArguments):
    """The detail of a lock."""

    depth: int | None = option(
        help="Names of modules down to which costs are locked.  Default: 3.",
        kind=int, least=1, most=99,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CheckArguments(GateArguments):
    """The mode of a check."""

    update: bool = option(False, help="Write the lock anew; exit 0.", kind=bool)
    strict: bool = option(
        False,
        help="Exit 1 unless a new lock would equal this one, to the byte.",
        kind=bool,
    )
