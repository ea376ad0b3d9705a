"""What changed between two checkpoints, and between two inventories."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._progress import telling
from rooftrace.errors import RequestError
from rooftrace.tracer.inventory import ParameterDiff, compare_parameters
from rooftrace.tracer.inventory.records import ModelInfo
from rooftrace.tracer.weightfiles.filenames import are_weights, is_checkpoint

if TYPE_CHECKING:
    from rooftrace.tracer.checkpoints import CheckpointDiff


def has_no_cost(before: Any, after: Any) -> bool:
    """Whether two sources have weights to compare, and no step: checkpoints or inventories."""
    infos = [isinstance(source, ModelInfo) for source in (before, after)]
    return any(infos) or are_weights(before, after)


def diff_checkpoints(
    before: Any,
    after: Any,
    args: Sequence[Any] = (),
    named: Mapping[str, Any] | None = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> CheckpointDiff | ParameterDiff:
    """What changed in the values and names of two checkpoints, or in the parameters of two models.

    Each side is a file of safetensors or torch.save, the index.json of a sharded one, a folder with
    one, or both are inventories.  args, named: other arguments of the call: any that is not None is
    refused.  Raises RequestError for that and for two sides of different kinds; CheckpointError;
    OSError.
    """
    unused = ["arguments of a call"] if args else []
    unused += [name for name, value in (named or {}).items() if value is not None]
    if isinstance(before, ModelInfo) and isinstance(after, ModelInfo):
        _refuse(unused, "an inventory has parameters, and no step that is run")
        return compare_parameters(before, after, names)
    if not (is_checkpoint(before) and is_checkpoint(after)):
        raise RequestError(
            f"diff: {_shown(before)} and {_shown(after)} are of two kinds; expected two "
            "checkpoints, two inventories, or two sources with a step (targets, modules, graphs)"
        )
    _refuse(
        unused,
        "a checkpoint has weights, and no step that is run; name its config.json to compare costs",
    )
    from rooftrace.tracer.checkpoints import compare_checkpoints

    with telling(progress):
        return compare_checkpoints(before, after, names)


def _shown(side: Any) -> str:
    if isinstance(side, (str, os.PathLike)):
        return repr(os.fspath(side))
    return repr(side) if isinstance(side, ModelInfo) else f"a {type(side).__name__}"


def _refuse(unused: Sequence[str], reason: str) -> None:
    if unused:
        raise RequestError(f"{', '.join(unused)}: {reason}")
