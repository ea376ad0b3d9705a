"""Colours, sizes and the blank sheet that every figure shares.  Knows no numbers.

Colours are from Okabe and Ito's palette, which stays distinct for colour-blind readers.  Figures
are made with matplotlib's objects alone: nothing global is set, nothing needs a display.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

DPI = 150
WIDTH = 12.0  # inches: 1800 pixels, and 10 points stay legible when shown 1200 wide
INK, FAINT, GRID = "#222222", "#6b6b6b", "#e3e3e3"
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, YELLOW, GREY = "#D55E00", "#56B4E9", "#F0E442", "#999999"

PHASES: Mapping[str, str] = {
    "training": RED,
    "prefill": BLUE,
    "decode": GREEN,
    "forward": "#7B4F9E",
}
ROLES: Mapping[str, str] = {
    "weights": BLUE,
    "activations": ORANGE,
    "kv": GREEN,
    "gradients": PINK,
    "optimizer": RED,
    "temporary": SKY,
    "constants": GREY,
}
KINDS: Mapping[str, str] = {
    **ROLES,
    "saved": "#C98500",
    "activations": "#F3C04D",
    "optimizer temporaries": "#E8A0A0",
}
"""Roles, with what is saved for backward and what an optimizer drops apart."""
REGIMES: Mapping[str, str] = {"compute": GREEN, "hbm": BLUE, "network": PINK, "launch": ORANGE}
MANY = (BLUE, ORANGE, GREEN, RED, SKY, PINK, "#7B4F9E", YELLOW, "#8C6D31", "#117733", GREY)
CHIPS = (INK, "#8A6FB0", "#7A8B99", "#B08968", "#5B8E7D")
MARKERS = ("o", "s", "D", "^", "v", "P")


def colours(names: Iterable[str], fixed: Mapping[str, str] | None = None) -> dict[str, str]:
    """A colour for each name: its fixed one, else the next of the palette, in the order given."""
    fixed = fixed or {}
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
    """A blank figure with its title at the top left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(
        0.012, 1 - 0.20 / height, title, fontsize=14, fontweight="bold", color=INK, va="top"
    )
    if subtitle:
        figure.text(0.012, 1 - 0.50 / height, subtitle, fontsize=10, color=FAINT, va="top")
    return figure


def plain_axes(axes: Axes) -> None:
    """Take away the frame and soften what is left."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=FAINT, labelsize=10)
    axes.set_axisbelow(True)


def row_legend(axes: Axes, handles: Sequence[Any], at: tuple[float, float], pad: float) -> None:
    """One line of keys whose lower left corner is at this place of the axes."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=at,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.3,
        handletextpad=0.5,
        borderaxespad=pad,
        labelcolor=INK,
    )


def extent(text: Text, renderer: Any) -> Bbox:
    """The place that a text takes, in pixels."""
    _take_literally(text)
    return text.get_window_extent(renderer)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG that is the same every time (no date, no version in it)."""
    import numpy as np
    from matplotlib.text import Text
    from PIL import Image

    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [part for part in axes.get_children() if isinstance(part, Text)]
        legend = axes.get_legend()
        texts += legend.get_texts() if legend is not None else []
    for text in texts:
        _take_literally(text)
    canvas: Any = figure.canvas
    canvas.draw()
    # The paper is white: without a fourth channel a PNG takes half the time, for as many bytes.
    pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
    Image.fromarray(pixels).save(path, "png", dpi=(DPI, DPI), compress_level=3)


def _take_literally(text: Text) -> None:
    """A name in a text may hold anything: "$" begins no formula, and ESC is seen."""
    text.set_parse_math(False)
    text.set_text(visible(text.get_text(), lines=True))
