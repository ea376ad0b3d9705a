"""Records of an inventory: the tensors of a module or a checkpoint, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rooftrace._plain import Plain, plain_record
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
class LayerInfo(Plain):
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

    KEYS = (
        "name role module class=kind shape dtype params=num_params bytes requires_grad shared "
        "stored statistics note"
    )

    def to_dict(self) -> dict[str, Any]:
        """Plain data in SI units; a tensor without a shape has no number of parameters."""
        made = plain_record(self, self.KEYS)
        unshaped = {} if self.shape is not None else {"params": None}
        return {**made, "class": self.kind or None, **unshaped}


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Plain, Shown):
    """What a module or a checkpoint consists of.  Sums are over parameters, each counted once."""

    name: str
    kind: str  # the class of the module; "safetensors" or "torch" for files
    layers: tuple[LayerInfo, ...]  # parameters; of a checkpoint all tensors
    buffers: tuple[LayerInfo, ...] = ()  # and tensors that a module holds beside both
    modules: int | None = None  # modules without modules inside; None for a checkpoint
    notes: tuple[str, ...] = ()

    schema = "rooftrace.inventory/1"
    KEYS = (
        "schema name class=kind params=total_params params_trainable=trainable_params "
        "params_frozen=non_trainable_params params_shared=shared_params "
        "uninitialized=_without_shape bytes_parameters bytes_buffers modules notes tensors"
    )

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
    def _without_shape(self) -> list[str]:
        return [layer.name for layer in self.uninitialized]

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


def total(layers: Iterable[LayerInfo]) -> int:
    """Elements of these tensors."""
    return sum(layer.num_params for layer in layers)
