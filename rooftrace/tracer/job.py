"""The request of a call or a command, as one record.

Every source takes the same arguments.  An argument that a source cannot use is an error, which
quotes the nearest name that it can use; else the user would believe that it had an effect.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from rooftrace.errors import SLIP, RequestError, UnusedError, hint, near
from rooftrace.graph import OpGraph, looks_saved
from rooftrace.tracer.names import is_script, names_code, phases as known_phases
from rooftrace.tracer.request import Options, Request


class Precisions(NamedTuple):
    """Storage precisions to price in, by name; None: as they were traced."""

    dtype: str | None = None  # of the model's own floats
    weights_dtype: str | None = None
    kv_dtype: str | None = None  # of its cache


SIZES = (
    "batch",
    "seq",
    "kv",
    "cached",
    "new",
    "inputs",
    "settings",
    "mesh",
    "checkpoint",
    "plan",
    "zero",
    "schedule",
    "interleave",
    "microbatches",
)
"""Fields of a Request that are sizes."""
HOW = ("loss", "optimizer", "branches", "assume", "repeats", "torch")
"""Fields of Options that are arguments of their own; its dtype follows from the precisions."""
PRICES = Precisions._fields
PHASE = ("phase", "phases")
WHOLE = ("request", "options")
"""Records in place of their fields."""
ARGUMENTS = (*PHASE, *SIZES, "trust_remote_code", *HOW, *PRICES, *WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """The full request: a source, the arguments of its call, and what to do with it."""

    source: Any  # a module, a step, a graph, graphs by phase, or what names a target or a file
    args: tuple[Any, ...] = ()  # of the call of a module or a step
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[str, ...] | None = None  # None: those that fit the source
    request: Request = field(default_factory=Request)  # its sizes
    options: Options = field(default_factory=Options)  # how it is traced
    precisions: Precisions = field(default_factory=Precisions)  # in which it is priced
    explicit: tuple[str, ...] = ()  # names of the arguments that differ from their defaults
    # Names of the arguments that say how one and the same phase is run.
    ARGUMENTS: ClassVar[tuple[str, ...]] = (*SIZES, *PRICES, *HOW, "trust_remote_code")

    @staticmethod
    def of(
        function: Callable[..., Any],
        source: Any,
        args: Sequence[Any],
        named: Mapping[str, Any],
        **ours: Any,
    ) -> Job:
        """The job of a call of `function`, one of ours, for a source.

        named: keyword arguments of the call, for the source or for us.  ours: arguments that
        `function` has by name, so that they are for us; None leaves one out.  Raises RequestError
        for an argument that neither takes, with the nearest name, and UnusedError for one that
        would change nothing.
        """
        job = Job(source=source, args=tuple(args))
        if not (job.is_named or job.is_graph):
            from rooftrace.tracer.callables import as_module

            job = replace(job, source=as_module(source, args, named))
        arguments, kwargs = _sorted(function, job, named)
        arguments = {n: v for n, v in {**arguments, **ours}.items() if v is not None}
        job = _read(arguments, replace(job, kwargs=kwargs))
        job.check_source()
        if job.phases is None and job.request.lengths is not None:
            job = replace(job, phases=("requests",))
        if job.phases is not None:
            job.check_phases(job.phases)
        return job

    # -- what the source is ------------------------------------------------------------------------

    @property
    def is_named(self) -> bool:
        """Whether the source is named by a string or a path."""
        return isinstance(self.source, (str, os.PathLike))

    @property
    def is_graph(self) -> bool:
        """Whether the source is a graph, graphs by phase, or a file of them."""
        graph = isinstance(self.source, (OpGraph, Mapping))
        return graph or (self.is_named and looks_saved(self.name))

    @property
    def is_code(self) -> bool:
        """Whether the source is named, and is Python code."""
        return self.is_named and names_code(self.name)

    @property
    def is_config_or_program(self) -> bool:
        """Whether the source is named, and is neither Python code nor a graph."""
        return self.is_named and not self.is_code and not self.is_graph

    @property
    def is_script(self) -> bool:
        """Whether the source is named, and is a script with its command line."""
        return self.is_named and not looks_saved(self.name) and is_script(self.name)

    @property
    def is_step(self) -> bool:
        """Whether the source is a function of the user's whose first argument is a module."""
        if self.is_named or self.is_graph or not callable(self.source):
            return False
        from torch import nn

        first = self.args[0] if self.args else None
        return not isinstance(self.source, nn.Module) and isinstance(first, nn.Module)

    @property
    def is_function(self) -> bool:
        """Whether the source is a function of the user's that no module is given to."""
        from rooftrace.tracer.callables import Function

        return isinstance(self.source, Function)

    @property
    def is_called(self) -> bool:
        """Whether the job has arguments for a call of the source."""
        return bool(self.args or self.kwargs)

    @property
    def is_sized(self) -> bool:
        """Whether the job asks for sizes (see `SIZES`)."""
        return any(name in self.explicit for name in SIZES)

    @property
    def name(self) -> str:
        """The name of the target or file; "this source" for an object."""
        return os.fspath(self.source) if self.is_named else "this source"

    # -- other jobs --------------------------------------------------------------------------------

    def without(self, *names: str) -> Job:
        """This job without these sizes."""
        plain = Request()
        request = replace(self.request, **{name: getattr(plain, name) for name in names})
        return replace(
            self, request=request, explicit=tuple(n for n in self.explicit if n not in names)
        )

    def of_one_phase(self) -> Job:
        """This job with the phase `forward`, unless it names a phase or its source has only one."""
        if self.phases is not None or self.is_graph or self.is_step or self.is_script:
            return self
        job = replace(self, phases=("forward",))
        job.check_phases(("forward",))
        return job

    def of_phases(
        self, graphs: Mapping[str, OpGraph], error: type[Exception], name: str
    ) -> dict[str, OpGraph]:
        """The graphs of the phases that are asked for; `error` says what `name` has no graph of."""
        for phase in self.phases or ():
            if phase not in graphs:
                raise error(f"{name}: no graph of phase {phase!r}; it holds {', '.join(graphs)}")
        return {phase: graphs[phase] for phase in self.phases or graphs}

    # -- what would change nothing -----------------------------------------------------------------

    def value(self, name: str) -> Any:
        """The value of an argument by its name."""
        for record in (self.request, self.precisions, self.options):
            if hasattr(record, name):
                return getattr(record, name)
        return self.phases

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Raise UnusedError if one of these arguments is explicit."""
        for name in names:
            if name in self.explicit:
                raise UnusedError(name, _shown(self.value(name)), reason)

    def check_source(self) -> None:
        """Raise UnusedError for an explicit argument that a source of this kind has no use for."""
        if self.is_graph:
            self.refuse(
                SIZES,
                f"{self.name}: a graph has its sizes; leave it out, or give the module or target "
                "it is made of",
            )
            self.refuse(
                (*HOW, "trust_remote_code"),
                f"{self.name}: a graph is traced already; leave it out, or trace again with it",
            )
        elif self.is_named:
            if self.is_script:
                self.refuse(
                    SIZES,
                    f"{self.name}: a script has its own sizes; give it options of its own",
                )
                self.refuse(
                    [name for name in HOW if name != "assume"],
                    f"{self.name}: a script runs what it runs; leave it out",
                )
            if self.is_code:
                self.refuse(("trust_remote_code",), "the code of this target runs as it is")
        elif self.is_step:
            self.refuse(
                ("phases", "loss", "optimizer", "dtype"), "a step of your own runs what it runs"
            )
            self.refuse(
                (*SIZES, "trust_remote_code"),
                "a step of your own has the sizes of its arguments",
            )
        else:
            self._check_module()
            self.refuse(("trust_remote_code", "settings"), "the module is built already")
            self.refuse(
                ("mesh", "checkpoint", "plan", "zero", "schedule", "interleave", "microbatches"),
                "the module is built already; shard it inside "
                "`with rooftrace.tools.fake_mesh({...}) as mesh:` and trace it there, or name a "
                "function build(mesh)",
            )
            if self.is_called:
                self.refuse(
                    SIZES,
                    "the arguments of the call have their sizes; change those, or leave them out "
                    "and let the sizes make them",
                )

    def _check_module(self) -> None:
        """Raise RequestError for a source that is no module, step, graph or name of one."""
        from torch import nn

        if not isinstance(self.source, nn.Module):
            raise RequestError(
                f"expected a torch.nn.Module to trace, got {type(self.source).__name__}: "
                f"{self.source!r:.80}"
            )

    def check_phases(self, phases: Sequence[str]) -> None:
        """Raise UnusedError for an argument that is for another phase."""
        names = ", ".join(phases)
        asked = {phase.partition(" stage")[0] for phase in phases}  # of a pipeline, each its own
        known = [kind for name, kind in known_phases().items() if name in asked]
        if not any(kind.tokens for kind in known):
            self.refuse(("kv",), f"it is the cached length of a decode step, and this is {names}")
        if "requests" not in asked:
            self.refuse(
                ("cached", "new"), f"it is of --phase requests, and this is {names}; leave one out"
            )
        if not any(kind.trains for kind in known):
            used = ("loss",) if self.options.optimizer == "none" else ("optimizer", "loss")
            self.refuse((*used, "checkpoint", "zero"), f"it is for training, and this is {names}")

    def check_used(self, graphs: Mapping[str, OpGraph]) -> None:
        """Raise UnusedError for an argument that changes none of these graphs."""
        self.check_phases(tuple(graphs))
        if not any(value.role == "kv" for graph in graphs.values() for value in graph.values):
            self.refuse(("kv_dtype",), f"no cache is kept in {', '.join(graphs)}")

    def check_call(self) -> None:
        """Raise RequestError for arguments that the module's forward cannot be called with."""
        parameters = _parameters(self.source)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        try:
            inspect.Signature(tuple(parameters.values())).bind(*self.args, **self.kwargs)
        except TypeError as error:
            takes = ", ".join(parameters) or "no arguments"
            raise RequestError(f"{type(self.source).__name__}: {error}; it takes {takes}") from None


# -- reading arguments -----------------------------------------------------------------------------


def _sorted(
    function: Callable[..., Any], job: Job, named: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments that are for us, and those that are for the call of a job's source."""
    parameters: Mapping[str, inspect.Parameter] = {}
    if not (job.is_named or job.is_graph):
        parameters = _parameters(job.source)
    elif job.args:
        raise RequestError(
            f"{function.__name__}({_shown(job.source)}, {_shown(job.args[0])}): the arguments of a "
            "call are for a module; pass sizes by name, for example batch=8"
        )
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name, value in named.items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.kind is not parameter.VAR_KEYWORD:
            theirs[name] = value
        elif name in ARGUMENTS and not (open_ended and _is_data(value)):
            ours[name] = value
        elif open_ended and (_is_data(value) or not near(name, _names_of(function), SLIP)):
            theirs[name] = value
        else:
            raise RequestError(_unknown(function, job.source, name, value, parameters))
    return ours, theirs


def _read(arguments: Mapping[str, Any], job: Job) -> Job:
    """The job with these arguments read into its fields; their names are among ARGUMENTS.

    Raises RequestError for two arguments that set the same field.
    """
    for first, other in (
        PHASE,
        *(("request", n) for n in SIZES),
        *(("options", n) for n in HOW),
    ):
        if first in arguments and other in arguments:
            raise RequestError(f"{first} and {other} say the same: give one of them")
    phases = _phases(arguments.get("phases", arguments.get("phase")))
    for name in PRICES:
        if not isinstance(arguments.get(name, ""), str):
            raise RequestError(
                f"{name}={_shown(arguments[name])}: expected the name of a precision, for example "
                "'fp8'"
            )
    sizes = {n: arguments[n] for n in (*SIZES, "trust_remote_code") if n in arguments}
    precisions = Precisions(*(arguments.get(name) for name in PRICES))
    how = {name: arguments[name] for name in HOW if name in arguments}
    request = arguments.get("request") or Request(**sizes)
    options = arguments.get("options") or Options(
        **how, dtype=precisions.dtype or precisions.weights_dtype
    )
    explicit = (
        *(["phases"] if phases is not None else []),
        *_changed(request, (*SIZES, "trust_remote_code")),
        *_changed(options, HOW),
        *(name for name in PRICES if name in arguments),
    )
    return replace(
        job,
        phases=phases,
        request=request,
        options=options,
        precisions=precisions,
        explicit=explicit,
    )


def _phases(value: Any) -> tuple[str, ...] | None:
    """One phase or several, as a tuple.  Raises RequestError for any other value."""
    if value is None or isinstance(value, str):
        return None if value is None else (value,)
    several = isinstance(value, Iterable) and not isinstance(value, Mapping)
    phases = tuple(value) if several else ()
    if not phases or not all(isinstance(name, str) for name in phases):
        raise RequestError(f"phases={_shown(value)}: expected some of {', '.join(known_phases())}")
    return phases


def _changed(record: Request | Options, names: Iterable[str]) -> list[str]:
    """Names of the fields that differ from their default value."""
    plain = type(record)()
    return [name for name in names if getattr(record, name) != getattr(plain, name)]


def _unknown(
    function: Callable[..., Any],
    source: Any,
    name: str,
    value: Any,
    parameters: Mapping[str, inspect.Parameter],
) -> str:
    """The message about an argument that neither the source nor our function takes."""
    ours = _names_of(function)
    text = f"{function.__name__}({name}={_shown(value)}): no such argument"
    text += hint(name, [*parameters, *ours])
    if parameters:
        text += f"; {type(source).__name__} takes {', '.join(parameters)}"
    return f"{text}; {function.__name__} takes {', '.join(ours)}"


def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of arguments of one of our functions: its own, and those of every source."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    _, *parameters = inspect.signature(function).parameters.values()  # the first is the source
    own = [p.name for p in parameters if p.kind in kinds]
    others = [n for n in ARGUMENTS if n not in WHOLE and n not in PHASE]
    return tuple(dict.fromkeys([*own, *others]))


def _parameters(source: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, or of a function after its module."""
    from torch import nn

    from rooftrace.tracer.values import parameters_of

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


def _is_data(value: Any) -> bool:
    """Whether a value is a tensor or holds one: it is for the model then, and is no option."""
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
    text = repr(value) if not callable(value) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
