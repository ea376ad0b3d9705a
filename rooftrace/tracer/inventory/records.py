"""Records of an inventory: the tensors of a module or a checkpoint, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rooftrace._shown import Shown, short
from rooftrace.hardware.units import format_capacity, plural
from rooftrace.tracer.inventory.values import WeightStatistics

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A plain tensor that holds bytes of a wrapper: packed values, scales."""

    name: str  # of the part, as ".scale"; "" for the only one
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """One tensor of a module or a checkpoint, with the names that a state_dict has."""

    name: str
    role: str  # "parameter", "buffer", or "attribute": a tensor beside these
    module: str = ""  # path of the module that owns it
    kind: str = ""  # name of that module's class; "" where only a file is known
    shape: tuple[int, ...] | None = None  # None: it has none before the first call (nn.LazyLinear)
    dtype: str = ""
    num_params: int = 0  # elements
    bytes: int = 0  # that store it; of several names for the same bytes the first has them
    requires_grad: bool | None = None  # None: a file does not say
    shared: tuple[str, ...] = ()  # other names of the same tensor, or of the same bytes
    stored: tuple[StoredPart, ...] = ()  # of a wrapper: what holds its bytes
    statistics: WeightStatistics | None = None
    note: str = ""  # why there are no statistics, or what they are of

    @property
    def memory(self) -> float:
        """`bytes` in MiB, as `total_memory_mb`."""
        return self.bytes / MIB

    @property
    def mean(self) -> float:
        """Of its finite values; nan without weights."""
        return self.statistics.mean if self.statistics else math.nan

    @property
    def std(self) -> float:
        """Of its finite values, over n - 1; nan without weights."""
        return self.statistics.std if self.statistics else math.nan

    @property
    def min(self) -> float:
        """The smallest finite value; nan without weights."""
        return self.statistics.min if self.statistics else math.nan

    @property
    def max(self) -> float:
        """The largest finite value; nan without weights."""
        return self.statistics.max if self.statistics else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain data in SI units; a tensor without a shape has no number of parameters."""
        return {
            "name": self.name,
            "role": self.role,
            "module": self.module,
            "class": self.kind or None,
            "shape": None if self.shape is None else list(self.shape),
            "dtype": self.dtype,
            "params": None if self.shape is None else self.num_params,
            "bytes": self.bytes,
            "requires_grad": self.requires_grad,
            "shared": list(self.shared),
            "stored": [
                {"name": p.name, "dtype": p.dtype, "shape": list(p.shape), "bytes": p.bytes}
                for p in self.stored
            ],
            "statistics": None if self.statistics is None else self.statistics.to_dict(),
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Shown):
    """What a module or a checkpoint consists of.  Sums are over parameters, each counted once."""

    name: str
    kind: str  # the class of the module; "safetensors" or "torch" for files
    layers: tuple[LayerInfo, ...]  # parameters; of a checkpoint all tensors
    buffers: tuple[LayerInfo, ...] = ()  # and tensors that a module holds beside both
    modules: int | None = None  # modules without modules inside; None for a checkpoint
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Tensors in `layers`.  A Linear with a bias is two of them."""
        return len(self.layers)

    @property
    def total_params(self) -> int:
        """Elements of all parameters; those without a shape yet are not in it."""
        return sum(layer.num_params for layer in self.layers)

    @property
    def trainable_params(self) -> int | None:
        """Elements that ask for a gradient; None for a checkpoint, which does not say."""
        return self._asking(True)

    @property
    def non_trainable_params(self) -> int | None:
        """Elements that ask for no gradient; None for a checkpoint, which does not say."""
        return self._asking(False)

    @property
    def shared_params(self) -> int:
        """Elements that stand under more than one name; they are counted once."""
        return sum(layer.num_params for layer in self.layers if layer.shared)

    @property
    def bytes_parameters(self) -> int:
        """Bytes that store the parameters."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def bytes_buffers(self) -> int:
        """Bytes of buffers and of tensors beside them."""
        return sum(layer.bytes for layer in self.buffers)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return self.bytes_parameters + self.bytes_buffers

    @property
    def total_memory_mb(self) -> float:
        """Bytes of the parameters in MiB."""
        return self.bytes_parameters / MIB

    @property
    def uninitialized(self) -> tuple[LayerInfo, ...]:
        """Tensors that have no shape before the first call."""
        return tuple(layer for layer in self.tensors if layer.shape is None)

    @property
    def tensors(self) -> tuple[LayerInfo, ...]:
        """Parameters, then buffers and the others."""
        return (*self.layers, *self.buffers)

    def _asking(self, gradient: bool) -> int | None:
        if any(layer.requires_grad is None for layer in self.layers):
            return None
        return total(layer for layer in self.layers if layer.requires_grad is gradient)

    def __repr__(self) -> str:
        more = " at least" if self.uninitialized else ""
        return short(
            self,
            f"{self.name}: {self.total_params:,} parameters{more} in "
            f"{plural(self.num_layers, 'tensor')}, {format_capacity(self.bytes_parameters)}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data: bytes and counts, every tensor with its statistics."""
        return {
            "schema": "rooftrace.inventory/1",
            "name": self.name,
            "class": self.kind,
            "params": self.total_params,
            "params_trainable": self.trainable_params,
            "params_frozen": self.non_trainable_params,
            "params_shared": self.shared_params,
            "uninitialized": [layer.name for layer in self.uninitialized],
            "bytes_parameters": self.bytes_parameters,
            "bytes_buffers": self.bytes_buffers,
            "modules": self.modules,
            "notes": list(self.notes),
            "tensors": [layer.to_dict() for layer in self.tensors],
        }


def total(layers: Iterable[LayerInfo]) -> int:
    """Elements of these tensors."""
    return sum(layer.num_params for layer in layers)
