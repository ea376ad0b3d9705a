"""JSON data for the script of a report's page: chips, steps, memory, modules and kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimates import Estimate, Row
from rooftrace.costmodels.estimates.rows import lead_op
from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import Op, OpGraph, pattern_of
from rooftrace.reporting.figures import roofs
from rooftrace.reporting.renderers import words

if TYPE_CHECKING:
    from rooftrace.costmodels.memory import Memory
    from rooftrace.hardware import Chip
    from rooftrace.reporting.sections import Results


# -- kernels ---------------------------------------------------------------------------------------
# Sums of kernels with equal name, module pattern, family, part, precision and fusion, as columns of
# numbers.  A page holds so many of them at most; those with less time are summed up by module,
# family and part, so that totals stay complete.

MOST_GROUPS = 1500
OTHERS_DEPTH, MOST_OTHERS = 3, 500
"""Names of a module path by which kernels beyond the most are summed up: fewer where there would be
more sums than these."""
LONGEST_FORMULA = 240
INPUTS_SHOWN, OPS_SHOWN = 4, 12


@dataclass(slots=True)
class Interned:
    """Texts of a page, each once."""

    texts: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def place(self, text: str) -> int:
        """The index of a text in `texts`."""
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


@dataclass(slots=True)
class _GroupSums:
    """Sums of equal kernels; `largest` is the one with most time, which gives the texts."""

    largest: Row
    calls: int = 0
    flops: int = 0
    useful: int = 0
    bytes: int = 0
    net: int = 0
    seconds: list[float] = field(default_factory=list)  # by chip
    limits: list[dict[str, float]] = field(default_factory=list)  # by chip: seconds by limiter


def columns_of(estimates: Sequence[Estimate], interned: Interned) -> dict[str, Any]:
    """The kernels of one step, most time on the first chip first, as columns of equal length.

    estimates: of one plan, on each chip.  Numbers are FLOP, byte and second; texts are indices of
    `interned`.
    """
    first = estimates[0]
    sums = _summed(estimates)
    ranked = sorted(sums.items(), key=lambda entry: (-entry[1].seconds[0], entry[0]))
    texts = [_texts(first, entry, key) for key, entry in ranked]
    entries = [entry for _, entry in ranked]
    return {
        **{name: [interned.place(each[name]) for each in texts] for name in _TEXTS},
        **{
            name: [getattr(entry, name) for entry in entries]
            for name in ("calls", "flops", "useful", "bytes", "net")
        },
        "seconds": [[entry.seconds[chip] for entry in entries] for chip in range(len(estimates))],
        "limit": [
            [interned.place(max(e.limits[chip], key=e.limits[chip].__getitem__)) for e in entries]
            for chip in range(len(estimates))
        ],
    }


_TEXTS = (
    *("name", "module", "family", "part", "precision"),
    *("shapes", "formula", "ops", "joins", "source"),
)
"""Keys of the texts of a group."""


def _summed(estimates: Sequence[Estimate]) -> dict[tuple[str, ...], _GroupSums]:
    rows = estimates[0].rows
    keys = [_key(estimates[0], row) for row in rows]
    kept = _kept(rows, keys)
    depth = _depth([row for row, key in zip(rows, keys, strict=True) if key not in kept])
    sums: dict[tuple[str, ...], _GroupSums] = {}
    for index, row in enumerate(rows):
        key = keys[index] if keys[index] in kept else _rest(row, depth)
        entry = sums.get(key)
        if entry is None:
            entry = sums[key] = _GroupSums(row, seconds=[0.0] * len(estimates))
            entry.limits = [defaultdict(float) for _ in estimates]
        if row.timing.t_device > entry.largest.timing.t_device:
            entry.largest = row
        entry.calls += row.count
        entry.flops += row.flops
        entry.useful += row.flops_causal
        entry.bytes += row.bytes
        entry.net += row.bytes_net
        for chip, estimate in enumerate(estimates):
            timing = estimate.rows[index].timing
            entry.seconds[chip] += timing.t_device
            entry.limits[chip][timing.regime] += timing.t_device
    return sums


def _key(estimate: Estimate, row: Row) -> tuple[str, ...]:
    joins = estimate.plan.groups[row.index].joins
    module = pattern_of(row.module)
    return (row.name, module, row.family, row.part, row.precision, "; ".join(joins))


def _kept(rows: Sequence[Row], keys: Sequence[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The keys with most time, as many as a page holds."""
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for row, key in zip(rows, keys, strict=True):
        seconds[key] += row.timing.t_device
    ranked = sorted(seconds, key=lambda key: (-seconds[key], key))
    return set(ranked[:MOST_GROUPS])


def _depth(rest: Sequence[Row]) -> int:
    """The most names of module paths that give at most MOST_OTHERS sums of these kernels."""
    return next(
        depth
        for depth in range(OTHERS_DEPTH, -1, -1)
        if not depth or len({_rest(row, depth) for row in rest}) <= MOST_OTHERS
    )


def _rest(row: Row, depth: int) -> tuple[str, ...]:
    """The key of a kernel that is summed up with others of its module, family and part."""
    module = ".".join(pattern_of(row.module).split(".")[:depth])
    return ("", module, row.family, row.part, "", "")


def _texts(estimate: Estimate, entry: _GroupSums, key: tuple[str, ...]) -> dict[str, str]:
    """The texts of a group: names, shapes, the formula of its rule, the reasons of its fusion."""
    row, graph = entry.largest, estimate.graph
    if not key[0]:  # the sum of smaller ones
        names = {"name": "smaller kernels", "module": key[1]}
        return {**dict.fromkeys(_TEXTS, ""), **names, "family": row.family, "part": row.part}
    lead = lead_op(estimate.plan, estimate.plan.groups[row.index])
    ops = [words.op_name(graph.ops[i].target) for i in row.ops] if len(row.ops) > 1 else []
    more = f" and {len(ops) - OPS_SHOWN} more" if len(ops) > OPS_SHOWN else ""
    return {
        "name": words.kernel_name(row.name),
        "module": pattern_of(row.module),
        "family": row.family,
        "part": row.part,
        "precision": row.precision,
        "shapes": shapes_of(graph, lead),
        "formula": formula_of(lead),
        "ops": f"{', '.join(ops[:OPS_SHOWN])}{more}",
        "joins": "; ".join(dict.fromkeys(estimate.plan.groups[row.index].joins)),
        "source": lead.source or "",
    }


def shapes_of(graph: OpGraph, op: Op) -> str:
    """ "bf16[8, 64], bf16[64, 32] -> bf16[8, 32]": inputs and outputs of an op."""
    inputs = [str(graph.values[index]) for index in op.inputs]
    outputs = [str(graph.values[index]) for index in op.outputs]
    left = len(inputs) - INPUTS_SHOWN
    shown = inputs[:INPUTS_SHOWN] + ([f"{left} more"] if left > 0 else [])
    return f"{', '.join(shown)} -> {', '.join(outputs[:INPUTS_SHOWN]) or 'nothing'}"


def formula_of(op: Op) -> str:
    """The formula of an op: the first sentences of the docstring of its rule."""
    rule = find_rule(op.target)
    text = (rule.price.__doc__ or "") if rule is not None else ""
    first = " ".join(text.strip().partition("\n\n")[0].split())
    return words.short_text(first, LONGEST_FORMULA)


# -- contents --------------------------------------------------------------------------------------
# Quantities are FLOP, byte, second, FLOP/byte; `Page` of site/app/src/contents.ts has these fields.

MOMENTS = 500
"""Moments of a memory timeline: about as many as a figure has pixels for."""
MOST_MODULES = 4000
"""Modules of a phase; of more, the page has those of its kernels."""
HELD = 60
"""Tensors at the peak that are listed."""


def contents(results: Results) -> dict[str, Any]:
    """The data of a report's page."""
    interned = Interned()
    steps = {
        phase: {
            execution: _step(list(by_chip.values()), interned)
            for execution, by_chip in executions.items()
        }
        for phase, executions in results.estimates.items()
    }
    memory = {
        phase: _memory(need, results.estimate(phase).graph, interned)
        for phase, need in results.memory.items()
    }
    modules = {phase: _modules(results, phase) for phase in results.phases}
    for phase in results.phases:
        if len(modules[phase]) > MOST_MODULES:
            shown = _shown_modules(steps[phase].values(), interned)
            modules[phase] = _folded(modules[phase], shown)
            if phase in memory:
                memory[phase]["modules"] = _moved_up(memory[phase]["modules"], shown)
    return {
        "title": str(results.model.get("name") or "model"),
        "main": results.main,
        "phases": list(results.phases),
        "executions": list(results.executions),
        "chips": [_chip(roof.chip, roof.ceilings) for roof in roofs(results)],
        "steps": steps,
        "memory": memory,
        "modules": modules,
        "texts": interned.texts,
    }


def _chip(chip: Chip, ceilings: Iterable[tuple[str, float]]) -> dict[str, Any]:
    return {
        "name": chip.name,
        "title": chip.title,
        "bandwidth": chip.memory_bandwidth.value,
        "capacity": chip.memory_capacity.value,
        "room": chip.room(),
        "ceilings": [{"name": name, "rate": rate} for name, rate in ceilings],
    }


def _step(estimates: Sequence[Estimate], interned: Interned) -> dict[str, Any]:
    first = estimates[0]
    return {
        "workload": words.workload_words(first.phase, first.graph.workload),
        "flops": first.flops,
        "bytes": first.bytes_hbm,
        "floor": first.bytes_compulsory,
        "intensity": first.ai_hbm,
        "kernels": first.kernels,
        "peak": first.memory.peak,
        "item": first.item,
        "roles": {role: size for role, size in first.bytes.to_dict().items() if size},
        "on": [_on_chip(estimate) for estimate in estimates],
        "groups": columns_of(estimates, interned),
    }


def _on_chip(estimate: Estimate) -> dict[str, Any]:
    interval = estimate.t_interval
    return {
        "word": words.time_word([estimate]),
        "seconds": estimate.t_est,
        "within": None if interval is None else list(interval),
        "bound": estimate.t_bound,
        "busy": estimate.times.t_serial,
        "waiting": estimate.times.t_launch,
        "mfu": estimate.mfu,
        "rate": estimate.items_per_s,
        "rate_per_chip": estimate.items_per_s_per_chip,
        "limits": estimate.times.regime_shares,
        "ridge": estimate.ridge,
    }


def _memory(need: Memory, graph: OpGraph, interned: Interned) -> dict[str, Any]:
    """The timeline of a phase as columns, and its peak by module and tensor."""
    moments = need.timeline.coarse(MOMENTS).moments
    sizes = [moment.by_kind for moment in moments]
    held: dict[str, int] = {}
    for tensor in need.tensors:
        held[tensor.module] = held.get(tensor.module, 0) + tensor.bytes
    return {
        "peak": need.peak,
        "time": [moment.time for moment in moments],
        "op": [interned.place(_op_words(graph, moment.op)) for moment in moments],
        "sizes": {
            kind: [size[kind] for size in sizes]
            for kind in (sizes[0] if sizes else ())
            if any(size[kind] for size in sizes)
        },
        "parts": [list(part) for part in need.timeline.parts()],
        "modules": held,
        "tensors": [
            {
                "what": words.held_words(tensor),
                "role": "saved" if tensor.saved else tensor.role,
                "module": tensor.module,
                "each": f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]",
                "count": tensor.count,
                "bytes": tensor.bytes,
            }
            for tensor in need.tensors[:HELD]
        ],
    }


def _op_words(graph: OpGraph, index: int) -> str:
    if not 0 <= index < len(graph.ops):
        return "before the first op"
    op = graph.ops[index]
    return f"{words.op_name(op.target)} in {op.module or '(root)'}"


def _shown_modules(steps: Iterable[Mapping[str, Any]], interned: Interned) -> set[str]:
    """The modules of the kernels on the page, and those around them."""
    shown = {""}
    for step in steps:
        for place in set(step["groups"]["module"]):
            path = interned.texts[place]
            while path not in shown:
                shown.add(path)
                path = path.rpartition(".")[0]
    return shown


def _moved_up(numbers: Mapping[str, int], shown: Collection[str]) -> dict[str, int]:
    """Sums by shown module; the sums of others go to the nearest shown one around them."""
    sums: dict[str, int] = {}
    for path, number in numbers.items():
        around = pattern_of(path)
        while around not in shown:
            around = around.rpartition(".")[0]
        sums[around] = sums.get(around, 0) + number
    return sums


def _folded(
    modules: Mapping[str, Mapping[str, Any]], shown: Collection[str]
) -> dict[str, dict[str, Any]]:
    """The shown modules, with the parameters of the hidden ones inside them."""
    sums = _moved_up({path: entry["parameters"] for path, entry in modules.items()}, shown)
    return {
        path: {**entry, "parameters": sums.get(path, 0)}
        for path, entry in modules.items()
        if path in shown
    }


def _modules(results: Results, phase: str) -> dict[str, dict[str, Any]]:
    """Class, count and parameters of each module pattern."""
    modules: dict[str, dict[str, Any]] = {}
    for path, kind in results.estimate(phase).graph.modules.items():
        name = kind if path or kind != results.model.get("name") else ""  # the title says it
        entry = modules.setdefault(pattern_of(path), {"class": name, "count": 0, "parameters": 0})
        entry["count"] += 1
    for module, count in results.parameters(phase).items():
        blank = {"class": "", "count": 0, "parameters": 0}
        modules.setdefault(module, blank)["parameters"] = count
    return modules
