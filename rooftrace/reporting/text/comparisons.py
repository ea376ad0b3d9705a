"""Our FLOPs beside another counter's, in words: for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_flops
from rooftrace.reporting.text.changed import times
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.findings.counters import Comparison

SHOWN = 12
_UNEXPLAINED = "not explained"
_COLUMNS = (
    view.Column("module", units.CODE, "module"),
    view.Column("ours", units.TEXT, "ours"),
    view.Column("theirs", units.TEXT, "theirs"),
    view.Column("gap", units.WORDS, "we count"),
    view.Column("reason", units.TEXT, "reason"),
)


def verdict(comparison: Comparison) -> str:
    """One sentence: equal, how far apart, or why there is no count."""
    if comparison.error:
        return f"no count: {comparison.error}"
    where = f"on {comparison.device}"
    if not comparison.flops_matrix and not comparison.peer_matrix:
        return f"neither counts any matrix FLOPs ({where})"
    if comparison.flops_matrix == comparison.peer_matrix:
        return f"equal: {format_flops(comparison.peer_matrix)} ({where})"
    share = "" if comparison.ratio is None else f", {comparison.ratio:.4f} of ours"
    gap = signed(comparison.flops_matrix - comparison.peer_matrix)
    return f"{format_flops(comparison.peer_matrix)} ({where}){share}; we count {gap}"


def notes(comparison: Comparison) -> list[str]:
    """What else to know when both numbers stand side by side."""
    if comparison.error:
        return []
    lines = [comparison.note] if comparison.note else []
    if comparison.peer_unit == "MAC":
        own = (comparison.peer_matrix + comparison.peer_vector) // 2
        lines.append(
            f"{comparison.peer} counts a multiply-add as 1: its own total is "
            f"{format_flops(own).replace('FLOP', 'MAC')}, and it calls them flops"
        )
    if comparison.flops_vector or comparison.peer_vector:
        theirs = format_flops(comparison.peer_vector) if comparison.peer_vector else "none"
        lines.append(
            "left out: vector work (norms, activations ...), ours "
            f"{format_flops(comparison.flops_vector)}, theirs {theirs}"
        )
    if comparison.differences and comparison.unexplained:
        unexplained = format_flops(comparison.unexplained)
        lines.append(f"{unexplained} of the differences have no reason we know")
    return lines


def signed(flops: int) -> str:
    """A difference with its sign, and in words: "2.10 GFLOP more"."""
    return f"{format_flops(abs(flops))} {'more' if flops > 0 else 'less'}"


def counts(ops: Mapping[str, int]) -> str:
    """ "mm 2.10 GFLOP, bmm 1.00 GFLOP"; "none" for nothing."""
    return ", ".join(f"{words.op_name(op)} {format_flops(n)}" for op, n in ops.items()) or "none"


def comparisons_view(name: str, comparisons: Sequence[Comparison]) -> view.View:
    """What other counters say of a model, phase by phase.  name: what the model is called."""
    head = view.Note(f"{name}, matrix FLOPs", on="screen", label="compare  ")
    sections = [view.Section(parts=[head], place=0)]
    for place, phase in enumerate(dict.fromkeys(comparison.phase for comparison in comparisons), 1):
        mine = [comparison for comparison in comparisons if comparison.phase == phase]
        own = f"rooftrace: {format_flops(mine[0].flops_matrix)} (a multiply-add is 2)"
        parts = [view.Note(own, on="page"), view.Note(own, on="screen", label=f"{phase}  ")]
        for comparison in mine:
            parts += _counter(comparison)
        sections.append(view.Section(title=phase, parts=parts, place=place))
    return view.View(tuple(sections), f"Matrix FLOPs of `{name}`, counted by others")


def _counter(comparison: Comparison) -> list[Any]:
    """What one counter says, and each difference: as a table on a page, as lines on a screen."""
    text, version = verdict(comparison), f"{comparison.peer} {comparison.version}".rstrip()
    equal = not comparison.error and comparison.flops_matrix == comparison.peer_matrix
    mark = "warn" if comparison.error else "good" if equal else "bad"
    parts: list[view.Part] = [
        view.Note(f"**{comparison.peer}** {comparison.version}: {text}", on="page", bullet=1),
        view.Note(
            text,
            mark,
            on="screen",
            label=f"  {version}  ",
        ),
    ]
    for line in notes(comparison):
        parts.append(view.Note(line, on="page", bullet=2))
        parts.append(view.Note(f"    {line}", "faint", on="screen"))
    rows = [
        {
            "module": times(d.module, d.instances),
            "ours": counts(d.ours),
            "theirs": counts(d.theirs),
            "gap": signed(d.delta),
            "reason": d.reason or _UNEXPLAINED,
        }
        for d in comparison.differences
    ]
    parts.append(view.Table(columns=_COLUMNS, rows=rows, padded=False, on="page"))
    for d, row in zip(comparison.differences[:SHOWN], rows, strict=False):
        reason = view.Note(
            f"{row['gap']}: {row['reason']}",
            "" if d.reason else "bad",
            on="screen",
            label=f"    {row['module']}  ",
        )
        counted = f"      ours {row['ours']}; theirs {row['theirs']}"
        parts += [reason, view.Note(counted, "faint", on="screen")]
    if len(rows) > SHOWN:
        more = f"    ... and {len(rows) - SHOWN} more (--format json has all)"
        parts.append(view.Note(more, "faint", on="screen"))
    return parts
