"""Compares two checkpoints tensor by tensor; a slice of each side is in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rooftrace._progress import tell
from rooftrace.tracer.checkpoints.configs import config_diff
from rooftrace.tracer.checkpoints.drift import Special, drift_of, same_bytes, special_in
from rooftrace.tracer.checkpoints.records import CheckpointDiff, Drift, TensorDiff, TensorLook
from rooftrace.tracer.checkpoints.renames import renames
from rooftrace.tracer.weightfiles import Checkpoint, Stored, open_checkpoint


def compare_checkpoints(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    names: tuple[str, str] | None = None,
) -> CheckpointDiff:
    """What changed from one checkpoint to another, in names, shapes, dtypes and values.

    Raises CheckpointError for a file that is no checkpoint or is damaged, and OSError.
    """
    first, second = open_checkpoint(before), open_checkpoint(after)
    return CheckpointDiff(
        names=names or (first.path, second.path),
        tensors=tuple(_tensors(first, second)),
        params=(first.params, second.params),
        bytes=(first.bytes, second.bytes),
        config=config_diff(first.config, second.config),
        notes=tuple(dict.fromkeys(note for side in (first, second) for note in side.notes)),
    )


def _tensors(first: Checkpoint, second: Checkpoint) -> Iterator[TensorDiff]:
    """Every tensor of both, those of the second in its order, then what was removed."""
    before, after = first.tensors, second.tensors
    removed = {name: tensor for name, tensor in before.items() if name not in after}
    added = {name: tensor for name, tensor in after.items() if name not in before}
    if removed and added:
        tell("looking for renamed tensors")
    moved = {pair.after: pair for pair in renames(removed, added)}
    for number, (name, tensor) in enumerate(after.items(), start=1):
        tell(f"comparing tensors, {number:,} of {len(after):,}")
        if name in before:
            yield _compared(before[name], tensor)
        elif name in moved:
            pair = moved[name]
            yield _compared(before[pair.before], tensor, pair.before, pair.by)
        else:
            yield TensorDiff(name=name, status="added", before=None, after=_alone(tensor))
    gone = {pair.before for pair in moved.values()}
    for name, tensor in removed.items():
        if name not in gone:
            yield TensorDiff(name=name, status="removed", before=_alone(tensor), after=None)


def _compared(before: Stored, after: Stored, old: str = "", by: str = "") -> TensorDiff:
    drift, looks, note = _drift(before, after)
    if before.shape != after.shape:
        status = "shape"
    elif before.dtype != after.dtype:
        status = "dtype"
    elif old:
        status = "renamed"
    else:
        status = "frozen" if _equal(before, after, drift) else "drifted"
    return TensorDiff(
        name=after.name,
        status=status,
        before=looks[0],
        after=looks[1],
        renamed_from=old,
        renamed_by=by,
        drift=drift,
        note=note,
    )


def _drift(
    before: Stored, after: Stored
) -> tuple[Drift | None, tuple[TensorLook, TensorLook], str]:
    """The drift, or why there is none; and how each side looks."""
    closed = next((side.dtype for side in (before, after) if not side.decoded), None)
    if before.shape != after.shape or closed is not None:
        note = f"{closed} is not decoded: its bytes are compared, not its values"
        note = note if before.shape == after.shape else "of other shapes"
        return None, (_alone(before), _alone(after)), note
    drift, (first, second) = drift_of(before.slices(), after.slices())
    return drift, (_look(before, first), _look(after, second)), ""


def _equal(before: Stored, after: Stored, drift: Drift | None) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes."""
    return same_bytes(before.slices(), after.slices()) if drift is None else drift.equal


def _alone(tensor: Stored) -> TensorLook:
    """A tensor that is compared with no other; it is read for what is not finite."""
    return _look(tensor, special_in(tensor.slices()) if tensor.decoded else Special())


def _look(tensor: Stored, special: Special) -> TensorLook:
    return TensorLook(
        dtype=tensor.dtype,
        shape=tensor.shape,
        elements=tensor.elements,
        bytes=tensor.bytes,
        nans=special.nans,
        infs=special.infs,
    )
