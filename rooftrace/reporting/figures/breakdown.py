"""Stacked bars: bytes by role, time by family and by limit, memory by role.

Phases differ by orders of magnitude, so each has its scale: the longest bar of a phase is its
largest total.  Every bar has its total in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_capacity, format_time, format_traffic
from rooftrace.reporting.figures import memoryplot, printing, style
from rooftrace.reporting.figures.printing import SCREEN, Medium
from rooftrace.reporting.renderers import words
from rooftrace.reporting.sections import tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rooftrace.reporting.sections import Results

MOST_PARTS = 9  # families with a colour each; the rest is one part
NAMES, TOTALS = 1.86, 1.86  # inches before the longest bar and behind it, on a screen
ROW, GROUP = 0.36, 0.5  # inches of a bar; bars between groups
WAITING = "waiting for the host"
OWN_SCALE = "; the longest bar of each phase is its own scale"
EXCHANGES = "communication"
LEAST_OVERLAP = 0.005  # of t_est: kernels that overlap by less are drawn in turn


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
        total, floor = format_traffic(estimate.bytes_hbm), float(estimate.bytes_compulsory)
        bars.append(Bar(phase, execution, parts, total, floor))
    return bars


def family_bars(report: Results) -> list[Bar]:
    """Seconds by family, host waiting included; the mark ends a step whose kernels overlap."""
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
        total, end = format_time(estimate.t_est), None
        overlap = sum(parts.values()) - estimate.t_est
        if overlap > LEAST_OVERLAP * estimate.t_est:
            parts |= {EXCHANGES: parts.pop(EXCHANGES, 0.0)}  # last: they overlap the others
            total, end = f"{total} + {format_time(overlap)}", estimate.t_est
        bars.append(Bar(phase, execution, parts, total, end))
    return bars


def regime_bars(report: Results) -> list[Bar]:
    """Seconds of t_est by their limit."""
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


def byte_figure(report: Results, medium: Medium = SCREEN) -> Figure:
    """HBM bytes of every phase and execution by role, with the compulsory floor."""
    return _figure(
        f"HBM bytes of a step: {report.model.get('name') or 'model'}",
        (
            memoryplot.of_report(report),
            f"by whose bytes they are{OWN_SCALE}",
        ),
        [("", byte_bars(report), style.ROLES, format_traffic)],
        "compulsory floor",
        medium,
    )


def time_figure(report: Results, medium: Medium = SCREEN) -> Figure:
    """Estimated time of every phase and execution, by family and by regime."""
    families = family_bars(report)
    overlaps = any(bar.mark is not None for bar in families)
    names = [*_ranking(report), "others", WAITING]
    tones = style.colours(names)
    regimes = {words.LIMITS[name]: colour for name, colour in style.REGIMES.items()}
    return _figure(
        f"{_kind(report)} time of a step on {report.chips[0].title}: "
        f"{report.model.get('name') or 'model'}",
        (
            memoryplot.of_report(report),
            f"kernels in turn, host included{OWN_SCALE}"
            + ("; a line ends the step: + is what runs beside the rest" if overlaps else ""),
        ),
        [
            ("by family", families, tones, format_time),
            ("by what limits it", regime_bars(report), regimes, format_time),
        ],
        "",
        medium,
    )


def _kind(report: Results) -> str:
    word = words.time_word(estimate for _, _, estimate in report.of_first_chip())
    return {"expected": "Expected", "bound": "Least"}.get(word, "Expected or least")


def peak_figure(report: Results, medium: Medium = SCREEN) -> Figure:
    """Peak memory of every phase, with the capacity of one chip."""
    chip = report.chips[0]
    return _figure(
        f"Peak memory of a step: {report.model.get('name') or 'model'}",
        (
            memoryplot.of_report(report),
            f"{report.main}; one {chip.title} holds {format_capacity(chip.memory_capacity.value)}"
            + OWN_SCALE * (len(report.memory) > 1),
        ),
        [("", memory_bars(report), style.ROLES, format_capacity)],
        "capacity of one chip",
        medium,
    )


Panel = tuple[str, Sequence[Bar], Mapping[str, str], Callable[[float], str]]


def _figure(
    title: str, subtitles: Sequence[str], panels: Sequence[Panel], mark: str, medium: Medium
) -> Figure:
    frames = [Frame.of(panel, mark, medium) for panel in panels]
    body = sum(frame.height for frame in frames) + 0.15
    figure, total = style.headed(medium, body, title, subtitles)
    top = body
    for panel, frame in zip(panels, frames, strict=True):
        low = top - frame.height + 0.1
        axes = figure.add_axes(
            (
                frame.left / medium.width,
                low / total,
                frame.span / medium.width,
                frame.rows * ROW / total,
            )
        )
        _draw(axes, panel, frame)
        _legend(axes, panel, mark, frame)
        top -= frame.height
    return figure


@dataclass(frozen=True, slots=True)
class Frame:
    """The place of a panel in inches: before its bars, of its longest bar, of its keys.

    stacked: the name of a group stands above its bars, where there is no room at their left.
    """

    left: float
    span: float
    rows: float
    legend: float
    room: float
    stacked: bool
    named: bool

    @classmethod
    def of(cls, panel: Panel, mark: str, medium: Medium) -> Frame:
        """The room of the bars and keys of a panel on a medium."""
        name, bars, _, _ = panel
        stacked = medium.is_narrow
        left, right = NAMES, TOTALS
        if stacked:
            left = max(printing.width_of(b.name or b.group, 11, not b.name) for b in bars) + 0.3
            right = max(printing.width_of(b.total, 10, bold=True) for b in bars) + 0.2
        groups = len({bar.group for bar in bars})
        gaps = groups * (1 if stacked and any(bar.name for bar in bars) else GROUP) - GROUP
        room = medium.width - (2 * style.MARGIN if stacked else left + style.MARGIN)
        legend = printing.legend_height([*_keys(panel), *([mark] if mark else [])], room)
        span = medium.width - left - right
        return cls(left, span, len(bars) + gaps, legend, room, stacked, bool(name))

    @property
    def height(self) -> float:
        """Inches of the bars, the keys above them and the room between."""
        return self.rows * ROW + self.legend + (0.30 if self.stacked and not self.named else 0.50)


def _draw(axes: Axes, panel: Panel, frame: Frame) -> None:
    _, bars, _, _ = panel
    scale: dict[str, float] = {}
    for bar in bars:
        reach = max(bar.length, bar.mark if _near(bar) and bar.mark else 0.0)
        scale[bar.group] = max(scale.get(bar.group, 0.0), reach)
    above = frame.stacked and any(bar.name for bar in bars)
    y, group = -GROUP if above else 0.0, None
    for bar in bars:
        first = bar.group != group
        if above and first:
            y += 1
            _group(axes, bar.group, y - 0.85, frame)
        elif group is not None and first:
            y += GROUP
        _bar(axes, bar, y, scale[bar.group] or 1.0, panel, frame)
        if first and not above:
            _group(axes, bar.group, y, frame)
        group = bar.group
        y += 1
    axes.set_xlim(0, 1)
    axes.set_ylim(frame.rows - 0.5, -0.5)
    axes.axis("off")


def _group(axes: Axes, name: str, y: float, frame: Frame) -> None:
    axes.text(
        (style.MARGIN - frame.left) / frame.span, y, name, fontsize=11, fontweight="bold",
        va="center", color=style.INK, transform=axes.get_yaxis_transform(),
    )  # fmt: skip


def _bar(axes: Axes, bar: Bar, y: float, scale: float, panel: Panel, frame: Frame) -> None:
    """One bar with its parts, its mark, its total and its name at the left."""
    from matplotlib.patches import Rectangle

    _, _, tones, wording = panel
    mark = bar.mark / scale if bar.mark is not None and _near(bar) else None
    left = 0.0
    for name, amount in bar.parts.items():
        width = amount / scale
        colour = tones.get(name, style.GREY)
        part: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.8}
        axes.add_artist(Rectangle((left, y - 0.37), width, 0.74, **part))  # barh looks for limits
        start, room = _clear_part(left, left + width, mark)
        texts = (f"{name} {wording(amount)}", wording(amount), words.percent(amount / bar.length))
        inches = room * frame.span - 0.08
        text = next((text for text in texts if printing.fits(text, 9, inches)), "")
        if text:
            middle, ink = start + room / 2, style.ink_on(colour)
            axes.text(middle, y, text, fontsize=9, ha="center", va="center", color=ink)
        left += width
    if mark is not None:
        line: dict[str, Any] = {"color": style.INK, "linewidth": 2.2, "solid_capstyle": "butt"}
        axes.plot([mark, mark], [y - 0.48, y + 0.48], clip_on=False, **line)
    end = max(left, mark or 0.0) + 0.1 / frame.span
    strong: dict[str, Any] = {"fontweight": "bold", "va": "center", "color": style.INK}
    axes.text(end, y, bar.total, fontsize=10, **strong)
    at: dict[str, Any] = {"transform": axes.get_yaxis_transform()}
    faint: dict[str, Any] = {"ha": "right", "va": "center", "color": style.FAINT}
    axes.text(-0.07 / frame.span, y, bar.name, fontsize=10, **faint, **at)


def _near(bar: Bar) -> bool:
    """Whether the mark of a bar is within its reach; a far one would squeeze the bar."""
    return bar.mark is not None and bar.mark <= 3 * bar.length


def _clear_part(start: float, end: float, mark: float | None) -> tuple[float, float]:
    """Start and width of the larger piece of a part that the mark leaves free for its label."""
    if mark is None or not start < mark < end:
        return start, end - start
    return (start, mark - start) if mark - start > end - mark else (mark, end - mark)


def _keys(panel: Panel) -> list[str]:
    """Parts that any bar of a panel has."""
    _, bars, tones, _ = panel
    return [part for part in tones if any(part in bar.parts for bar in bars)]


def _legend(axes: Axes, panel: Panel, mark: str, frame: Frame) -> None:
    """Keys above the bars; the name of the panel at their left, or above them."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    name, bars, tones, _ = panel
    handles: list[Patch | Line2D] = [Patch(color=tones[p], label=p) for p in _keys(panel)]
    if mark and any(_near(bar) for bar in bars):
        handles.append(
            Line2D(
                [], [], color=style.INK, linewidth=2.2, marker="|", linestyle="", markersize=12,
                markeredgewidth=2.2, label=mark,
            )
        )  # fmt: skip
    margin = (style.MARGIN - frame.left) / frame.span
    up = 1 + (0.10 if frame.stacked else 0.02) / (frame.rows * ROW)
    left = margin - 0.05 / frame.span if frame.stacked else -0.06 / frame.span
    style.row_legend(axes, handles, (left, up), 0.2, frame.room)
    if name:
        above = frame.legend + 0.16 if frame.stacked else 0.08
        axes.text(
            margin, 1 + above / (frame.rows * ROW), name, fontsize=11, color=style.INK,
            va="bottom", transform=axes.transAxes,
        )  # fmt: skip
