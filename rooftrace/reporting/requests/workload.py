"""What runs: the options of a target, its sizes and how it is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rooftrace.reporting.requests import options
from rooftrace.reporting.requests.options import option
from rooftrace.tracer.asking.names import CHECKPOINTS
from rooftrace.tracer.pipelines import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What runs.  Its fields are the arguments that `Job.of` reads and checks."""

    phases: Sequence[str] | None = option(
        help="forward, training, prefill, decode, requests; default: those that fit the model.",
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
        help="A field of the config (config.num_hidden_layers=8), a keyword of the function that "
        "TARGET names, or, where steps are priced, a field of every execution model, for example "
        "weight_residency.moe=2, utilization.b_sat=64 or kv_append=as-run.  Repeatable.",
        flag="--set", metavar="NAME=VALUE", repeats=True, read=options.settings,
    )  # fmt: skip
    mesh: Mapping[str, int] | None = option(
        help="Spread it over processes, for example dp=32,tp=8.  A Hugging Face model takes "
        "the plans of transformers (dp, dp_replicate, tp, ep); code shards itself in a "
        "function build(mesh).",
        metavar="AXIS=N,...", read=options.mesh,
    )  # fmt: skip
    checkpoint: str = option(
        "none",
        help="Which activations of a Hugging Face model training makes again.",
        words=CHECKPOINTS,
    )
    schedule: str | None = option(
        help=f"Order of the work of a pipeline (--mesh pp=...): {', '.join(SCHEDULES)}.  "
        "Default: 1f1b."
    )
    microbatches: int | None = option(
        help="Microbatches of --batch each that a step of a pipeline has.  Default: 2 for each "
        "stage.",
        kind=int,
    )
    optimizer: str = option(
        "adamw", help="Optimizer of a training step: none, or any of torch.optim.", shown="adamw"
    )
    assume: Mapping[str, Any] | None = option(
        help="Decide what a trace cannot know, for example branch=true or "
        "routing@*.gate=skewed:1.0.  Repeatable.",
        metavar="KIND[@MODULE]=VALUE", repeats=True, read=options.assumptions,
    )  # fmt: skip
    repeats: bool = option(
        True,
        help="Trace equal layers once, and list them once.",
        flag="--repeats/--no-repeats", kind=bool, shown="repeats",
    )  # fmt: skip
    torch: str | None = option(
        help="The release of PyTorch that runs the step, for example 2.8: it decides which ops "
        "are one kernel on CUDA.  Default: the installed one.",
        metavar="RELEASE",
    )
    trust_remote_code: bool = option(
        False, help="Let a Hugging Face repository run its own code.", kind=bool
    )


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """The requests of one step, each with its length."""

    cached: Any = option(
        help="A step of requests of different lengths: positions in the cache of each, for "
        "example 8x4096,100,0.",
        metavar="LIST", read=partial(options.lengths, "--cached"),
    )  # fmt: skip
    new: Any = option(
        help="New tokens of each of these requests, or of all; default 1.",
        metavar="LIST", read=partial(options.lengths, "--new"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """The storage precisions to price in; None: as they were traced."""

    dtype: str | Sequence[str | None] | None = option(
        help="Price the model's own floats in this precision (fp8, bf16, int4 ...).",
        read=options.several,
    )
    weights_dtype: str | None = option(help="Price weights in this precision.")
    kv_dtype: str | Sequence[str | None] | None = option(
        help="Price the KV cache in this precision.", read=options.several
    )
