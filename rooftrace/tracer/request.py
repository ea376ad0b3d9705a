"""What may be asked for: phases, sizes, inputs; and the error for what makes no sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
            if value is not None and value < 1:
                raise RequestError(f"--{name} {value}: expected a whole number of at least 1")


@dataclass(frozen=True)
class Options:
    """How to trace.

    loss: maps the output to a scalar; None takes the module's own or a unit gradient into each
    floating output.  optimizer: adamw, adam, sgd, none, or the name of any torch.optim class that
    steps without a closure.  dtype: the precision that the step will be priced in (low precision
    weights get fp32 masters).  branches: decisions for unknown conditions, by number.
    """

    loss: Loss | None = None
    optimizer: str = "adamw"
    dtype: str | None = None
    branches: Mapping[int, bool] = field(default_factory=dict)


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
