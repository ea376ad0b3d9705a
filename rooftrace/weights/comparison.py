"""Compares two checkpoints tensor by tensor; a slice of each side is in memory at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftrace._progress import tell
from rooftrace._reading import FileKind, json_of, text_of
from rooftrace.diffs.changes import Pairing, union
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.targets import (
    Checkpoint,
    CheckpointError,
    Stored,
    load_module,
    open_checkpoint,
)
from rooftrace.tracer.targets.checkpoints import as_bytes, as_doubles
from rooftrace.weights.inventory import (
    CheckpointDiff,
    ConfigDiff,
    Drift,
    TensorDiff,
    TensorLook,
    compare_parameters,
)
from rooftrace.weights.taking import inventory_of


def compare_checkpoints(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    names: tuple[str, str] | None = None,
) -> CheckpointDiff:
    """Changes from one checkpoint to another, in names, shapes, dtypes and values.

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


def _compared(
    before: Stored, after: Stored, old: str | None = None, by: str | None = None
) -> TensorDiff:
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


# -- configs ---------------------------------------------------------------------------------------
# What a change of config.json does to the parameters of its model, which is built on meta.


_LONGEST = 80
"""Letters of a value of a config that are shown."""
_ABSENT = "absent"
_CONFIG = FileKind("JSON file", CheckpointError)


def config_diff(before: str | None, after: str | None) -> ConfigDiff | None:
    """Differences of two config.json; None if one is missing or both are equal.

    A model that cannot be built is said in the note.  Raises CheckpointError for a file that is no
    JSON.
    """
    if before is None or after is None:
        return None
    rows = union(_fields(Path(before)), _fields(Path(after)), _ABSENT)
    fields = tuple(row for row in rows if row[1] != row[2])
    if not fields:
        return None
    tell("building the models of both configs")
    try:
        first, second = (
            inventory_of(load_module(path)[0], False, path) for path in (before, after)
        )
    except (TargetError, RequestError) as error:
        return ConfigDiff(fields=fields, parameters=None, note=f"not built: {error}")
    return ConfigDiff(fields=fields, parameters=compare_parameters(first, second))


def _fields(path: Path) -> dict[str, str]:
    table = json_of(text_of(path, _CONFIG), str(path), _CONFIG)
    return dict(_flat("", table))


def _flat(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """The values in nested tables under the paths of their keys, as JSON."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{place}.{key}" if place else key, item)
    else:
        text = json.dumps(value)
        yield place, text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# -- renames ---------------------------------------------------------------------------------------
# Which tensor of one checkpoint is that of another under a new name.


class Rename(NamedTuple):
    """A name before, the name after, and how that is known."""

    before: str
    after: str
    by: str


def renames(before: Mapping[str, Stored], after: Mapping[str, Stored]) -> list[Rename]:
    """Names of the same tensors among those that only one side has.

    First by their bytes, which are read for that where dtype and shape occur on both sides; of
    several tensors of the same bytes, as biases of zeros, by the ends of their names too.  Then by
    shape and the end of the name, where that leads to a single tensor on each side.
    """
    pairing = Pairing(sorted(before), sorted(after))
    looks = {(t.dtype, t.shape) for t in before.values()}
    looks &= {(t.dtype, t.shape) for t in after.values()}

    def by_bytes(tensor: Stored) -> Hashable:
        look = tensor.dtype, tensor.shape
        return (look, tensor.digest()) if look in looks and tensor.cells else None

    keys = _keys(pairing, before, after, by_bytes)
    pairing.by(keys[0].get, keys[1].get, alone=True)
    _by_ends(pairing, keys)
    equal = len(pairing.pairs)
    _by_ends(pairing, _keys(pairing, before, after, lambda tensor: tensor.shape))
    return [
        Rename(old, new, "bytes" if number < equal else "shape and name")
        for number, (old, new, _) in enumerate(pairing.pairs)
    ]


def _keys(
    pairing: Pairing[str],
    before: Mapping[str, Stored],
    after: Mapping[str, Stored],
    key_of: Callable[[Stored], Hashable],
) -> list[dict[str, Hashable]]:
    """The keys of the tensors of each side without a partner."""
    sides = zip((before, after), pairing.left, strict=True)
    return [{name: key_of(tensors[name]) for name in left} for tensors, left in sides]


def _by_ends(pairing: Pairing[str], keys: Sequence[Mapping[str, Hashable]]) -> None:
    """Pair names of one key that end in the same steps and have those alone on their side.

    The longest ends come first: "model.layers.0.up.weight" goes with "layers.0.up.weight".
    """
    deepest = max((name.count(".") + 1 for left in pairing.left for name in left), default=0)
    for steps in range(deepest, 0, -1):
        before, after = (partial(_ending, side, steps) for side in keys)
        pairing.by(before, after, alone=True)


def _ending(keys: Mapping[str, Hashable], steps: int, name: str) -> Hashable:
    """The key of a name with its last steps; None without a key, or as many steps."""
    parts, key = name.split("."), keys[name]
    return None if key is None or len(parts) < steps else (key, *parts[-steps:])


# -- drift -----------------------------------------------------------------------------------------
# How far the values of one tensor are from those of another, slice by slice.


class Special(NamedTuple):
    """How many values are not finite."""

    nans: int = 0
    infs: int = 0

    def with_(self, values: Tensor) -> Special:
        """These and those among a slice of doubles."""
        return Special(self.nans + int(values.isnan().sum()), self.infs + int(values.isinf().sum()))


class _Sums:
    """Sums over the slices that were added so far."""

    def __init__(self) -> None:
        self.equal = True
        self.before = self.after = self.difference = self.product = self.largest = 0.0
        self.before_special = self.after_special = Special()
        self.left_out = 0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add a slice of each side."""
        alike = before.dtype == after.dtype and torch.equal(as_bytes(before), as_bytes(after))
        self.equal &= alike
        x = as_doubles(before)
        y = x if alike else as_doubles(after)
        if not math.isfinite(float(x.sum()) + float(y.sum())):
            x, y = self._finite(x, y)
        squares = float(torch.dot(x, x))
        self.before += squares
        if alike:
            self.after += squares
            self.product += squares
        elif x.numel():
            self.after += float(torch.dot(y, y))
            self.product += float(torch.dot(x, y))
            difference = y - x
            self.difference += float(torch.dot(difference, difference))
            self.largest = max(self.largest, float(difference.abs_().max()))

    def _finite(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The elements that are finite on both sides; the others are counted."""
        self.before_special = self.before_special.with_(x)
        self.after_special = self.after_special.with_(y)
        both = x.isfinite() & y.isfinite()
        self.left_out += both.numel() - int(both.sum())
        return x[both], y[both]

    def drift(self) -> Drift:
        """The drift over all slices."""
        lengths = math.sqrt(self.before) * math.sqrt(self.after)
        return Drift(
            equal=self.equal,
            norm_before=math.sqrt(self.before),
            norm_after=math.sqrt(self.after),
            norm_difference=math.sqrt(self.difference),
            cosine=min(1.0, max(-1.0, self.product / lengths)) if lengths else None,
            largest=self.largest,
            left_out=self.left_out,
        )


def drift_of(
    before: Iterable[Tensor], after: Iterable[Tensor]
) -> tuple[Drift, tuple[Special, Special]]:
    """The drift between two tensors, and what of each is not finite.

    Their slices begin and end at the same elements.
    """
    sums = _Sums()
    with torch.no_grad():
        for one_side, other_side in zip(before, after, strict=True):
            sums.add(one_side, other_side)
    return sums.drift(), (sums.before_special, sums.after_special)


def special_in(slices: Iterable[Tensor]) -> Special:
    """How many values of a tensor are not finite."""
    special = Special()
    for part in slices:
        values = as_doubles(part)
        if not math.isfinite(float(values.sum())):
            special = special.with_(values)
    return special


def same_bytes(before: Iterable[Tensor], after: Iterable[Tensor]) -> bool:
    """Whether two tensors consist of the same bytes, read up to the first that differ."""
    pairs = zip(before, after, strict=True)
    return all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in pairs)
