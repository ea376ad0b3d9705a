"""Made by `python -m tests.reporting.signatures`; see signed.py."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from torch import nn

from rooftrace.costmodels.estimates import Comparison, Estimate, ScriptCost, moduletree
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.memory import LargestBatch
from rooftrace.diffs.costs import Diff
from rooftrace.diffs.runs import RunDiff
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip, Host
from rooftrace.hardware.systems import System
from rooftrace.measured.fit import Calibration, Validation
from rooftrace.reporting.commands.compat import Profile
from rooftrace.reporting.commands.estimates import Module, Source
from rooftrace.reporting.commands.fleet_sweeps import SweepFleet
from rooftrace.reporting.commands.reportfolder import Report
from rooftrace.reporting.commands.rooflinesteps import Reports, Rooflines
from rooftrace.reporting.commands.solving import Answer
from rooftrace.studies.advice import GraphBreaks
from rooftrace.studies.explaining import Explanation, decode_forms
from rooftrace.studies.sensitivity import Elasticities
from rooftrace.studies.solving import MeshAnswer, ScalingAnswer, TrainingRun, workloads
from rooftrace.studies.sweeps import Form, Sweep, grids
from rooftrace.tracer.api import PathLike
from rooftrace.weights import CheckpointDiff, ParameterDiff

def sweep_fleet(
    targets: Iterable[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    over: Mapping[str, Any] | Sequence[str],
    vary: Mapping[str, Sequence[Any]] | None = ...,
    rules: Sequence[str | os.PathLike[str]] = ...,
    scheduler: str | None = ...,
    workers: int | None = ...,
    retries: int = ...,
    progress: Callable[[str], None] | None = ...,
    most: int = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **options: Any,
) -> SweepFleet:
    """Sweep many targets on the workers of Dask; the table of each lands in a folder when it ends.

    targets: names of targets, or files of forms; each with each combination of `vary` is a task.
    out: the folder, with a parquet file for each task.  A task whose file is there is not run, so
    the same call goes on after a stop; where the files of a target, the request or a release have
    changed, it is run.  Files of other requests move to `out/_earlier`, and back when asked for.
    over, vary and other options: those of `sweep`.  rules: Python files whose rules workers
    use, too.

    scheduler: the address of a Dask scheduler, "tcp://HOST:PORT"; "none": this process, one after
    the other; None: processes of this machine, where there is more than one task.  workers: how
    many of them.  retries: how often a task runs again whose worker died.

    A target that fails stops no other: see `.failures` of the result.  Raises RequestError for a
    request that makes no sense, and what `run_fleet` raises: FleetError where the scheduler goes
    away, FleetStopped (a KeyboardInterrupt) for Ctrl-C.  What is done stays.
    """

def profile(
    model: Module,
    inputs: Sequence[Any] = ...,
    *,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    **kwargs: Any,
) -> Profile:
    """FLOPs, MACs and parameters of one forward pass of `model(*inputs, **kwargs)`."""

def summary(
    model: Source,
    input_size: Sequence[Any] | None = ...,
    *,
    input_data: Any = ...,
    dtypes: Any = ...,
    depth: int = ...,
    col_names: Sequence[str] = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> moduletree.Summary:
    """An estimate of one forward pass that prints as a tree of modules, as torchinfo's does.

    Give `input_size` (one shape, or a list of shapes) or `input_data` (a tensor, a tuple, or a dict
    of keyword arguments); for a target, a graph or a Hugging Face model sizes may stand in their
    place (batch=8), as for `estimate`.  dtypes: of the inputs that input_size makes, one for all or
    one for each, as torch.long or "int64"; by default the precision of the model's own floats.
    depth: how far down modules are printed.  col_names: some of input_size, output_size,
    num_params, params_percent, kernel_size, mult_adds, trainable, and of flops, bytes, time.

    Raises RequestError for an unknown column or dtype, and the errors of `estimate`.
    """

def compare(
    model: Source,
    *args: Any,
    peers: Sequence[str] = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    **kwargs: Any,
) -> list[Comparison]:
    """Our matrix FLOPs and those of other counters, with every difference by module and op.

    model: a module, called with these arguments, or a target (a string or path) at batch, seq, kv
    and inputs.  peers: flopcounter (torch.utils.flop_counter) and fvcore.  phases: by default
    forward and training; for a target those that fit the model.  A module with real weights runs
    on them; afterwards its tensors hold what they held, and random numbers go on as before.

    Raises RequestError for an unknown
    peer, for a graph (no counter can run it), and for an argument that neither the model nor
    rooftrace takes; TargetError and TraceError as `trace` does.
    """

def diff(
    first: Source,
    second: Source | None = ...,
    /,
    *args: Any,
    before: Mapping[str, Any] | None = ...,
    after: Mapping[str, Any] | None = ...,
    git: str | Sequence[str] | bool | None = ...,
    bisect: str | None = ...,
    names: tuple[str, str] | None = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Diff | RunDiff | CheckpointDiff | ParameterDiff:
    """The changes in cost from `first` to `second`; in time of measured runs, weights of files.

    Each is a module (called with the same arguments), a graph, graphs by phase, a saved graph or a
    target.  The code of a target runs from its files in a separate process.  Sizes and
    precisions, as for `report`, hold for both sides; if one is a graph, for the other side only.

    before, after: options of one side by name: sizes, precisions, chip, execution, knobs, rewrites,
    tf32, optimizer, assume, torch, python (another interpreter), git (a revision).  With these, or
    with git, one target is enough.  git: "main" compares that revision with the working tree,
    ("v1", "v2") two revisions, True where HEAD left the default branch with the working tree.
    bisect: "time>5%" finds the first commit of that range at which it holds, and returns its diff.
    names: titles of the two sides.

    Measured runs are traces of torch.profiler, run files and Runs; of one alone the result says
    where its time goes.  graphs= says what ran, to
    predict the difference: a graph, a target or a module, or two of them, one for each side.

    Checkpoints (safetensors, torch.save, their indexes and folders) and inventories take names.

    Raises RequestError for an argument that no side takes, RevisionError for a revision that cannot
    be used, TargetError for a side that does not build.
    """

def estimate(
    source: Source,
    *args: Any,
    phase: str | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    cached: Any = ...,
    new: Any = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Estimate:
    """The cost of one step on `chip` (default h200-sxm) under `execution` (default mixed for a
    script, efficient for all others).

    source: a graph, or a Plan, which has its execution; else a module with its arguments or
    anything that `trace` takes, at a `phase`.  A graph's chip and execution may also stand second
    and third.  dtype, weights_dtype, kv_dtype: storage precisions to price in.
    system: how chips are joined, for a step of several processes; its chip is `chip` then.  knobs,
    rewrites, tf32, library, exchange, what_if, settings: changes of the execution.

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in; and the errors of `trace`.
    """

def priced_graphs(
    source: Source,
    *args: Any,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    cached: Any = ...,
    new: Any = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    **kwargs: Any,
) -> dict[str, OpGraph]:
    """The graphs by phase of a source, in the precisions of the call; takes what `report` takes."""

def roofline(
    sources: Source | Sequence[Source],
    *,
    batch: int | Sequence[int] | None = ...,
    seq: int | Sequence[int] | None = ...,
    kv: int | Sequence[int] | None = ...,
    names: Sequence[str] | None = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Rooflines:
    """Steps of several models under the roofs of several chips.

    sources: targets, graphs, or graphs by phase.  batch, seq, kv: a size, or several values of one
    of them; each value is traced, and `plot` joins its points.  phases: by default those
    that fit each source.  names: one for each source, in tables and figures; default: those of
    the models.  dtype, weights_dtype, kv_dtype and other arguments of `report` hold for all.

    Returns the Rooflines: print it, `.to_frame()`, `.plot(path)`.  Raises RequestError for no
    source, names that are not one for each, several values of two sizes, and the errors of
    `report`.
    """

def run(
    command: str | Sequence[str],
    *,
    progress: Callable[[str], None] | None = ...,
    steps: int | None = ...,
    ranks: int | None = ...,
    rank: int = ...,
    boundary: str = ...,
    clock: str = ...,
    scratch: str | os.PathLike[str] | None = ...,
    assume: Mapping[str, Any] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> ScriptCost:
    """Run a script, unmodified, on a GPU that is not there, and price its steps.

    The script runs in a separate process.  It sees a CUDA device with the name and memory of
    `chip` (default h200-sxm); its tensors there have shapes, no values.

    command: "train.py --batch_size=12", "torchrun --nproc_per_node=8 train.py", or its words.
    system: how chips are joined, for a script of several processes; its chip is `chip` then.
    steps: after so many training steps, or calls of a script that trains nothing, it is ended; None
    for its own end.  Steps equal to the two before are counted and not run again.  ranks: of how
    many processes this is the one numbered `rank`, where the launcher does not say.  boundary:
    what begins a turn: "auto" finds training steps and calls, "batch" begins one with each batch of
    a data loader, "call" with each call of a module, "optimizer" after each step of the optimizers,
    "mark=NAME" where the script says NAME to torch.profiler or NVTX ("step": a profiler's
    `step()`).  execution: by default what the script compiles is compiled, and the rest eager.
    clock: "simulated" lets the script read the time that its steps would take on the chip.
    scratch: a folder that gets the files that the script writes.  assume: as in `trace`.

    Raises RequestError for a command line that is none, and ScriptError where the script fails.
    """

def explain(
    source: Source,
    *args: Any,
    op: str | int | None = ...,
    at: Mapping[str, int] | None = ...,
    plot: str | Path | None = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Explanation:
    """Where the numbers of a step come from: FLOPs and bytes as formulas, limits, and tests.

    op: the path of a module, or its end, with * as in file names; the name of an op; or the number
    of a kernel in the plan.  None: the whole step as a worked example, with the least batch that
    computing limits and a sweep.  phase: default decode for a Hugging Face model that has it, else
    forward.  at: the sizes that formulas are in, by the names that `form` has, with their values;
    default batch, and kv (decode) or seq, as they are asked for or as the source has them.
    chip: of several, the first is explained, and all are in the sweep.  plot: a PNG for the sweep.
    Other arguments are those of `trace` and `estimate`.

    Raises RequestError where no kernel answers to `op`, and for sizes that the source does not
    have; and the errors of `form` and `estimate`.
    """

def explore(
    source: Source,
    *args: Any,
    plot: str | os.PathLike[str] | None = ...,
    progress: Callable[[str], None] | None = ...,
    over: Mapping[str, Any] | None = ...,
    link: str | float | None = ...,
    alpha: float = ...,
    seq: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> decode_forms.Exploration:
    """Whether any batch makes a decode step limited by computing, over devices and cache lengths.

    source: a target, or a `Form` (or the file of one) over batch and kv.  over: values of devices
    that share the routed experts (default 1 to 64; 1 without such), of kv (default 2048 to 16384,
    or up to the length of the model), and of batch, of one device (default: powers of 2, then every
    number).  alpha: the share of the slower of HBM and
    link at which computing counts as the limit.  link: byte/s, or "50 GB/s"; default: the chip's
    fastest.  plot: a PNG.  FLOPs and bytes are those of estimates; other arguments as of `trace`.

    Raises RequestError for a name or values that there are not and for devices without routed
    experts, and the errors of `form`.
    """

def graph_breaks(
    source: Source,
    *args: Any,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> GraphBreaks:
    """Where torch.compile breaks the graph of a step, and the costs of it on `chip`.

    source: a module with the arguments of its call, or a target.  Dynamo, the front end of
    torch.compile, runs on it without a compiler, on meta tensors; nothing is generated, and what
    the process has compiled stays as it is.  phase: forward (default), training, prefill, decode.
    execution: compiled (default: a launch for each kernel), or efficient: a CUDA graph for each
    compiled graph.

    Raises DynamoError, which names the line, where the run fails; RequestError for a source without
    a module; and the errors of `trace`.
    """

def calibrate(
    measured: Any,
    chip: str | Chip | None = ...,
    execution: str | ExecutionModel | None = ...,
    target: Source | None = ...,
    *,
    start: str | Knobs | None = ...,
    free: Sequence[str] | None = ...,
    title: str = ...,
    trust_targets: bool = ...,
    counters: str | os.PathLike[str] | None = ...,
    counted_steps: int | None = ...,
    factors: bool = ...,
    by_layer: bool = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    **kwargs: Any,
) -> Calibration:
    """Fit knobs to measurements on `chip`; print the result to see them and how sure they are.

    measured, target, trust_targets, phases, sizes: as for `validate`; a run of `rooftrace.measure`
    needs no target.  chip: by default the device at hand, which is measured then.  execution: how
    the steps ran; by default as a run says, and eager for other measurements.  start: knobs to
    begin with, by name or path; by default typical ones for a GPU, and the datasheet for other
    chips.  free: names of the knobs to fit; by default compute and memory, and with a run or a
    trace as many as it supports.  counters: a file of a hardware profiler with the DRAM bytes of
    the step that was measured; a total is of `counted_steps` steps.  factors: whether bytes get
    factors by kind, where single kernels were measured; by_layer: and the weights of each layer.
    Pass the result as `knobs=` to `report` or `execution_model`;
    `.save(path)` writes it to a file for --knobs.

    Raises the errors of `validate`, and RequestError for fewer measurements than knobs to fit.
    """

def validate(
    measured: Any,
    chip: str | Chip | None = ...,
    execution: str | ExecutionModel | None = ...,
    target: Source | None = ...,
    knobs: str | os.PathLike[str] | Knobs | None = ...,
    *,
    trust_targets: bool = ...,
    counters: str | os.PathLike[str] | None = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Validation:
    """Compare measurements with their predictions; print the result to see it on one screen.

    measured: a path to a run of `rooftrace measure`, a trace of torch.profiler or a table of step
    times, told apart by its contents; or a Run, a Trace or steps.  execution: how the step was
    run.  target: what was run: a graph (`trace(model, x)`), graphs by phase, or a target.  With a
    trace also give the target's sizes as for `report` (batch, seq, kv, dtype ...).  With a table
    give a template such as "models.py:{target}", in which {target} stands for the name in a line,
    and {batch}, {seq}, {kv} and {image_size} for its sizes.  With a run of the suite leave it out:
    its rows name models of the suite.  trust_targets: names in the file are targets themselves,
    which are imported and called: only for a file that you trust as you trust code.  knobs:
    calibrated constants, by name or path, by default the typical ones of the chip's kind; None for
    the datasheet's peaks.  phases: compare only these.  counters: a CSV of Nsight
    Compute or rocprof of the same step as the trace.

    Raises RequestError for arguments that do not go together; ProfileError for a file that cannot
    be read, or a trace of something else.
    """

def best_mesh(
    target: Any,
    *,
    chips: int | Sequence[int],
    over: Any = ...,
    step: float | str | None = ...,
    tpot: float | str | None = ...,
    price: float | None = ...,
    kept_free: float = ...,
    progress: Callable[[str], None] | None = ...,
    global_batch: int | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> MeshAnswer:
    """The mesh of so many chips with most items per second of a chip, of those that fit.

    target: a config, or code that builds a module over a mesh; each candidate is a trace of its
    own, kept on disk.  chips: one number or several.  mesh: names the axes whose sizes are looked
    for (default dp and tp; tp stays within a node); schedule goes with pp.  global_batch: requests,
    or samples of training, of one step over all chips, the same for every mesh; each replica takes
    its part.  Default: `batch` for each chip.  over: several of them.  batch: of training, what a
    replica takes at once; default all of its part, or as much as fits, one in a pipeline.
    step, tpot: limits in seconds, or as "30 ms", of a step and of a decode step.  checkpoint:
    default "full" where a step does not fit without.  price: dollar/hour of one chip.  kept_free:
    share of the memory.  Other arguments are those of `trace`.

    Raises RequestError where no mesh can be traced.  Where none fits and holds the limits, the
    answer has no `best`, and says what is nearest and how many chips are needed.
    """

def scaling(
    target: Any,
    *,
    chips: int | Sequence[int] | None = ...,
    price: float | None = ...,
    kept_free: float = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> ScalingAnswer:
    """A step on each number of chips (default 1 to 1,024): weak and strong scaling.

    mesh: the axes; replicas are added along the first one that is no pipeline.  Weak: each replica
    keeps its batch.  Strong: all chips do together what the most of them do in one step, in
    microbatches.  Other arguments are those of `best_mesh`.  Raises RequestError where no number
    of chips is a multiple of the other axes.
    """

def training_run(
    target: Any,
    *,
    chips: int | None = ...,
    price: float | None = ...,
    power: float | None = ...,
    pue: float | None = ...,
    kept_free: float = ...,
    progress: Callable[[str], None] | None = ...,
    tokens: float | str | None = ...,
    mtbf: float | str | None = ...,
    restart: float | str | None = ...,
    storage: float | str | None = ...,
    save_time: float | str | None = ...,
    interval: float | str | None = ...,
    global_batch: int | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> TrainingRun:
    """Days, chip-hours, dollars and energy of a training on so many tokens, with interruptions.

    tokens: as 15e12 or "15T" (samples of other models).  mesh: its sizes; or chips: how many, of
    which the best mesh is taken (see `best_mesh`).  price: dollar/hour of one chip.  power: watts
    of one, with its share of the node.  pue: energy of the building over that of its computers.
    mtbf: seconds between interruptions of all chips.  restart: seconds until training goes on.
    storage: byte/s at which all chips write a checkpoint.  save_time: seconds for which one stops
    training.  interval: seconds of training between two.  These may be texts, as "3 h".  Other
    arguments are those of `best_mesh`.

    Raises RequestError where the step does not fit the chips, or the training never ends.
    """

def largest_batch(
    model: Source,
    *args: Any,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> dict[str, dict[str, LargestBatch]]:
    """The largest batch that fits each chip, by phase and name of the chip.

    model: a module with its arguments, or a target (with seq, kv and inputs, or a Request, for its
    other sizes).  The batch is the first dimension of the inputs; every answer is traced, and so is
    the batch after it.  execution: how the step is run, since a fused kernel keeps what it makes in
    between to itself.  loss, optimizer, assume and the like, or options: as for `trace`.  dtype,
    weights_dtype, kv_dtype: storage precisions to price in.  Raises RequestError for a graph, for
    an argument `batch`, and for a module that runs at no other batch.
    """

def report(
    model: Source,
    *args: Any,
    out: str | os.PathLike[str] | None = ...,
    formats: Sequence[str] | None = ...,
    max_batch: bool = ...,
    progress: Callable[[str], None] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    cached: Any = ...,
    new: Any = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Report:
    """Trace `model` called with these arguments and price it.

    model: a module with its arguments, a graph, graphs by phase, a saved graph or a target.  batch,
    seq, kv and inputs: the sizes of a target, or of a Hugging Face model without arguments.  loss,
    optimizer, branches, assume, repeats, torch: as for `trace`.  phases: by default forward and
    training; for a target those that fit it.  chip: one or several names, chips or TOML paths;
    default the one that `knobs` were fitted on, else h200-sxm.
    system: how chips are joined, for a step of several processes; its chip then is `chip`.  dtype,
    weights_dtype, kv_dtype: storage precisions to price in.  out: a folder for report.html,
    report.md, report.json, ops.csv and figures.  formats: which of html, md, json, csv, png (these
    by default) and trace.  max_batch: also look for the largest batch that fits each chip
    (`largest_batch`).  execution: one or several, default naive and efficient, and for a script
    naive and mixed.  knobs: calibrated constants of every execution, by name or path or as
    `calibrate` returns them; None for the datasheet's peaks.  rewrites, tf32, library, exchange,
    what_if, settings: other changes to every execution.  progress: a function that is called
    with a few words on each thing that is being done.

    Returns the Report; print it for one screen.  Raises RequestError for an argument that neither
    the model nor rooftrace takes.
    """

def reports(
    targets: Sequence[str],
    *,
    out: str | Path | None = ...,
    formats: Sequence[str] | None = ...,
    style: str = ...,
    names: Sequence[str] | None = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    cached: Any = ...,
    new: Any = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **asked: Any,
) -> Reports:
    """A report on each of several targets; with `out`, a folder for each inside of that one.

    asked: arguments of `report` for all targets.  `out` also gets comparison.html, .md, .json and
    .csv (by `formats`) and a figure with all steps on one roofline.  A folder is written as soon as
    its report is there; a target that fails stops no other.  names: one for each target, in the
    table and figure of all.

    Returns the Reports, with the failures by target.  Raises RequestError for no target, one that
    is there twice, too many, and names that are not one for each.
    """

@overload
def sensitivity(source: Source, *args: Any, grid: None = None, **kwargs: Any) -> Elasticities: ...
@overload
def sensitivity(
    source: Source, *args: Any, grid: Mapping[str, Any], **kwargs: Any
) -> grids.GridEffects:
    """The sensitivity of a step to its sizes, to each fact of the chip, and to each knob.

    source: a module, a target, a `Form` or the file of one, whose sizes are then given by name.
    over: sizes to look at, with their values, for example {"config.num_hidden_layers": 32};
    default batch, and kv (decode) or seq.  Without `grid`: elasticities at these sizes.

    grid: levels by factor, every combination of which is priced: sizes ("batch": [1, 8, 64]),
    fields of a config and keywords of a function (each combination a form of its own), "chip",
    "execution", "dtype", "weights_dtype", "kv_dtype", and numbers by name
    ("chip.memory_bandwidth": ["x0.5", "x1", "x2"]; "knobs.compute", "execution.elementwise").
    Names joined by "+" change together.  response: "t_est", "t_bound", "flops", "bytes_hbm" or
    another of RESPONSES; log: effects of its logarithm.

    plot: a PNG, a tornado.  Other arguments are those of `trace` and `estimate`; phase: default
    decode for a Hugging Face model that has it, else forward.
    Raises RequestError for an unknown name or level, and the errors of `form`.
    """

def solve(
    source: Source,
    *args: Any,
    at: Mapping[str, int] | None = ...,
    most: int = ...,
    progress: Callable[[str], None] | None = ...,
    find: str = ...,
    tpot: float | str | None = ...,
    ttft: float | str | None = ...,
    step: float | str | None = ...,
    mix: str | workloads.Mix | None = ...,
    apart: bool = ...,
    prefill_chip: Any = ...,
    over: Any = ...,
    chips: int | Sequence[int] | None = ...,
    price: float | Mapping[str, float] | None = ...,
    power: float | Mapping[str, float] | None = ...,
    pue: float | None = ...,
    kept_free: float = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Answer:
    """Answer a question about a step, with the margin, the second best and the grounds.

    find: a size, as "batch" or "kv": its largest value within the limits; "cheapest", "energy",
    "throughput", "latency": the best deployment within them; "rates": the bandwidth, FLOP rate and
    link at which computing would limit; "passing": the length of the cache at which attention takes
    longer than the MLP; "chips": how many by capacity.  tpot, ttft, step: limits in seconds, or as
    "30 ms": per output token, to the first token of the longest prompt, of a step.
    mix: requests as "2048:256@3,8192:1024" (prompt, output, share), whose prefills delay the
    decode steps or run `apart`, on chips like these or on `prefill_chip`.  over: values of the open
    size.  chip: default all with a price for "cheapest", else "h200-sxm".  chips: how many share
    each product; default as few as hold the limits.  execution: default "serving" for prefill and
    decode, else "efficient".  price, power: dollar/hour and watt (with its share of the node) of
    one chip, for all or by name.  pue: energy of the building over that of its computers.
    kept_free: share of the memory.  at: the other sizes of a saved form.  chip, execution, dtype,
    kv_dtype: one or several.  Other arguments are those of `trace`.

    Raises RequestError for a size that there is not, limits that are no times, chips without a
    price where dollars are asked for; and the errors of `form`.  If no candidate meets the limits,
    the answer has no `best`, and names the nearest.
    """

def form(
    source: Source,
    *args: Any,
    over: Sequence[str] | Mapping[str, Any] = ...,
    phase: str | None = ...,
    most: int = ...,
    progress: Callable[[str], None] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    cached: Any = ...,
    new: Any = ...,
    **kwargs: Any,
) -> Form:
    """The step of a source with some of its sizes left open.

    over: names of the sizes, or for each its values: a range, a list, or a text as "1..1024" or
    "256..65536:x2".  Sizes are batch, seq, kv, integers of a config ("config.num_hidden_layers"),
    keywords of the function that a target names, names in the shapes of `inputs`, and dimensions
    of the arguments of a call ("x.1").  phase: prefill, decode, forward (default) or training.
    most: of traces.  Other arguments are those of `trace`.

    Raises RequestError for a size that there is not, an empty range, and a size that the model
    cannot take; and the errors of `trace`.
    """

def sweep(
    source: Source,
    *args: Any,
    out: str | os.PathLike[str] | None = ...,
    progress: Callable[[str], None] | None = ...,
    over: Mapping[str, Any] | Sequence[str],
    vary: Mapping[str, Sequence[Any]] | None = ...,
    most: int = ...,
    phases: Sequence[str] | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    optimizer: str = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool = ...,
    torch: str | None = ...,
    trust_remote_code: bool = ...,
    dtype: str | Sequence[str | None] | None = ...,
    weights_dtype: str | None = ...,
    kv_dtype: str | Sequence[str | None] | None = ...,
    chip: str | Chip | Sequence[str | Chip] | None = ...,
    system: str | System | Sequence[str | System] | None = ...,
    host: str | os.PathLike[str] | Host | None = ...,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = ...,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = ...,
    rewrites: Sequence[str] = ...,
    tf32: bool | None = ...,
    library: str | None = ...,
    exchange: str | None = ...,
    what_if: Mapping[str, float] | None = ...,
    **kwargs: Any,
) -> Sweep:
    """The cost of a step over ranges of its sizes, on each chip, from a handful of traces.

    source: a module, a target, a `Form` or the file of one.  over: the sizes and their values, as
    for `form`.  vary: settings of the source, each with several values; each combination is traced
    by itself.  chip, execution, dtype, kv_dtype: one or several.  out: a .parquet or .csv file;
    finished parts are kept with the traces until it is complete, and the same call resumes there.

    Returns the Sweep: `.frame()`, `.crossings()`, `.cliffs()`, `.best()`.  Raises RequestError for
    an unknown size, an empty range, and the errors of `form`.
    """

def trace(
    model: nn.Module | Callable[..., Any] | OpGraph | Mapping[str, OpGraph] | str | PathLike,
    *args: Any,
    phase: str | None = ...,
    loss: Callable[[Any], Any] | None = ...,
    optimizer: str | None = ...,
    dtype: str | None = ...,
    branches: Mapping[int, bool] | None = ...,
    assume: Mapping[str, Any] | None = ...,
    repeats: bool | None = ...,
    torch: str | None = ...,
    batch: int | None = ...,
    seq: int | None = ...,
    kv: int | None = ...,
    inputs: Mapping[str, str] | None = ...,
    settings: Mapping[str, Any] | None = ...,
    mesh: Mapping[str, int] | None = ...,
    checkpoint: str = ...,
    plan: str = ...,
    zero: int = ...,
    schedule: str | None = ...,
    interleave: int | None = ...,
    microbatches: int | None = ...,
    trust_remote_code: bool = ...,
    cached: Any = ...,
    new: Any = ...,
    **kwargs: Any,
) -> OpGraph:
    """Capture one step of `model` called with these arguments.

    Of a tensor among the arguments only the size is read; of a small one (ids, masks, lengths)
    also its value.  phase: forward (default), training (adds loss, backward and
    the optimizer step), prefill or decode (one token after a prompt of `input_ids`).  loss: maps
    the output to a scalar; without it the model's own loss, or a unit gradient into each floating
    output.  optimizer: adamw (default), none, or the name of a class in torch.optim, in any case.
    dtype: the precision that the step will be priced in, if not the model's own (`reprice`).
    branches: which way unknown conditions go, by their number in the order they are met.
    assume: what is taken for unknown values, by kind or kind@module: {"density": 0.1,
    "branch@layers.*.gate": True, "value": 3, "routing": "skewed:1.0"}.
    repeats: equal layers stand once in the graph, and their Python runs once where a second run
    could record nothing else; False runs and lists everything.
    torch: the release of PyTorch that runs the step, "2.8" or "2.5.1", where it is another than the
    one that is installed: it decides which ops are one kernel on CUDA.

    model may also be a torch.export.ExportedProgram, or a plain function, trace(fn, x, y), with the
    modules and tensors that it refers to.  Or it is a function of yours whose first argument is a
    module: a whole step.  Ops of autograd and of torch.optim in it are its backward and its
    optimizer; phase, loss, optimizer and dtype are then what it runs.

    Or it names a target, "path/file.py:build" or a Hugging Face config.json: then, and for a
    Hugging Face model without arguments, batch, seq, kv and inputs={"x": "8,3,224,224:fp32"} are
    the sizes.  cached=(4096, 100) and new=(1, 512) are those of a step of requests of different
    lengths, in place of batch, seq and kv.  Of a saved graph phase chooses one.

    Raises TraceError where the model's code fails.  Raises RequestError for a phase that the model
    does not have, and for an argument that neither the model nor rooftrace takes.
    """
