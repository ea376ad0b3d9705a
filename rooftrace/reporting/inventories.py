"""The inventory of a module, a target or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.errors import RequestError, UnusedError
from rooftrace.reporting.estimates import Source
from rooftrace.tracer.inventory.records import ModelInfo
from rooftrace.tracer.weightfiles.filenames import is_checkpoint


def inventory(
    model: Source,
    *,
    weights: bool | None = None,
    plot: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ModelInfo:
    """What a model consists of: parameters, bytes, a row for each tensor, statistics of weights.

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
            from rooftrace.reporting.distributions import write_distributions

            tell("drawing the weights")
            write_distributions(made, Path(plot))
    return made


def _of_module(model: Any, weights: bool) -> ModelInfo:
    from rooftrace.tracer.inventory import inventory_of

    return inventory_of(model, weights)


def _of_named(name: str, weights: bool, trusted: bool) -> ModelInfo:
    from rooftrace.tracer.inventory import inventory_of

    if is_checkpoint(name):
        from rooftrace.tracer.weightfiles import open_checkpoint

        if trusted:
            raise UnusedError("trust_remote_code", "True", f"{name} is a checkpoint: no code")
        return inventory_of(open_checkpoint(name), weights)
    from rooftrace.tracer.asking import Request
    from rooftrace.tracer.asking.names import names_code
    from rooftrace.tracer.graphfiles import looks_saved
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
