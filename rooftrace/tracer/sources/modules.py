"""Sources that are objects of the user's: a module that is called, and a step."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rooftrace.errors import RequestError
from rooftrace.tracer.asking import Job, Options, names
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sources.apart import Traced

if TYPE_CHECKING:
    from rooftrace.tracer.inputs import Loaded

AS_CALLED: Mapping[str, int] = MappingProxyType({})
"""Sizes of a call: those of its arguments."""
_DIMENSION = re.compile(r"(\w+)\.(\d+)")
"""A size of a call that is a dimension of an argument: "x.1", or "0.1" for the first argument."""


@contextmanager
def collector_paused(keep: bool = False) -> Iterator[None]:
    """No garbage collection inside: tracing and pricing make many objects that all stay.

    keep: exclude all objects from later collections too (gc.freeze).  That is for a program that
    ends soon: garbage made inside is never freed.
    """
    from rooftrace.tracer.patches import shared

    enabled = gc.isenabled()
    with shared.collector_off.used():
        try:
            yield
        finally:
            if enabled and keep:
                gc.freeze()


@contextmanager
def _traced_apart() -> Iterator[None]:
    """Inside, the modes of the user's own code are off, and nothing is collected."""
    from torch import inference_mode

    from rooftrace.tracer.patches import contexts

    with collector_paused(), contexts.apart(), inference_mode(False):
        yield


@dataclass(frozen=True, slots=True)
class StepSource:
    """A step of the user's: a function whose first argument is a module."""

    step: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Options

    def traced(self) -> Traced:
        """The graph, under the phase that its run showed."""
        from rooftrace.tracer.phases import steps

        with _traced_apart():
            graph = steps.trace_step(self.step, self.args, self.kwargs, self.options)
        return Traced({graph.phase: graph})


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module with the arguments of its call, or with the sizes that make them."""

    job: Job

    @property
    def module(self) -> Any:
        """The module, or the function that was made one."""
        return self.job.source

    @property
    def is_sized(self) -> bool:
        """Whether sizes make the arguments of the call."""
        return self.job.is_sized and not self.job.is_called

    def has_size(self, name: str) -> bool:
        """Whether the call has a size of this name: batch, or a dimension of an argument."""
        place = _DIMENSION.fullmatch(name)
        if place is None:
            return name == "batch"
        args, argument = self.job.args, place[1]
        if argument.isdigit():
            return int(argument) < len(args) and args[int(argument)] is not None
        return self.job.kwargs.get(argument) is not None

    def traced(self) -> Traced:
        """The graphs; each phase has arguments of its own, which its run may change."""
        from rooftrace.tracer.phases import steps

        job = self.job
        if self.is_sized:
            return Traced(self.phases_at(job.phases))
        try:
            return Traced(self.each_at(AS_CALLED))
        except steps.OwnBackwardError:
            if "phases" in job.explicit or not job.is_function:
                raise
        return self._as_step().traced()

    def loaded(self, sizes: Mapping[str, int] = AS_CALLED) -> Loaded:
        """The module with the inputs of its call.

        sizes: of the call; "batch" is the first dimension of its tensors.  Raises RequestError for
        a size that it does not have.
        """
        from rooftrace.tracer.inputs import Loaded, call_inputs, module_inputs

        job = self.job
        if self.is_sized:
            return Loaded(self.module, module_inputs(self.module, job.request), "")
        job.check_call()
        args, kwargs = _resized(job.args, job.kwargs, sizes)
        return Loaded(self.module, call_inputs(self.module, args, kwargs, sizes.get("batch")), "")

    def each_at(self, sizes: Mapping[str, int]) -> dict[str, OpGraph]:
        """The graphs of all phases at these sizes of the call, each of a call of its own."""
        graphs: dict[str, OpGraph] = {}
        with _traced_apart():
            for phase in self.job.phases or names.usual(self.module):
                graphs |= self.phases_at((phase,), sizes)
        return graphs

    def phases_at(
        self, phases: Sequence[str] | None, sizes: Mapping[str, int] = AS_CALLED
    ) -> dict[str, OpGraph]:
        """The graphs of some phases, None for those that fit, from one call at these sizes."""
        from rooftrace.tracer.phases import trace_phases

        with _traced_apart():
            made = self.loaded(sizes)
            return trace_phases(made.module, made.inputs, phases, self.job.options)

    def _as_step(self) -> StepSource:
        """The call of a function that runs backward itself, as a step of the user's."""

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return function.function(*args, **kwargs)  # so that its ops are outside of modules

        call.__name__ = type(self.module).__name__
        job = self.job
        return StepSource(call, (self.module, *job.args), job.kwargs, job.options)


def _resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call with these sizes of their dimensions."""
    wanted = {place: size for name, size in sizes.items() if (place := _DIMENSION.fullmatch(name))}
    if not wanted:
        return args, kwargs
    from rooftrace.tracer.twins import inputs_on_meta

    moved, named = inputs_on_meta((list(args), dict(kwargs)))
    for place, size in wanted.items():
        name, dimension = place[1], int(place[2])
        held, key = (moved, int(name)) if name.isdigit() else (named, name)
        held[key] = _with_size(held[key], dimension, size, place[0])
    return moved, named


def _with_size(old: Any, dimension: int, size: int, name: str) -> Any:
    if not hasattr(old, "new_empty") or not -old.dim() <= dimension < old.dim():
        raise RequestError(f"size {name}: the argument has no such dimension")
    shape = list(old.shape)
    shape[dimension] = size
    return old.new_empty(shape).requires_grad_(old.requires_grad)
