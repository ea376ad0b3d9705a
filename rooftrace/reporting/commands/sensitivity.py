"""Sensitivity of a step: elasticities at some sizes, or the effects of a full factorial grid."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

from rooftrace._progress import tell, telling
from rooftrace._reading import FileKind, json_of, text_of
from rooftrace.costmodels.fusion import ExecutionModel, execution_model
from rooftrace.costmodels.rewrites import check_precisions
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip, load_chip
from rooftrace.reporting.commands import options
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.explaining import first_graph, sizes_of
from rooftrace.reporting.commands.pricing import PricingOptions, check_groups
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.sweeps import form_of, known_form, lengths_in, level_values
from rooftrace.studies.advice import NamedNumbers, UnknownNumberError
from rooftrace.studies.forms import Conditions
from rooftrace.studies.sensitivity import Elasticities, elasticities
from rooftrace.studies.sweeps import Form, grids
from rooftrace.tracer import Job, names

# -- factors ---------------------------------------------------------------------------------------

_CONFIG = FileKind("JSON file", RequestError)

OWNERS = ("chip.", "execution.", "knobs.")
WORDS = ("batch", "seq", "kv", "chip", "execution", *grids.PRECISIONS)
AS_TRACED = "none"
"""The level of a precision that leaves it as it was traced."""


def factors_of(
    grid: Mapping[str, Any],
    sizes: Mapping[str, int],
    chip: Chip,
    execution: ExecutionModel,
    job: Job | None,
    is_size: Callable[[str], bool],
) -> list[grids.Factor]:
    """The factors of a grid.

    grid: levels by name, several names joined by "+".  sizes: of the step.  job: that is traced;
    None for a form.  is_size: whether a form may be over a name.
    Raises RequestError for an unknown name, for no levels, and for a text that is no level.
    """
    if not isinstance(grid, Mapping):
        raise RequestError(
            f"grid={grid!r:.60}: expected levels by name, for example {{'batch': [1, 8, 64]}}"
        )
    reader = _GridReader(sizes, chip, execution, job, is_size)
    return [reader.factor(str(name), levels) for name, levels in grid.items()]


class _GridReader:
    """Reads names and levels for one step."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        chip: Chip,
        execution: ExecutionModel,
        job: Job | None,
        is_size: Callable[[str], bool],
    ) -> None:
        self.sizes, self.job, self.is_size = sizes, job, is_size
        self.numbers = NamedNumbers.of(chip, execution)

    def factor(self, name: str, levels: Any) -> grids.Factor:
        """One factor."""
        parts = tuple(part.strip() for part in name.split("+"))
        texts = _listed(name, levels)
        kinds = {self._kind(part) for part in parts}
        if len(kinds) > 1:
            raise RequestError(
                f"{name}: names that change together are all sizes, all settings or all numbers"
            )
        kind = kinds.pop()
        by_kind: Mapping[str, Callable[[str, Sequence[Any]], Sequence[Any]]] = {
            grids.CHIP: self._chips,
            grids.EXECUTION: self._executions,
            grids.DTYPE: self._precisions,
            grids.NUMBER: self._changes,
            grids.SIZE: self._sized,
            grids.SETTING: self._settings,
        }
        columns = [by_kind[kind](part, texts) for part in parts]
        spelt = _spelt(parts[0], texts) if kind == grids.SIZE else texts
        labels = tuple(_label(kind, text) for text in spelt)
        if len(parts) == 1 and kind in (grids.SIZE, grids.SETTING):
            labels = tuple(columns[0])
        return grids.Factor(name, kind, parts, tuple(zip(*columns, strict=True)), labels)

    def _kind(self, name: str) -> str:
        if name == "chip":
            return grids.CHIP
        if name == "execution":
            return grids.EXECUTION
        if name in grids.PRECISIONS:
            return grids.DTYPE
        if name.startswith(OWNERS):
            try:
                self.numbers.named(name)
            except UnknownNumberError as error:
                raise UnknownNumberError(f"grid: {error}") from None
            return grids.NUMBER
        if self.is_size(name):
            return grids.SIZE
        if self.job is not None and (
            name.startswith("config.") or (self.job.is_code and name.isidentifier())
        ):
            return grids.SETTING
        names_ = [*self.sizes, *WORDS, *self.numbers.values]
        raise RequestError(
            f"factor {name!r}: expected a size ({', '.join(self.sizes)}), "
            f"{'' if self.job is None else 'a field of the config as config.hidden_size, '}"
            f"{', '.join(WORDS[3:])}, or a number of the chip or a knob, as chip.memory_bandwidth"
            f"{hint(name, names_)}"
        )

    def _chips(self, name: str, texts: Sequence[Any]) -> list[Chip]:
        return [text if isinstance(text, Chip) else load_chip(str(text)) for text in texts]

    def _executions(self, name: str, texts: Sequence[Any]) -> list[ExecutionModel]:
        return [execution_model(text) for text in texts]

    def _precisions(self, name: str, texts: Sequence[Any]) -> list[str | None]:
        levels = [None if text in (None, AS_TRACED) else str(text) for text in texts]
        for level in levels:
            check_precisions(*(level if name == each else None for each in grids.PRECISIONS))
        return levels

    def _changes(self, name: str, texts: Sequence[Any]) -> list[grids.LevelChange]:
        unit = self.numbers.unit(self.numbers.named(name)[0])
        return [grids.LevelChange.parsed(name, str(text), unit) for text in texts]

    def _sized(self, name: str, texts: Sequence[Any]) -> list[int]:
        return [_whole(name, text, self.sizes.get(name)) for text in _spelt(name, texts)]

    def _settings(self, name: str, texts: Sequence[Any]) -> list[Any]:
        if not any(_is_factor(text) for text in texts):
            return [options.plain(text) for text in texts]
        before = self.sizes.get(name)
        if before is None and self.job is not None and name.startswith("config."):
            before = number_of_config(self.job, name)
        return [
            _whole(name, text, before) if _is_factor(text) else options.plain(text)
            for text in texts
        ]


def _listed(name: str, levels: Any) -> list[Any]:
    """The levels of a factor as a list.  Raises RequestError for none."""
    if isinstance(levels, str):
        listed: list[Any] = [part.strip() for part in levels.split(",") if part.strip()]
    elif isinstance(levels, Sequence):
        listed = list(levels)
    else:
        raise RequestError(f"{name}={levels!r:.40}: expected levels, for example [1, 8, 64]")
    if not listed:
        raise RequestError(f"{name}: the factor has no levels; for example {name}=1,8,64")
    return listed


def _spelt(name: str, texts: Sequence[Any]) -> list[Any]:
    """Levels of a size; ranges such as 1..64:x2 written out."""
    levels: list[Any] = []
    for text in texts:
        ranged = isinstance(text, str) and ".." in text
        levels += level_values(name, text) if ranged else [text]
    return levels


def _is_factor(text: Any) -> bool:
    return isinstance(text, str) and text[:1] == "x" and text[1:2].isdigit()


def _whole(name: str, text: Any, before: int | None) -> int:
    """A size: an integer, or a factor on the present one."""
    try:
        if not _is_factor(text):
            number = float(text)
        elif before is None:
            raise RequestError(f"{name}={text}: what it is now is not known; say numbers")
        else:
            number = before * float(text[1:])
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        number = 0.0
    if number < 1 or not number.is_integer():
        of = f" of {before:,}" if _is_factor(text) else ""
        raise RequestError(
            f"{name}={text}{of}: expected whole numbers of at least 1, a range as 1..64:x2, or "
            "factors such as x0.5"
        )
    return int(number)


def _label(kind: str, level: Any) -> Any:
    if kind in (grids.CHIP, grids.EXECUTION):
        return getattr(level, "name", level)
    return AS_TRACED if level is None else level


def number_of_config(job: Job, name: str) -> int:
    """An integer of the config that a target names: "config.hidden_size".

    Raises RequestError where the file does not say it.
    """
    path = names.config_file(job.name) if job.is_named and not job.is_code else None
    value: Any = None
    if path is not None and path.is_file():
        value = json_of(text_of(path, _CONFIG), str(path), _CONFIG)
        for part in name.removeprefix("config.").split("."):
            value = value.get(part) if isinstance(value, dict) else None
        value = job.request.settings.get(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: the config of {job.name} does not say it; give its value")
    return value


# -- sensitivity -----------------------------------------------------------------------------------

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
    """The sensitivity of a step to its sizes, to each fact of the chip, and to each knob.

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
    Raises RequestError for an unknown name or level, and the errors of `form`.
    """
    saved = known_form(source)
    pricing, named = PricingOptions.parted(kwargs)
    (model,), (used,) = conditions_of(sensitivity, pricing, source)
    with telling(progress):
        if saved is not None:
            step: _SizedStep = _FormStep(saved, named, over)
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
    """The errors at sizes that a model does not take."""
    if not traces:
        return (RequestError,)  # a form needs no torch
    from rooftrace.errors import TraceError

    return (RequestError, TraceError)


class _SizedStep:
    """A step at some sizes."""

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


class _FormStep(_SizedStep):
    def __init__(
        self, form: Form, named: Mapping[str, Any], over: Mapping[str, int] | Sequence[str] | None
    ) -> None:
        named = dict(named)
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


class _JobStep(_SizedStep):
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
        values = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
        if not values:
            raise RequestError("over is empty: name at least one size, for example batch")
        if any(value is None and name in _LENGTHS for name, value in values.items()):
            usual = sizes_of(job, graph)
        self.sizes = {
            name: _size_of(name, value, usual.get(name), job) for name, value in values.items()
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
        """The job at some sizes."""
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
        text = ", ".join(f"{name} {value}" for name, value in settings.items())
        tell(f"tracing {text}" if text else "tracing")
        return form_of(replace(self.job, request=request), levels)


def _size_of(name: str, value: Any, usual: int | None, job: Job) -> int:
    """The value of a size: of the request, else of the source."""
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
    from rooftrace.errors import TraceError

    for most in (2, 1):
        try:
            return form_of(job, {n: _levels(job, n, size, most) for n, size in sizes.items()})
        except (RequestError, TraceError):
            continue
    return form_of(job, {name: (size,) for name, size in sizes.items()})


def _levels(job: Job, name: str, size: int, most: int) -> Sequence[int]:
    if not name.startswith("config.") or size <= _FEW:
        return lengths_in(job, name, range(max(1, size // 2), most * size + 1))
    eighths = (4, 5, 6, 7, 8, *((10, 12, 16) if most > 1 else ()))
    return tuple(size * part // 8 for part in eighths if size * part % 8 == 0)


def _with_executions(grid: Any, pricing: PricingOptions) -> Any:
    """The grid with the changes of the pricing options in the executions and chips of it."""
    if not isinstance(grid, Mapping):
        return grid  # its reader raises
    made = dict(grid)
    for name in ("execution", "chip"):
        levels = grid.get(name)
        levels = options.words(levels) if isinstance(levels, str) else levels
        if levels and name == "execution":
            made[name] = replace(pricing, execution=levels).executions()
        elif levels and pricing.host is not None:
            made[name] = replace(pricing, chip=levels, system=None).chips(())
    return made


def _grid(
    step: _SizedStep,
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
            for number, name in enumerate(factor.names):
                levels[name] = tuple(sorted({values[number] for values in factor.levels}))
    if not levels:
        name, size = next(iter(step.sizes.items()))
        levels = {name: (size,)}
    sizes = {n: v for n, v in step.sizes.items() if step.job is None or n in levels}
    return grids.grid_effects(
        factors, sizes, chip, conditions, lambda chosen: step.form(chosen, levels), response, log
    )


def draw(result: Elasticities | grids.GridEffects, path: Path) -> None:
    """A tornado: the effects of a grid, or times after a number is doubled and halved."""
    from rooftrace.reporting.figures import elasticity_plot, style, tornado

    if isinstance(result, Elasticities):
        style.save(partial(elasticity_plot, result), path)
        return
    word = "logarithms" if result.log else "means"
    draw_effects = partial(
        tornado,
        result.effects.main,
        f"What moves {result.title}",
        f"{result.phase}, {result.response} over {len(result):,} points, {word}",
        result.written_mean,
    )
    style.save(draw_effects, path)
