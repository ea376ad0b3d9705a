"""Our FLOPs beside another counter's, in words: for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_flops

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rooftrace.costmodels.findings.counters import Comparison, Difference

SHOWN = 12
_UNEXPLAINED = "not explained"


def verdict(one: Comparison) -> str:
    """One sentence: equal, how far apart, or why there is no count."""
    if one.error:
        return f"no count: {one.error}"
    where = f"on {one.device}"
    if not one.flops_matrix and not one.peer_matrix:
        return f"neither counts any matrix FLOPs ({where})"
    if one.flops_matrix == one.peer_matrix:
        return f"equal: {format_flops(one.peer_matrix)} ({where})"
    share = "" if one.ratio is None else f", {one.ratio:.4f} of ours"
    gap = signed(one.flops_matrix - one.peer_matrix)
    return f"{format_flops(one.peer_matrix)} ({where}){share}; we count {gap}"


def notes(one: Comparison) -> list[str]:
    """What else to know when both numbers stand side by side."""
    if one.error:
        return []
    lines = [one.note] if one.note else []
    if one.peer_unit == "MAC":
        own = (one.peer_matrix + one.peer_vector) // 2
        lines.append(
            f"{one.peer} counts a multiply-add as 1: its own total is "
            f"{format_flops(own).replace('FLOP', 'MAC')}, and it calls them flops"
        )
    if one.flops_vector or one.peer_vector:
        theirs = format_flops(one.peer_vector) if one.peer_vector else "none"
        lines.append(
            "left out: vector work (norms, activations ...), ours "
            f"{format_flops(one.flops_vector)}, theirs {theirs}"
        )
    if one.differences and one.unexplained:
        lines.append(f"{format_flops(one.unexplained)} of the differences have no reason we know")
    return lines


def signed(flops: int) -> str:
    """A difference with its sign, and in words: "2.10 GFLOP more"."""
    return f"{format_flops(abs(flops))} {'more' if flops > 0 else 'less'}"


def counts(ops: Mapping[str, int]) -> str:
    """ "mm 2.10 GFLOP, bmm 1.00 GFLOP"; "none" for nothing."""
    return ", ".join(f"{_short(op)} {format_flops(n)}" for op, n in ops.items()) or "none"


def render_comparisons(name: str, comparisons: Sequence[Comparison]) -> RenderableType:
    """The terminal view."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text.assemble(("compare  ", "bold"), f"{name}, matrix FLOPs")]
    phase = ""
    for one in comparisons:
        if one.phase != phase:
            phase = one.phase
            parts.append(Text.assemble((f"\n{phase}", "bold"), f"  {_own(one)}"))
        equal = not one.error and one.flops_matrix == one.peer_matrix
        style = "yellow" if one.error else "green" if equal else "red"
        title = f"  {one.peer} {one.version}".rstrip()
        parts.append(Text.assemble((title, "bold"), "  ", (verdict(one), style)))
        parts += [Text(f"    {line}", style="dim") for line in notes(one)]
        for d in one.differences[:SHOWN]:
            head = Text.assemble("    ", (_label(d), "cyan"), f"  {signed(d.delta)}: ")
            parts.append(head.append(d.reason or _UNEXPLAINED, "" if d.reason else "red"))
            parts.append(
                Text(f"      ours {counts(d.ours)}; theirs {counts(d.theirs)}", style="dim")
            )
        if len(one.differences) > SHOWN:
            rest = len(one.differences) - SHOWN
            parts.append(Text(f"    ... and {rest} more (--format json has all)", style="dim"))
    return Group(*parts)


def comparisons_markdown(name: str, comparisons: Sequence[Comparison]) -> str:
    """GitHub-flavoured markdown."""
    lines = [f"## Matrix FLOPs of `{name}`, counted by others", ""]
    phase = ""
    for one in comparisons:
        if one.phase != phase:
            phase = one.phase
            lines += [f"### {phase}", "", _own(one), ""]
        lines.append(f"- **{one.peer}** {one.version}: {verdict(one)}")
        lines += [f"  - {line}" for line in notes(one)]
        if one.differences:
            lines += [
                "",
                "| module | ours | theirs | we count | reason |",
                "|---|---|---|---:|---|",
            ]
            lines += [
                f"| `{_label(d)}` | {counts(d.ours)} | {counts(d.theirs)} | {signed(d.delta)} | "
                f"{d.reason or _UNEXPLAINED} |"
                for d in one.differences
            ]
            lines.append("")
    return "\n".join([*lines, ""])


def _own(one: Comparison) -> str:
    return f"rooftrace: {format_flops(one.flops_matrix)} (a multiply-add is 2)"


def _label(d: Difference) -> str:
    path = d.module or "(root)"
    return f"{path} x{d.instances}" if d.instances > 1 else path


def _short(op: str) -> str:
    return op.removeprefix("aten.").removeprefix("rooftrace.")
