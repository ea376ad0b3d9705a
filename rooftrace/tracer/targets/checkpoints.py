"""Reads checkpoints slice by slice: files of torch.save, safetensors, shards, folders."""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from rooftrace._reading import FileKind, json_of, opened, record_of, text_of
from rooftrace.errors import hint
from rooftrace.hardware.units import plural
from rooftrace.tracer.names import ENDS, INDEX, MODEL, SAFETENSORS, TORCH, in_folder
from rooftrace.tracer.values import dtype_name, trees

# -- slices ----------------------------------------------------------------------------------------
# A few elements of a tensor at a time, whatever its strides: a copy has a bound.

SLICE = 1 << 18
"""Elements that are read at once: 2 MiB as doubles, which a cache holds."""


def ranges(elements: int, size: int = SLICE) -> Iterator[tuple[int, int]]:
    """(start, stop) of each slice of so many elements."""
    for start in range(0, elements, size):
        yield start, min(start + size, elements)


def flat_slice(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The elements `start` to `stop` of a strided tensor, in the order of its shape, as a row.

    A contiguous tensor gives a view.  Of any other one these elements alone are copied.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    index = torch.arange(start, stop, device=tensor.device)
    offsets = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        offsets += index % size * stride
        index = torch.div(index, size, rounding_mode="floor")
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    row = tensor.as_strided((extent,), (1,))
    if row.element_size() == 1:  # indexing knows bytes, and not every format of 8 bits
        return row.view(torch.uint8)[offsets].view(tensor.dtype)
    return row[offsets]


def as_doubles(values: Tensor) -> Tensor:
    """Values of any dtype as a row of doubles on the CPU; a complex number is two of them."""
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).reshape(-1)
    return values.cpu().to(torch.float64)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of a row of values, as torch.uint8."""
    values = values.detach().resolve_conj().resolve_neg()
    return values.contiguous().view(torch.uint8)


# -- stored ----------------------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A file of weights that cannot be read: names the file, the tensor, and the fault."""


KIND = FileKind("checkpoint", CheckpointError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A tensor in a file.  Nothing of it is in memory before `read`.

    A cell is an element.  Of a format without a byte-sized dtype in torch it is a byte, and
    `decoded` is false: then only the bytes are read, not the values.
    """

    name: str
    dtype: str  # our name of it ("bf16"); the file's where it is not decoded
    shape: tuple[int, ...]  # of elements
    elements: int
    bytes: int
    cells: int
    decoded: bool
    read: Callable[[int, int], Tensor]  # the cells from start to stop, as a row

    def slices(self) -> Iterator[Tensor]:
        """The cells in their order, so many at a time that memory has a bound."""
        for start, stop in ranges(self.cells):
            yield self.read(start, stop)

    def digest(self) -> str:
        """A hash of the bytes of all cells."""
        hashed = hashlib.blake2b(digest_size=20)
        for part in self.slices():
            hashed.update(as_bytes(part).numpy().data)
        return hashed.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """The tensors of a checkpoint, by name, over all of its files."""

    path: str
    kind: str  # "safetensors" or "torch"
    tensors: Mapping[str, Stored]
    files: int
    notes: tuple[str, ...] = ()  # other contents of the files
    config: str | None = None  # the path of the config.json next to it

    @property
    def params(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())


# -- torchfile -------------------------------------------------------------------------------------
# Reads a file of torch.save: mapped into memory, with weights_only, so that no code runs.
#
# A file is a zip whose entries are the bytes of storages, and a pickle that says which tensor lies
# where.  torch reads that pickle with an unpickler that knows tensors and containers alone.  Older
# files, each one pickle, are refused.

_MOST_PICKLE = 1 << 28
"""Bytes of the pickle in a file, which says where the tensors are: 256 MiB."""
_DEEPEST = 32
"""Containers inside of each other."""
_MOST_REPEATED = 1 << 28
"""Elements of a tensor that repeats the same bytes (one that was expanded)."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_BELOW_A_BYTE = (torch.float4_e2m1fn_x2,)


def read_torch(path: Path) -> tuple[list[Stored], int]:
    """The tensors of a file of torch.save, and how many other values it holds.

    Raises OSError, and CheckpointError for another file and for one that holds more than tensors,
    containers, numbers and text.
    """
    _check_zip(path)
    others: list[str] = []
    tensors = dict(_tensors(_loaded(path), "", str(path), others))
    return [s for name, t in tensors.items() for s in _stored(name, t, path)], len(others)


def _check_zip(path: Path) -> None:
    where = str(path)
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            head = file.read(2)
        if head[:1] == b"\x80":
            raise KIND.unreadable(
                where,
                "it is a pickle, which may run code, so it is not opened; write it again with "
                "torch.save of a newer torch, or as safetensors",
            )
        raise KIND.unreadable(where, "it is no zip, or it is cut off" if head else "it is empty")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError) as problem:
        raise KIND.unreadable(where, problem) from None
    names = {entry.filename.partition("/")[2]: entry for entry in entries}
    if "data.pkl" not in names or "constants.pkl" in names:
        reason = "it is a TorchScript archive, which holds code"
        reason = reason if "constants.pkl" in names else "it is a zip without data.pkl"
        raise KIND.unreadable(where, f"{reason}; expected what torch.save writes of a state_dict")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise KIND.unreadable(where, f"{entry.filename!r:.200} in it is compressed")
    if names["data.pkl"].file_size > _MOST_PICKLE:
        raise KIND.unreadable(where, f"its data.pkl has more than {_MOST_PICKLE >> 20} MiB")


def _loaded(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as problem:
        name = _GLOBAL.search(str(problem))
        holds = f"it holds {name[1]}" if name else "its pickle holds more than tensors"
        raise KIND.unreadable(
            str(path),
            f"{holds}, and only tensors, containers, numbers and text are read, as anything else "
            "may run code; save the state_dict alone",
        ) from None
    except OSError:
        raise
    except Exception as problem:  # whatever torch says of a damaged file
        raise KIND.unreadable(str(path), str(problem).partition("\n")[0] or repr(problem)) from None


def _tensors(
    tree: Any, name: str, where: str, others: list[str], depth: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, each under the path of its keys: "model.head.weight"."""
    if depth > _DEEPEST:
        raise KIND.unreadable(where, f"its containers are more than {_DEEPEST} deep")
    if isinstance(tree, Tensor):
        yield name or "tensor", tree
    elif isinstance(tree, (Mapping, list, tuple)):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, item in items:
            inside = f"{name}.{key}" if name else str(key)
            yield from _tensors(item, inside, where, others, depth + 1)
    else:
        others.append(name)


def _stored(name: str, tensor: Tensor, path: Path) -> Iterator[Stored]:
    """The plain tensors of a tensor: those inside a wrapper or a sparse tensor."""
    for part, suffix in trees.parts_of(tensor):
        yield _plain(name + suffix, part, path)


def _plain(name: str, tensor: Tensor, path: Path) -> Stored:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    where = f"{path}: {name!r:.200}"
    if tensor.is_meta:
        raise CheckpointError(f"{where} is on the meta device: there are no bytes of it")
    decoded = not tensor.is_quantized and dtype not in _BELOW_A_BYTE
    cells = tensor
    if not decoded:
        cells = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    stored = cells.untyped_storage().nbytes() // cells.itemsize
    if cells.numel() > max(stored, _MOST_REPEATED):
        raise CheckpointError(f"{where}: {cells.numel():,} elements repeat {stored:,} stored ones")
    return Stored(
        name=name,
        dtype=dtype_name(dtype) if decoded else str(dtype).removeprefix("torch."),
        shape=shape,
        elements=tensor.numel() * (2 if dtype in _BELOW_A_BYTE else 1),
        bytes=cells.numel() * cells.itemsize,
        cells=cells.numel(),
        decoded=decoded,
        read=partial(_read, cells.detach()),
    )


def _read(tensor: Tensor, start: int, stop: int) -> Tensor:
    part = flat_slice(tensor, start, stop).clone()
    _forget(tensor, start, stop)
    return part


_ADVICE = getattr(mmap, "MADV_DONTNEED", None)


def _forget(tensor: Tensor, start: int, stop: int) -> None:
    """Give the mapped pages of a slice back: the file has them.  Only to save memory.

    Nobody writes to the mapping, so nothing is lost; a page at an edge is read once more.
    """
    if _ADVICE is None or not tensor.is_contiguous():
        return
    low = tensor.data_ptr() + start * tensor.itemsize
    high = low + (stop - start) * tensor.itemsize
    low += -low % mmap.PAGESIZE  # full pages inside: other memory may adjoin them
    high -= high % mmap.PAGESIZE
    if high > low:
        with suppress(OSError, AttributeError):
            _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _ADVICE)


def _libc() -> Any:
    return ctypes.CDLL(None)


# -- From a path to a checkpoint: one file, an index of shards, or the folder of either ------------


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
    note = f"{path.name}: {plural(others, 'value')} beside the tensors: not read"
    return tensors, (note,) if others else ()


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
        stored, unread = _read_file(shard)
        by_name = {tensor.name: tensor for tensor in stored}
        missing = [name for name in names if name not in by_name]
        if missing:
            raise KIND.refused(
                where,
                f"{file!r:.200} lacks {missing[0]!r:.200}"
                + (f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""),
            )
        tensors |= {name: by_name[name] for name in names}
        notes += unread
        if len(by_name) > len(names):
            more = plural(len(by_name) - len(names), "tensor")
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
# tensor, then their bytes, without gaps.  The library `safetensors` maps full files into memory;
# here a slice is read on demand.


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
"""Dtypes of less than a byte: their sizes are read, their values are not decoded."""


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
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
    entries = record_of(dict[str, _HeaderEntry], table, where, KIND)
    begin = _LENGTH + length
    ordered = sorted(entries.items(), key=lambda entry: entry[1].data_offsets)
    _check_places(ordered, size - begin, where)
    return [_stored_in_header(name, entry, begin, path) for name, entry in ordered]


def _check_places(ordered: list[tuple[str, _HeaderEntry]], size: int, where: str) -> None:
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
            fault = "overlap" if start < end else f"have {start - end:,} bytes between them"
            raise KIND.refused(where, f"{before!r:.200} and {after!r:.200} {fault}")


def _bits(name: str, entry: _HeaderEntry, where: str) -> int:
    if entry.dtype in _BITS:
        return _BITS[entry.dtype]
    if entry.dtype not in _TORCH:
        dtypes = (*_TORCH, *_BITS)
        raise KIND.refused(
            where,
            f"{name!r:.200}: unknown dtype {entry.dtype!r:.60}; expected one of "
            f"{', '.join(dtypes)}{hint(entry.dtype, dtypes)}",
        )
    return 8 * _dtype(entry.dtype).itemsize


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _TORCH[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _stored_in_header(name: str, entry: _HeaderEntry, begin: int, path: Path) -> Stored:
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
        read=partial(_read_slice, path, begin + low, dtype),
    )


def _read_slice(path: Path, begin: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """The elements from `start` to `stop` of the tensor whose bytes begin at `begin`."""
    buffer = bytearray((stop - start) * dtype.itemsize)
    if not buffer:
        return torch.empty(0, dtype=dtype)
    with path.open("rb") as file:
        file.seek(begin + start * dtype.itemsize)
        if file.readinto(buffer) != len(buffer):
            raise KIND.unreadable(str(path), "it became shorter while it was read")
    return torch.frombuffer(buffer, dtype=dtype)
