"""What the script of a report's page draws from: plain numbers and texts of a report, as JSON.

Quantities are FLOP, byte, second, FLOP/byte.  `Page` in web/src/contents.ts has the same fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.reporting.hypertext.kernelgroups import Interned, columns_of
from rooftrace.reporting.view import words
from rooftrace.tracer.paths import pattern_of

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.costmodels.memory import Memory
    from rooftrace.reporting.sections import Results
    from rooftrace.tracer.graph import OpGraph

MOMENTS = 500
"""Moments of a memory timeline: about as many as a figure has pixels for."""
MOST_MODULES = 4000
"""Modules of a phase; of more, those stand on the page that its kernels are shown in."""
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
        "chips": [_chip(results, chip.name) for chip in results.chips],
        "steps": steps,
        "memory": memory,
        "modules": modules,
        "texts": interned.texts,
    }


def _chip(results: Results, name: str) -> dict[str, Any]:
    estimates = [
        results.estimate(phase, execution, name)
        for phase in results.phases
        for execution in results.executions
    ]
    chip = estimates[0].chip
    rates = {f"matrix {estimate.peak_precision}": estimate.peak for estimate in estimates}
    vector = chip.peak("vector", "fp32") if chip.has_peak("vector", "fp32") else None
    if vector is not None and vector not in rates.values():
        rates["vector fp32"] = vector
    return {
        "name": chip.name,
        "title": chip.title,
        "bandwidth": chip.memory_bandwidth.value,
        "capacity": chip.memory_capacity.value,
        "ceilings": [
            {"name": name, "rate": rate}
            for name, rate in sorted(rates.items(), key=lambda entry: -entry[1])
        ],
    }


def _step(estimates: Sequence[Estimate], interned: Interned) -> dict[str, Any]:
    first = estimates[0]
    return {
        "workload": words.workload_words(first.phase, first.graph.workload),
        "flops": first.flops,
        "bytes": first.bytes_hbm,
        "floor": first.bytes_compulsory,
        "kernels": first.kernels,
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
        "limits": estimate.times.regime_shares,
        "ridge": estimate.ridge,
    }


def _memory(need: Memory, graph: OpGraph, interned: Interned) -> dict[str, Any]:
    """The timeline of a phase as columns, and what its peak is made of."""
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
    """The modules that kernels on the page stand in, and those around them."""
    shown = {""}
    for step in steps:
        for place in set(step["groups"]["module"]):
            path = interned.texts[place]
            while path not in shown:
                shown.add(path)
                path = path.rpartition(".")[0]
    return shown


def _moved_up(numbers: Mapping[str, int], shown: Collection[str]) -> dict[str, int]:
    """Sums by module, those of modules that are not shown in the one around them that is."""
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
    """The modules that are shown, with the parameters of those inside of them that are not."""
    sums = _moved_up({path: entry["parameters"] for path, entry in modules.items()}, shown)
    return {
        path: {**entry, "parameters": sums.get(path, 0)}
        for path, entry in modules.items()
        if path in shown
    }


def _modules(results: Results, phase: str) -> dict[str, dict[str, Any]]:
    """Class, how many and parameters of each module pattern."""
    modules: dict[str, dict[str, Any]] = {}
    for path, name in results.estimate(phase).graph.modules.items():
        entry = modules.setdefault(pattern_of(path), {"class": name, "count": 0, "parameters": 0})
        entry["count"] += 1
    for module, count in results.parameters(phase).items():
        blank = {"class": "", "count": 0, "parameters": 0}
        modules.setdefault(module, blank)["parameters"] = count
    return modules
