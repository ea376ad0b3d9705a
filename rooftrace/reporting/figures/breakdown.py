"""Stacked bars: whose bytes move, where the time goes, what fills the memory.

Phases differ by orders of magnitude, so each has a scale of its own: the longest bar of a phase is
its largest total, and every bar says its total in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_capacity, format_time, format_traffic
from rooftrace.reporting.figures import style
from rooftrace.reporting.sections import tally
from rooftrace.reporting.view import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rooftrace.reporting.sections import Results

MOST_PARTS = 9  # families with a colour of their own; the rest is one part
LEFT, SPAN = 0.155, 0.69  # of the page: before the bars, and the longest bar
WAITING = "waiting for the host"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: parts in drawing order, a total in words, and a mark at some amount."""

    group: str
    name: str
    parts: Mapping[str, float]
    total: str
    mark: float | None = None

    @property
    def length(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def byte_bars(report: Results) -> list[Bar]:
    """HBM bytes by role; the mark is the compulsory floor."""
    bars = []
    for phase, execution, estimate in report.of_first_chip():
        parts = {role: float(size) for role, size in estimate.bytes.to_dict().items() if size}
        bars.append(
            Bar(
                phase,
                execution,
                parts,
                format_traffic(estimate.bytes_hbm),
                float(estimate.bytes_compulsory),
            )
        )
    return bars


def family_bars(report: Results) -> list[Bar]:
    """Seconds of t_est by family, host waiting included."""
    ranking = _ranking(report)
    bars = []
    for phase, execution, estimate in report.of_first_chip():
        seconds = {
            entry.key: entry.seconds for entry in tally(estimate.rows, lambda row: row.family)
        }
        parts = {name: seconds.pop(name) for name in ranking if name in seconds}
        if seconds:
            parts["others"] = sum(seconds.values())
        if estimate.times.t_launch > 0:
            parts[WAITING] = estimate.times.t_launch
        bars.append(Bar(phase, execution, parts, format_time(estimate.t_est)))
    return bars


def regime_bars(report: Results) -> list[Bar]:
    """Seconds of t_est by what limits them."""
    return [
        Bar(
            phase,
            execution,
            {
                words.LIMITS[name]: seconds
                for name, seconds in estimate.times.regime_seconds.items()
                if seconds > 0
            },
            f"{format_time(estimate.t_est)}, {words.percent(estimate.mfu)} MFU",
        )
        for phase, execution, estimate in report.of_first_chip()
    ]


def memory_bars(report: Results) -> list[Bar]:
    """Bytes alive at the peak of each phase; the mark is one chip's capacity."""
    chip = report.chips[0]
    return [
        Bar(
            phase,
            "",
            {role: float(size) for role, size in need.at_peak.items() if size},
            f"{format_capacity(need.peak)}, "
            + ("fits" if need.fits(chip) else words.plural(need.chips_needed(chip), "chip")),
            chip.memory_capacity.value,
        )
        for phase, need in report.memory.items()
    ]


def _ranking(report: Results) -> list[str]:
    """Families by their largest share of any estimate: the ones that get a colour."""
    shares: dict[str, float] = {}
    for _, _, estimate in report.of_first_chip():
        for entry in tally(estimate.rows, lambda row: row.family):
            share = entry.seconds / estimate.t_est if estimate.t_est else 0.0
            shares[entry.key] = max(shares.get(entry.key, 0.0), share)
    return sorted(shares, key=lambda name: (-shares[name], name))[:MOST_PARTS]


# -- figures -------------------------------------------------------------------------------------


def byte_figure(report: Results) -> Figure:
    """HBM bytes of every phase and execution by role, with the compulsory floor."""
    return _figure(
        f"HBM bytes of a step: {report.model.get('name') or 'model'}",
        "by whose bytes they are; the longest bar of each phase is its own scale",
        [("", byte_bars(report), style.ROLES, format_traffic)],
        "compulsory floor",
    )


def time_figure(report: Results) -> Figure:
    """Estimated time of every phase and execution, by family and by regime."""
    families = family_bars(report)
    names = [*_ranking(report), "others", WAITING]
    tones = style.colours(names, {"others": "#c8c8c8", WAITING: "#5c5c5c"})
    regimes = {words.LIMITS[name]: colour for name, colour in style.REGIMES.items()}
    return _figure(
        f"{_kind(report)} time of a step on {report.chips[0].title}: "
        f"{report.model.get('name') or 'model'}",
        "kernels in turn, host included; the longest bar of each phase is its own scale",
        [
            ("by family", families, tones, format_time),
            ("by what limits it", regime_bars(report), regimes, format_time),
        ],
        "",
    )


def _kind(report: Results) -> str:
    word = words.time_word(estimate for _, _, estimate in report.of_first_chip())
    return {"expected": "Expected", "bound": "Least"}.get(word, "Expected or least")


def peak_figure(report: Results) -> Figure:
    """Peak memory of every phase beside the capacity of one chip."""
    chip = report.chips[0]
    return _figure(
        f"Peak memory of a step: {report.model.get('name') or 'model'}",
        f"one {chip.title} holds {format_capacity(chip.memory_capacity.value)}",
        [("", memory_bars(report), style.ROLES, format_capacity)],
        "capacity of one chip",
    )


Panel = tuple[str, Sequence[Bar], Mapping[str, str], Callable[[float], str]]


def _figure(title: str, subtitle: str, panels: Sequence[Panel], mark: str) -> Figure:
    rows = [_rows(bars) for _, bars, _, _ in panels]
    heights = [0.36 * count + 0.75 for count in rows]  # inches
    total = 0.75 + sum(heights) + 0.15
    figure = style.sheet(total, title, subtitle)
    top = total - 0.75
    for (name, bars, tones, wording), height, count in zip(panels, heights, rows, strict=True):
        axes = figure.add_axes((LEFT, (top - height + 0.1) / total, SPAN, (height - 0.65) / total))
        _draw(axes, bars, tones, wording, mark, count)
        _legend(axes, name, bars, tones, mark)
        top -= height
    return figure


def _rows(bars: Sequence[Bar]) -> float:
    """Bars, and half a bar between groups."""
    return len(bars) + 0.5 * (len({bar.group for bar in bars}) - 1)


def _draw(
    axes: Axes,
    bars: Sequence[Bar],
    tones: Mapping[str, str],
    wording: Callable[[float], str],
    mark: str,
    rows: float,
) -> None:
    scale: dict[str, float] = {}
    for bar in bars:
        reach = max(bar.length, bar.mark if _near(bar) and bar.mark else 0.0)
        scale[bar.group] = max(scale.get(bar.group, 0.0), reach)
    y, group = 0.0, None
    for bar in bars:
        if group is not None and bar.group != group:
            y += 0.5
        _bar(axes, bar, y, scale[bar.group] or 1.0, tones, wording, first=bar.group != group)
        group = bar.group
        y += 1
    axes.set_xlim(0, 1)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.axis("off")


def _bar(
    axes: Axes,
    bar: Bar,
    y: float,
    scale: float,
    tones: Mapping[str, str],
    wording: Callable[[float], str],
    *,
    first: bool,
) -> None:
    """One bar with its parts, its mark, its total and its names at the left."""
    mark = bar.mark / scale if bar.mark is not None and _near(bar) else None
    left = 0.0
    for name, amount in bar.parts.items():
        width = amount / scale
        colour = tones.get(name, style.GREY)
        axes.barh(y, width, left=left, height=0.74, color=colour, edgecolor="white", linewidth=0.8)
        start, room = _clear_part(left, left + width, mark)
        texts = (f"{name} {wording(amount)}", wording(amount), words.percent(amount / bar.length))
        fitting = [text for text in texts if len(text) * 5.6 + 6 < room * SPAN * style.WIDTH * 72]
        if fitting:  # in points
            middle, ink = start + room / 2, style.ink_on(colour)
            axes.text(middle, y, fitting[0], fontsize=9, ha="center", va="center", color=ink)
        left += width
    if mark is not None:
        line: dict[str, Any] = {"color": style.INK, "linewidth": 2.2, "solid_capstyle": "butt"}
        axes.plot([mark, mark], [y - 0.48, y + 0.48], clip_on=False, **line)
    end = max(left, mark or 0.0) + 0.008
    strong: dict[str, Any] = {"fontweight": "bold", "va": "center", "color": style.INK}
    axes.text(end, y, bar.total, fontsize=10, **strong)
    at: dict[str, Any] = {"transform": axes.get_yaxis_transform()}
    if first:
        axes.text(-LEFT / SPAN + 0.018, y, bar.group, fontsize=11, **strong, **at)
    faint: dict[str, Any] = {"ha": "right", "va": "center", "color": style.FAINT}
    axes.text(-0.008, y, bar.name, fontsize=10, **faint, **at)


def _near(bar: Bar) -> bool:
    """Whether the mark of a bar is within its reach; a far one would squeeze the bar."""
    return bar.mark is not None and bar.mark <= 3 * bar.length


def _clear_part(start: float, end: float, mark: float | None) -> tuple[float, float]:
    """Start and width of the larger piece of a part that the mark leaves free for its label."""
    if mark is None or not start < mark < end:
        return start, end - start
    return (start, mark - start) if mark - start > end - mark else (mark, end - mark)


def _legend(
    axes: Axes, name: str, bars: Sequence[Bar], tones: Mapping[str, str], mark: str
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = [part for part in tones if any(part in bar.parts for bar in bars)]
    handles: list[Patch | Line2D] = [Patch(color=tones[part], label=part) for part in used]
    if mark and any(_near(bar) for bar in bars):
        handles.append(
            Line2D(
                [],
                [],
                color=style.INK,
                linewidth=2.2,
                marker="|",
                linestyle="",
                markersize=12,
                markeredgewidth=2.2,
                label=mark,
            )
        )
    style.row_legend(axes, handles, (-0.01, 1.0), 0.2)
    if name:
        place = axes.get_position()
        axes.text(
            0.012,
            place.y1 + 0.006,
            name,
            fontsize=11,
            color=style.INK,
            va="bottom",
            transform=axes.figure.transFigure,
        )
