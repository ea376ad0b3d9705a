"""Arguments that take one value or several, and every combination of some of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rooftrace._progress import WARNING, tell
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planforms import Conditions
from rooftrace.costmodels.rewriting import check_precisions
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip, load_chip
from rooftrace.hardware.systems import System, load_system


def each_chip(value: Any) -> list[Any]:
    """The chips, or their names, of an argument `chip`.  Raises RequestError for none."""
    return _each("chip", value, (str, Chip, os.PathLike))


def each_joined(chips: Any, systems: Any) -> list[Any]:
    """The chips of an argument `chip`, or those of an argument `system`, which has its own."""
    if systems is None:
        return each_chip(chips)
    joined = _each("system", systems, (str, System, os.PathLike))
    return [load_system(system).joined_chip for system in joined]


def chips_for(chip: Any, execution: Any, system: Any = None) -> list[Chip]:
    """The chips of arguments `chip`, or `system`, on which these executions are priced.

    Without either, the chip that the knobs of the executions were fitted on, else h200-sxm.  Tells
    where knobs were fitted on another one.
    """
    models = [execution_model(each) for each in each_execution(execution)]
    if chip is None and system is None:
        chip = ExecutionModel.usual_chip(models)
    chips = [load_chip(each) for each in each_joined(chip, system)]
    fitted = [model for model in models if isinstance(model.knobs, Knobs) and model.knobs.is_fit]
    for text in dict.fromkeys(model.borrowed_on(each) for model in fitted for each in chips):
        if text:
            tell(WARNING + text)
    return chips


def one_chip(chip: Any, execution: Any) -> Chip:
    """The chip of an argument that takes one, as `chips_for` has them."""
    (chosen,) = chips_for(None if chip is None else load_chip(chip), execution)
    return chosen


def each_execution(value: Any) -> list[Any]:
    """The execution models, or their names, of an argument.  Raises RequestError for none."""
    return _each("execution", value, (str, ExecutionModel))


def each_condition(
    execution: Any, dtype: Any, weights_dtype: str | None, kv_dtype: Any
) -> tuple[Conditions, ...]:
    """Every combination of executions and precisions, of which there may be one or several each.

    Raises RequestError for none, and for precisions that there are not.
    """
    combinations = tuple(
        Conditions.of(model, first, weights_dtype, second)
        for model in each_execution(execution)
        for first in _each("dtype", dtype, (str,))
        for second in _each("kv_dtype", kv_dtype, (str,))
    )
    for conditions in combinations:
        check_precisions(conditions.dtype, conditions.weights_dtype, conditions.kv_dtype)
    return combinations


def _each(name: str, value: Any, kinds: tuple[type[Any], ...]) -> list[Any]:
    """One or several values as a list.  Whoever reads the list checks its values."""
    several = isinstance(value, Iterable) and not isinstance(value, kinds)
    values = list(value) if several else [value]
    if not values:
        raise RequestError(f"{name}: expected at least one, got none")
    return values
