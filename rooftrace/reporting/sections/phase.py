"""One phase in detail: whose bytes, which families, modules and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.hardware.units import (
    MISSING,
    format_capacity,
    format_count,
    format_flops,
    format_intensity,
    format_time,
    format_traffic,
)
from rooftrace.reporting.sections.fusion import fusion_lines
from rooftrace.reporting.sections.pipes import image, share, table
from rooftrace.reporting.sections.tallies import Tally, tally
from rooftrace.reporting.text import words
from rooftrace.tracer.graph import ROLES, pattern_of

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.costmodels.memory import Memory
    from rooftrace.reporting.pages import Report


PATTERNS_SHOWN, KERNELS_SHOWN, MEMORY_SHOWN = 25, 15, 10


def phase_section(report: Report, phase: str, figures: Sequence[str]) -> list[str]:
    main = report.estimate(phase)
    every = [report.estimate(phase, execution) for execution in report.executions]
    titles = [("HBM bytes by role", _roles(every)), ("Families", _families(every))]
    parts = main.by_part()
    if len(parts) > 1:
        titles.append(("Parts", _parts(main)))
    titles += [
        (f"Modules, {main.execution.name}", _modules(main)),
        (f"Kernels, {main.execution.name}", _kernels(main)),
        (f"What fusing saves, {main.execution.name}", fusion_lines(report.headroom[phase])),
        ("Memory at the peak", _memory(report.memory.get(phase))),
    ]
    titles = [(title, body) for title, body in titles if body]
    lines = []
    for title, body in titles:
        lines += ["", f"### {title}", "", *body]
    names = (f"memory-{phase}.png", f"roofline-{phase}.png")
    return lines[1:] + [line for name in names for line in image(name, figures)]


def _memory(need: Memory | None) -> list[str]:
    """What the peak is made of: by module, and the tensors with most bytes."""
    if need is None or not need.tensors:
        return []
    groups, held = need.by_block(), need.tensors
    modules = [
        [
            f"`{group['module'] or '(root)'}`",
            ", ".join(f"{role} {format_capacity(size)}" for role, size in group["roles"].items()),
            f"{group['tensors']:,}",
            format_capacity(group["bytes"]),
            share(group["bytes"], need.peak),
        ]
        for group in groups[:MEMORY_SHOWN]
    ]
    tensors = [
        [
            f"`{words.held_words(one)}`",
            "saved for backward" if one.saved else one.role,
            f"`{one.module or '(root)'}`",
            f"{one.dtype}[{', '.join(map(str, one.shape))}]" if one.dtype else "",
            f"{one.count:,}",
            format_capacity(one.bytes),
            share(one.bytes, need.peak),
        ]
        for one in held[:MEMORY_SHOWN]
    ]
    head = ["Module", "Of which", "Tensors", "Bytes", "Share of the peak"]
    more = ["Made by", "Role", "Module", "Each", "Tensors", "Bytes", "Share of the peak"]
    return [
        *table(head, modules, left=2),
        *_rest(len(groups), "module", sum(group["bytes"] for group in groups[MEMORY_SHOWN:])),
        "",
        *table(more, tensors, left=4),
        *_rest(len(held), "kind", sum(one.bytes for one in held[MEMORY_SHOWN:])),
    ]


def _rest(count: int, noun: str, size: int) -> list[str]:
    rest = count - MEMORY_SHOWN
    if rest <= 0:
        return []
    return ["", f"{words.plural(rest, f'more {noun}')}: {format_capacity(size)}."]


def _roles(estimates: Sequence[Estimate]) -> list[str]:
    """Bytes by role, executions side by side; roles that move nothing are left out."""
    head = ["Role"]
    for one in estimates:
        head += [one.execution.name, "share"]
    rows = []
    for role in ROLES:
        sizes = [one.bytes.to_dict()[role] for one in estimates]
        if any(sizes):
            rows.append(
                [
                    role,
                    *(
                        cell
                        for size, one in zip(sizes, estimates, strict=True)
                        for cell in (format_traffic(size), share(size, one.bytes_hbm))
                    ),
                ]
            )
    rows.append(
        [
            "**all**",
            *(cell for one in estimates for cell in (f"**{format_traffic(one.bytes_hbm)}**", "")),
        ]
    )
    rows.append(
        [
            "compulsory floor",
            *(
                cell
                for one in estimates
                for cell in (
                    format_traffic(one.bytes_compulsory),
                    share(one.bytes_compulsory, one.bytes_hbm),
                )
            ),
        ]
    )
    return table(head, rows)


def _families(estimates: Sequence[Estimate]) -> list[str]:
    """FLOP, bytes, intensity and time by family, executions side by side."""
    head = ["Family"]
    by_execution = []
    for one in estimates:
        name = one.execution.name
        head += [f"FLOP, {name}", "HBM", "FLOP/byte", "time", "share of t_est"]
        by_execution.append({entry.key: entry for entry in tally(one.rows, lambda row: row.family)})
    names = list(by_execution[-1])
    names += [name for found in by_execution for name in found if name not in names]
    rows = []
    for name in dict.fromkeys(names):
        row = [name]
        for one, found in zip(estimates, by_execution, strict=True):
            entry = found.get(name)
            row += (
                [MISSING] * 5
                if entry is None
                else [
                    format_flops(entry.flops),
                    format_traffic(entry.bytes),
                    words.bare(format_intensity(entry.intensity), "FLOP/byte"),
                    format_time(entry.seconds),
                    share(entry.seconds, one.t_est),
                ]
            )
        rows.append(row)
    if any(one.times.t_launch > 0 for one in estimates):
        rows.append(
            [
                "waiting for the host",
                *(
                    cell
                    for one in estimates
                    for cell in (
                        "",
                        "",
                        "",
                        format_time(one.times.t_launch),
                        share(one.times.t_launch, one.t_est),
                    )
                ),
            ]
        )
    return table(head, rows)


def _parts(one: Estimate) -> list[str]:
    rows = [
        [
            name,
            f"{entry['calls']:,}",
            format_flops(entry["flops"]),
            format_traffic(entry["bytes"]),
            format_time(entry["t_device"]),
            share(entry["t_device"], one.t_est),
            words.LIMITS[entry["regime"]],
        ]
        for name, entry in one.by_part().items()
    ]
    return table(["Part", "Kernels", "FLOP", "HBM", "Time", "Share of t_est", "Limited by"], rows)


def _modules(one: Estimate) -> list[str]:
    """Module paths with starred indices, most time first."""
    entries = one.by_pattern()
    classes = {pattern_of(path): name for path, name in one.graph.modules.items()}
    params = _parameters(one)
    rows = [
        [
            f"`{entry['key'] or '(root)'}`",
            classes.get(entry["key"], ""),
            f"{entry['instances']:,}",
            format_count(params[entry["key"]]) if entry["key"] in params else MISSING,
            format_flops(entry["flops"]),
            format_traffic(entry["bytes"]),
            format_time(entry["t_device"]),
            share(entry["t_device"], one.t_est),
            words.LIMITS[entry["regime"]],
        ]
        for entry in entries[:PATTERNS_SHOWN]
    ]
    lines = table(
        [
            "Module",
            "Class",
            "Instances",
            "Parameters",
            "FLOP",
            "HBM",
            "Time",
            "Share of t_est",
            "Limited by",
        ],
        rows,
        left=2,
    )
    rest = entries[PATTERNS_SHOWN:]
    if rest:
        seconds = sum(entry["t_device"] for entry in rest)
        lines += [
            "",
            f"{len(rest):,} more patterns: {format_time(seconds)}, {share(seconds, one.t_est)}.",
        ]
    return lines


def _parameters(one: Estimate) -> dict[str, int]:
    """Parameters by module pattern, from the names of the weights that the step touches."""
    found: dict[str, int] = {}
    for index in one.graph.external:
        tensor = one.graph.values[index]
        if tensor.role == "weights" and tensor.storage == index and tensor.name:
            key = pattern_of(tensor.name.rpartition(".")[0])
            found[key] = found.get(key, 0) + one.graph.times(tensor) * tensor.elements
    return found


def _kernels(one: Estimate) -> list[str]:
    """Kernels by name, module pattern and regime, most time first."""
    entries = tally(one.rows, lambda row: (row.name, row.timing.regime, pattern_of(row.module)))
    rows = [_kernel_cells(entry, one) for entry in entries[:KERNELS_SHOWN]]
    rest = entries[KERNELS_SHOWN:]
    if rest:
        seconds = sum(entry.seconds for entry in rest)
        rows.append(
            [
                f"{len(rest):,} more",
                "",
                "",
                f"{sum(entry.calls for entry in rest):,}",
                format_flops(sum(entry.flops for entry in rest)),
                format_traffic(sum(entry.bytes for entry in rest)),
                "",
                format_time(seconds),
                share(seconds, one.t_est),
            ]
        )
    return table(
        [
            "Kernel",
            "Bound",
            "Module",
            "Calls",
            "FLOP",
            "HBM",
            "FLOP/byte",
            "Time",
            "Share of t_est",
        ],
        rows,
        left=3,
    )


def _kernel_cells(entry: Tally[tuple[str, str, str]], one: Estimate) -> list[str]:
    name, regime, module = entry.key
    return [
        f"`{words.kernel_name(name)}`",
        words.LIMITS[regime],
        f"`{module or '(root)'}`",
        f"{entry.calls:,}",
        format_flops(entry.flops),
        format_traffic(entry.bytes),
        words.bare(format_intensity(entry.intensity), "FLOP/byte"),
        format_time(entry.seconds),
        share(entry.seconds, one.t_est),
    ]
