"""What may be asked for: phases, sizes, inputs; and the error for what makes no sense."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rooftrace.tracer.graph import pattern_of

PHASES = ("forward", "training", "prefill", "decode")

Loss = Callable[[Any], Any]
"""Maps a module's output to a scalar tensor."""


class RequestError(ValueError):
    """A request that makes no sense for this module: quotes what was asked and says what to do."""


@dataclass(frozen=True)
class Request:
    """Sizes and switches for a target.

    batch; seq: prompt or sequence length; kv: cached length of a decode step (default seq).
    inputs: extra or replacing inputs by name, "shape:dtype".  trust_remote_code: let a Hugging Face
    repository run its own code.  Raises RequestError for a size below 1.
    """

    batch: int | None = None
    seq: int | None = None
    kv: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "kv"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _size(name, value))
        texts = isinstance(self.inputs, Mapping) and all(
            isinstance(text, str) for item in self.inputs.items() for text in item
        )
        if not texts:
            raise RequestError(
                f"inputs={self.inputs!r:.60}: expected shapes by name, for example "
                'inputs={"x": "8,3,224,224:fp32"}; tensors are arguments of the call'
            )


def _size(name: str, value: Any) -> int:
    """A size as an int, also one of numpy's.  Raises RequestError."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        shown = repr(value) if isinstance(value, str) else value
        raise RequestError(f"--{name} {shown}: expected a whole number of at least 1")
    return size


_EXPECTED = {
    "loss": "a function that maps the output to a scalar tensor",
    "optimizer": "a name, for example 'sgd'",
    "branches": "decisions by number, for example {0: True}",
    "assume": "values by kind, for example {'branch': True}",
    "repeats": "True or False",
}


@dataclass(frozen=True)
class Options:
    """How to trace.

    loss: maps the output to a scalar; None takes the module's own or a unit gradient into each
    floating output.  optimizer: adamw, adam, sgd, none, or the name of any torch.optim class that
    steps without a closure.  dtype: the precision that the step will be priced in (low precision
    weights get fp32 masters).  branches: decisions for unknown conditions, by number.  assume: what
    is taken for unknown values, by "KIND" or "KIND@MODULE" (see `ASSUMABLE`).  repeats: whether
    equal layers and loop steps stand once in the graph.  Raises RequestError for an assumption that
    cannot be made.
    """

    loss: Loss | None = None
    optimizer: str = "adamw"
    dtype: str | None = None
    branches: Mapping[int, bool] = field(default_factory=dict)
    assume: Mapping[str, Any] = field(default_factory=dict)
    repeats: bool = True

    def __post_init__(self) -> None:
        fits = {
            "loss": self.loss is None or callable(self.loss),
            "optimizer": isinstance(self.optimizer, str),
            "branches": isinstance(self.branches, Mapping),
            "assume": isinstance(self.assume, Mapping),
            "repeats": self.repeats in (True, False),
        }
        for name, fit in fits.items():
            if not fit:
                shown = f"{getattr(self, name)!r:.60}"
                raise RequestError(f"{name}={shown}: expected {_EXPECTED[name]}")
        for key, value in self.assume.items():
            check_assumption(key, value)


# -- what is assumed -------------------------------------------------------------------------------

ROUTINGS = ("balanced", "uniform")
ASSUMABLE: Mapping[str, str] = {
    "branch": "True or False, for an unknown condition",
    "density": "a share from 0 to 1, of an unknown mask that is true",
    "value": "a number, for an unknown one",
    "balanced-routing": "balanced (each class equally often) or uniform (drawn by a fixed seed), "
    "for choices by unknown scores",
}
"""The kinds of assumption that a user can decide, and what each takes."""

_WORDS = {"true": True, "false": False}


def check_assumption(key: str, value: Any) -> None:
    """Raise RequestError for a kind that there is not, or a value that it does not take."""
    kind, at, module = key.partition("@")
    if kind not in ASSUMABLE or (at and not module):
        raise RequestError(
            f"assumption {key!r}: expected KIND or KIND@MODULE, for example "
            f"'branch@model.layers.*.mlp'; kinds are {', '.join(ASSUMABLE)}"
        )
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "branch": isinstance(value, bool),
        "density": number and 0 <= value <= 1,
        "value": number and math.isfinite(value),
        "balanced-routing": value in ROUTINGS,
    }
    if not fits[kind]:
        raise RequestError(f"assumption {key}={value}: expected {ASSUMABLE[kind]}")


def parse_assumption(text: str) -> tuple[str, Any]:
    """The key and value of "KIND[@MODULE]=VALUE".  Raises RequestError."""
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not equals or not written:
        raise RequestError(
            f"assumption {text!r}: expected KIND[@MODULE]=VALUE, for example density=0.1; "
            f"kinds are {', '.join(ASSUMABLE)}"
        )
    value: Any = _WORDS.get(written.lower(), written)
    for number in (float, int):  # int last: 3 is both
        try:
            value = number(written)
        except ValueError:
            continue
    check_assumption(key, value)
    return key, value


def assumed(assume: Mapping[str, Any], kind: str, where: str) -> Any:
    """What the user decided for `kind` in the module `where`; None where nothing.

    A key that names the module counts before one that does not; of several the last.
    """
    for key, value in reversed(tuple(assume.items())):
        name, _, pattern = key.partition("@")
        if name == kind and pattern and _stands_for(pattern, where):
            return value
    return assume.get(kind)


def check_modules(assume: Mapping[str, Any], paths: Iterable[str], name: str) -> None:
    """Raise RequestError for an assumption about a module that is not among `paths`."""
    known = [path for path in paths if path]
    for key in assume:
        pattern = key.partition("@")[2]
        if pattern and not any(_stands_for(pattern, path) for path in known):
            shown = list(dict.fromkeys(pattern_of(path) for path in known))
            raise RequestError(
                f"assumption {key!r}: no module of {name} is called {pattern!r}; "
                f"there are {', '.join(shown[:12]) or 'none'}{', ...' if shown[12:] else ''}"
            )


def _stands_for(pattern: str, path: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(pattern_of(path), pattern)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of the module, and of the calls that belong to other phases.

    labels: further arguments of a training call.  decode: the arguments of a step that continues
    from a cache (without the cache); None where the module has no such step.  cached: further
    arguments of calls that return or continue a cache.  cached_kwargs: a prompt of the cached
    length, where it is not that of the call.  item, items: what a step produces and how many.
    assumptions: kind and text.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] | None = None
    cached: Mapping[str, Any] = field(default_factory=dict)
    cached_kwargs: Mapping[str, Any] | None = None
    items: int | None = None
    item: str = "sample"
    workload: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[tuple[str, str], ...] = ()


class TargetError(ValueError):
    """A target that cannot be found or built: quotes it and says what was expected."""


@dataclass(frozen=True)
class Loaded:
    """A torch module on meta (`module`), inputs for it, and what it is called."""

    module: Any
    inputs: Inputs
    name: str
