"""Sentences and short cells that reports share: data in, text out, no layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.ops import MATRIX
from rooftrace.costmodels.timing.timings import ranked
from rooftrace.graph import pattern_of
from rooftrace.hardware import units
from rooftrace.hardware.units import (
    MISSING,
    format_bandwidth,
    format_capacity,
    format_count,
    format_flop_rate,
    format_flops,
    format_intensity,
    format_time,
    format_traffic,
)

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.costmodels.fusion import Coverage
    from rooftrace.costmodels.memory import Held, LargestBatch, Memory
    from rooftrace.costmodels.timing.timings import StepTimes
    from rooftrace.graph import Assumption
    from rooftrace.hardware import Chip

UNSUPPORTED_ON_A_SCREEN = 3
"""How many ops without a rule are named."""

ATTENTION_BACKWARD = (
    "2 times the FLOP of its forward; scores that a fused kernel computes again are recomputation "
    "(FlopCounterMode counts both: 2.5 times)"
)
"""The convention for FLOP of attention's backward."""

plural, listed = units.plural, units.listed

LIMITS: Mapping[str, str] = {
    "hbm": "HBM",
    "compute": "compute",
    "network": "network",
    "launch": "launch",
}


def limit(name: str) -> str:
    """A limit as tables name it; a name that is in words already stays."""
    return LIMITS.get(name, name)


def percent(share: float | None) -> str:
    """A share in percent for narrow cells: "91%", "<1%" where it would round to 0, "30x"."""
    if share is None:
        return MISSING
    if share >= 9.995:
        return f"{share:,.0f}x"
    if 0 < share < 0.005:
        return "<1%"
    if 0.995 <= share < 1:
        return ">99%"
    return f"{share * 100:.0f}%"


def bare(text: str, unit: str) -> str:
    """`text` without its unit, for a column with the unit in its head: "9.1 TFLOP" -> "9.1 T"."""
    return text.removesuffix(unit).rstrip()


def time_word(estimates: Iterable[Estimate]) -> str:
    """The kind of the times of estimates: "expected", "bound", or "time" where both occur."""
    kinds = {estimate.expected for estimate in estimates}
    if len(kinds) > 1:
        return "time"
    return "expected" if True in kinds else "bound"


def interval_words(interval: tuple[float, float] | None) -> str:
    """The least and the most of an interval of seconds: "31.9–72.1 ms"."""
    if interval is None:
        return MISSING
    low, high = map(format_time, interval)
    number, _, unit = low.rpartition(" ")
    return f"{number if high.endswith(f' {unit}') else low}–{high}"


def regime_words(times: StepTimes) -> str:
    """The regime with its share of t_est, and the next one: "HBM 91%, compute 7%"."""
    shares = times.regime_shares
    first, second = ranked(shares)[:2]
    text = f"{LIMITS[first]} {percent(shares[first])}"
    return f"{text}, {LIMITS[second]} {percent(shares[second])}" if shares[second] > 0 else text


def model_words(model: Mapping[str, Any], workload: Mapping[str, Any], processes: int = 1) -> str:
    """ "DeepseekV3ForCausalLM, 671.0 B parameters (16.4 GiB in each of 8 processes), fp8"."""
    parts = [str(model.get("name") or "model")]
    params = model.get("params")
    if params is not None:
        part = format_capacity(model.get("bytes_parameters", 0))
        held = f" ({part} in each of {processes} processes)" if processes > 1 else ""
        parts.append(f"{format_count(params)} parameters{held}")
    dtype = workload.get("dtype") or model.get("dtype")
    if dtype:
        parts.append(str(dtype))
    declared = model.get("bytes_stored") and model["bytes_stored"] == model.get("bytes_parameters")
    stored = workload.get("weights_dtype") or (model.get("stored_as") if declared else None)
    if stored and stored != dtype:
        parts.append(f"weights {stored}")
    if workload.get("kv_dtype") and workload["kv_dtype"] != dtype:
        parts.append(f"KV cache {workload['kv_dtype']}")
    return ", ".join(parts)


def workload_words(phase: str, workload: Mapping[str, Any]) -> str:
    """The inputs of one step: "8 x 255 tokens, adamw", "8 x 1 token, KV 4,096", "batch 8".

    Of a pipeline: "16 microbatches of 1 x 255 tokens, adamw".
    """
    item = str(workload.get("item") or "sample")
    parts = []
    batch, items, kv = workload.get("batch"), workload.get("items"), workload.get("kv")
    release = [f"as torch {workload['torch']} runs it"] if workload.get("torch") else []
    if workload.get("requests"):
        return ", ".join((_requests_words(workload["requests"]), *release))
    if batch and items and item == "token" and items % batch == 0:
        parts.append(f"{batch} x {plural(items // batch, item)}")
    elif batch:
        parts.append(f"batch {batch}")
    elif items:
        parts.append(plural(int(items), item))
    if parts and (microbatches := workload.get("microbatches")):
        noun = "microbatch" if microbatches == 1 else "microbatches"
        parts[0] = f"{microbatches:,} {noun} of {parts[0]}"
    if kv and phase != "prefill":
        parts.append(f"KV {kv:,}")
    if phase == "training" and workload.get("optimizer"):
        optimizer = workload["optimizer"]
        parts.append("no optimizer" if optimizer == "none" else str(optimizer))
    return ", ".join((*parts, *release))


_FEW = 3
"""Groups of equal requests that are listed one by one."""


def _requests_words(groups: Sequence[Sequence[int]]) -> str:
    """Requests of one step: "2 requests: 1 x 1 token behind 4096, 1 x 512 behind 0"."""
    count = sum(group[2] for group in groups)
    if len(groups) > _FEW:
        new = sum(tokens * each for _, tokens, each in groups)
        cached = sum(held * each for held, _, each in groups)
        return f"{plural(count, 'request')}, {plural(new, 'new token')} behind {cached:,} cached"
    parts = [f"{each} x {plural(tokens, 'token')} behind {held:,}" for held, tokens, each in groups]
    return f"{plural(count, 'request')}: {', '.join(parts)}"


def kernel_name(name: str) -> str:
    """The name of a kernel without the namespace that nearly all share."""
    return name.removeprefix("aten.")


def op_name(name: str) -> str:
    """The name of an op without its namespace, where that is PyTorch's or ours."""
    return name.removeprefix("aten.").removeprefix("rooftrace.")


def chip_words(estimate: Estimate) -> str:
    """ "H200 SXM, 1979 TFLOP/s fp8 dense, 4800 GB/s, ridge 412.3 FLOP/byte, 131.3 GiB"."""
    chip = estimate.chip
    return ", ".join(
        (
            chip.title,
            f"{format_flop_rate(estimate.peak)} {estimate.peak_precision} dense",
            format_bandwidth(chip.memory_bandwidth.value),
            f"ridge {format_intensity(estimate.ridge)}",
            format_capacity(chip.memory_capacity.value),
        )
    )


def capacity_words(chip: Chip) -> str:
    """Both readings of a chip's memory, since both are in use: "141.0 GB = 131.3 GiB"."""
    size = chip.memory_capacity.value
    return f"{format_traffic(size)} = {format_capacity(size)}"


def fit_words(memory: Mapping[str, Memory], chip: Chip, processes: int = 1) -> tuple[bool, str]:
    """Whether every phase fits one chip, or each of several, and the sentence that says so."""
    if not memory:
        return True, ""
    misfits = [phase for phase, need in memory.items() if not need.fits(chip)]
    each = "one" if processes == 1 else f"each of {processes:,}"
    chip_name = f"{each} {chip.name} ({capacity_words(chip)})"
    if not misfits:
        largest = max(memory, key=lambda phase: memory[phase].peak)
        return True, (
            f"Fits {chip_name}: the peak is {format_capacity(memory[largest].peak)}, in {largest}."
        )
    weights = max(memory[phase].weights for phase in misfits)
    if weights > chip.memory_capacity.value:
        cause = f"{format_traffic(weights)} of weights do not fit {chip_name}"
    else:
        verb = "does" if len(misfits) == 1 else "do"
        cause = f"{listed(misfits)} {verb} not fit {chip_name}"
    by_count: dict[int, list[str]] = {}
    for phase in misfits:
        by_count.setdefault(memory[phase].chips_needed(chip), []).append(phase)
    needs = listed(
        [
            f"{listed(phases)} {'needs' if len(phases) == 1 else 'need'} {plural(count, 'chip')}"
            for count, phases in by_count.items()
        ]
    )
    held = "one chip if it" if processes == 1 else "these chips if they"
    return False, (
        f"{cause[0].upper()}{cause[1:]}: by capacity alone, {needs}. "
        f"Times are those of {held} held them."
    )


def held_words(held: Held) -> str:
    """A tensor at the peak: "weight", "weight.exp_avg", "mm, backward", "input_ids"."""
    if held.op and not held.name:
        return f"{kernel_name(held.op)}, {held.part}"
    name = held.name
    if held.module and name.startswith(f"{held.module}."):
        name = name[len(held.module) + 1 :]
    return name or held.role


def batch_words(batch: LargestBatch) -> str:
    """ "12", "65,536 or more", "0: weights alone do not fit", "0: one sample takes 150.2 GiB"."""
    if batch.batch:
        return f"{batch.batch:,} or more" if batch.open_ended else f"{batch.batch:,}"
    if not batch.weights_fit:
        return "0: weights alone do not fit"
    return f"0: one sample takes {format_capacity(batch.peak)}"


def alive(memory: Memory) -> dict[str, int]:
    """The peak by kind of tensor, summing to it; temporaries are all that is not listed."""
    lasting = {"weights": "weights", "kv": "KV", "gradients": "gradients", "optimizer": "optimizer"}
    sizes = {name: memory.at_peak.get(role, 0) for role, name in lasting.items()}
    if memory.gathered or memory.buffers:
        sizes["weights"] -= memory.gathered
        sizes |= {"gathered": memory.gathered, "buffers": memory.buffers}
    sizes["saved"] = memory.saved
    sizes["optimizer temporaries"] = memory.optimizer_temporaries
    return {**sizes, "temporaries": memory.peak - sum(sizes.values())}


def coverage_words(
    coverages: Iterable[Coverage], unrecorded: Sequence[Assumption] = ()
) -> tuple[bool, str]:
    """Whether the totals are complete, and the line that must accompany every total.

    unrecorded: ops that ran out of sight of the traces.
    """
    ops = with_rule = size = size_with_rule = 0
    for coverage in coverages:
        ops += coverage.ops
        with_rule += coverage.ops_with_rule
        size += coverage.bytes
        size_with_rule += coverage.bytes_with_rule
    share = size_with_rule / size if size else 1.0
    shown = "100 %" if size_with_rule == size else f"{min(share * 100, 99.99):.2f} %"
    sentence = f"{with_rule:,} of {ops:,} ops have a rule, {shown} of bytes"
    if not unrecorded:
        return with_rule == ops, sentence
    gaps = "; ".join(dict.fromkeys(item.text for item in unrecorded))
    return False, (
        f"{with_rule:,} of {ops:,} recorded ops have a rule, but not everything was recorded: "
        f"totals are a lower bound ({gaps})"
    )


def coverage_lines(estimates: Sequence[Estimate]) -> list[tuple[str, str]]:
    """(line, mark): how much of these steps was counted, and the ops without a rule."""
    gaps = [gap for estimate in estimates for gap in estimate.graph.unrecorded]
    complete, sentence = coverage_words((e.coverage for e in estimates), gaps)
    missing = [(line, "bad") for line in missing_rules(estimates)]
    return [(f"coverage: {sentence}", "" if complete else "bad"), *missing]


def attention_again(parts: Sequence[tuple[Estimate, int]]) -> list[str]:
    """The recomputed products of attention's backward, which the FLOP of a step leave out.

    parts: the pieces of the step, and how often each runs.
    """
    again = sum(
        times * step.graph.times(op) * cost.flops(MATRIX, ("recompute",))
        for step, times in parts
        for op, cost in zip(step.graph.ops, step.plan.op_costs, strict=True)
        if op.part == "backward" and "attention" in op.name
    )
    if not again:
        return []
    return [f"attention's backward: {ATTENTION_BACKWARD}, {format_flops(again)} here"]


def missing_rules(estimates: Iterable[Estimate]) -> list[str]:
    """The first few ops without a rule, and how to add one."""
    missing = {
        entry.target: entry for estimate in estimates for entry in estimate.unsupported_ops()
    }
    if not missing:
        return []
    by_size = sorted(missing.values(), key=lambda entry: (-entry.bytes, entry.target))
    shown = by_size[:UNSUPPORTED_ON_A_SCREEN]
    lines = [
        f"  no rule: {entry.target} x{entry.count:,}, {format_traffic(entry.bytes)}, in "
        f"{entry.modules[0] or '(root)'}; no FLOP counts, and its bytes are between "
        f"{format_traffic(entry.bytes_least)} and {format_traffic(entry.most)}"
        for entry in shown
    ]
    stub = next(iter(missing.values())).stub.splitlines()[0]
    rest = len(missing) - len(shown)
    more = f" ({rest} more ops)" if rest else ""
    return [*lines, f"  add one with {stub}, see report.md{more}"]


def assumption_words(assumptions: Iterable[Assumption]) -> str:
    """Assumptions by kind, one that several phases make counted once: "2 branch, 1 loss"."""
    distinct = {(a.kind, pattern_of(a.where), a.text) for a in assumptions}
    kinds = Counter(kind for kind, _, _ in distinct)
    ranked_kinds = sorted(kinds.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{count} {kind}" for kind, count in ranked_kinds) or "none"


_OF_WEIGHTS = ("config", "plan", "precision", "quantization", "unbuilt")


def of_weights(assumptions: Iterable[Assumption]) -> list[str]:
    """Assumptions on the types of stored weights, spelled out, each once."""
    return list(dict.fromkeys(f"{a.kind}: {a.text}" for a in assumptions if a.kind in _OF_WEIGHTS))


HOST_FACTS = frozenset(
    {"dispatch_eager", "dispatch_view", "module_call", "dispatch_compiled", "graph_launch"}
)
"""Facts of a chip that are about its host."""


def guess_words(chip: Chip) -> str:
    """Facts of a chip without a source; those of links, which one chip does not use, left out.

    So is the entry into a compiled graph, which a step without graph breaks does not pay.
    """
    names = [
        name
        for name, fact in chip.facts()
        if fact.kind == "guess"
        and not name.startswith(("measured ", "link ", "graph_entry", "context"))
    ]
    host = [name for name in names if name in HOST_FACTS]
    if len(host) > 1:
        names = [name for name in names if name not in host] + [f"{len(host)} of the host"]
    return ", ".join(names) or "none"


def differing(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of labels that do not have the same value in all of these mappings."""
    first = labels[0] if labels else {}
    return [name for name in first if len({str(each.get(name)) for each in labels}) > 1]


def short_text(text: str, most: int) -> str:
    """A text in so many letters; a cut one ends in "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def short_module(path: str, width: int) -> str:
    """A module path cut from the left, at a dot, where paths differ least: "…mlp.experts".

    A line of code keeps its number: "…ions.py:103".
    """
    if len(path) <= width:
        return path
    tail = path[len(path) - width + 1 :]
    dot = -1 if ":" in tail else tail.find(".")
    return f"…{tail[dot + 1 :] if 0 <= dot < len(tail) // 2 else tail}"
