"""What a call or a command asks for: sorts its arguments, and refuses what nothing would use.

Every source takes the same arguments.  What a source cannot honour is an error with the nearest
name of what it can: an argument that changes nothing would be believed.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rooftrace.tracer.asking.request import PHASES, Options, Request, RequestError
from rooftrace.tracer.graph import OpGraph, looks_saved

SIZES = ("batch", "seq", "kv", "inputs", "trust_remote_code")
"""Fields of a Request."""
HOW = ("loss", "optimizer", "branches", "assume", "repeats")
"""Fields of Options that are arguments of their own; its dtype follows from the prices."""
PRICES = ("dtype", "weights_dtype", "kv_dtype")
"""Storage precisions to price in."""
PHASE = ("phase", "phases")
WHOLE = ("request", "options")
"""Records in place of their fields."""
ARGUMENTS = (*PHASE, *SIZES, *HOW, *PRICES, *WHOLE)
_MODULES = 0.8
"""How like one of our names an argument of a forward with **kwargs must be to be a slip."""


class UnusedError(RequestError):
    """An argument that would change nothing: its name, its value as shown, and why."""

    def __init__(self, name: str, shown: str, reason: str) -> None:
        super().__init__(f"{name}={shown}: {reason}")
        self.name, self.shown, self.reason = name, shown, reason


@dataclass(frozen=True)
class Asked:
    """What is run, how it is traced, and in which precisions it is priced.

    given: names of the arguments that are not what they are without being given.
    """

    phases: tuple[str, ...] | None = None
    request: Request = field(default_factory=Request)
    options: Options = field(default_factory=Options)
    dtype: str | None = None
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    given: tuple[str, ...] = ()

    @property
    def prices(self) -> tuple[str | None, str | None, str | None]:
        """Precisions of the model's floats, of its weights, of its cache."""
        return self.dtype, self.weights_dtype, self.kv_dtype

    def sized(self) -> tuple[str, ...]:
        """Names of the given sizes."""
        return tuple(name for name in self.given if name in SIZES)

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Raise RequestError if one of these arguments was given."""
        for name in names:
            if name in self.given:
                raise UnusedError(name, _shown(self.value(name)), reason)

    def value(self, name: str) -> Any:
        """What was given as `name`."""
        for record in (self.request, self.options, self):
            if name in _names(type(record)):
                return getattr(record, name)
        return self.phases

    def without(self, *names: str) -> Asked:
        """Without these sizes."""
        plain = {f.name: getattr(Request(), f.name) for f in fields(Request)}
        request = replace(self.request, **{name: plain[name] for name in names})
        return replace(self, request=request, given=tuple(n for n in self.given if n not in names))


def asked(arguments: Mapping[str, Any]) -> Asked:
    """The record of arguments, whose names are among ARGUMENTS.  None is: not given.

    Raises RequestError for two that say the same.
    """
    known = {name: value for name, value in arguments.items() if value is not None}
    for one, other in (PHASE, ("request", "batch"), ("request", "seq"), ("options", "optimizer")):
        if one in known and other in known:
            raise RequestError(f"{one} and {other} say the same: give one of them")
    phases = known.get("phases", known.get("phase"))
    if isinstance(phases, str):
        phases = (phases,)
    elif phases is not None:
        listed = isinstance(phases, Iterable) and not isinstance(phases, Mapping)
        phases = tuple(phases) if listed else ()
        if not phases or not all(isinstance(name, str) for name in phases):
            shown = _shown(known.get("phases", known.get("phase")))
            raise RequestError(f"phases={shown}: expected some of {', '.join(PHASES)}")
    for name in PRICES:
        if not isinstance(known.get(name, ""), str):
            raise RequestError(
                f"{name}={_shown(known[name])}: expected the name of a precision, for example 'fp8'"
            )
    request = known.get("request") or Request(**{n: known[n] for n in SIZES if n in known})
    dtype, weights = known.get("dtype"), known.get("weights_dtype")
    how = {name: known[name] for name in HOW if name in known}
    options = known.get("options") or Options(**how, dtype=dtype or weights)
    result = Asked(
        None if phases is None else tuple(phases),
        request,
        options,
        dtype,
        weights,
        known.get("kv_dtype"),
    )
    plain = Asked()
    given = [
        *(["phases"] if result.phases is not None else []),
        *(n for n in SIZES if getattr(request, n) != getattr(plain.request, n)),
        *(n for n in HOW if getattr(options, n) != getattr(plain.options, n)),
        *(n for n in PRICES if n in known),
    ]
    return replace(result, given=tuple(given))


def sorted_arguments(
    source: Any, args: Sequence[Any], named: Mapping[str, Any], own: Callable[..., Any]
) -> tuple[Asked, dict[str, Any]]:
    """What is asked, and the keyword arguments that are for the call of `source`.

    own: the function that was called, for the names of its other arguments.  Raises RequestError
    for an argument that neither takes, with the nearest name.
    """
    function = own.__name__
    if is_named(source) or isinstance(source, (OpGraph, Mapping)):
        if args:
            raise RequestError(
                f"{function}({_shown(source)}, {_shown(args[0])}): the arguments of a call are for "
                "a module; pass sizes by name, for example batch=8"
            )
        parameters: Mapping[str, inspect.Parameter] = {}
    else:
        parameters = _parameters(source)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name, value in named.items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.kind is not parameter.VAR_KEYWORD:
            theirs[name] = value
        elif name in ARGUMENTS and not (open_ended and _is_data(value)):
            ours[name] = value
        elif open_ended and (_is_data(value) or not _near(name, _names_of(own), _MODULES)):
            theirs[name] = value
        else:
            raise RequestError(_unknown(function, source, name, value, parameters, own))
    return asked(ours), theirs


def refuse_for_graph(wanted: Asked, name: str) -> None:
    """Raise RequestError for what a graph cannot be asked: its sizes and its trace are past."""
    wanted.refuse(
        ("batch", "seq", "kv", "inputs"),
        f"{name}: a graph has its sizes; leave it out, or give the module or target it is made of",
    )
    wanted.refuse(
        (*HOW, "trust_remote_code"),
        f"{name}: a graph is traced already; leave it out, or trace again with it",
    )


def check_used(wanted: Asked, graphs: Mapping[str, OpGraph]) -> None:
    """Raise RequestError for an argument that none of these graphs could feel."""
    names = ", ".join(graphs)
    check_phases(wanted, tuple(graphs))
    if not any(value.role == "kv" for graph in graphs.values() for value in graph.values):
        wanted.refuse(("kv_dtype",), f"no cache is kept in {names}")


def check_phases(wanted: Asked, phases: Sequence[str]) -> None:
    """Raise RequestError for an argument that is for another phase."""
    names = ", ".join(phases)
    if "decode" not in phases:
        wanted.refuse(("kv",), f"it is the cached length of a decode step, and this is {names}")
    if "training" not in phases:
        used = ("loss",) if wanted.options.optimizer == "none" else ("optimizer", "loss")
        wanted.refuse(used, f"it is for training, and this is {names}")


def check_graph(value: Any, function: str) -> None:
    """Raise RequestError for a model where one of our functions takes its graph."""
    if not isinstance(value, OpGraph):
        raise RequestError(
            f"{function}: expected an OpGraph, got {type(value).__name__}; trace it first, for "
            f"example {function}(rooftrace.trace(model, x))"
        )


def is_named(source: Any) -> bool:
    """Whether a source is named by a string or a path."""
    return isinstance(source, (str, os.PathLike))


def is_graph(source: Any) -> bool:
    """Whether a source is a graph, graphs by phase, or a file of them."""
    if isinstance(source, (OpGraph, Mapping)):
        return True
    return is_named(source) and looks_saved(os.fspath(source))


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ "; did you mean 'batch'?" for the nearest of the known names; "" where none is near."""
    close = _near(name, known, cutoff)
    return f"; did you mean {close!r}?" if close else ""


def _near(name: str, known: Iterable[str], cutoff: float) -> str:
    names = [other for other in known if other != name]
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return close[0] if close else ""


def _unknown(
    function: str,
    source: Any,
    name: str,
    value: Any,
    parameters: Mapping[str, inspect.Parameter],
    own: Callable[..., Any],
) -> str:
    hint = nearest(name, [*parameters, *_names_of(own)])
    text = f"{function}({name}={_shown(value)}): no such argument{hint}"
    if parameters:
        text += f"; {type(source).__name__} takes {', '.join(parameters)}"
    return f"{text}; {function} takes {', '.join(_names_of(own))}"


def _names_of(own: Callable[..., Any]) -> tuple[str, ...]:
    """Names of arguments of one of our functions: its own, and those of every source."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    listed = [p.name for p in inspect.signature(own).parameters.values() if p.kind in kinds]
    others = [n for n in ARGUMENTS if n not in WHOLE and n not in PHASE]
    return tuple(dict.fromkeys([*listed[1:], *others]))


def _parameters(source: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, or of a function after its module."""
    from torch import nn

    from rooftrace.tracer.tensors import parameters_of

    anything = {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}
    if isinstance(source, nn.Module):
        hooked = source._forward_pre_hooks or type(source).__call__ is not nn.Module.__call__
        return {**parameters_of(source), **(anything if hooked else {})}
    if not callable(source):
        return {}
    try:
        return inspect.signature(source).parameters
    except (TypeError, ValueError):  # a callable written in C does not say
        return anything


def check_call(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise RequestError for arguments that a module's forward cannot be called with."""
    parameters = _parameters(module)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    try:
        inspect.Signature(tuple(parameters.values())).bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(parameters) or "no arguments"
        raise RequestError(f"{type(module).__name__}: {error}; it takes {takes}") from None


def _is_data(value: Any) -> bool:
    """Whether a value is a tensor or holds one, so that it is a model's and no option."""
    if isinstance(value, Mapping):
        return any(map(_is_data, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_data, value))
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _shown(value: Any) -> str:
    if _is_data(value):
        return "..."
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    text = repr(value) if is_named(value) or not callable(value) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


def _names(record: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(record) if f.name not in ("given", "request", "options"))
