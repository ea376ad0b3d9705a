"""Parameters of two models beside each other, module by module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.tracer.changes import Change
from rooftrace.tracer.changes.aligning import union
from rooftrace.tracer.changes.limits import Limited
from rooftrace.tracer.changes.metrics import CAPACITY, EXACT, Metrics
from rooftrace.tracer.inventory.records import LayerInfo, ModelInfo, total
from rooftrace.tracer.paths import pattern_of

SIZES: Metrics = {"params": EXACT, "bytes": CAPACITY}


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    """Modules whose paths differ only in indices: how many there are, and their parameters."""

    path: str  # with indices starred
    modules: tuple[int, int]  # before, after
    params: tuple[int, int]
    shapes: tuple[tuple[str, ...], tuple[str, ...]]  # of one kind of tensor each: "weight [8, 4]"

    @property
    def delta(self) -> int:
        """Parameters after, less those before."""
        return self.params[1] - self.params[0]


@dataclass(frozen=True, kw_only=True)
class ParameterDiff(Plain, Shown, Limited):
    """What changed in the parameters from one model to another."""

    names: tuple[str, str]
    params: tuple[int, int]
    bytes: tuple[int, int]
    modules: tuple[ModuleParameters, ...]  # those that differ, largest change first
    unchanged: int  # paths that have the same parameters on both sides

    schema = "rooftrace.parameters/1"
    KEYS = "schema before=names.0 after=names.1 params bytes unchanged_paths=unchanged modules"

    METRICS = SIZES
    COMPARED = "parameters"

    def places(self) -> list[tuple[str, Mapping[str, Change]]]:
        """The parameters of all modules, and their bytes."""
        return [("", {"params": Change(*self.params), "bytes": Change(*self.bytes)})]

    def __repr__(self) -> str:
        (before, after), names = self.params, " -> ".join(self.names)
        return short(self, f"{names}: {before:,} -> {after:,} parameters ({after - before:+,})")


def compare_parameters(
    before: ModelInfo, after: ModelInfo, names: tuple[str, str] | None = None
) -> ParameterDiff:
    """The parameters of two models by module; a shared one counts where it stands first."""
    nothing: list[LayerInfo] = []
    compared = [
        ModuleParameters(
            path,
            (_modules(first), _modules(second)),
            (total(first), total(second)),
            (_shapes(first), _shapes(second)),
        )
        for path, first, second in union(_by_path(before.layers), _by_path(after.layers), nothing)
    ]
    rows = [row for row in compared if row.delta or row.shapes[0] != row.shapes[1]]
    return ParameterDiff(
        names=names or (before.name, after.name),
        params=(before.total_params, after.total_params),
        bytes=(before.bytes_parameters, after.bytes_parameters),
        modules=tuple(sorted(rows, key=lambda row: -abs(row.delta))),
        unchanged=len(compared) - len(rows),
    )


def _by_path(layers: Iterable[LayerInfo]) -> dict[str, list[LayerInfo]]:
    rows: dict[str, list[LayerInfo]] = {}
    for layer in layers:
        rows.setdefault(pattern_of(layer.module), []).append(layer)
    return rows


def _modules(layers: Iterable[LayerInfo]) -> int:
    return len({layer.module for layer in layers})


def _shapes(layers: Iterable[LayerInfo]) -> tuple[str, ...]:
    """Tensors of the modules in words, equal ones once: "weight [8, 4]"."""
    words = [f"{layer.name.rpartition('.')[2]} {_sizes(layer.shape)}" for layer in layers]
    return tuple(dict.fromkeys(words))


def _sizes(shape: tuple[int, ...] | None) -> str:
    return "of no shape yet" if shape is None else str(list(shape))
