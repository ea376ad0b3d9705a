"""The sizes that may be asked for, and how to trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rooftrace.errors import RequestError, one_of
from rooftrace.graph.assumptions import check_assumption
from rooftrace.tracer.names import CHECKPOINTS, PLANS, ZERO, is_shared
from rooftrace.tracer.recording import Release, installed_release, read_release

Loss = Callable[[Any], Any]
"""Maps a module's output to a scalar tensor."""


@dataclass(frozen=True)
class Request:
    """Sizes and switches for a target.  Raises RequestError for a size below 1."""

    batch: int | None = None
    seq: int | None = None  # length of the sequence, or of the prompt
    kv: int | None = None  # cached length of a decode step; None: seq
    # Requests of different lengths in one step: positions in the cache of each (0: none), and how
    # many tokens of each the step runs.  One number is for all requests.
    cached: Any = None
    new: Any = None
    inputs: Mapping[str, str] = field(default_factory=dict)  # more inputs: "shape:dtype" by name
    # Fields of a Hugging Face config, as "config.hidden_size" or with dots for those of its parts,
    # and keyword arguments of the function or class that a target names.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Processes along each axis of a device mesh, outermost first; {}: one process.
    mesh: Mapping[str, int] = field(default_factory=dict)
    # Which activations of a Hugging Face model training makes again: see `names.CHECKPOINTS`.
    checkpoint: str = "none"
    plan: str = PLANS[0]  # of tensor parallelism of a Hugging Face model
    zero: int = ZERO[-1]  # what replicas share that train a Hugging Face model: see `names.ZERO`
    # The order of a pipeline's work (see schedules.SCHEDULES), how many stages each process has,
    # and how many microbatches there are.
    schedule: str | None = None
    interleave: int | None = None
    microbatches: int | None = None
    trust_remote_code: bool = False  # a Hugging Face repository may run its own code

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "kv", "interleave", "microbatches"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _size(name, value))
        if not isinstance(self.settings, Mapping) or not all(
            isinstance(name, str) and isinstance(value, (bool, int, float, str))
            for name, value in self.settings.items()
        ):
            raise RequestError(
                f"settings={self.settings!r:.60}: expected numbers, words, True or False by name, "
                'for example settings={"config.num_hidden_layers": 8}'
            )
        self._check_mesh()
        self._check_lengths()
        texts = isinstance(self.inputs, Mapping) and all(
            isinstance(text, str) for item in self.inputs.items() for text in item
        )
        if not texts:
            raise RequestError(
                f"inputs={self.inputs!r:.60}: expected shapes by name, for example "
                'inputs={"x": "8,3,224,224:fp32"}; tensors are arguments of the call'
            )

    @property
    def lengths(self) -> RequestLengths | None:
        """The requests of one step; None where all have one length, or a batch."""
        return read_lengths(self.cached, self.new)

    def _check_lengths(self) -> None:
        """Make cached and new tuples of as many numbers.  Raises RequestError."""
        lengths = self.lengths
        if lengths is None:
            return
        for name in ("batch", "seq", "kv"):
            if getattr(self, name) is not None:
                raise RequestError(
                    f"--{name} {getattr(self, name)}: requests that --cached and --new list have "
                    "their own sizes; leave it out"
                )
        object.__setattr__(self, "cached", lengths.cached)
        object.__setattr__(self, "new", lengths.new)

    def _check_mesh(self) -> None:
        """Raise RequestError for a mesh, or a kind of checkpoints, that there is not."""
        if not isinstance(self.mesh, Mapping):
            raise RequestError(
                f"mesh={self.mesh!r:.60}: expected a size for each axis, for example "
                "mesh={'dp': 4, 'tp': 8}"
            )
        for axis, size in self.mesh.items():
            whole = isinstance(size, int) and not isinstance(size, bool)
            if not isinstance(axis, str) or not axis or not whole or size < 1:
                raise RequestError(
                    f"--mesh {axis}={size}: expected a whole number of at least 1 for each axis, "
                    "for example dp=4,tp=8"
                )
        for name in ("schedule", "interleave", "microbatches"):
            value = getattr(self, name)
            if value is not None and self.mesh.get("pp", 1) < 2:
                raise RequestError(
                    f"--{name} {value}: it is for a pipeline, and the mesh has none; expected an "
                    "axis pp of at least 2, for example --mesh pp=4,dp=8"
                )
        for name, words in (("checkpoint", CHECKPOINTS), ("plan", PLANS)):
            if (value := getattr(self, name)) not in words:
                raise RequestError(f"--{name} {value}: {one_of(value, words)}")
        if self.plan != PLANS[0] and self.mesh.get("tp", 1) < 2:
            raise RequestError(
                f"--plan {self.plan}: it is for tensor parallelism; expected an axis tp in --mesh"
            )
        if self.zero not in ZERO or isinstance(self.zero, bool):
            raise RequestError(f"--zero {self.zero}: expected one of {', '.join(map(str, ZERO))}")
        if self.zero != ZERO[-1] and not is_shared(self.mesh):
            raise RequestError(
                f"--zero {self.zero}: it is for replicas; expected an axis dp in --mesh"
            )
        if self.zero == 2 and self.mesh.get("pp", 1) > 1:
            raise RequestError(
                f"--zero 2 with --mesh pp={self.mesh['pp']}: gradients of microbatches add up "
                "before they are shared, and DeepSpeed refuses it, too; expected 1 or 3"
            )


LARGEST = (1 << 63) - 1
"""The largest size that torch can count."""


def _size(name: str, value: Any) -> int:
    """A size as an int, also one of numpy's.  Raises RequestError."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if not 1 <= size <= LARGEST:
        if size > LARGEST:
            shown = f"a whole number of {size.bit_length()} bits"
            raise RequestError(f"--{name}: {shown}; torch counts with 63")
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
    """How to trace.  Raises RequestError for an assumption that cannot be made."""

    # Maps the output to a scalar; None: the module's own loss, or a unit gradient into each
    # floating output.
    loss: Loss | None = None
    # "none", or the name of a class in torch.optim, in any case, that steps without a closure.
    optimizer: str = "adamw"
    # The precision that the step will be priced in: weights of less than fp32 get fp32 masters.
    dtype: str | None = None
    # Which way unknown conditions go, by the number in which they are met.
    branches: Mapping[int, bool] = field(default_factory=dict)
    # Values for unknown ones, by "KIND" or "KIND@MODULE" (see assumptions.ASSUMABLE).
    assume: Mapping[str, Any] = field(default_factory=dict)
    # Whether equal layers and loop steps stand once in the graph.
    repeats: bool = True
    # The release of PyTorch that runs the step, "2.8" or "2.5.1"; None: the one that is installed.
    torch: str | None = None

    @property
    def release(self) -> Release:
        """The release of PyTorch that runs the step."""
        return installed_release() if self.torch is None else read_release(self.torch)

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
        if self.torch is not None:
            object.__setattr__(self, "torch", str(read_release(self.torch)))


# -- requests of one step of a server --------------------------------------------------------------

MOST = 1 << 16
"""Requests of one step at most."""
_LONGEST = 1 << 48
"""Positions of a request below which everything stays countable."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Requests that one step runs together, their tokens packed in one row.

    cached: positions in the cache of each, 0 for the start of a prompt.  new: tokens that the step
    runs of each behind them: 1 decodes, several are a part of a prompt or a speculative step.

    A window is how many positions a token sees, itself among them; 0: all before it.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.new)

    @property
    def longest(self) -> int:
        """Positions in the longest cache."""
        return max(self.cached)

    def rows(self, window: int = 0) -> tuple[int, ...]:
        """Rows of a layer's cache before the step, by request: no token sees more."""
        return tuple(min(held, window - 1) if window else held for held in self.cached)

    def keys(self, window: int = 0) -> int:
        """Rows of a layer's cache in the step, with the new ones, of all requests."""
        return sum(self.rows(window)) + self.tokens

    def pairs(self, window: int = 0) -> int:
        """(query, key) pairs of one head of all requests, each alone: new x (rows + new)."""
        rows = self.rows(window)
        return sum(new * (held + new) for held, new in zip(rows, self.new, strict=True))

    def visible(self, window: int = 0) -> int:
        """Those pairs that a causal mask shows: token j sees min(cached + j + 1, window) rows."""
        return sum(
            _visible(held, new, window) for held, new in zip(self.cached, self.new, strict=True)
        )

    def positions(self) -> list[int]:
        """Where each new token stands in its request."""
        return [
            place
            for held, new in zip(self.cached, self.new, strict=True)
            for place in range(held, held + new)
        ]

    def groups(self) -> list[list[int]]:
        """Cached positions, new tokens and how many requests are so, longest first."""
        pairs = sorted(zip(self.cached, self.new, strict=True), reverse=True)
        return [[*pair, len(list(same))] for pair, same in groupby(pairs)]


def _visible(cached: int, new: int, window: int) -> int:
    growing = min(new, max(0, window - cached)) if window else new  # tokens that see all before
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def read_lengths(cached: Any, new: Any) -> RequestLengths | None:
    """Lengths from a number or several of each; None where neither is there.

    new: default one token each.  cached: default none.  One number of either is for all.  Raises
    RequestError for numbers that do not fit.
    """
    if cached is None and new is None:
        return None
    starts = [0] if cached is None else list(_numbers("cached", cached, least=0))
    tokens = [1] if new is None else list(_numbers("new", new, least=1))
    count = max(len(starts), len(tokens))
    for name, other, numbers in (("cached", "new", starts), ("new", "cached", tokens)):
        if len(numbers) not in (1, count):
            raise RequestError(
                f"--{name} has {len(numbers)} numbers, --{other} has {count}: expected one for "
                "each request, or one for all, for example --cached 4096,100 --new 1,512"
            )
    if count > MOST:
        raise RequestError(f"--cached, --new: {count:,} requests; expected {MOST:,} at most")
    starts, tokens = (each * (count // len(each)) for each in (starts, tokens))
    return RequestLengths(tuple(starts), tuple(tokens))


def _numbers(name: str, value: Any, least: int) -> Iterator[int]:
    several: Sequence[Any] = value if isinstance(value, (list, tuple, range)) else [value]
    if not several:
        raise RequestError(f"--{name}: expected a number for each request, got none")
    for each in several:
        try:
            number = -1 if isinstance(each, bool) else operator.index(each)
        except TypeError:
            number = -1
        if not least <= number < _LONGEST:
            raise RequestError(
                f"--{name} {each}: expected whole numbers of at least {least}, one for each "
                "request, for example --cached 4096,100 --new 1,512"
            )
        yield number
