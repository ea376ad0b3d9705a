"""Factors of a grid from what is asked: names and levels, as text or as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooftrace._reading import FileKind, json_of, text_of
from rooftrace.costmodels.elasticity import grids
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.rewriting import check_precisions
from rooftrace.costmodels.studies import NamedNumbers, UnknownNumberError
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip, load_chip
from rooftrace.reporting.requests import options
from rooftrace.reporting.stepforms import level_values
from rooftrace.tracer.asking import Job, names

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

    grid: levels by name, several names joined by "+".  sizes: where the step is.  job: what is
    traced; None for a form.  is_size: whether a form may be over a name.
    Raises RequestError for a name that nothing has, for no levels, and for a level that is none.
    """
    if not isinstance(grid, Mapping):
        raise RequestError(
            f"grid={grid!r:.60}: expected levels by name, for example {{'batch': [1, 8, 64]}}"
        )
    reader = _Reader(sizes, chip, execution, job, is_size)
    return [reader.factor(str(name), levels) for name, levels in grid.items()]


class _Reader:
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
        read = by_kind[kind]
        columns = [read(part, texts) for part in parts]
        labels = tuple(_label(kind, text) for text in self._texts(kind, parts[0], texts))
        if len(parts) == 1 and kind in (grids.SIZE, grids.SETTING):
            labels = tuple(columns[0])
        return grids.Factor(name, kind, parts, tuple(zip(*columns, strict=True)), labels)

    def _texts(self, kind: str, name: str, texts: Sequence[Any]) -> Sequence[Any]:
        return _spelt(name, texts) if kind == grids.SIZE else texts

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
        known = [*self.sizes, *WORDS, *self.numbers.values]
        raise RequestError(
            f"factor {name!r}: expected a size ({', '.join(self.sizes)}), "
            f"{'' if self.job is None else 'a field of the config as config.hidden_size, '}"
            f"{', '.join(WORDS[3:])}, or a number of the chip or a knob, as chip.memory_bandwidth"
            f"{hint(name, known)}"
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
    """A size: a whole number, or a factor on the one that there is."""
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
    """A whole number of the config that a target names: "config.hidden_size".

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
