"""Arguments that each public call takes, and options as lock files and projects store them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip
from rooftrace.reporting.commands import options
from rooftrace.reporting.commands.arguments import (
    CalibrateArguments,
    CheckArguments,
    ExplainArguments,
    ExploreArguments,
    InventoryArguments,
    LockArguments,
    MeasureArguments,
    MeasuredArguments,
    MeshArguments,
    RunArguments,
    SensitivityArguments,
    SolveArguments,
    SweepArguments,
    TrainingArguments,
)
from rooftrace.reporting.commands.options import Option, options_of
from rooftrace.reporting.commands.pricing import (
    CHANGES,
    PLAIN,
    ExecutionOptions,
    LengthOptions,
    PrecisionOptions,
    PricingOptions,
    Workload,
)
from rooftrace.tracer.names import ScriptCommand, is_script

if TYPE_CHECKING:
    pass


# -- options ---------------------------------------------------------------------------------------
# Options of targets and prices as lock files and projects store them.

Kept: TypeAlias = options.Plain | list[str] | dict[str, options.Plain]
"""The value of an option in a file."""
_OF_STEPS = ("chip", "execution")
"""Options of prices that stand with the costs of each step."""
PRICED = {
    **{o.name: o.kept for o in options_of(ExecutionOptions) if o.name not in _OF_STEPS},
    "factors": dict[str, options.Plain],  # fields of every execution model
    "rules": list[str],  # files of the user with rules
}
"""How every target is priced: the type of each value by its name."""
ASKED = {o.name: o.kept for o in (*options_of(Workload), *options_of(PrecisionOptions))}
"""How a target is run: the type of each value by its name."""
# As locks say them: an optimizer that is named stands there, the usual one too.
_USUAL = {**vars(PLAIN), **vars(Workload()), "tf32": False, "optimizer": None}
PricedTable = make_dataclass(
    "PricedTable", [(*each, None) for each in PRICED.items()], frozen=True, kw_only=True
)
TargetTable = make_dataclass(
    "TargetTable",
    [("target", str), *((*each, None) for each in ASKED.items())],
    frozen=True,
    kw_only=True,
)


def stored(values: Mapping[str, Any]) -> dict[str, Kept]:
    """Values of options as a lock keeps them, without defaults."""
    plain = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    return {n: v for n, v in plain.items() if v not in (None, [], {}, _USUAL.get(n))}


# -- calls -----------------------------------------------------------------------------------------
# The arguments of each public call, and its default executions.

Function = TypeVar("Function", bound=Callable[..., Any])
USUAL = ""
"""Stands for the execution that is usual for the source (`usual_execution`)."""
SERVED = "serving?"
"""Stands for "serving" of a prefill or a decode step, and for USUAL of others."""


@dataclass(frozen=True, kw_only=True)
class TakenArguments:
    """The shared arguments of a public function.

    several: arguments of prices that may have several values.  usual: the default executions.
    one_phase: it is of one phase.
    """

    records: tuple[type, ...] = (Workload, PrecisionOptions, ExecutionOptions)
    several: tuple[str, ...] = ()
    usual: tuple[str, ...] = (USUAL,)
    one_phase: bool = True
    without: tuple[str, ...] = ()  # options of its records that it has not
    listed: tuple[str, ...] = ()  # sizes that may have several values
    alone: tuple[str, ...] = ()  # options that it has of a workload, where that is none of records

    def options(self) -> Iterator[Option]:
        """The options of all its records."""
        for record in self.records:
            for each in options_of(record):
                if each.name in self.listed:
                    read = partial(options.size_list, each.spelled)
                    yield replace(each, kind=str, metavar="LIST", read=read)
                elif each.name not in self.without:
                    yield each
        yield from (each for each in options_of(Workload) if each.name in self.alone)

    @property
    def has_rules(self) -> bool:
        """Whether rules of the user may change its result."""
        return not {Workload, ExecutionOptions}.isdisjoint(self.records)


_PRICED = (Workload, PrecisionOptions, ExecutionOptions)
_GRID = ("chip", "system", "execution", "dtype", "kv_dtype")
_LISTED = (Workload, LengthOptions, PrecisionOptions, ExecutionOptions)
_REPORTED = TakenArguments(
    records=_LISTED,
    several=("chip", "system", "execution"),
    usual=("naive", USUAL),
    one_phase=False,
)
_SWEPT = TakenArguments(records=(SweepArguments, *_PRICED), several=_GRID)
_TRACED = TakenArguments(records=(Workload, LengthOptions), without=("phases",))
CALLS: Mapping[str, TakenArguments] = {
    "best_mesh": TakenArguments(records=(MeshArguments, *_PRICED), usual=(SERVED,)),
    "training_run": TakenArguments(
        records=(TrainingArguments, MeshArguments, *_PRICED), usual=(SERVED,)
    ),
    "calibrate": TakenArguments(
        records=(MeasuredArguments, CalibrateArguments, *_PRICED),
        usual=("eager",),
        one_phase=False,
        without=CHANGES,
    ),
    "compare": TakenArguments(records=(Workload, PrecisionOptions), one_phase=False),
    "diff": TakenArguments(one_phase=False),
    "diff_measured": TakenArguments(one_phase=False),
    "estimate": TakenArguments(records=_LISTED),
    "explain": TakenArguments(records=(ExplainArguments, *_PRICED), several=("chip", "system")),
    "explore": TakenArguments(
        records=(ExploreArguments, *_PRICED), usual=("serving",), without=("phases", "batch", "kv")
    ),
    "graph_breaks": TakenArguments(usual=("compiled",)),
    "largest_batch": TakenArguments(several=("chip", "system"), one_phase=False),
    "form": _TRACED,
    "report": _REPORTED,
    "reports": _REPORTED,
    "roofline": TakenArguments(
        several=("chip", "system"), one_phase=False, listed=("batch", "seq", "kv")
    ),
    "sensitivity": TakenArguments(records=(SensitivityArguments, *_PRICED)),
    "check": TakenArguments(records=(CheckArguments,)),
    "inventory": TakenArguments(records=(InventoryArguments,), alone=("trust_remote_code",)),
    "lock": TakenArguments(
        records=(*_PRICED, LockArguments), several=("chip", "execution"), one_phase=False
    ),
    "measure_suite": TakenArguments(records=(MeasureArguments,), alone=("phases", "batch", "seq")),
    "run": TakenArguments(records=(RunArguments, ExecutionOptions)),
    "scaling": TakenArguments(usual=(SERVED,)),
    "profile": TakenArguments(records=(Workload, PrecisionOptions), usual=("eager",)),
    "solve": TakenArguments(records=(SolveArguments, *_PRICED), several=_GRID, usual=("serving",)),
    "summary": TakenArguments(usual=("eager",)),
    "validate": TakenArguments(
        records=(MeasuredArguments, *_PRICED), usual=("eager",), one_phase=False
    ),
    "sweep": _SWEPT,
    "sweep_fleet": _SWEPT,
    "trace": _TRACED,
    "priced_graphs": TakenArguments(
        records=(Workload, LengthOptions, PrecisionOptions), one_phase=False
    ),
}
"""By the name of the function, or of the command."""


def conditions_of(
    function: Callable[..., Any], pricing: PricingOptions, *sources: Any, phase: Any = None
) -> tuple[tuple[ExecutionModel, ...], tuple[Chip, ...]]:
    """The executions and chips that a call of `function` is priced with.

    A script has the device that it sees, where the call names none.  Raises RequestError for
    several where it takes one.
    """
    call = CALLS[function.__name__]
    scripts = [ScriptCommand.of(s) for s in sources if isinstance(s, str) and is_script(s)]
    if pricing.chip is None and pricing.system is None and scripts:
        pricing = replace(pricing, chip=scripts[0].chip, system=scripts[0].system)
    models = pricing.executions(*_usual(call, sources, phase) if pricing.execution is None else ())
    chips = pricing.chips(models)
    for name, values in (("execution", models), ("chip", chips)):
        if len(values) > 1 and name not in call.several:
            names = ", ".join(each.name for each in values)
            raise RequestError(f"{name} {names}: expected one")
    return tuple(models), tuple(chips)


def _usual(call: TakenArguments, sources: Sequence[Any], phase: str | None) -> Iterator[str]:
    """The executions of a call that names none."""
    from rooftrace.costmodels.fusion import usual_execution

    for name in call.usual:
        if name == SERVED and phase in ("prefill", "decode"):
            yield "serving"
        else:
            yield usual_execution(*sources) if name in (USUAL, SERVED) else name


def only_prices(function: Callable[..., Any], named: Mapping[str, Any]) -> PricingOptions:
    """The arguments of prices.  Raises RequestError for others."""
    pricing, others = PricingOptions.parted(named)
    for name in others:
        near = hint(name, list(inspect.signature(function).parameters))
        raise RequestError(f"{function.__name__}({name}=): no such argument{near}")
    return pricing


def takes(function: Function) -> Function:
    """A function of ours, once its signature shows the arguments that CALLS says it takes."""
    signature = inspect.signature(function)
    mine = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    names = {parameter.name for parameter in mine}
    call = CALLS[function.__name__]
    added = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.metadata["option"].required else each.default,
            annotation=each.type,
        )
        for record in call.records
        for each in fields(record)
        if each.name not in {*names, *call.without}
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*mine, *added, *rest])
    return function
