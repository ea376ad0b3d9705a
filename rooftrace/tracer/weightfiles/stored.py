"""Records of what a file of weights holds: tensors that are read slice by slice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from rooftrace._reading import FileKind
from rooftrace.tracer.weightfiles.slices import as_bytes, ranges


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
