"""Options of a request: the target and its sizes, and the chips and constants that price it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from rooftrace._progress import WARNING, tell
from rooftrace.costmodels.fusion import (
    REWRITES,
    TYPICAL,
    ExecutionError,
    ExecutionModel,
    execution_model,
)
from rooftrace.costmodels.kernels import Knobs
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip, Host, load_chip, load_host
from rooftrace.hardware.systems import System, load_system
from rooftrace.reporting.commands import options
from rooftrace.reporting.commands.options import option
from rooftrace.tracer.names import CHECKPOINTS, PLANS, ZERO
from rooftrace.tracer.sharding import SCHEDULES

if TYPE_CHECKING:
    from rooftrace.graph import OpGraph
    from rooftrace.measured.fit import Calibration
    from rooftrace.studies.forms import Conditions


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The target and its sizes.  Its fields are the arguments that `Job.of` reads and checks."""

    phases: Sequence[str] | None = option(
        help="Phases: forward, training, prefill, decode, requests; default: those that fit the "
        "model.",
        flag="--phase", metavar="LIST", read=options.words,
    )  # fmt: skip
    batch: int | None = option(help="Batch size; default 1, or the batch of the inputs.", kind=int)
    seq: int | None = option(help="Sequence (prompt) length in tokens.", kind=int)
    kv: int | None = option(help="Cached length before a decode step; default: --seq.", kind=int)
    inputs: Mapping[str, str] | None = option(
        help="An input by name, for example pixels=8,3,224,224:fp32.  Repeatable.",
        flag="--input", metavar="NAME=SHAPE:DTYPE", repeats=True, read=options.inputs,
    )  # fmt: skip
    settings: Mapping[str, Any] | None = option(
        help="Set a field of the config (config.num_hidden_layers=8), a keyword of the function "
        "that TARGET names, or, where steps are priced, a field of every execution model "
        "(utilization.b_sat=64, kv_append=as-run).  Repeatable.",
        flag="--set", metavar="NAME=VALUE", repeats=True, read=options.settings,
    )  # fmt: skip
    mesh: Mapping[str, int] | None = option(
        help="Shard the step over processes, for example dp=32,tp=8.  A Hugging Face model takes "
        "dp, dp_replicate, cp, tp, ep, etp and pp (see --plan); code shards itself in a "
        "function build(mesh).",
        metavar="AXIS=N,...", read=options.mesh,
    )  # fmt: skip
    checkpoint: str = option(
        "none",
        help="Activations of a Hugging Face model that training recomputes.",
        words=CHECKPOINTS,
    )
    plan: str = option(
        PLANS[0],
        help="Tensor parallelism of a Hugging Face model: as inference engines and Megatron-LM "
        "shard it, or by the plan of transformers.",
        words=PLANS,
    )
    zero: int = option(
        ZERO[-1],
        help="What replicas (dp) of a Hugging Face model that trains share: 1 states of the "
        "optimizer (Megatron-LM's distributed optimizer), 2 gradients, too (FSDP2 without "
        "resharding after forward), 3 weights, too (FSDP2).",
        kind=int,
    )
    schedule: str | None = option(
        help=f"Schedule of a pipeline (--mesh pp=...): {', '.join(SCHEDULES)}.  Default: 1f1b, or "
        "interleaved-1f1b with --interleave."
    )
    interleave: int | None = option(
        help="Stages of each process of a pipeline, the virtual pipeline size of Megatron-LM.  "
        "Default: those of --schedule, 1 or 2.",
        kind=int,
    )
    microbatches: int | None = option(
        help="Microbatches of a pipeline step, of --batch each.  Default: 2 for each stage.",
        kind=int,
    )
    optimizer: str = option(
        "adamw", help="Optimizer of a training step: none, or any of torch.optim.", shown="adamw"
    )
    assume: Mapping[str, Any] | None = option(
        help="Decide a value that a trace cannot know, for example branch=true or "
        "routing@*.gate=skewed:1.0.  Repeatable.",
        metavar="KIND[@MODULE]=VALUE", repeats=True, read=options.assumptions,
    )  # fmt: skip
    repeats: bool = option(
        True,
        help="Trace equal layers once, and list them once.",
        flag="--repeats/--no-repeats", kind=bool, shown="repeats",
    )  # fmt: skip
    torch: str | None = option(
        help="Release of PyTorch that runs the step, for example 2.8; it decides which ops are one "
        "kernel on CUDA.  Default: the installed one.",
        metavar="RELEASE",
    )
    trust_remote_code: bool = option(
        False, help="Let a Hugging Face repository run its own code.", kind=bool
    )


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """The requests of one step, each with its length."""

    cached: Any = option(
        help="Positions in the cache of each request of a step, for example 8x4096,100,0.",
        metavar="LIST", read=partial(options.lengths, "--cached"),
    )  # fmt: skip
    new: Any = option(
        help="New tokens of each request of --cached, or one number for all; default 1.",
        metavar="LIST", read=partial(options.lengths, "--new"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """The storage precisions to price in; None: as they were traced."""

    dtype: str | Sequence[str | None] | None = option(
        help="Price the floats of the model as fp64, fp32, bf16, fp16, fp8, mxfp8, fp4, mxfp4 or "
        "nvfp4; integers are for weights and caches.",
        read=options.several,
    )
    weights_dtype: str | None = option(
        help="Price weights as such floats, or as int8, int4, int4_g128 (a scale for 128) ..."
    )
    kv_dtype: str | Sequence[str | None] | None = option(
        help="Price the KV cache as such floats, or as int8 or int4.", read=options.several
    )


# -- pricing ---------------------------------------------------------------------------------------
# How steps are priced: on which chips, run how, with which constants.
#
# An argument that changes prices is one field here: it is then taken by every call and every
# command that prices, by a side of a diff and by a lock.

USUAL_CHIP = "that of --knobs, else h200-sxm"
_FIELDS = frozenset(each.name for each in fields(ExecutionModel)) - {"name"}


CHANGES = ("knobs", "rewrites", "tf32", "library", "exchange", "what_if", "factors")
"""Arguments that change an execution model."""


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """On which chips steps run, and how."""

    chip: str | Chip | Sequence[str | Chip] | None = option(
        help="Chips by name or TOML path.",
        metavar="LIST", read=options.words, shown=f"({USUAL_CHIP})",
    )  # fmt: skip
    system: str | System | Sequence[str | System] | None = option(
        help="Systems of joined chips for --mesh, by name or TOML path, in place of --chip "
        "(rooftrace systems list).",
        metavar="LIST", read=options.several,
    )  # fmt: skip
    host: str | os.PathLike[str] | Host | None = option(
        help="Host of the chips by name or TOML path (typical, desktop, torchscript, torch-2.0): "
        "what Python, dispatch and launches take.  Default: what a chip's file says, else typical.",
        metavar="HOST", shown="typical",
    )  # fmt: skip
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = option(
        help="Execution models: naive, eager, compiled, mixed, efficient, serving, seed-naive, "
        "seed-efficient.",
        metavar="LIST", read=options.words,
    )  # fmt: skip
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = option(
        TYPICAL,
        help="Constants of real kernels: typical (of the kind of chip), a calibrated TOML file, or "
        "none (datasheet peaks: times are bounds).",
        metavar="FILE", shown=TYPICAL,
    )  # fmt: skip
    rewrites: Sequence[str] = option(
        (),
        help="Rewrites of a server, added to every execution model: "
        f"{', '.join(REWRITES)}.",
        flag="--rewrite", metavar="LIST", read=options.words,
    )  # fmt: skip
    tf32: bool | None = option(help="Run fp32 matrix products on the matrix engine.", kind=bool)
    library: str | None = option(
        help="Whose kernels run: torch, or those of an inference engine: vllm, sglang, trtllm.",
        shown="vllm for serving, else torch",
    )
    exchange: str | None = option(
        help="Exchange of rows with the experts of other processes (--mesh ep=...): as-run, or the "
        "measured kernels of DeepEP: deepep, deepep-low-latency.",
        shown="as-run",
    )
    what_if: Mapping[str, float] | None = option(
        help="Disturbances of a step of many processes: interference (share by which computing "
        "slows during an exchange), stragglers (spread of chips, over the mean), "
        "expert-imbalance (tokens of the busiest process, over the mean).",
        metavar="NAME=NUMBER,...", read=options.what_ifs,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PricingOptions(ExecutionOptions, PrecisionOptions):
    """All arguments of prices."""

    factors: Mapping[str, Any] | None = None  # fields of every execution model, of `settings`

    @staticmethod
    def parted(named: Mapping[str, Any]) -> tuple[PricingOptions, dict[str, Any]]:
        """Split arguments into those of prices and the others.

        Precisions are in both.  Of `settings`, fields of an execution model are of prices.
        """
        priced = {name: named[name] for name in PRICES if named.get(name) is not None}
        if "knobs" in named:
            priced["knobs"] = named["knobs"]
        others = {name: value for name, value in named.items() if name not in PRICES}
        precisions = [each.name for each in fields(PrecisionOptions)]
        priced |= {name: others[name] for name in precisions if name in others}
        settings = named.get("settings")
        if isinstance(settings, Mapping):
            priced["factors"] = {n: v for n, v in settings.items() if _of_execution(n)}
            others["settings"] = {n: v for n, v in settings.items() if not _of_execution(n)}
            if settings and not others["settings"]:
                del others["settings"]
        return PricingOptions(**priced), others

    def executions(self, *usual: str | ExecutionModel) -> list[ExecutionModel]:
        """The named execution models, or the usual ones, with all changes.

        Raises RequestError for none, and ExecutionError.
        """
        named: list[Any] = list(usual)
        if self.execution is not None:
            named = each_of("execution", self.execution, (str, ExecutionModel))
        changes: dict[str, Any] = {}
        if self.knobs is None or self.knobs != TYPICAL:
            changes["knobs"] = self.knobs
        for name, value in (
            ("tf32", self.tf32), ("library", self.library), ("exchange", self.exchange),
            ("disturbances", self.what_if),
        ):  # fmt: skip
            if value:
                changes[name] = value
        models = [execution_model(each, **changes) for each in named]
        plain = {name.replace("-", "_"): value for name, value in (self.factors or {}).items()}
        try:
            models = [execution_model(model, **plain) for model in models]
        except ExecutionError as error:
            raise RequestError(f"--set: {error}") from error
        added = (self.rewrites,) if isinstance(self.rewrites, str) else tuple(self.rewrites)
        return [
            execution_model(model, rewrites=(*model.rewrites, *added)) if added else model
            for model in models
        ]

    def chips(self, models: Sequence[ExecutionModel]) -> list[Chip]:
        """The named chips, or those of the systems.

        Without either, the chip that the knobs of these models were fitted on, else h200-sxm.
        Each with the facts of `host`, where that is named.
        Tells where knobs were fitted on another one.  Raises RequestError for none.
        """
        if self.system is not None:
            if self.chip is not None:
                raise RequestError(
                    f"chip={self.chip!r:.40} beside system=: a system has its own chip"
                )
            joined = each_of("system", self.system, (str, System, os.PathLike))
            chips = [load_system(system).joined_chip for system in joined]
        elif self.chip is None:
            chips = [ExecutionModel.chip_of(None, models)]
        else:
            named = each_of("chip", self.chip, (str, Chip, os.PathLike))
            chips = [load_chip(each) for each in named]
        tell_borrowed(models, chips)
        return chips if self.host is None else list(map(load_host(self.host).under, chips))

    def conditions(self, models: Sequence[ExecutionModel]) -> tuple[Conditions, ...]:
        """Every combination of executions and precisions, of which there may be several each.

        Raises RequestError for none, and for precisions that there are not.
        """
        from rooftrace.costmodels.rewrites import check_precisions
        from rooftrace.studies.forms import Conditions

        combinations = tuple(
            Conditions(model, first, self.weights_dtype, second)
            for model in models
            for first in each_of("dtype", self.dtype, (str,))
            for second in each_of("kv_dtype", self.kv_dtype, (str,))
        )
        for each in combinations:
            check_precisions(each.dtype, each.weights_dtype, each.kv_dtype)
        return combinations


PRICES = tuple(each.name for each in fields(ExecutionOptions))
"""Names of the arguments that are of prices alone."""
PLAIN = PricingOptions()
"""The defaults."""


def _of_execution(name: Any) -> bool:
    """Whether a setting is a field of an execution model, or of one of its records."""
    return isinstance(name, str) and name.partition(".")[0].replace("-", "_") in _FIELDS


def tell_borrowed(models: Iterable[ExecutionModel], chips: Sequence[Chip]) -> None:
    """Tell where knobs were fitted on another chip than these."""
    fitted = [model for model in models if isinstance(model.knobs, Knobs) and model.knobs.is_fit]
    for text in dict.fromkeys(model.borrowed_on(each) for model in fitted for each in chips):
        if text:
            tell(WARNING + text)


def check_groups(graphs: Callable[[], Iterable[OpGraph]], models: Iterable[ExecutionModel]) -> None:
    """Raise RequestError for settings of several processes where steps are of one.

    graphs: makes the graphs of the steps, called where it matters.
    """
    for model in models:
        settings = [f"{name}={value:g}" for name, value in model.disturbances.asked.items()]
        if model.exchange != "as-run":
            settings.append(f"exchange={model.exchange}")
        if settings and not any(graph.groups for graph in graphs()):
            raise RequestError(
                f"{', '.join(settings)} (--what-if, --exchange): it is of steps of several "
                "processes, and this is of one; name a mesh, as --mesh dp=4"
            )


def each_of(name: str, value: Any, kinds: tuple[type[Any], ...]) -> list[Any]:
    """One or several values as a list.  Whoever reads the list checks its values."""
    several = isinstance(value, Iterable) and not isinstance(value, kinds)
    values = list(value) if several else [value]
    if not values:
        raise RequestError(f"{name}: expected at least one, got none")
    return values
