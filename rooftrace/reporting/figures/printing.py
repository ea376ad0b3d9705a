"""Colours, sheets and files of figures: one palette for all outputs, and PNG, SVG or PDF files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import visible
from rooftrace._formats import FIGURES
from rooftrace._outputs import MADE_BY, MARK
from rooftrace._writing import write_bytes
from rooftrace.errors import RequestError, one_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

# -- palette ---------------------------------------------------------------------------------------
# Limits, phases, families of ops and kinds of bytes never share a tone: limits have the strong
# tones of Okabe and Ito's palette, families the muted and kinds the light ones of Paul Tol's.  All
# stay apart for colour-blind readers.

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
GREY = "#999999"
LEAST_LIGHT = 120  # of 255: the least of a tone on a dark page

LIMITS: Mapping[str, str] = {"compute": GREEN, "hbm": BLUE, "network": PINK, "launch": ORANGE}
PHASES: Mapping[str, str] = {
    "training": "#D55E00",
    "prefill": "#6A3D9A",
    "decode": "#C2185B",
    "forward": "#8C6D31",
}
FAMILIES: Mapping[str, str] = {
    "attention": "#332288",
    "moe": "#882255",
    "dense": "#DDCC77",
    "head": "#CC6677",
    "convolution": "#999933",
    "rnn": "#88CCEE",
    "norm": "#44AA99",
    "embedding": "#AA4499",
    "elementwise": "#117733",
    "loss": "#661100",
    "optimizer": "#6699CC",
    "communication": "#5C5C5C",
}
ROLES: Mapping[str, str] = {
    "weights": "#77AADD",
    "activations": "#EE8866",
    "kv": "#BBCC33",
    "gradients": "#FFAABB",
    "optimizer": "#EEDD88",
    "temporary": "#99DDFF",
    "constants": "#CCCCCC",
}
KINDS: Mapping[str, str] = {**ROLES, "saved": "#44BB99", "optimizer temporaries": "#AAAA00"}
"""Roles; activations saved for backward and temporaries of an optimizer apart."""


def on_dark(colour: str) -> str:
    """A colour for a dark page: as it is where it is light enough, else mixed with white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    light = 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]
    share = max(0.0, (LEAST_LIGHT - light) / (255 - light))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


# -- printing --------------------------------------------------------------------------------------
# A figure is laid out in inches, with type of 9 to 11 points, on the sheet of a `Medium`; the file
# has it at the scale of that medium.  So one layout serves a screen, a page and a column, and type
# on paper has 7 to 9 points.  Equal figures give equal files: they have no date.


@dataclass(frozen=True, slots=True)
class Medium:
    """Inches of the sheet that a figure is laid out on, and how it is printed.

    scale: inches of the file for each inch of the sheet.  dots: pixels of a PNG for each inch of
    the file.  title: points of the title on the sheet.
    """

    name: str
    width: float
    scale: float = 1.0
    dots: int = 150
    title: float = 14.0

    @property
    def is_narrow(self) -> bool:
        """Whether texts that are side by side on a screen have to stand above each other."""
        return self.width < 7.0


_PAPER = 0.78  # 9 to 11.5 points of a sheet are 7 to 9 of a paper
SCREEN = Medium("screen", 12.0)
MEDIA: Mapping[str, Medium] = {
    "screen": SCREEN,
    "paper": Medium("paper", 7.2 / _PAPER, _PAPER, 300, 11.5),
    "paper-column": Medium("paper-column", 3.5 / _PAPER, _PAPER, 300, 11.5),
}
"""A screen; the width of a page of two columns, 7.2 in; one of its columns, 3.5 in."""


def medium_of(style: str) -> Medium:
    """The medium of this name.  Raises RequestError for another one."""
    if style not in MEDIA:
        raise RequestError(f"style {style!r}: {one_of(style, MEDIA)}")
    return MEDIA[style]


@lru_cache(maxsize=4096)
def width_of(text: str, size: float, bold: bool = False) -> float:
    """Inches that a line of text takes on the sheet, at a size in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(visible(text), font, False)
    return float(width) / 72


def wrapped(text: str, size: float, room: float, bold: bool = False) -> list[str]:
    """The text as lines that take at most so many inches; a longer word is cut. None for ""."""
    lines: list[str] = []
    words = visible(text).split()

    def fits(many: int) -> bool:
        return width_of(" ".join(words[:many]), size, bold) <= room

    while words:  # to measure a text takes as long as to draw it: not once for each word
        many, least = len(words), 0
        if not fits(many):
            while many - least > 1:
                middle = (least + many) // 2
                least, many = (middle, many) if fits(middle) else (least, middle)
            many = max(1, least)
        if not least and len(words[0]) > 1 and not fits(1):
            words[0] = f"{words[0].rstrip('…')[:-1]}…"
            continue
        lines.append(" ".join(words[:many]))
        del words[:many]
    return lines


def fits(text: str, size: float, room: float) -> bool:
    """Whether a line of text is narrower than so many inches.

    Letters are wider than a fifth of their size, by which most texts are known to be too wide.
    """
    return len(text) * size / 72 / 5 < room and width_of(text, size) < room


def save(draw: Callable[[], Figure], *paths: Path, medium: Medium = SCREEN) -> None:
    """Draw a figure once and write it as PNG, SVG or PDF, by the ending of each file.

    matplotlib has its default settings meanwhile: a `matplotlibrc` may lie in the working folder,
    and with `text.usetex` names would be programs of TeX.  But letters keep their shapes: text is
    as wide as `width_of` says, and drawn a tenth faster.  SVG and PDF hold text as text, a PDF with
    the fonts (TrueType) in it.  Raises RequestError for another ending.
    """
    from matplotlib import rc_context, rcParams, rcParamsDefault

    usual = {**dict(dict.items(rcParamsDefault)), "text.hinting": "no_hinting"}
    del usual["backend"]
    with rc_context():
        dict.update(rcParams, usual)  # as they are: setting one by one warns of old names
        figure = draw()
        for path in paths:
            _write(figure, path, medium)


def _write(figure: Figure, path: Path, medium: Medium) -> None:
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FIGURES:
        raise RequestError(f"{path}: a figure is written as {', '.join(FIGURES)}: name it so")
    texts = _texts(figure)
    for text in texts:
        take_literally(text)
    if ending == "png":
        _write_png(figure, path, medium)
        return
    halos = {text: text.get_path_effects() for text in texts if text.get_path_effects()}
    for text in halos:  # the outline of letters would make them drawings
        text.set_path_effects([])
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.55, "pad": 0.5})
    write_bytes(path, (_svg if ending == "svg" else _pdf)(figure, medium))
    for text, effects in halos.items():
        text.set_path_effects(effects)
        text.set_bbox(None)


def take_literally(text: Text) -> None:
    """Show a name as it is: "$" begins no formula, and control characters become escapes."""
    text.set_parse_math(False)
    text.set_text(visible(text.get_text(), lines=True))


def _texts(figure: Figure) -> list[Text]:
    from matplotlib.text import Text

    texts = [*figure.texts]
    for axes in figure.axes:
        texts += [part for part in axes.get_children() if isinstance(part, Text)]
        legend = axes.get_legend()
        texts += legend.get_texts() if legend is not None else []
    return texts


def _write_png(figure: Figure, path: Path, medium: Medium) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    figure.set_dpi(medium.dots * medium.scale)
    canvas: Any = figure.canvas
    canvas.draw()
    # The paper is white: without a fourth channel a PNG takes half the time, for as many bytes.
    size = canvas.get_width_height()
    pixels = Image.frombytes("RGB", size, canvas.buffer_rgba(), "raw", "RGBX")
    file, about = io.BytesIO(), PngInfo()
    about.add_text("made_by", MADE_BY["made_by"])
    how: dict[str, Any] = {"dpi": (medium.dots, medium.dots), "pnginfo": about}
    pixels.save(file, "png", compress_level=3, **how)
    write_bytes(path, file.getvalue())


def _svg(figure: Figure, medium: Medium) -> bytes:
    """The drawing on its sheet, whose printed size is scaled."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "rooftrace"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": MARK})
    width, height = (side * medium.scale for side in figure.get_size_inches())
    text = re.sub(rb'width="[^"]*pt"', f'width="{width:.4f}in"'.encode(), file.getvalue(), count=1)
    return re.sub(rb'height="[^"]*pt"', f'height="{height:.4f}in"'.encode(), text, count=1)


def _pdf(figure: Figure, medium: Medium) -> bytes:
    """The drawing as one page of the printed size, on which the sheet is scaled."""
    from matplotlib import rc_context
    from matplotlib.backends import backend_pdf

    pdf: Any = backend_pdf  # it has no types

    width, height = map(float, figure.get_size_inches())
    dpi, file = figure.dpi, io.BytesIO()
    with rc_context({"pdf.fonttype": 42, "pdf.compression": 6}):
        about = {"CreationDate": None, "Creator": MARK, "Producer": None}
        page = pdf.PdfFile(file, metadata=about)
        figure.set_dpi(72)
        try:
            page.newPage(width * medium.scale, height * medium.scale)
            page.width, page.height = width, height  # lines are cut at these
            page.output(medium.scale, 0, 0, medium.scale, 0, 0, pdf.Op.concat_matrix)
            renderer = pdf.RendererPdf(page, 72, height, width)
            figure.draw(renderer)
            renderer.finalize()
            page.finalize()
        finally:
            figure.set_dpi(dpi)
            page.close()
    return file.getvalue()


# -- keys, and words of ticks ----------------------------------------------------------------------


LEGEND_LINE = 0.20
"""Inches of a line of keys."""


def legend_columns(labels: Sequence[str], room: float) -> int:
    """The number of columns of keys in so many inches; a column is as wide as its widest key."""
    widths = [width_of(label, 9) + 0.38 for label in labels]
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
