"""From a path to a checkpoint: one file, an index of shards, or the folder of either."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from rooftrace._reading import json_of, opened, record_of, text_of
from rooftrace.errors import hint
from rooftrace.hardware.units import plural
from rooftrace.tracer.metacopies import dtype_name
from rooftrace.tracer.weights.filenames import ENDS, INDEX, MODEL, SAFETENSORS, TORCH, in_folder
from rooftrace.tracer.weights.torchfile import KIND, Checkpoint, CheckpointError, Stored, read_torch


@dataclass(frozen=True, slots=True)
class _Index:
    """Which file of a sharded checkpoint has which tensor."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = field(default_factory=dict)


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """The tensors of a checkpoint; their bytes are read later, slice by slice.

    source: a file of safetensors or torch.save, the index.json of a sharded one, or the folder of
    one.  Raises CheckpointError for any other file, for a damaged one, and OSError.
    """
    path = Path(source)
    try:
        path = _file_of(path)
        if path.name.endswith(INDEX):
            return _sharded(path, os.fspath(source))
        tensors, notes = _read_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or source}: there is no such file") from None
    return _checkpoint(path, os.fspath(source), {t.name: t for t in tensors}, notes=notes)


def _file_of(path: Path) -> Path:
    """The file that a path names: itself, or the only checkpoint of a folder."""
    if not path.is_dir():
        return path
    kinds = list(in_folder(path))
    if not kinds:
        raise CheckpointError(f"{path}: expected a folder with one of *{', *'.join(ENDS)}")
    files = kinds[0]
    named = [file for file in files if file.name.partition(".")[0] in MODEL]
    if len(files) > 1 and len(named) != 1:
        names = ", ".join(file.name for file in files[:6]) + (" ..." if len(files) > 6 else "")
        raise CheckpointError(f"{path}: {len(files)} checkpoints ({names}); name one of them")
    return named[0] if named else files[0]


def _read_file(path: Path) -> tuple[list[Stored], tuple[str, ...]]:
    if path.name.endswith(SAFETENSORS):
        return read_header(path), ()
    if not path.name.endswith(TORCH):
        raise CheckpointError(f"{path}: expected a file *{', *'.join(ENDS)}, or its folder")
    tensors, others = read_torch(path)
    beside = f"{path.name}: {plural(others, 'value')} beside the tensors: not read"
    return tensors, (beside,) if others else ()


def _sharded(path: Path, source: str) -> Checkpoint:
    """A checkpoint of several files.  Its index has to name files in its folder, and no others."""
    where = str(path)
    data = json_of(text_of(path, KIND), where, KIND, unique=True)
    index = record_of(_Index, data, where, KIND)
    by_file: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        by_file.setdefault(file, []).append(name)
    tensors: dict[str, Stored] = {}
    notes: list[str] = []
    for file, names in sorted(by_file.items()):
        shard = _shard(path, file)
        stored, beside = _read_file(shard)
        there = {tensor.name: tensor for tensor in stored}
        missing = [name for name in names if name not in there]
        if missing:
            raise KIND.refused(
                where,
                f"{file!r:.200} lacks {missing[0]!r:.200}"
                + (f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""),
            )
        tensors |= {name: there[name] for name in names}
        notes += beside
        if len(there) > len(names):
            more = plural(len(there) - len(names), "tensor")
            notes.append(f"{file}: {more} that the index leaves out: not read")
    return _checkpoint(path, source, tensors, files=len(by_file), notes=tuple(notes))


def _shard(index: Path, file: str) -> Path:
    """The path of a shard.  Raises CheckpointError where it is not there, or not in the folder."""
    parts = PurePosixPath(file).parts
    if not parts or ".." in parts or PurePosixPath(file).is_absolute() or "\\" in file:
        raise KIND.refused(str(index), f"shard {file!r:.200} is not in the folder of the index")
    if not file.endswith((SAFETENSORS, *TORCH)) or ":" in file or "\0" in file:
        raise KIND.refused(str(index), f"shard {file!r:.200}: expected a file of weights")
    path = index.parent / file
    if not path.is_file():
        raise KIND.refused(str(index), f"there is no shard {file!r:.200}")
    return path


def _checkpoint(
    path: Path,
    source: str,
    tensors: dict[str, Stored],
    files: int = 1,
    notes: tuple[str, ...] = (),
) -> Checkpoint:
    config = path.parent / "config.json"
    return Checkpoint(
        path=source,
        kind="safetensors" if SAFETENSORS in path.name else "torch",
        tensors=tensors,
        files=files,
        notes=notes,
        config=str(config) if config.is_file() else None,
    )


# -- safetensorsfile -------------------------------------------------------------------------------
# Reads safetensors files: the header strictly, the tensors slice by slice.
#
# The format: 8 bytes with the length of the header, a JSON table of dtype, shape and place of each
# tensor, then their bytes, without gaps.  The library `safetensors` maps whole files into memory;
# here a slice is read when it is asked for.


_LENGTH = 8
_MOST_HEADER = 100_000_000
"""Bytes of a header: the bound of the format."""
_MOST_ELEMENTS = (1 << 63) - 1
_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""The format's names of dtypes, and torch's."""
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Dtypes of less than a byte: their sizes are known, their values are not decoded."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> list[Stored]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises OSError, and CheckpointError for a header that does not describe the file exactly.
    """
    where = str(path)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_LENGTH)
        if len(head) < _LENGTH:
            raise KIND.unreadable(where, f"it has {size} bytes; a header's length takes 8")
        length = int.from_bytes(head, "little")
        if length > min(size - _LENGTH, _MOST_HEADER):
            reason = f"its header should have {length:,} bytes; the file has {size:,}"
            if length <= size - _LENGTH:
                reason = f"its header has {length:,} bytes; expected {_MOST_HEADER:,} at most"
            raise KIND.unreadable(where, reason)
        raw = file.read(length)
    table = json_of(raw, where, KIND, unique=True)
    if not isinstance(table, dict):
        raise KIND.unreadable(where, "its header is no table")
    record_of(dict[str, str], table.pop("__metadata__", {}), where, KIND, "__metadata__")
    entries = record_of(dict[str, _Entry], table, where, KIND)
    begin = _LENGTH + length
    ordered = sorted(entries.items(), key=lambda entry: entry[1].data_offsets)
    _check_places(ordered, size - begin, where)
    return [_stored(name, entry, begin, path) for name, entry in ordered]


def _check_places(ordered: list[tuple[str, _Entry]], size: int, where: str) -> None:
    """Every byte behind the header belongs to exactly one tensor."""
    for name, entry in ordered:
        low, high = entry.data_offsets
        if not 0 <= low <= high <= size:
            raise KIND.refused(
                where, f"{name!r:.200}: its bytes {low:,} to {high:,} are not in {size:,}"
            )
        bits = _bits(name, entry, where)
        if min(entry.shape, default=0) < 0 or math.prod(entry.shape) > _MOST_ELEMENTS:
            raise KIND.refused(where, f"{name!r:.200}: shape {list(entry.shape)} cannot be")
        needed = -(-math.prod(entry.shape) * bits // 8)
        if needed != high - low:
            look = f"{entry.dtype}{list(entry.shape)}"
            raise KIND.refused(
                where, f"{name!r:.200}: {look} takes {needed:,} bytes, and has {high - low:,}"
            )
    ends = [(("its header", 0)), *((name, entry.data_offsets[1]) for name, entry in ordered)]
    starts = [*((name, entry.data_offsets[0]) for name, entry in ordered), ("its end", size)]
    for (before, end), (after, start) in zip(ends, starts, strict=True):
        if end != start:
            what = "overlap" if start < end else f"have {start - end:,} bytes between them"
            raise KIND.refused(where, f"{before!r:.200} and {after!r:.200} {what}")


def _bits(name: str, entry: _Entry, where: str) -> int:
    if entry.dtype in _BITS:
        return _BITS[entry.dtype]
    if entry.dtype not in _TORCH:
        known = (*_TORCH, *_BITS)
        raise KIND.refused(
            where,
            f"{name!r:.200}: unknown dtype {entry.dtype!r:.60}; expected one of "
            f"{', '.join(known)}{hint(entry.dtype, known)}",
        )
    return 8 * _dtype(entry.dtype).itemsize


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _TORCH[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _stored(name: str, entry: _Entry, begin: int, path: Path) -> Stored:
    low, high = entry.data_offsets
    decoded = entry.dtype in _TORCH
    dtype = _dtype(entry.dtype) if decoded else torch.uint8
    return Stored(
        name=name,
        dtype=dtype_name(dtype) if decoded else entry.dtype,
        shape=entry.shape,
        elements=math.prod(entry.shape),
        bytes=high - low,
        cells=(high - low) // dtype.itemsize,
        decoded=decoded,
        read=partial(_read, path, begin + low, dtype),
    )


def _read(path: Path, begin: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """The elements from `start` to `stop` of the tensor whose bytes begin at `begin`."""
    buffer = bytearray((stop - start) * dtype.itemsize)
    if not buffer:
        return torch.empty(0, dtype=dtype)
    with path.open("rb") as file:
        file.seek(begin + start * dtype.itemsize)
        if file.readinto(buffer) != len(buffer):
            raise KIND.unreadable(str(path), "it became shorter while it was read")
    return torch.frombuffer(buffer, dtype=dtype)
