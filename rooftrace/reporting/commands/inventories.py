"""Inventories of a module, a target or a checkpoint, and histograms of weight values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._progress import tell, telling
from rooftrace.errors import RequestError, UnusedError
from rooftrace.hardware.units import plural
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.figures import style
from rooftrace.tracer.names import is_checkpoint
from rooftrace.weights.inventory import ModelInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rooftrace.weights.inventory import LayerInfo


# -- distributions ---------------------------------------------------------------------------------

MOST = 48
"""Histograms in a figure."""
_COLUMNS = 4
_ROW, _TOP, _BOTTOM = 1.75, 0.95, 0.35  # inches
_LETTERS = 38
"""Letters of a name above its histogram: its end."""


def write_distributions(model: ModelInfo, path: Path) -> None:
    """Draw the histograms of an inventory into a PNG, SVG or PDF.

    Raises RequestError where the inventory has none, and OSError.
    """
    style.save(lambda: distributions(model), path)


def distributions(model: ModelInfo) -> Figure:
    """A histogram for each tensor with values; of very many, for the largest.

    Raises RequestError where there is none.
    """
    drawn = [layer for layer in model.layers if layer.statistics and layer.statistics.histogram]
    if not drawn:
        raise RequestError(
            f"{model.name}: no weights to draw: they are on meta, or were not read (weights=True)"
        )
    largest = {id(x) for x in sorted(drawn, key=lambda layer: -layer.num_params)[:MOST]}
    shown = [layer for layer in drawn if id(layer) in largest]
    rows = math.ceil(len(shown) / _COLUMNS)
    height = _TOP + _BOTTOM + rows * _ROW
    which = "" if len(shown) == len(drawn) else f", the {len(shown)} largest of {len(drawn):,}"
    left_out = len(model.layers) - len(drawn)
    without = f"; {plural(left_out, 'tensor')} without values" if left_out else ""
    figure = style.sheet(
        height,
        f"Weights of {model.name}",
        f"values of each tensor, from the smallest to the largest finite one{which}{without}",
    )
    for number, layer in enumerate(shown):
        row, column = divmod(number, _COLUMNS)
        low = (height - _TOP - (row + 1) * _ROW + 0.35) / height
        place = (0.015 + column * 0.2475, low, 0.23, (_ROW - 0.85) / height)
        _histogram(figure.add_axes(place), layer)
    return figure


def _histogram(axes: Axes, layer: LayerInfo) -> None:
    statistics = layer.statistics
    assert statistics is not None
    low, high = statistics.min, statistics.max
    if low == high:  # a constant: one bar of some width
        low, high = low - 0.5, high + 0.5
    steps = len(statistics.histogram)
    edges = [low + (high - low) * i / steps for i in range(steps + 1)]
    axes.stairs(statistics.histogram, edges, fill=True, color=style.GREY)
    style.plain_axes(axes)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_xlim(low, high)
    axes.set_ylim(bottom=0)
    axes.set_xticks([low, high])
    axes.set_xticklabels([f"{statistics.min:.3g}", f"{statistics.max:.3g}"], fontsize=8)
    first, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    name = layer.name if len(layer.name) <= _LETTERS else f"…{layer.name[1 - _LETTERS :]}"
    axes.text(0, 1.28, name, transform=axes.transAxes, fontsize=9, color=style.INK, va="bottom")
    bad = statistics.nans + statistics.infs
    axes.text(
        0,
        1.06,
        f"mean {statistics.mean:.3g}, std {statistics.std:.3g}"
        + (f", {bad:,} NaN or inf" if bad else ""),
        transform=axes.transAxes,
        fontsize=8,
        color=style.RED if bad else style.FAINT,
        va="bottom",
    )


# -- inventories -----------------------------------------------------------------------------------


def inventory(
    model: Source,
    *,
    weights: bool | None = None,
    plot: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ModelInfo:
    """The inventory of a model: parameters, bytes, a row for each tensor, statistics of weights.

    model: a module, on any device, meta too; a target, which is built on meta and needs no inputs;
    or a checkpoint: a file of safetensors or torch.save, the index.json of a sharded one, or a
    folder.  Nothing of a module is run, and of a file nothing is unpickled.

    weights: read the values, slice by slice, for statistics and histograms; by default of a module
    that has them, and not of files.  A target that is code is then built with its weights.  plot:
    draw the histograms into this PNG file, which needs the values.

    Raises RequestError for weights that there are not, and for anything else than these sources;
    TargetError; CheckpointError.
    """
    if plot is not None and weights is False:
        raise RequestError(
            f"plot={os.fspath(plot)!r}: it draws the values; leave weights=False out"
        )
    with telling(progress):
        if isinstance(model, (str, os.PathLike)):
            read = bool(weights) or plot is not None
            made = _of_named(os.fspath(model), read, trust_remote_code)
        elif trust_remote_code:
            raise UnusedError("trust_remote_code", "True", "the module is built already")
        else:
            made = _of_module(model, weights is not False)
        if plot is not None:
            tell("drawing the weights")
            write_distributions(made, Path(plot))
    return made


def _of_module(model: Any, weights: bool) -> ModelInfo:
    from rooftrace.weights import inventory_of

    return inventory_of(model, weights)


def _of_named(name: str, weights: bool, trusted: bool) -> ModelInfo:
    from rooftrace.weights import inventory_of

    if is_checkpoint(name):
        from rooftrace.tracer.targets import open_checkpoint

        if trusted:
            raise UnusedError("trust_remote_code", "True", f"{name} is a checkpoint: no code")
        return inventory_of(open_checkpoint(name), weights)
    from rooftrace.graph import looks_saved
    from rooftrace.tracer import Request
    from rooftrace.tracer.names import names_code
    from rooftrace.tracer.targets import load_module

    if looks_saved(name):
        raise RequestError(
            f"{name}: a saved graph has ops, not modules; name the target that it was traced from"
        )
    if trusted and names_code(name):
        raise UnusedError("trust_remote_code", "True", f"the code of {name} runs as it is")
    tell("building the model")
    module, notes = load_module(name, Request(trust_remote_code=trusted), real=weights)
    made = inventory_of(module, weights, name)
    return replace(made, notes=(*made.notes, *notes))
