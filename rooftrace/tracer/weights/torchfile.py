"""Reads tensors of torch.save files slice by slice, and records what such a file holds."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftrace._reading import FileKind
from rooftrace.tracer.metacopies import dtype_name, trees

# -- slices ----------------------------------------------------------------------------------------
# A few elements of a tensor at a time, whatever its strides: what is copied has a bound.

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
    places = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        places += index % size * stride
        index = torch.div(index, size, rounding_mode="floor")
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    row = tensor.as_strided((extent,), (1,))
    if row.element_size() == 1:  # indexing knows bytes, and not every format of 8 bits
        return row.view(torch.uint8)[places].view(tensor.dtype)
    return row[places]


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
# Records of what a file of weights holds: tensors that are read slice by slice.


class CheckpointError(ValueError):
    """A file of weights that cannot be read: names the file, the tensor, and what is wrong."""


KIND = FileKind("checkpoint", CheckpointError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """A tensor in a file.  Nothing of it is in memory before `read`.

    A cell is an element.  Of a format that has no dtype of whole bytes in torch it is a byte, and
    `decoded` is false: then only the bytes are known, not the values.
    """

    name: str
    dtype: str  # our name of it ("bf16"); the file's own where it is not decoded
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
    notes: tuple[str, ...] = ()  # what in the files is not among the tensors
    config: str | None = None  # the path of the config.json beside it

    @property
    def params(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())


# -- torchfile -------------------------------------------------------------------------------------
# Reads what torch.save wrote: mapped into memory, with weights_only, so that no code runs.
#
# A file is a zip whose entries are the bytes of storages, and a pickle that says which tensor lies
# where.  torch reads that pickle with an unpickler that knows tensors and containers alone.  Older
# files, which are a pickle as a whole, are refused.

_MOST_PICKLE = 1 << 28
"""Bytes of the pickle in a file, which says where the tensors are: 256 MiB."""
_DEEPEST = 32
"""Containers inside of each other."""
_MOST_REPEATED = 1 << 28
"""Elements of a tensor that repeats the same bytes (one that was expanded)."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_BELOW_A_BYTE = (torch.float4_e2m1fn_x2,)


def read_torch(path: Path) -> tuple[list[Stored], int]:
    """The tensors of a file of torch.save, and how many other values stand beside them.

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
    """A tensor as what is read of it: a wrapper or a sparse tensor as the tensors inside."""
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
    low += -low % mmap.PAGESIZE  # whole pages inside: beside them other memory may lie
    high -= high % mmap.PAGESIZE
    if high > low:
        with suppress(OSError, AttributeError):
            _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _ADVICE)


def _libc() -> Any:
    return ctypes.CDLL(None)
