"""What moves a step most: elasticities at some sizes, or the effects of a full factorial grid."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from rooftrace._progress import tell, telling
from rooftrace.costmodels.elasticity import Elasticities, elasticities, grids
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.planforms import Conditions
from rooftrace.costmodels.rewriting import check_precisions
from rooftrace.costmodels.sweeping import Form
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.reporting.estimates import Source
from rooftrace.reporting.explaining import first_graph, sizes_of
from rooftrace.reporting.gridfactors import factors_of, number_of_config
from rooftrace.reporting.requests import StepRequest, options
from rooftrace.reporting.requests.calls import conditions_of
from rooftrace.reporting.requests.pricing import PricingOptions, check_groups
from rooftrace.reporting.stepforms import form_of, known_form
from rooftrace.tracer.asking import Job

_LENGTHS = ("batch", "seq", "kv")
_FEW = 32
"""Counts up to this are tried number by number, larger sizes of a config in eighths."""


@overload
def sensitivity(source: Source, *args: Any, grid: None = None, **kwargs: Any) -> Elasticities: ...


@overload
def sensitivity(
    source: Source, *args: Any, grid: Mapping[str, Any], **kwargs: Any
) -> grids.GridEffects: ...


def sensitivity(
    source: Source,
    *args: Any,
    over: Mapping[str, int] | Sequence[str] | None = None,
    grid: Mapping[str, Any] | None = None,
    response: str = "t_est",
    log: bool = False,
    plot: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Elasticities | grids.GridEffects:
    """How a step answers to its sizes, to each fact of the chip, and to each knob.

    source: a module, a target, a `Form` or the file of one, whose sizes are then given by name.
    over: sizes to look at, with their values, for example {"config.num_hidden_layers": 32};
    default batch, and kv (decode) or seq.  Without `grid`: elasticities at these sizes.

    grid: levels by factor, every combination of which is priced: sizes ("batch": [1, 8, 64]),
    fields of a config and keywords of a function (each combination a form of its own), "chip",
    "execution", "dtype", "weights_dtype", "kv_dtype", and numbers by name
    ("chip.memory_bandwidth": ["x0.5", "x1", "x2"]; "knobs.compute", "execution.elementwise").
    Names joined by "+" change together.  response: "t_est", "t_bound", "flops", "bytes_hbm" or
    another of RESPONSES; log: effects of its logarithm.

    plot: a PNG, a tornado.  Other arguments are those of `trace` and `estimate`; phase: default
    decode for a Hugging Face model that has it, else forward.
    Raises RequestError for a name or a level that there is not, and what `form` raises.
    """
    known = known_form(source)
    pricing, named = PricingOptions.parted(kwargs)
    (model,), (used,) = conditions_of(sensitivity, pricing, source)
    with telling(progress):
        if known is not None:
            step: _Step = _FormStep(known, named, over)
        else:
            job = StepRequest.of(sensitivity, source, args, kwargs).job
            step = _JobStep(job, over, model)
        check_precisions(*step.precisions)
        conditions = Conditions(model, *step.precisions)
        result: Elasticities | grids.GridEffects
        if grid is None:
            for name, changed in (("response", response != "t_est"), ("log", log)):
                if changed:
                    raise RequestError(f"{name}: it is of a grid; name some factors with grid")
            first, *others = step.forms()
            tell("changing one number after the other")
            result = elasticities(
                first, step.sizes, used, conditions, others, _refusals(step.job is not None)
            )
        else:
            result = _grid(step, _with_executions(grid, pricing), used, conditions, response, log)
        if plot is not None:
            draw(result, Path(plot))
    return result


def _refusals(traces: bool) -> tuple[type[Exception], ...]:
    """What is raised at sizes that a model does not take."""
    if not traces:
        return (RequestError,)  # a form needs no torch
    from rooftrace.tracer.source import TraceError

    return (RequestError, TraceError)


class _Step:
    """A step with the sizes at which it is looked at."""

    sizes: dict[str, int]
    precisions: tuple[str | None, ...]
    job: Job | None = None

    def is_size(self, name: str) -> bool:
        """Whether a form of it may be over a name."""
        raise NotImplementedError

    def forms(self) -> list[Form]:
        """Forms around its sizes; together they have all of them."""
        raise NotImplementedError

    def form(self, settings: Mapping[str, Any], levels: Mapping[str, Sequence[int]]) -> Form:
        """The form over these levels under settings of the source."""
        raise NotImplementedError


class _FormStep(_Step):
    def __init__(
        self, form: Form, asked: Mapping[str, Any], over: Mapping[str, int] | Sequence[str] | None
    ) -> None:
        named = dict(asked)
        precisions = [named.pop(name, None) for name in grids.PRECISIONS]
        sizes = {**named, **(over if isinstance(over, Mapping) else {})}
        self._form, self.precisions = form, tuple(precisions)
        self.sizes = dict(zip(form.names, form.numbers(sizes), strict=True))

    def is_size(self, name: str) -> bool:
        return name in self._form.names

    def forms(self) -> list[Form]:
        return [self._form]

    def form(self, settings: Mapping[str, Any], levels: Mapping[str, Sequence[int]]) -> Form:
        return self._form


class _JobStep(_Step):
    def __init__(
        self, job: Job, over: Mapping[str, int] | Sequence[str] | None, model: ExecutionModel
    ) -> None:
        self.precisions = job.precisions
        check_precisions(*self.precisions)
        job, graph = first_graph(job)
        check_groups(lambda: [graph], [model])
        self.job = job
        if over is None:
            self.sizes = sizes_of(job, graph)
            return
        usual: dict[str, int] = {}
        names = [over] if isinstance(over, str) else over
        asked = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
        if not asked:
            raise RequestError("over is empty: name at least one size, for example batch")
        if any(value is None and name in _LENGTHS for name, value in asked.items()):
            usual = sizes_of(job, graph)
        self.sizes = {
            name: _whole(name, value, usual.get(name), job) for name, value in asked.items()
        }

    def is_size(self, name: str) -> bool:
        assert self.job is not None
        shapes = (text.partition(":")[0] for text in self.job.request.inputs.values())
        dimension = not self.job.is_named and "." in name
        return name in _LENGTHS or dimension or any(name in s.split(",") for s in shapes)

    def forms(self) -> list[Form]:
        """One over batch and lengths; one over each further size alone."""
        assert self.job is not None
        job = self._at({n: v for n, v in self.sizes.items() if n not in _LENGTHS})
        main = {name: size for name, size in self.sizes.items() if name in _LENGTHS}
        rest = {name: size for name, size in self.sizes.items() if name not in _LENGTHS}
        if not main:
            name = next(iter(rest))
            main = {name: rest.pop(name)}
        forms = [_around(job, main)]
        fixed = self._at({n: v for n, v in self.sizes.items() if n in _LENGTHS})
        return forms + [_around(fixed, {name: size}) for name, size in rest.items()]

    def _at(self, sizes: Mapping[str, int]) -> Job:
        """The job with some of the sizes asked for."""
        assert self.job is not None
        request = self.job.request
        lengths: dict[str, Any] = {n: v for n, v in sizes.items() if n in _LENGTHS}
        settings = {n: v for n, v in sizes.items() if n not in _LENGTHS}
        if not sizes or (not self.job.is_named and not lengths):
            return self.job
        request = replace(request, **lengths, settings={**request.settings, **settings})
        return replace(self.job, request=request)

    def form(self, settings: Mapping[str, Any], levels: Mapping[str, Sequence[int]]) -> Form:
        assert self.job is not None
        others = {n: v for n, v in self.sizes.items() if n not in levels and n not in settings}
        request = self._at(others).request
        request = replace(request, settings={**request.settings, **settings})
        told = ", ".join(f"{name} {value}" for name, value in settings.items())
        tell(f"tracing {told}" if told else "tracing")
        return form_of(replace(self.job, request=request), levels)


def _whole(name: str, value: Any, usual: int | None, job: Job) -> int:
    """The value of a size that was asked for, or that the source has."""
    size = value if value is not None else usual
    if size is None and name.startswith("config."):
        size = number_of_config(job, name)
    if size is None:
        raise RequestError(f"size {name!r}: say its value too, for example {name}=64")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise RequestError(f"{name}={size!r:.40}: expected a whole number of at least 1")
    return size


def _around(job: Job, sizes: Mapping[str, int]) -> Form:
    """The form around some sizes: half to twice of each, or up to them where no more is taken."""
    from rooftrace.tracer.source import TraceError

    for most in (2, 1):
        try:
            return form_of(job, {name: _levels(name, size, most) for name, size in sizes.items()})
        except (RequestError, TraceError):
            continue
    return form_of(job, {name: (size,) for name, size in sizes.items()})


def _levels(name: str, size: int, most: int) -> Sequence[int]:
    if not name.startswith("config.") or size <= _FEW:
        return range(max(1, size // 2), most * size + 1)
    eighths = (4, 5, 6, 7, 8, *((10, 12, 16) if most > 1 else ()))
    return tuple(size * part // 8 for part in eighths if size * part % 8 == 0)


def _with_executions(grid: Any, pricing: PricingOptions) -> Any:
    """A grid; executions that it names are changed as the one that was asked for."""
    if not isinstance(grid, Mapping):
        return grid  # whoever reads it says what is wrong
    levels = grid.get("execution")
    if isinstance(levels, str):
        levels = options.words(levels)
    return (
        {**grid, "execution": replace(pricing, execution=levels).executions()} if levels else grid
    )


def _grid(
    step: _Step,
    grid: Mapping[str, Any],
    chip: Chip,
    conditions: Conditions,
    response: str,
    log: bool,
) -> grids.GridEffects:
    factors = factors_of(grid, step.sizes, chip, conditions.execution, step.job, step.is_size)
    levels: dict[str, Sequence[int]] = {}
    for factor in factors:
        if factor.kind == grids.SIZE:
            for place, name in enumerate(factor.names):
                levels[name] = tuple(sorted({values[place] for values in factor.levels}))
    if not levels:
        name, size = next(iter(step.sizes.items()))
        levels = {name: (size,)}
    sizes = {n: v for n, v in step.sizes.items() if step.job is None or n in levels}
    return grids.grid_effects(
        factors, sizes, chip, conditions, lambda chosen: step.form(chosen, levels), response, log
    )


def draw(result: Elasticities | grids.GridEffects, path: Path) -> None:
    """A tornado: the effects of a grid, or times after a number is doubled and halved."""
    from rooftrace.reporting.figures import ofsizes, style

    if isinstance(result, Elasticities):
        style.save(partial(ofsizes.elasticity_plot, result), path)
        return
    word = "logarithms" if result.log else "means"
    tornado = partial(
        ofsizes.tornado,
        result.effects.main,
        f"What moves {result.title}",
        f"{result.phase}, {result.response} over {len(result):,} points, {word}",
        result.written_mean,
    )
    style.save(tornado, path)
