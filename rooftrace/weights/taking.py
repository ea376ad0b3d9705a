"""Takes the inventory of a module, wherever its tensors are, and of a file of weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.hardware.precisions import storage_bytes
from rooftrace.hardware.units import plural
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.targets import Checkpoint, Stored
from rooftrace.tracer.targets.checkpoints import as_doubles, flat_slice, ranges
from rooftrace.tracer.torch_private import FakeTensor
from rooftrace.tracer.values import dtype_name, masks, trees
from rooftrace.weights.inventory import (
    BINS,
    NO_VALUES,
    LayerInfo,
    ModelInfo,
    StoredPart,
    WeightStatistics,
    merged,
)

_MOST_UNPACKED = 1 << 28
"""Elements of a quantised tensor that is unpacked as a whole for its statistics."""


class _Held(NamedTuple):
    """A tensor that a module holds, under its first name."""

    tensor: Tensor
    name: str
    owner: nn.Module
    path: str
    role: str


@overrides.apart()
def inventory_of(source: nn.Module | Checkpoint, weights: bool, name: str = "") -> ModelInfo:
    """The parts of a module or a checkpoint.

    weights: read the values too, where there are any.  name: what to call it; by default the
    module's own name or class.  Nothing of a module is run.  Raises RequestError for any other
    source.
    """
    if isinstance(source, Checkpoint):
        return _of_checkpoint(source, weights, name)
    if not isinstance(source, nn.Module):
        raise RequestError(
            "inventory: expected a torch.nn.Module, a target or a checkpoint, got "
            f"{type(source).__name__}: {source!r:.80}"
        )
    held, names = _held_by(source)
    taken: set[_Region] = set()
    layers: dict[str, list[LayerInfo]] = {"parameter": [], "buffer": [], "attribute": []}
    by_bytes = _by_bytes(held)
    for number, item in enumerate(held, start=1):
        if weights and not number % 100:
            tell(f"reading weights, {number:,} of {len(held):,}")
        others = names[id(item.tensor)][1:]
        views = [x.name for x in by_bytes.get(_region(item.tensor), ()) if x is not item]
        shared = tuple(dict.fromkeys((*others, *views)))
        layers[item.role].append(_layer(item, shared, taken, weights))
    config = getattr(source, "config", None)
    return ModelInfo(
        name=name or str(getattr(config, "name_or_path", "") or trees.class_name(source)),
        kind=trees.class_name(source),
        layers=tuple(layers["parameter"]),
        buffers=(*layers["buffer"], *layers["attribute"]),
        modules=sum(1 for module in source.modules() if not any(True for _ in module.children())),
        notes=tuple(_notes(layers["parameter"])),
    )


def _held_by(root: nn.Module) -> tuple[list[_Held], dict[int, list[str]]]:
    """Every tensor of a module once, and the names of each by its identity.

    What is registered comes first: an attribute of one module may hold a parameter of another.
    """
    names: dict[int, list[str]] = {}
    held: list[_Held] = []
    seen: set[int] = set()
    for own in (_registered, _beside):
        for path, module in root.named_modules(remove_duplicate=False):
            for role, name, tensor in own(module, seen):
                whole = trees.shown_path(f"{path}.{name}" if path else name)
                if id(tensor) not in names:
                    held.append(_Held(tensor, whole, module, trees.shown_path(path), role))
                spelled = names.setdefault(id(tensor), [])
                if whole not in spelled:
                    spelled.append(whole)
    return held, names


_Named = Iterator[tuple[str, str, Tensor]]
"""The role, the name and the tensor of what one module holds itself."""


def _registered(module: nn.Module, seen: set[int]) -> _Named:
    for role, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in tensors.items():
            if tensor is not None:
                seen.update(id(part) for part, _ in _plain_parts(tensor))
                seen.add(id(tensor))
                yield role, name, tensor


def _beside(module: nn.Module, seen: set[int]) -> _Named:
    """Tensors in other attributes; packed weights are unpacked."""
    if isinstance(module, torch.jit.ScriptModule):
        return  # its other attributes are code's
    for name, tensor in trees.held_tensors(module, seen):
        yield "attribute", name, tensor
    for name, item in vars(module).items():
        if isinstance(item, torch.ScriptObject) and hasattr(item, "unpack"):
            yield from (("attribute", f"{name}.{n}", t) for n, t in _unpacked(item))


def _unpacked(packed: Any) -> list[tuple[str, Tensor]]:
    """The weight and the bias in a packed object of torch.ao."""
    try:
        inside = packed.unpack()
    except Exception:  # of a backend that this build of torch has not
        return []
    parts = inside if isinstance(inside, tuple) else (inside,)
    named = zip(("weight", "bias"), parts, strict=False)
    return [(name, part) for name, part in named if isinstance(part, Tensor)]


_Region = tuple[int, int, int]
"""The bytes of a plain tensor: its storage, where they begin in it, and how many they are."""


def _region(tensor: Tensor) -> _Region | None:
    """The bytes of a plain tensor; None where it has none of its own."""
    if isinstance(tensor, (*trees.LAZY, FakeTensor)) or trees.is_hollow(tensor):
        return None
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    size = tensor.element_size()
    return trees.bytes_of(tensor), int(tensor.storage_offset()) * size, tensor.numel() * size


def _by_bytes(held: Iterable[_Held]) -> dict[_Region | None, list[_Held]]:
    """The tensors that are views of the same bytes."""
    views: dict[_Region | None, list[_Held]] = {}
    for item in held:
        region = _region(item.tensor)
        if region is not None:
            views.setdefault(region, []).append(item)
    return views


def _layer(item: _Held, shared: tuple[str, ...], taken: set[_Region], weights: bool) -> LayerInfo:
    """The record of a tensor.  taken: the bytes that others have; its own are added."""
    tensor = item.tensor
    asks = bool(tensor.requires_grad)
    named: dict[str, Any] = {
        "name": item.name,
        "role": item.role,
        "module": item.path,
        "kind": trees.class_name(item.owner),
        "requires_grad": asks,
        "shared": shared,
    }
    if isinstance(tensor, trees.LAZY):
        note = "it has no shape before the first call"
        return LayerInfo(**named, dtype=_dtype(tensor), note=note)
    shape = _shape(tensor)
    declared = masks.stored_in(item.owner).get(item.name.rpartition(".")[2])
    size = _new_bytes(tensor, taken)
    if declared is not None and size:
        size = storage_bytes(declared, math.prod(shape))
    statistics, note = _statistics(tensor) if weights else (None, "")
    return LayerInfo(
        **named,
        shape=shape,
        dtype=declared or _dtype(tensor),
        num_params=math.prod(shape),
        bytes=size,
        stored=_parts(tensor),
        statistics=statistics,
        note=note,
    )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the weight; of one that bitsandbytes packed, that of what it unpacks to."""
    state = getattr(tensor, "quant_state", None)
    logical = getattr(state, "shape", None)
    return tuple(int(size) for size in (logical if logical is not None else tensor.shape))


def _dtype(tensor: Tensor) -> str:
    name = dtype_name(tensor.dtype)
    kind = type(tensor)
    if kind in trees.ORDINARY or isinstance(tensor, trees.LAZY) or not _parts(tensor):
        return name
    return f"{name} in {kind.__name__}"


def _plain_parts(tensor: Tensor) -> list[tuple[Tensor, str]]:
    """The plain tensors that hold the bytes of a tensor; of several views of the same the first."""
    if isinstance(tensor, trees.LAZY):
        return [(tensor, "")]
    parts: list[tuple[Tensor, str]] = []
    regions: set[_Region] = set()
    for part, suffix in trees.parts_of(tensor):
        region = _region(part)
        if region is None or region not in regions:
            parts.append((part, suffix))
        if region is not None:
            regions.add(region)
    return parts


def _size(part: Tensor) -> int:
    """Bytes of a plain tensor, without those that its attributes hold."""
    return sum(piece.numel() * piece.element_size() for piece in trees.pieces_of(part))


def _new_bytes(tensor: Tensor, taken: set[_Region]) -> int:
    """Bytes that store a tensor and that no other tensor before it has."""
    total = 0
    for part, _ in _plain_parts(tensor):
        region = _region(part)
        if region is None or region not in taken:
            total += _size(part)
        if region is not None:
            taken.add(region)
    return total


def _parts(tensor: Tensor) -> tuple[StoredPart, ...]:
    """The stored parts of a wrapper; empty for a plain tensor."""
    parts = _plain_parts(tensor)
    if len(parts) == 1 and (parts[0][0] is tensor or type(tensor) in trees.ORDINARY):
        return ()
    return tuple(
        StoredPart(suffix, dtype_name(part.dtype), tuple(part.shape), _size(part))
        for part, suffix in parts
    )


def _statistics(tensor: Tensor) -> tuple[WeightStatistics | None, str]:
    """The statistics of the values of a tensor, and a note on them."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return None, "on meta: no weights"
    try:
        plain, note = _plain(tensor)
    except Exception as error:  # whatever the class of a tensor says of being unpacked
        return None, f"not unpacked: {' '.join(str(error).split())[:120] or type(error).__name__}"
    if plain is None:
        return None, note
    values = plain

    def slices() -> Iterator[Tensor]:
        for start, stop in ranges(values.numel()):
            yield flat_slice(values, start, stop)

    try:
        with torch.no_grad():
            return statistics_of(slices), note
    except (RuntimeError, NotImplementedError) as error:  # torch converts no fp4, for one
        return None, f"not read: {str(error).splitlines()[0]:.120}"


def _plain(tensor: Tensor) -> tuple[Tensor | None, str]:
    """A strided tensor with the values of any one; None and the reason where there is none."""
    if trees.is_sparse(tensor):
        pieces = trees.pieces_of(tensor)
        return pieces[-1], "of the stored values alone: it is sparse"
    if getattr(tensor, "quant_state", None) is not None:
        return None, "packed by bitsandbytes: its bytes are no values"
    wrapped = trees.is_hollow(tensor) or tensor.is_quantized
    if not wrapped:
        if _parts(tensor) and not tensor.is_floating_point():
            return tensor, "of the stored integers, without scales"
        return tensor, ""
    if tensor.numel() > _MOST_UNPACKED:
        return None, f"not unpacked: more than {_MOST_UNPACKED:,} elements"
    unpacked: Any = tensor.dequantize()
    if not isinstance(unpacked, Tensor) or trees.is_hollow(unpacked):
        return None, f"not unpacked: {type(tensor).__name__}.dequantize() gives no plain tensor"
    return unpacked, "of the values it unpacks to"


def _notes(layers: list[LayerInfo]) -> Iterator[str]:
    """Remarks that the sums do not show."""
    lazy = [layer for layer in layers if layer.shape is None]
    if lazy:
        yield (
            f"{plural(len(lazy), 'parameter')} without a shape before the first call: "
            "sums are lower bounds"
        )
    twice = sum(layer.num_params for layer in layers if layer.shared and not layer.bytes)
    if twice:
        yield f"{plural(twice, 'element')} are views of bytes that other parameters have"


def _of_checkpoint(checkpoint: Checkpoint, weights: bool, name: str) -> ModelInfo:
    layers = []
    for number, stored in enumerate(checkpoint.tensors.values(), start=1):
        if weights:
            tell(f"reading weights, {number:,} of {len(checkpoint.tensors):,}")
        layers.append(_of_stored(stored, weights))
    notes = list(checkpoint.notes)
    below = Counter(layer.dtype for layer in layers if layer.note)
    notes += [f"{plural(n, 'tensor')} of {dtype}: values not decoded" for dtype, n in below.items()]
    return ModelInfo(
        name=name or checkpoint.path,
        kind=checkpoint.kind,
        layers=tuple(layers),
        notes=tuple(notes),
    )


def _of_stored(stored: Stored, weights: bool) -> LayerInfo:
    note = "" if stored.decoded else "its values are not decoded"
    return LayerInfo(
        name=stored.name,
        role="parameter",
        module=stored.name.rpartition(".")[0],
        shape=stored.shape,
        dtype=stored.dtype,
        num_params=stored.elements,
        bytes=stored.bytes,
        statistics=statistics_of(stored.slices) if weights and stored.decoded else None,
        note=note,
    )


# -- statistics ------------------------------------------------------------------------------------
# Statistics and a histogram of the values of a tensor, slice by slice.


def statistics_of(slices: Callable[[], Iterable[Tensor]]) -> WeightStatistics:
    """The statistics of a tensor with a histogram.  slices: gives its values, twice."""
    total = merged(_of_slice(as_doubles(part)) for part in slices())
    histogram: tuple[int, ...] = ()
    if total.count and math.isfinite(total.max - total.min):
        counts = torch.zeros(BINS, dtype=torch.float64)
        for part in slices():
            counts += _binned(as_doubles(part), total.min, total.max)
        histogram = tuple(int(n) for n in counts.tolist())
    return replace(total, histogram=histogram)


def _of_slice(values: Tensor) -> WeightStatistics:
    finite, nans = values, 0
    size = values.numel()
    if not math.isfinite(float(values.sum())):
        nans = int(values.isnan().sum())
        finite = values[values.isfinite()]
    count = finite.numel()
    if not count:
        return replace(NO_VALUES, nans=nans, infs=size - nans)
    mean = float(finite.mean())
    return WeightStatistics(
        count=count,
        mean=mean,
        squares=float((finite - mean).square_().sum()),
        min=float(finite.min()),
        max=float(finite.max()),
        zeros=count - int(torch.count_nonzero(finite)),
        nans=nans,
        infs=size - count - nans,
    )


def _binned(values: Tensor, low: float, high: float) -> Tensor:
    if low == high:  # histc takes equal limits as: find them yourself
        counts = torch.zeros(BINS, dtype=torch.float64)
        counts[BINS // 2] = float((values == low).sum())
        return counts
    return torch.histc(values, BINS, low, high)
