"""Changes that could make a step cheaper: candidates, their priced what-ifs, and their order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from rooftrace._plain import Plain
from rooftrace._shown import short
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.estimates.rows import lead_op
from rooftrace.costmodels.fusion import (
    SUMMARIES,
    ExecutionModel,
    Plan,
    execution_model,
    waits_at,
)
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.ops import price_ops, with_families
from rooftrace.costmodels.rewrites import HALVES, Edit, applicable, findings, written_rewrites
from rooftrace.costmodels.timing.timings import REGIMES, ranked
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.precisions import compute_family, precision
from rooftrace.hardware.units import format_flops, format_share, format_time, format_traffic, listed
from rooftrace.studies.advice.variants import Compared, Headroom, Study, Variant, most_saved

if TYPE_CHECKING:
    import pandas

LEVERS = (
    "attention",
    "fusion",
    "launch",
    "rewrite",
    "layout",
    "padding",
    "optimizer",
    "wait",
    "copy",
    "compute",
    "weights",
    "cache",
    "kernels",
    "memory",
    "together",
)
"""Changes of a what-if: the attention kernel, which ops share a kernel, how kernels are launched,
the graph, the order of dimensions in memory, odd sizes, the optimizer's kernels, waits of the host
for the device, copies, the precision of everything, of the weights, or of the KV cache, kernels
larger than a compiler makes, memory; the last is several of these at once."""


@dataclass(frozen=True, kw_only=True)
class WhatIf(Plain, Compared):
    """A step with one thing changed, and the step without the change; both are estimates."""

    lever: Annotated[str, ("enum", LEVERS)]
    action: str  # a sentence
    option: str  # options of rooftrace, or a call, for the same; may be empty
    needs: str  # its assumptions and costs
    at_most: bool = False  # whether the gain is an upper bound
    runs: int = 1  # of `after` for as much work, whose gradients add up; the optimizer steps once
    away: int = 0  # bytes in the host's memory, which come and go once in a step
    t_away: float = 0.0  # seconds of those copies

    KEYS = (
        "lever action source option t_before t_after gain share at_most acts_on needs rests_on "
        "peak fits"
    )

    @cached_property
    def source(self) -> str:
        """The line whose kernels lose most seconds, "model.py:12".

        Where only launches change it is the line with most kernels; "" where no line is known, and
        where no line of the step changes.
        """
        if self.lever == "together" or self.runs > 1 or self.after.graph.processes > 1:
            return ""
        lines, kernels, gone = (defaultdict[str, float](float) for _ in range(3))
        if self.away:
            steps = (op.source for op in self.before.graph.ops if op.part == "optimizer")
            return next(filter(None, steps), "")
        forward = {op.module: op.source for op in self.before.graph.ops if op.part == "forward"}
        for sign, step in ((1, self.before), (-1, self.after)):
            for row in step.rows:
                op = lead_op(step.plan, step.plan.groups[row.index])
                line = op.source or (op.part == "recompute" and forward.get(op.module)) or ""
                lines[line] += sign * row.timing.t_device
                kernels[line] += row.count if sign > 0 else 0
                gone[line] += sign * row.count
        if self.lever == "wait":
            gone_waits = waits_at(self.before.graph)
            gone_waits.subtract(waits_at(self.after.graph))
            lines = defaultdict(float, gone_waits)
        best = max(lines, key=lines.__getitem__, default="")
        few = self.before.times.t_serial * LEAST
        if lines[best] <= (0 if self.lever == "wait" else few):
            lines = gone if max(gone.values(), default=0) > 0 else kernels
        return max(lines, key=lines.__getitem__, default="")

    @property
    def t_after(self) -> float:
        """Seconds of as much work with the change."""
        if self.runs == 1:
            return self.after.t_est + self.t_away
        once = self.after.by_part()["optimizer"].seconds if self.after.memory.optimizer else 0.0
        return self.runs * (self.after.t_est - once) + once

    @cached_property
    def acts_on(self) -> Annotated[str, ("enum", REGIMES)]:
        """The regime that loses most seconds: compute, hbm, network or launch."""
        return ranked(self.regime_seconds)[0]

    @cached_property
    def rests_on(self) -> str:
        """The difference of the two steps in FLOP, HBM bytes and kernels."""
        before, after = self.before, self.after
        texts = {
            "": (format_flops(before.flops), format_flops(after.flops)),
            "HBM ": (format_traffic(before.bytes_hbm), format_traffic(after.bytes_hbm)),
            "kernels ": (f"{before.kernels:,}", f"{after.kernels:,}"),
        }
        changed = [f"{of}{was} -> {now}" for of, (was, now) in texts.items() if was != now]
        return ", ".join(changed) or "the same FLOP, bytes and kernels"

    @property
    def peak(self) -> int:
        """Bytes alive at the peak with the change; gradients that add up are there all the time."""
        memory = self.after.memory
        kept = memory.gradients - memory.at_peak.get("gradients", 0) if self.runs > 1 else 0
        return memory.peak + kept - self.away

    @property
    def fits(self) -> bool:
        """Whether the step with the change fits the chip."""
        return self.peak <= self.after.chip.room()

    def __repr__(self) -> str:
        return short(self, str(self))

    def __str__(self) -> str:
        most = "at most " if self.at_most else ""
        return (
            f"{self.action}: {format_time(self.t_before)} -> {format_time(self.t_after)}, "
            f"{most}{format_time(self.gain)} less ({format_share(self.share)})"
        )


@dataclass(frozen=True)
class Guidance(Plain):
    """Changes that would help a step, most seconds first.  Each gain is of the change alone.

    together: compatible changes priced as one; None for fewer than two, and where they save no more
    than the best of them.  Gains do not add up to it.  ranks: the numbers of those changes, from 1,
    among the options.
    """

    step: Estimate
    options: tuple[WhatIf, ...]
    together: WhatIf | None = None
    ranks: tuple[int, ...] = ()
    fitting: tuple[WhatIf, ...] = ()  # after which the step fits its chip, shortest first

    KEYS = "execution=step.execution.name what_ifs=options together? to_fit=fitting"

    def to_frame(self) -> pandas.DataFrame:
        """One row per what-if, in order, the last one for all together; seconds and bytes."""
        import pandas

        every = (*self.options, *([self.together] if self.together else []))
        return pandas.DataFrame.from_records(
            [what_if.to_dict() for what_if in every], columns=WhatIf.KEYS.split()
        )

    def __repr__(self) -> str:
        step = self.step
        best = f"first: {self.options[0]}" if self.options else "no modelled change"
        return short(
            self,
            f"{step.graph.title} on {step.chip.name}, {step.execution.name}, "
            f"{format_time(step.t_est)}; {best}",
        )

    def __str__(self) -> str:
        lines = [f"{number}. {what_if}" for number, what_if in enumerate(self.options, 1)]
        if self.together is not None:
            lines.append(str(self.together))
        return "\n".join(lines) or "no modelled change saves 1 % or more of the step"


# -- whatifs ---------------------------------------------------------------------------------------

LEAST = 0.01
"""Share of a step that a change has to save to be listed."""


def guidance(
    graph: OpGraph | Plan | Estimate,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
) -> Guidance:
    """Changes that would make a step on `chip` faster, in order (an Estimate has its chip).

    Each change stands alone and is priced by an estimate: how the step is run, named rewrites,
    findings in the code, narrower precisions, larger kernels.  Less than 1 % is left out.
    """
    step = graph if isinstance(graph, Estimate) else estimate(graph, chip, execution)
    if not step.t_est:
        return Guidance(step, ())
    priced = ((change, priced_change(step, change)) for change in changes_of(step))
    helping = [
        (change, w)
        for change, w in priced
        if w is not None and w.share >= LEAST and (w.fits or w.lever != "memory")
    ]
    helping.sort(key=lambda pair: -pair[1].gain)
    options = [what_if for _, what_if in helping]
    larger = _larger_kernels(step)
    if larger is not None and larger.share >= LEAST and not _repeats(larger, options):
        options.append(larger)
    options.sort(key=lambda what_if: -what_if.gain)
    chosen = merged([change for change, _ in helping])
    if len(chosen) < 2:
        return Guidance(step, tuple(options))
    ranks = tuple(options.index(what_if) + 1 for change, what_if in helping if change in chosen)
    together = priced_change(step, all_of(chosen, f"{listed([*map(str, ranks)])} together"))
    best = max(options[rank - 1].share for rank in ranks)
    if together is None or together.share < best + LEAST:
        return Guidance(step, tuple(options))
    return Guidance(step, tuple(options), together, ranks)


def _repeats(larger: WhatIf, options: Sequence[WhatIf]) -> bool:
    """Whether a change of the same line, without new kernels, saves as much as larger kernels."""
    code = ("attention", "layout", "rewrite")
    return any(
        w.lever in code and w.gain > larger.gain and w.source == larger.source for w in options
    )


def priced_change(step: Estimate, change: StepChange) -> WhatIf | None:
    """The what-if of a change; None where the chip has no rate for its precision."""
    before = by_rules(step) if change.regroups else step
    model = change.applied(before.execution)
    graph = change.edited(step.plan.source)
    if graph is not None and change.lever != "memory" and most_saved(step, graph) < LEAST:
        return None
    variant = Variant(graph=graph, precisions=change.precisions, execution=model)
    try:
        after = Study(step).estimate(variant)
    except MissingPeakError:
        return None
    return WhatIf(
        lever=change.lever,
        action=f"{change.action[:1].upper()}{change.action[1:]}",
        option=change.option(before.execution),
        needs=change.needs,
        before=before,
        after=after,
        at_most=change.at_most,
    )


def by_rules(step: Estimate) -> Estimate:
    """The step without measured factors on bytes, which hold for its kernels alone."""
    planned = step.plan.by_rules
    return step if planned is step.plan else estimate(planned, step.chip)


def _larger_kernels(step: Estimate) -> WhatIf | None:
    """The kernels that joins beyond those of a compiler would make, all at once."""
    if step.execution.fusion != "detected":
        return None
    larger = Headroom(by_rules(step))
    if not larger.left:
        return None
    first = larger.left[0]
    where = f"{first.name}{f' in {first.module}' if first.module else ''}"
    return WhatIf(
        lever="kernels",
        action="Write larger kernels",
        option="estimate.headroom().beyond",
        needs="kernels that a compiler does not make (epilogues of products, whole attention, "
        f"chains), first of all {where}",
        before=larger.after,
        after=larger.beyond,
        at_most=True,
    )


# -- changes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """Other precisions, other fields of the execution model, or both.

    precisions: by the names that `reprice` has for them.
    """

    lever: str
    action: str
    needs: str
    precisions: Mapping[str, str] = field(default_factory=dict)
    execution: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    at_most: bool = False
    narrow: bool = False  # whether its edits leave nothing to multiply in fp32

    @property
    def regroups(self) -> bool:
        """Whether kernels are formed in another way than in a run whose bytes were measured."""
        return bool(self.edits) or not {"fusion", "attention"}.isdisjoint(self.execution)

    def edited(self, graph: OpGraph) -> OpGraph | None:
        """The graph of the mended code; None where nothing of it changes."""
        for edit in self.edits:
            graph = edit(graph)
        return graph if self.edits else None

    def applied(self, model: ExecutionModel) -> ExecutionModel:
        """The execution model with this change; rewrites are added to those that it has."""
        fields = dict(self.execution)
        if "rewrites" in fields:
            fields["rewrites"] = (*model.rewrites, *fields["rewrites"])
        return replace(model, **fields, name=f"{model.name}, {self.lever}") if fields else model

    def option(self, model: ExecutionModel) -> str:
        """Options of the command line for it, else a call in Python; "" where code changes."""
        if self.edits:
            return ""
        texts = [f"--{name.replace('_', '-')} {value}" for name, value in self.precisions.items()]
        fields = dict(self.execution)
        if rewrites := fields.pop("rewrites", ()):
            texts.append(f"--rewrite {','.join(rewrites)}")
        if fields.pop("tf32", False):
            texts.append("--tf32")
        if not fields:
            return " ".join(texts)
        preset = _preset(model, fields)
        if preset:
            return " ".join([f"--execution {preset}", *texts])
        changed = ", ".join(f'{name}="{value}"' for name, value in fields.items())
        start = f'"{model.name}"' if model.name in SUMMARIES else "execution"
        call = f"execution_model({start}, {changed})"
        return f"{' '.join(texts)} and {call}" if texts else call


def _preset(model: ExecutionModel, fields: Mapping[str, Any]) -> str:
    """The preset that runs a step as `model` with these fields does; empty where none does.

    What other options of the command line say (--knobs, --tf32, --rewrite, --library) is as in
    `model`.
    """
    wanted = replace(model, **fields)
    for name in SUMMARIES:
        preset = execution_model(name)
        said: dict[str, Any] = {"name": model.name, "knobs": model.knobs, "tf32": model.tf32}
        said |= {"disturbances": model.disturbances, "exchange": model.exchange}
        if model.name in SUMMARIES and model.library != execution_model(model.name).library:
            said["library"] = model.library
        if not preset.rewrites:
            said["rewrites"] = model.rewrites
        if wanted == replace(preset, **said):
            return name
    return ""


def changes_of(step: Estimate) -> Iterator[StepChange]:
    """Every change that may help this step; which of them does is for prices to say."""
    yield from _how_run(step.execution, step.graph, step.chip)
    yield from _rewrites(step)
    compiled = step.execution.fusion == "detected" and step.execution.dispatch != "mixed"
    halves = [half for half in HALVES if step.chip.has_peak("matrix", half)]
    for mend in findings(step.plan.source, engines.ACCESS, compiled, halves):
        fields = mend._asdict()
        yield StepChange(edits=(fields.pop("edit"),), **fields)
    yield from _precisions(step)


# -- how the step is run ---------------------------------------------------------------------------


def _how_run(model: ExecutionModel, graph: OpGraph, chip: Chip) -> Iterator[StepChange]:
    if model.attention == "materialised":
        yield StepChange(
            lever="attention",
            action="Run attention as one kernel",
            needs="a fused attention kernel for these shapes and this mask",
            execution={"attention": "flash"},
        )
    if model.fusion == "none":
        dispatch = {"dispatch": "compiled"} if model.dispatch == "eager" else {}
        yield StepChange(
            lever="fusion",
            action="Compile the step, so that ops share kernels",
            needs="a compiler that joins ops as torch.compile does; joins are found in the graph",
            execution={"fusion": "detected", **dispatch},
        )
    if model.dispatch != "graph" and chip.kind == "gpu":
        stops = waits_at(graph).total()
        each = f"; a graph for each of {stops + 1:,} parts between waits" if stops else ""
        yield StepChange(
            lever="launch",
            action="Launch by CUDA graphs" if stops else "Launch the step as one CUDA graph",
            needs=f"shapes and addresses that stay from step to step{each}",
            execution={"dispatch": "graph"},
        )


ACTIONS: Mapping[str, str] = {
    "shared-heads": "Read keys and values that heads share without a copy for each",
    "mask-numbers": "Tell the attention kernel the kind of its mask, not the mask",
    "gated-delta-rule": "Run delta rules with the kernels of flash-linear-attention",
    "linear-attention": "Run linear attention with the kernels of flash-linear-attention",
    "causal-conv1d": "Run causal convolutions over time by the kernel of causal-conv1d",
    "selective-scan": "Run selective scans by the kernel of mamba_ssm",
    "ssd": "Run state-space layers by the chunked kernels of mamba_ssm",
    "absorb-latent": "Attend to the cached latents, their projection absorbed into query and "
    "output",
    "routed-experts": "Compute each expert for the tokens routed to it only",
    "fused-routing": "Choose experts, and make their weights, in one kernel",
    "fused-experts": "Take and put back rows of experts inside their products",
    "index-scores": "Add the scores of keys up over heads before they are written",
    "narrow-operands": "Multiply narrow numbers with wide results, in place of widened ones",
    "fused-qkv": "Compute query, key and value as one product",
    "fused-gate-up": "Compute the gate and up projections as one product",
    "last-logits": "Compute the logits of the one position that is read, as the last of a prompt",
    "static-cache": "Write new rows into a cache that has room",
}
"""The action of each named rewrite, but for `written_rewrites`."""


def _rewrites(step: Estimate) -> Iterator[StepChange]:
    source = step.plan.source
    if step.graph.phase == "training":
        return
    classified = with_families(source, price_ops(source)[0])
    for name in applicable(classified, step.execution):
        if name == "static-cache" and step.execution.kv_append == "in-place":
            continue  # it is done
        action, names = (ACTIONS[name], (name,)) if name in ACTIONS else written_rewrites(source)
        yield StepChange(
            lever="rewrite",
            action=action,
            needs="code, or a server, that does so; results stay the same",
            execution={"rewrites": names},
        )


# -- precisions ------------------------------------------------------------------------------------

NARROWER: Mapping[str, str] = {
    "fp64": "fp32",
    "fp32": "bf16",
    "bf16": "fp8",
    "fp16": "fp8",
    "fp8": "fp4",
}
"""The next narrower precision to compute in, by the names of a chip's rates."""
STORED: Mapping[str, str] = {"bf16": "fp8", "fp16": "fp8", "fp8": "int4", "int8": "int4"}
"""The next narrower precision to store weights in, or a KV cache; computing stays as wide."""


def _precisions(step: Estimate) -> Iterator[StepChange]:
    """Tensor roles in the step's precision one step narrower; convolutions have 16 bits or more."""
    graph, chip = step.plan.source, step.chip
    wide = Study.priced_precision(graph)
    family, training = compute_family(wide), graph.phase == "training"
    if family == "fp32" and not step.execution.tf32 and chip.has_peak("matrix", "tf32"):
        yield StepChange(
            lever="compute",
            action="Multiply matrices in TF32",
            needs="products that round their operands to 10 bits; accuracy is not checked",
            execution={"tf32": True},
        )
    flops = Counter[str]()
    for work, flop in step.plan.total.computed().items():
        flops[work.operation] += flop
    convolves = flops["convolution"] > flops["matmul"]
    narrower = None if training else NARROWER.get(family)
    low = narrower is not None and precision(narrower).bits < 16
    if narrower and chip.has_peak("matrix", narrower) and not (low and convolves):
        yield StepChange(
            lever="compute",
            action=f"Compute and store in {narrower} what is in {wide}",
            needs=f"{narrower} {'everywhere, also between layers' if low else 'weights'}; "
            "accuracy is not checked",
            precisions={"dtype": narrower},
            at_most=low,
        )
    stored = STORED.get(family)
    if stored is None or training or convolves:
        return
    external = [graph.values[i] for i in graph.external if graph.values[i].storage == i]
    held = {tensor.role for tensor in external if tensor.dtype == wide}
    for role, thing, needs in (
        ("weights", "weights", "{} weights, widened for free where they are used, their"),
        ("kv", "KV cache", "a cache in {}, widened for free where it is used, its"),
    ):
        if role in held and (role == "weights" or precision(stored).bits >= 8):
            yield StepChange(
                lever=thing.split()[-1],
                action=f"Store the {thing} in {stored}",
                needs=f"{needs.format(stored)} scales not counted; accuracy is not checked",
                precisions={f"{role}_dtype": stored},
                at_most=True,
            )


# -- several at once -------------------------------------------------------------------------------

_STRONGER = ("eager", "compiled", "graph")


def merged(changes: Sequence[StepChange]) -> tuple[StepChange, ...]:
    """Compatible changes, in order, without those that contradict an earlier one.

    One that another implies goes, too: weights in fp8, where all is; TF32 or autocast without fp32.
    """
    everything = {change.precisions.get("dtype") for change in changes}
    narrow = any(change.narrow for change in changes)
    kept: list[StepChange] = []
    precisions: dict[str, str] = {}
    for change in changes:
        new = change.precisions
        done = bool(new) and "dtype" not in new and set(new.values()) <= everything
        done |= change.execution == {"tf32": True} and (narrow or everything != {None})
        done |= change.narrow and everything != {None}
        clash = any(precisions.get(name, value) != value for name, value in new.items())
        if not done and not clash:
            precisions |= new
            kept.append(change)
    return tuple(kept)


def all_of(chosen: Sequence[StepChange], action: str) -> StepChange:
    """One change that is all of these, none of which contradicts another."""
    execution: dict[str, Any] = {}
    for change in chosen:
        for name, value in change.execution.items():
            if name == "rewrites":
                execution[name] = tuple(dict.fromkeys((*execution.get(name, ()), *value)))
            elif name == "dispatch":
                execution[name] = max(value, execution.get(name, value), key=_STRONGER.index)
            else:
                execution[name] = value
    return StepChange(
        lever="together",
        action=action,
        needs="what each of them needs",
        precisions={name: v for change in chosen for name, v in change.precisions.items()},
        execution=execution,
        edits=tuple(edit for change in chosen for edit in change.edits),
        at_most=any(change.at_most for change in chosen),
    )
