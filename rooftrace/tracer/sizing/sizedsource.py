"""One source at many sizes: which names its sizes have, and its trace at any of them.

Sizes are batch, seq and kv; integers of a config ("config.num_hidden_layers") or keyword arguments
of the function that a target names; names that stand in the shapes of inputs ("x=8,3,side,side");
and dimensions of the arguments of a call ("x.1", or "0.1" for the first one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rooftrace._progress import tell
from rooftrace.errors import RequestError, hint
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sizing.tracecache import TraceCache
from rooftrace.tracer.sources import ModuleSource, traced

_LENGTHS = ("batch", "seq", "kv")
_WORD = re.compile(r"[A-Za-z_]\w*")


class SizedSource:
    """The graphs of a job at many sizes.

    Raises RequestError for a name that is no size of the source.
    """

    def __init__(self, job: Job, names: Sequence[str]) -> None:
        from rooftrace.tracer.targets import isolation

        self.job, self.names = job, tuple(names)
        self._kept, self._cache = isolation.Kept(), TraceCache.usual()
        self._call = ModuleSource(job) if job.is_called and not job.is_named else None
        self.traces = 0  # that were not in the cache
        doubled = next((name for name in names if list(names).count(name) > 1), None)
        if doubled:
            raise RequestError(f"size {doubled!r} stands twice; name each size once")
        if job.is_graph:
            raise RequestError(
                f"{job.name}: a graph has its sizes; name the module or the target that it is made "
                "of, or a form (made by `rooftrace sweep ... --save-form FILE`)"
            )
        if job.is_script and names:
            raise RequestError(
                f"size {names[0]!r}: {job.name} is a script, which has its own sizes; give it "
                f"options of its own, or name the module in it ({job.name.split()[0]}:NAME)"
            )
        for name in names:
            self._check(name)

    def job_at(self, numbers: Sequence[int]) -> Job:
        """The job at these sizes."""
        sizes = dict(zip(self.names, numbers, strict=True))
        lengths: dict[str, Any] = {n: size for n, size in sizes.items() if n in _LENGTHS}
        inputs = {
            name: _WORD.sub(lambda m: str(sizes.get(m[0], m[0])), shape) + colon + dtype
            for name, text in self.job.request.inputs.items()
            for shape, colon, dtype in [text.partition(":")]
        }
        settings = {
            name: size
            for name, size in sizes.items()
            if name not in _LENGTHS and not self._is_in_shapes(name)
        }
        request = replace(
            self.job.request,
            **lengths,
            inputs=inputs,
            settings={**self.job.request.settings, **settings},
        )
        return replace(self.job, request=request, explicit=())

    def graphs(self, numbers: Sequence[int]) -> Mapping[str, OpGraph]:
        """The graphs by phase at these sizes.  Raises what tracing raises."""
        from rooftrace.tracer.targets import isolation

        if self._call is not None:
            sizes = dict(zip(self.names, numbers, strict=True))
            return self._call.each_at(sizes)
        job = self.job_at(numbers)
        known = self._cache.get(job)
        if known is not None:
            return known
        self.traces += 1
        with isolation.keeping(self._kept):
            made = traced(job)
        self._cache.put(job, made)
        return made.graphs

    def _is_in_shapes(self, name: str) -> bool:
        shapes = (text.partition(":")[0] for text in self.job.request.inputs.values())
        return any(name in _WORD.findall(shape) for shape in shapes)

    def _check(self, name: str) -> None:
        """Raise RequestError for a name that is no size."""
        job = self.job
        if self._is_in_shapes(name) or (name in _LENGTHS and self._call is None):
            return
        if self._call is not None:
            if self._call.has_size(name):
                return
            expected = "batch, or a dimension of an argument, as x.1 or 0.1"
        elif job.is_named and not job.is_code:
            if name.startswith("config."):
                return  # the config says if it has such a field
            expected = "batch, seq, kv, or a number of the config, as config.num_hidden_layers"
        elif job.is_named:
            if name.isidentifier():
                return  # the function says if it takes such an argument
            expected = "batch, or a keyword argument of the function"
        else:
            expected = "batch, seq or kv"
        shapes = ", or a name in the shape of an input" if job.is_named else ""
        raise RequestError(f"size {name!r}: expected {expected}{shapes}{hint(name, _LENGTHS)}")


# -- another batch ---------------------------------------------------------------------------------

BatchTrace = Callable[[str, int], OpGraph]
"""Traces a phase at a batch size."""


def at_batches(job: Job) -> tuple[tuple[str, ...], BatchTrace]:
    """The phases of a job, and a function that traces one of them at another batch size.

    Each trace is kept.  Raises RequestError for a graph, whose sizes are fixed, and for a source
    that cannot run at another batch size.
    """
    from rooftrace.tracer.targets import isolation

    if job.is_graph:
        raise RequestError(
            "another batch cannot be traced from a graph, which has its sizes: give the module or "
            "the target that it was made from"
        )
    kept = isolation.Kept()

    def run(phases: tuple[str, ...] | None, batch: int) -> Mapping[str, OpGraph]:
        if not job.is_named:
            return ModuleSource(job).phases_at(phases, {"batch": batch})
        request = replace(job.request, batch=batch)
        # Explicit arguments were checked for all phases, and may be for another phase than this.
        with isolation.keeping(kept):
            return traced(replace(job, phases=phases, request=request, explicit=())).graphs

    first = run(job.phases, 1)
    job.check_used(first)
    traces = {(phase, 1): graph for phase, graph in first.items()}

    def trace_at(phase: str, batch: int) -> OpGraph:
        if (phase, batch) not in traces:
            tell(f"{phase} at batch {batch:,}")
            try:
                traces[phase, batch] = run((phase,), batch)[phase]
            except RuntimeError as error:  # a TraceError, or torch's own
                raise RequestError(
                    f"{phase} runs with batch 1 and not with {batch}, so the first dimension of "
                    f"its inputs is not their batch: {str(error).splitlines()[0]}"
                ) from error
        return traces[phase, batch]

    return tuple(first), trace_at
