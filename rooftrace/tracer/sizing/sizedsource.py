"""One source at many sizes: which names its sizes have, and its trace at any of them.

Sizes are batch, seq and kv; integers of a config ("config.num_hidden_layers") or keyword arguments
of the function that a target names; names that stand in the shapes of inputs ("x=8,3,side,side");
and dimensions of the arguments of a call ("x.1", or "0.1" for the first one).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rooftrace.errors import RequestError, hint
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sizing.tracecache import TraceCache
from rooftrace.tracer.sources import collector_paused, traced

_LENGTHS = ("batch", "seq", "kv")
_DIMENSION = re.compile(r"(\w+)\.(\d+)")
_WORD = re.compile(r"[A-Za-z_]\w*")


class SizedSource:
    """The graphs of a job at many sizes.

    Raises RequestError for a name that is no size of the source.
    """

    def __init__(self, job: Job, names: Sequence[str]) -> None:
        from rooftrace.tracer.targets import isolation

        self.job, self.names = job, tuple(names)
        self._kept, self._cache = isolation.Kept(), TraceCache.usual()
        self.traces = 0  # that were not in the cache
        doubled = next((name for name in names if list(names).count(name) > 1), None)
        if doubled:
            raise RequestError(f"size {doubled!r} stands twice; name each size once")
        if job.is_graph:
            raise RequestError(
                f"{job.name}: a graph has its sizes; name the module or the target that it is made "
                "of, or a form (made by `rooftrace sweep ... --save-form FILE`)"
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
            if name not in _LENGTHS and self._is_setting(name)
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

        if self._is_call:
            return self._call_at(dict(zip(self.names, numbers, strict=True)))
        job = self.job_at(numbers)
        known = self._cache.get(job)
        if known is not None:
            return known
        self.traces += 1
        with isolation.keeping(self._kept):
            made = traced(job)
        self._cache.put(job, made)
        return made.graphs

    @property
    def _is_call(self) -> bool:
        return not self.job.is_named and self.job.is_called

    def _is_setting(self, name: str) -> bool:
        return not self._is_in_shapes(name)

    def _is_in_shapes(self, name: str) -> bool:
        shapes = (text.partition(":")[0] for text in self.job.request.inputs.values())
        return any(name in _WORD.findall(shape) for shape in shapes)

    def _check(self, name: str) -> None:
        """Raise RequestError for a name that is no size."""
        job = self.job
        if self._is_in_shapes(name) or (name in _LENGTHS and not self._is_call):
            return
        if self._is_call:
            dimension = _DIMENSION.fullmatch(name)
            if name == "batch" or (dimension and self._argument(dimension[1]) is not None):
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

    def _argument(self, name: str) -> Any:
        if name.isdigit():
            return self.job.args[int(name)] if int(name) < len(self.job.args) else None
        return self.job.kwargs.get(name)

    def _call_at(self, sizes: Mapping[str, int]) -> Mapping[str, OpGraph]:
        """The graphs of a call whose arguments have these sizes; what grows is unknown numbers."""
        from torch import inference_mode

        from rooftrace.tracer.asking import names
        from rooftrace.tracer.inputs import call_inputs
        from rooftrace.tracer.patches import contexts
        from rooftrace.tracer.phases import trace_phases
        from rooftrace.tracer.twins import inputs_on_meta

        job = self.job
        graphs: dict[str, OpGraph] = {}
        with collector_paused(), contexts.apart(), inference_mode(False):
            for phase in job.phases or names.usual(job.source):
                args, kwargs = inputs_on_meta((job.args, dict(job.kwargs)))
                for name, size in sizes.items():
                    if dimension := _DIMENSION.fullmatch(name):
                        args, kwargs = _resized(args, kwargs, dimension[1], int(dimension[2]), size)
                inputs = call_inputs(job.source, args, kwargs, sizes.get("batch"))
                graphs |= trace_phases(job.source, inputs, (phase,), job.options)
        return graphs


def _resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: str, dimension: int, size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, one of them with another size along one dimension."""
    changed, named = list(args), dict(kwargs)
    old = changed[int(name)] if name.isdigit() else named[name]
    if not hasattr(old, "new_empty") or not -old.dim() <= dimension < old.dim():
        raise RequestError(f"size {name}.{dimension}: the argument has no such dimension")
    shape = list(old.shape)
    shape[dimension] = size
    new = old.new_empty(shape).requires_grad_(old.requires_grad)
    if name.isdigit():
        changed[int(name)] = new
    else:
        named[name] = new
    return tuple(changed), named
