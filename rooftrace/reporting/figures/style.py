"""The kit of all figures: colours, sheets, axes, ticks, legends, and texts that keep clear.

Colours with a meaning are those of the palette in `printing`, the same on every output.  Figures
are made with matplotlib's objects alone: no global settings, no display.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rooftrace.reporting.figures import printing
from rooftrace.reporting.figures.printing import SCREEN, Medium

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

DPI = 150  # of the canvas that labels are placed on
MARGIN = 0.144  # inches left and right of a title
save, medium_of = printing.save, printing.medium_of
INK, FAINT, GRID = "#222222", "#6b6b6b", "#e3e3e3"
BLUE, ORANGE, GREEN, PINK, GREY = (
    printing.BLUE,
    printing.ORANGE,
    printing.GREEN,
    printing.PINK,
    printing.GREY,
)
RED, SKY, YELLOW = "#D55E00", "#56B4E9", "#F0E442"

PHASES = printing.PHASES
ROLES, KINDS, REGIMES, FAMILIES = printing.ROLES, printing.KINDS, printing.LIMITS, printing.FAMILIES
on_dark = printing.on_dark
OTHERS = "#c8c8c8"
MEANINGS: Mapping[str, str] = {
    **printing.FAMILIES, **PHASES, **printing.LIMITS, "HBM": BLUE, "others": OTHERS,
    "waiting for the host": ORANGE,
}  # fmt: skip
"""Tones of names that mean the same in every figure."""
MANY = (
    RED, "#6A3D9A", "#C2185B", "#8C6D31", "#332288", "#117733", "#661100", "#5C5C5C", SKY, YELLOW,
)  # fmt: skip
"""Tones of all other names: none is that of a limit."""
CHIPS = (INK, "#7A8B99", "#A57C52", "#5B8E7D", "#8A6FB0")
MARKERS = ("o", "s", "D", "^", "v", "P")


def colours(names: Iterable[str], fixed: Mapping[str, str] = MEANINGS) -> dict[str, str]:
    """A colour for each name: its fixed one, else the next of the palette, in the order given."""
    names = list(names)
    free = [colour for colour in MANY if colour not in {fixed.get(name) for name in names}] or MANY
    others = [name for name in names if name not in fixed]
    tones = {**fixed, **{name: free[i % len(free)] for i, name in enumerate(others)}}
    return {name: tones[name] for name in names}


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on `colour`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def ink_of(colour: str) -> str:
    """The colour of a mark, dark enough to read as text on white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    light = 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]
    scale = min(1.0, 88 / light) if light else 1.0
    return "#" + "".join(f"{int(part * scale):02x}" for part in parts)


def sheet(height: float, title: str, subtitle: str = "") -> Figure:
    """A blank figure for a screen, with its title at the top left: one line, and one below it."""
    figure = _blank(SCREEN, height)
    figure.text(
        0.012, 1 - 0.20 / height, title, fontsize=14, fontweight="bold", color=INK, va="top"
    )
    if subtitle:
        figure.text(0.012, 1 - 0.50 / height, subtitle, fontsize=10, color=FAINT, va="top")
    return figure


def headed(
    medium: Medium, body: float, title: str, subtitles: Sequence[str] = ()
) -> tuple[Figure, float]:
    """A blank figure with its title at the top left and `body` inches below it, and its height.

    Texts take as many lines as they need; each subtitle begins a new one.
    """
    room = medium.width - 2 * MARGIN
    heads = printing.wrapped(title, medium.title, room, bold=True)
    below = [line for text in subtitles for line in printing.wrapped(text, 10, room)]
    step = 0.30 * medium.title / 14
    top = 0.20 * medium.title / 14
    height = body + top + step * len(heads) + 0.17 * len(below) + 0.08
    figure = _blank(medium, height)
    left = MARGIN / medium.width
    for line in heads:
        figure.text(
            left, 1 - top / height, line, fontsize=medium.title, fontweight="bold", color=INK,
            va="top",
        )  # fmt: skip
        top += step
    for line in below:
        figure.text(left, 1 - top / height, line, fontsize=10, color=FAINT, va="top")
        top += 0.17
    return figure, height


def _blank(medium: Medium, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(medium.width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain_axes(axes: Axes) -> None:
    """Hide the top and right spine; soften the others and the ticks."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=FAINT, labelsize=10)
    axes.set_axisbelow(True)


def grid_axes(axes: Axes) -> None:
    """A grid behind the marks; no top and right spine."""
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)


def log_axes(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Log-log axes between these limits, with a grid of decades."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    plain_axes(axes)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)


def log_ticks(axis: XAxis | YAxis, wording: Callable[[float], str] | None = None) -> None:
    """Name each decade in view once, and mark 2 to 9 between; of few decades 1, 2 and 5 too.

    Call it after the limits are set.  wording: a value in words; default `decade_words`.
    """
    from matplotlib import ticker

    low, high = sorted(map(float, axis.get_view_interval()))
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    size = axis.axes.get_window_extent()
    long, each = (size.width, 95) if axis.axis_name == "x" else (size.height, 30)
    stride = max(1, math.ceil((last - first + 1) * each / long))
    between = range(2, 10) if stride == 1 else ()
    major = [10.0**n for n in range(first, last + 1) if n % stride == 0]
    minor = [k * 10.0**n for n in range(first - 1, last + 1) for k in between or (1,)]
    if len(major) < 3 and stride == 1:
        major = [k * 10.0**n for n in range(first - 1, last + 1) for k in (1, 2, 5)]
    axis.set_major_locator(ticker.FixedLocator([v for v in major if low <= v <= high]))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(lambda value, _: (wording or decade_words)(value))
    _small_marks(axis, [v for v in minor if low <= v <= high and v not in major])


def _small_marks(axis: XAxis | YAxis, places: Sequence[float]) -> None:
    """Marks below or left of the axes: one line, where each tick of matplotlib is three."""
    from matplotlib.lines import Line2D
    from matplotlib.markers import TICKDOWN, TICKLEFT, MarkerStyle

    axes, edge, is_x = axis.axes, [0.0] * len(places), axis.axis_name == "x"
    marks = Line2D(
        places if is_x else edge, edge if is_x else places, linestyle="none",
        marker=MarkerStyle(TICKDOWN if is_x else TICKLEFT), markersize=2.5, markeredgewidth=0.6,
        color=GREY, clip_on=False,
        transform=axes.get_xaxis_transform() if is_x else axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.add_artist(marks)


def decade_words(value: float) -> str:
    """ "0.1", "1", "1,000"; very large and small ones as 10 with an exponent."""
    if 1e-4 < value < 1e6:
        return f"{value:,.6g}"
    power = math.floor(math.log10(value) + 1e-9)
    lead = round(value / 10.0**power)
    return f"${'' if lead == 1 else f'{lead} '}10^{{{power}}}$".replace(" 10", r"\cdot 10")


def bare_words(wording: Callable[[float], str]) -> Callable[[float], str]:
    """The words of a tick: "100 TFLOP/s", not "100.0 TFLOP/s"."""

    def worded(value: float) -> str:
        number, _, unit = wording(value).partition(" ")
        return f"{float(number.replace(',', '')):,g} {unit}"

    return worded


LEGEND_LINE = 0.20
"""Inches of a line of keys."""


def legend_columns(labels: Sequence[str], room: float) -> int:
    """The number of columns of keys in so many inches; a column is as wide as its widest key."""
    widths = [printing.width_of(label, 9) + 0.38 for label in labels]
    for lines in range(1, len(labels)):
        columns = math.ceil(len(labels) / lines)
        longer = len(labels) % columns  # as matplotlib shares keys out: the first have one more
        sizes = [len(labels) // columns + (column < longer) for column in range(columns)]
        starts = [sum(sizes[:column]) for column in range(columns)]
        if sum(max(widths[a : a + n]) for a, n in zip(starts, sizes, strict=True)) <= room:
            return columns
    return 1


def legend_height(labels: Sequence[str], room: float) -> float:
    """The inches of keys of these names, in as many lines as they need."""
    return LEGEND_LINE * math.ceil(len(labels) / legend_columns(labels, room)) if labels else 0.0


def row_legend(
    axes: Axes, handles: Sequence[Any], at: tuple[float, float], pad: float, room: float
) -> None:
    """Keys with their lower left corner at this place of the axes, in lines of `room` inches."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=at,
        ncols=legend_columns([str(handle.get_label()) for handle in handles], room),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.3,
        handletextpad=0.5,
        labelspacing=0.45,
        borderaxespad=pad,
        borderpad=0.4,
        labelcolor=INK,
    )


def side_legend(axes: Axes) -> None:
    """Keys at the right of the axes, one below another."""
    axes.legend(
        loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9, labelspacing=0.9
    )


# -- texts -----------------------------------------------------------------------------------------


def note(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    shift: tuple[float, float],
    side: str = "left",
    size: float = 9,
    colour: str = FAINT,
    **more: Any,
) -> None:
    """A text at a place in data, shifted by some points; `side` of it is at the place."""
    how = {"va": "bottom", "fontsize": size, "ha": side, "color": colour, **more}
    axes.annotate(text, at, xytext=shift, textcoords="offset points", **how)


def halo() -> list[Any]:
    """The path effects of a text over lines: a white outline."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white", alpha=0.85)]


@dataclass(frozen=True, slots=True)
class PlotText:
    """A text of a plot and the point (in data) that it belongs to.

    slide: pixels that it may move to the left, along a horizontal line.  first: placed before the
    others.  leader: a line joins it to its point.  spacing: linespacing of matplotlib.
    """

    x: float
    y: float
    text: str
    colour: str
    size: float = 9
    weight: str = "normal"
    slide: float = 0.0
    first: bool = False
    leader: bool = True
    spacing: float | None = 1.15


def mark_box(axes: Axes, x: float, y: float, size: float) -> Box:
    """The pixels of a mark at a point in data, and 2 points around it.  size: in points."""
    middle_x, middle_y = map(float, axes.transData.transform((x, y)))
    side = 2 * (0.5 * size + 2) * DPI / 72
    return Box.around(middle_x, middle_y, side, side)


def place_texts(
    figure: Figure,
    axes: Axes,
    texts: Sequence[PlotText],
    marks: Sequence[Box],
    line: Sequence[tuple[float, float]],
) -> list[tuple[PlotText, Label, Box]]:
    """Write texts clear of each other, of marks and of a sampled line; the place of each."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    labels, written = [], []
    for text in texts:
        drawn = figure.text(
            0, 0, text.text, fontsize=text.size, color=text.colour, fontweight=text.weight,
            zorder=7, linespacing=text.spacing, va="bottom", ha="left", path_effects=halo(),
        )  # fmt: skip
        printing.take_literally(drawn)
        extent = drawn.get_window_extent(renderer)
        x, y = map(float, axes.transData.transform((text.x, text.y)))
        width, height = float(extent.width) + 4, float(extent.height) + 2
        inset = 5 if text.slide else 0
        labels.append(Label(x - inset, y, width, height, text.slide, text.first))
        written.append(drawn)
    frame = axes.get_window_extent()
    inside = Box(frame.x0 + 4, frame.y0 + 4, frame.x1 - 4, frame.y1 - 4)
    boxes = place(labels, inside, points=marks, line=line)
    to_sheet = figure.transFigure.inverted()
    for drawn, box in zip(written, boxes, strict=True):
        x, y = map(float, to_sheet.transform((box.x0 + 2, box.y0 + 1)))
        drawn.set_position((x, y))
    return list(zip(texts, labels, boxes, strict=True))


def join(figure: Figure, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A thin line from pixel to pixel."""
    from matplotlib.lines import Line2D

    ends = figure.transFigure.inverted().transform([start, end])
    figure.add_artist(
        Line2D(ends[:, 0], ends[:, 1], color=colour, linewidth=0.9, alpha=0.8, zorder=4)
    )


# -- Places labels so that none covers another, a point or a line.  Pixels in, pixels out ----------

REACHES = (7, 14, 24, 38, 56, 80, 110, 150, 200, 260, 330)  # pixels between anchor and label
DIRECTIONS = 16
SAMPLED = 16  # pixels: no more are between two spots of a sampled line
PASSES = 4
# The cost of faults of a place, in pixels of distance.
OVER_LABEL, OUTSIDE, OVER_POINT, CROSSING, OVER_LINE = 1e7, 1e7, 1e6, 2000.0, 250.0


class Box(NamedTuple):
    """A rectangle."""

    x0: float
    y0: float
    x1: float
    y1: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Box:
        """The box with this middle and size."""
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def contains(self, x: float, y: float) -> bool:
        """Whether the point lies inside."""
        return self.x0 < x < self.x1 and self.y0 < y < self.y1

    def within(self, frame: Box) -> Box:
        """The box moved into a frame, by as little as that takes."""
        x0 = max(min(self.x0, frame.x1 - (self.x1 - self.x0)), frame.x0)
        y0 = max(min(self.y0, frame.y1 - (self.y1 - self.y0)), frame.y0)
        return Box(x0, y0, x0 + self.x1 - self.x0, y0 + self.y1 - self.y0)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the box that is nearest to (x, y)."""
        return min(max(x, self.x0), self.x1), min(max(y, self.y0), self.y1)


class Label(NamedTuple):
    """A label to place: the point it belongs to, and its size.

    slide: pixels to the left of the point that are as good, for the label of a horizontal line.
    first: placed before the others, and not moved again.
    """

    x: float
    y: float
    width: float
    height: float
    slide: float = 0.0
    first: bool = False


def place(
    labels: Sequence[Label],
    frame: Box,
    *,
    taken: Sequence[Box] = (),
    points: Sequence[Box] = (),
    line: Sequence[tuple[float, float]] = (),
) -> list[Box]:
    """A box inside `frame` for each label.

    No box overlaps another or one that is `taken` as long as any candidate is free; boxes keep off
    `points`, leaders off boxes, and both off the sampled `line` where that is possible.
    """
    import numpy as np

    count, sampled = len(labels), np.array(line, float).reshape(-1, 2).T
    orders = [
        *itertools.islice(_orders(count), min(max(count, 1), ORDERS, 1 + TRIED // max(count, 1)))
    ]
    choices, tried = [_choices(label, frame, points, sampled) for label in labels], []
    for order in orders:
        ranked = sorted(order, key=lambda i: (not labels[i].first, not labels[i].slide))
        tried.append(_settled(labels, ranked, choices, taken))
        if tried[-1][0] < CROSSING:
            break
    placed = min(tried, key=lambda pair: pair[0])[1]
    return [placed[i] for i in range(count)]


ORDERS, TRIED = 8, 48
"""Orders that are tried at the most, and about how many labels are placed in all of them."""


def _orders(count: int) -> Iterator[list[int]]:
    """Orders in which labels take their places: as given, backwards, and from others on."""
    numbers = [*range(count)]
    for start in range(count or 1):
        turned = numbers[start:] + numbers[:start]
        yield turned
        yield turned[::-1]


class _Choices(NamedTuple):
    """The places that a label may take; boxes: their x0, y0, x1 and y1, each of all places.

    costs: what each costs wherever the other labels are.  foreign: the points that are not the
    label's.
    """

    places: Sequence[Box]
    boxes: Any
    costs: Any
    foreign: Sequence[Box]


def _choices(label: Label, frame: Box, points: Sequence[Box], line: Any) -> _Choices:
    import numpy as np

    places, costs, ends = [], [], []
    for reach, box in candidates(label):
        box = box if label.slide else box.within(frame)
        x, y = box.nearest(label.x, label.y)
        away = reach if label.slide else math.hypot(x - label.x, y - label.y) + reach * 0.2
        inside = frame.x0 <= box.x0 and frame.y0 <= box.y0
        inside = inside and box.x1 <= frame.x1 and box.y1 <= frame.y1
        costs.append(away if inside else away + OUTSIDE)
        places.append(box)
        ends.append((x, y))
    boxes = np.array(places, float).reshape(-1, 4).T
    x0, y0, x1, y1 = boxes[:, :, None]
    at_x, at_y = line
    under = (x0 - 3 < at_x) & (at_x < x1 + 3) & (y0 - 3 < at_y) & (at_y < y1 + 3)
    fixed = np.array(costs, float) + OVER_POINT * _overlaps(boxes, points, 2)
    if not label.slide:
        fixed += 2 * OVER_LINE * _across(line, (label.x, label.y), np.array(ends, float))
    foreign = [point for point in points if not point.contains(label.x, label.y)]
    return _Choices(places, boxes, fixed + OVER_LINE * under.sum(1).clip(0, 10), foreign)


def _across(line: Any, start: tuple[float, float], ends: Any) -> Any:
    """Whether the way from a start to each of the ends crosses a sampled line."""
    spots = line.T - start
    near = abs(spots[1:] - spots[:-1]).max(1, initial=0) < SAMPLED  # of one line, not the next
    first, second = spots[:-1][near], spots[1:][near]
    way, step = (ends - start)[:, None], second - first

    def turn(a: Any, b: Any) -> Any:
        return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]

    apart = turn(way, first) * turn(way, second) <= 0  # the spots are on both sides of the way
    between = turn(step, -first) * turn(step, way - first) < 0  # so are its ends of the line
    return (apart & between).any(1)


def _overlaps(boxes: Any, others: Sequence[Box], gap: float) -> Any:
    """How many of the others come closer than `gap` to each box."""
    import numpy as np

    x0, y0, x1, y1 = boxes[:, :, None]
    from_x, from_y, to_x, to_y = np.array(others, float).reshape(-1, 4).T
    apart = (x0 >= to_x + gap) | (from_x >= x1 + gap) | (y0 >= to_y + gap) | (from_y >= y1 + gap)
    return (~apart).sum(1)


def _settled(
    labels: Sequence[Label],
    order: Sequence[int],
    choices: Sequence[_Choices],
    taken: Sequence[Box],
) -> tuple[float, dict[int, Box]]:
    """The cost and the boxes of labels that take the best free place one by one, some times."""
    placed: dict[int, Box] = {}
    prices: dict[int, float] = {}
    leaders: dict[int, list[tuple[float, float]]] = {}
    for _ in range(PASSES):
        before = dict(placed)
        for i in order:
            if labels[i].first and i in placed:
                continue
            others = [*taken, *(box for j, box in placed.items() if j != i)]
            lines = [leaders[j] for j in placed if j != i]
            best, price, own = placed.get(i), math.inf, choices[i]
            costs = own.costs + OVER_LABEL * _overlaps(own.boxes, others, 4)
            crossed = [*others, *own.foreign]
            for box, cost in zip(own.places, costs.tolist(), strict=True):
                if cost < price:
                    cost += _crossings(labels[i], box, crossed, lines)
                    if cost < price:
                        best, price = box, cost
            if best is not None:
                placed[i], prices[i] = best, price
                leaders[i] = [*leader(labels[i], best)]
        if placed == before:
            break
    return sum(prices.values()), placed


def candidates(label: Label) -> Iterator[tuple[float, Box]]:
    """(distance, box) around the anchor, nearest first, the right-hand side before the others; for
    a label that may slide, above and below its line."""
    if label.slide:
        for shift in range(0, int(label.slide), 20):
            for gap in (5, 24):
                for y0 in (label.y + gap, label.y - gap - label.height):
                    x0 = label.x - shift - label.width
                    yield gap + shift / 20, Box(x0, y0, x0 + label.width, y0 + label.height)
        return
    for reach in REACHES:
        for step in range(DIRECTIONS):
            # 0, 1, -1, 2, -2 ... sixteenths of a turn, starting up and to the right
            turn = (step + 1) // 2 * (1 if step % 2 else -1)
            angle = math.pi / 8 * (0.5 + turn)
            x = label.x + math.cos(angle) * reach + math.cos(angle) * label.width / 2
            y = label.y + math.sin(angle) * reach + math.sin(angle) * label.height / 2
            yield reach, Box.around(x, y, label.width, label.height)


def leader(label: Label, box: Box) -> Iterator[tuple[float, float]]:
    """Points along the line from the anchor to its box."""
    if label.slide:
        return
    x, y = box.nearest(label.x, label.y)
    steps = max(1, int(math.hypot(x - label.x, y - label.y) / 4))
    for i in range(1, steps):
        yield label.x + (x - label.x) * i / steps, label.y + (y - label.y) * i / steps


def _crossings(
    label: Label,
    box: Box,
    crossed: Sequence[Box],
    leaders: Sequence[Sequence[tuple[float, float]]],
) -> float:
    """The cost of leaders of others over the box, and of its own over others."""
    spots = list(leader(label, box))
    count = sum(_is_on(other, box) for other in leaders)
    count += sum(_is_on(spots, other) for other in crossed)
    return CROSSING * count


def _is_on(spots: Sequence[tuple[float, float]], box: Box) -> bool:
    """Whether one of these points, which follow a straight line, is inside the box."""
    if not spots:
        return False
    (ax, ay), (bx, by), (x0, y0, x1, y1) = spots[0], spots[-1], box
    if max(ax, bx) <= x0 or min(ax, bx) >= x1 or max(ay, by) <= y0 or min(ay, by) >= y1:
        return False
    return any(x0 < x < x1 and y0 < y < y1 for x, y in spots)
