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

    Call it after the limits are set.  wording: a value in words; default `printing.decade_words`.
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
    axis.set_major_formatter(lambda value, _: (wording or printing.decade_words)(value))
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


def row_legend(
    axes: Axes, handles: Sequence[Any], at: tuple[float, float], pad: float, room: float
) -> None:
    """Keys with their lower left corner at this place of the axes, in lines of `room` inches."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=at,
        ncols=printing.legend_columns([str(handle.get_label()) for handle in handles], room),
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

    if not labels:
        return []
    count, spots = len(labels), np.array(line, float).reshape(-1, 2).T
    board, tried = _Board([_choices(a, frame, taken, points, spots) for a in labels]), []
    for order in itertools.islice(_orders(count), min(ORDERS, 1 + TRIED // count)):
        ranked = sorted(order, key=lambda i: (not labels[i].first, not labels[i].slide))
        tried.append((board.settle(ranked), dict(board.chosen)))
        if tried[-1][0] < CROSSING:
            break
    _, chosen = min(tried, key=lambda pair: pair[0])
    return [own.places[chosen[i]] for i, own in enumerate(board.choices)]


ORDERS, TRIED = 8, 72
"""Orders that are tried at the most, and about how many labels are placed in all of them."""


def _orders(count: int) -> Iterator[list[int]]:
    """Orders in which labels take their places: as given, backwards, and from others on."""
    for start in range(count):
        turned = [*range(start, count), *range(start)]
        yield turned
        yield turned[::-1]


class _Choices(NamedTuple):
    """The places that a label may take; boxes: their x0, y0, x1 and y1, each of all places.

    starts, ends: of the leaders there, x and y; nan for a label without.  costs: what each place
    costs wherever the other labels are.  stays: whether the label is not moved again.
    """

    places: Sequence[Box]
    boxes: Any
    starts: Any
    ends: Any
    costs: Any
    stays: bool


def _choices(
    label: Label, frame: Box, taken: Sequence[Box], points: Sequence[Box], spots: Any
) -> _Choices:
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
        ends.append((math.nan, math.nan) if label.slide else (x, y))
    boxes, way = _edges(places), np.array(ends, float).T.copy()
    starts = way * 0 + np.array([[label.x], [label.y]])
    x0, y0, x1, y1 = boxes[:, :, None]
    at_x, at_y = spots
    under = (x0 - 3 < at_x) & (at_x < x1 + 3) & (y0 - 3 < at_y) & (at_y < y1 + 3)
    foreign = [*taken, *(point for point in points if not point.contains(label.x, label.y))]
    fixed = np.array(costs, float) + OVER_LABEL * _overlaps(boxes, taken, 4).sum(1)
    fixed += OVER_POINT * _overlaps(boxes, points, 2).sum(1)
    fixed += CROSSING * _pierced(starts, way, _edges(foreign)).sum(1)
    fixed += 2 * OVER_LINE * _crossed(starts, way, *_pieces(spots)).any(1)
    fixed += OVER_LINE * under.sum(1).clip(0, 10)
    return _Choices(places, boxes, starts, way, fixed, label.first)


def _pieces(spots: Any) -> tuple[Any, Any]:
    """The ends of the straight pieces of sampled lines: x and y of their first and last spots."""
    import numpy as np

    step = np.diff(spots)
    near = abs(step).max(0, initial=0) < SAMPLED  # of one line, not the next
    (dx, dy), (to_x, to_y) = step[:, :-1], step[:, 1:]
    same = (abs(dx * to_y - dy * to_x) < 1e-6) & (dx * to_x + dy * to_y > 0)
    joined = np.concatenate([[False], near[:-1] & near[1:] & same, [False]])[: len(near) + 1]
    return spots[:, :-1][:, near & ~joined[:-1]], spots[:, 1:][:, near & ~joined[1:]]


def _edges(boxes: Sequence[Box]) -> Any:
    """x0, y0, x1 and y1, each of all boxes."""
    import numpy as np

    return np.array(boxes, float).reshape(-1, 4).T.copy()


def _crossed(start: Any, ends: Any, firsts: Any, seconds: Any) -> Any:
    """Whether ways from starts to ends cross others: by way, and by other; x and y of each."""
    start, ends = start[:, :, None], ends[:, :, None]
    firsts, seconds = firsts[:, None], seconds[:, None]

    def turn(a: Any, b: Any) -> Any:
        return a[0] * b[1] - a[1] * b[0]

    way, other = ends - start, seconds - firsts
    apart = turn(way, firsts - start) * turn(way, seconds - start) <= 0
    return apart & (turn(other, start - firsts) * turn(other, ends - firsts) < 0)


def _pierced(start: Any, ends: Any, boxes: Any) -> Any:
    """Whether ways from starts to ends go through boxes: by way, and by box."""
    import numpy as np

    corners = boxes.reshape(2, 2, 1, -1)  # low and high, x and y
    start, way = start[:, :, None], (ends - start)[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = (corners - start) / way  # parts of the way, at the sides of the box
    enter = np.maximum(*np.minimum(low, high))
    leave = np.minimum(*np.maximum(low, high))
    return (enter < leave) & (leave > 0) & (enter < 1)


def _overlaps(boxes: Any, others: Sequence[Box], gap: float) -> Any:
    """Whether boxes come closer than `gap` to others: by box, and by other."""
    x0, y0, x1, y1 = boxes[:, :, None]
    from_x, from_y, to_x, to_y = _edges(others)
    apart = (x0 >= to_x + gap) | (from_x >= x1 + gap) | (y0 >= to_y + gap) | (from_y >= y1 + gap)
    return ~apart


class _Board:
    """The places of all labels in one row, and what each costs beside the chosen ones."""

    def __init__(self, choices: Sequence[_Choices]) -> None:
        import numpy as np

        self.choices, self.chosen = choices, dict[int, int]()
        ends = [0, *itertools.accumulate(len(own.places) for own in choices)]
        self.parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        self.starts, self.ends, self.boxes = (
            np.concatenate([getattr(own, name) for own in choices], 1)
            for name in ("starts", "ends", "boxes")
        )
        self.faults = np.zeros(ends[-1])
        self._made: dict[tuple[int, int], Any] = {}

    def costs(self, i: int) -> Any:
        """The cost of each place of a label."""
        return self.choices[i].costs + self.faults[self.parts[i]]

    def price(self, *labels: int) -> float:
        """The cost of the chosen places of labels."""
        return float(sum(self.costs(i)[self.chosen[i]] for i in labels))

    def put(self, i: int, place: int | None) -> None:
        """Choose a place of a label; None: it has none."""
        if i in self.chosen:
            self.faults -= self._faults(i, self.chosen.pop(i))
        if place is not None:
            self.faults += self._faults(i, place)
            self.chosen[i] = place

    def _faults(self, i: int, place: int) -> Any:
        """The costs that a place of a label adds to those of others."""
        if (i, place) not in self._made:
            own, only = self.choices[i], slice(place, place + 1)
            box, start, end = own.boxes[:, only], own.starts[:, only], own.ends[:, only]
            faults = 1 * _pierced(self.starts, self.ends, box)[:, 0]
            faults += _pierced(start, end, self.boxes)[0]
            faults += _crossed(self.starts, self.ends, start, end)[:, 0]
            made = CROSSING * faults
            made += OVER_LABEL * _overlaps(self.boxes, [own.places[place]], 4)[:, 0]
            made[self.parts[i]] = 0
            self._made[i, place] = made
        return self._made[i, place]

    def settle(self, order: Sequence[int]) -> float:
        """Let labels take the best free place one by one, some times; what that costs.

        Those in conflict with another one then try a place at its box.
        """
        for i in order:
            self.put(i, None)
        for _ in range(PASSES):
            before = dict(self.chosen)
            for i in order:
                if not (self.choices[i].stays and i in self.chosen):
                    self.put(i, int(self.costs(i).argmin()))
            if self.chosen == before:
                free = [i for i in order if not self.choices[i].stays]
                if not sum(self._exchange(i, j) for i, j in itertools.permutations(free, 2)):
                    break
        return self.price(*order)

    def _exchange(self, i: int, j: int) -> bool:
        """If it pays, a label in conflict takes a place at another one's box, which then moves."""
        if self.price(i) < CROSSING:
            return False
        price, places = self.price(i, j), (self.chosen[i], self.chosen[j])
        apart = ~_overlaps(self.choices[i].boxes, [self.choices[j].places[places[1]]], 0)[:, 0]
        self.put(j, None)
        self.put(i, int((self.costs(i) + OUTSIDE * apart).argmin()))
        for k in (j, i):
            self.put(k, int(self.costs(k).argmin()))
        if self.price(i, j) < price:
            return True
        self.put(i, places[0])
        self.put(j, places[1])
        return False


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
