"""Calls of a module as each phase makes them; nothing is recorded here."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer import names
from rooftrace.tracer.inputs import Inputs, calls as arguments
from rooftrace.tracer.sharding import plans, zero
from rooftrace.tracer.values import (
    META,
    REAL_VALUE,
    Values,
    parameters_of,
    tensors_in,
    trees,
    with_tensors,
)


class EncoderOutputs(tuple[Any, ...]):
    """An encoder's output, which a decoder may read by index or by name; other names are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@contextlib.contextmanager
def without_experts(module: nn.Module, values: Values) -> Iterator[None]:
    """Inside, experts give results of their tokens' sizes and precision, and nothing chooses them.

    For calls of which only the cache is read: its sizes depend on no choice of experts.
    """
    some = [part for part in module.modules() if plans.has_experts(part)]
    before = [part.__dict__.get("forward") for part in some]
    for part in some:
        part.__dict__["forward"] = _sized
    try:
        with values.unchosen() if some else nullcontext():
            yield
    finally:
        for part, forward in zip(some, before, strict=True):
            if forward is None:
                del part.__dict__["forward"]
            else:
                part.__dict__["forward"] = forward


def _sized(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The result of experts; `ep_forward` of transformers returns a plain tensor of a DTensor."""
    return torch.empty_like(zero.local_of(tokens))


def drained(output: Any) -> Any:
    """The output of a module; a generator is run to its end, as its caller would do."""
    return list(output) if inspect.isgenerator(output) else output


@dataclass(frozen=True)
class PlainCall:
    """A call of a module as a phase makes it, with nothing recorded.

    losses: makes from the output the tensors where backward starts; None: no backward.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    device: str
    losses: Callable[[Any], tuple[list[Tensor], bool]] | None

    def __call__(self) -> Any:
        """Forward, and backward where there is one; the output of forward."""
        with torch.device(self.device), torch.set_grad_enabled(self.losses is not None):
            output = drained(self.module(*self.args, **self.kwargs))
            if self.losses is not None:
                losses, _ = self.losses(output)
                torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        return output


def _call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a module.  By this name `recording.origin` knows where the user's code ends."""
    return drained(module(*args, **kwargs))


class ModuleCalls:
    """A module with its inputs on a device: calls it as a phase does."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        loss: Callable[[Any], Any] | None = None,
        device: str = META.type,
    ) -> None:
        self.module, self.inputs, self.loss, self.device = module, inputs, loss, device
        self._place: CachePlace | None = None  # of a cache without a name, after a prompt
        self._tried = ""  # the attempts to find it

    def plain_call(self, phase: str) -> PlainCall:
        """The call of a phase, to be run without a recorder.

        The call before it (the prompt of a decode step) runs here.  Raises RequestError, whatever
        the module raises, and RequestError for a phase that can be traced only.
        """
        if phase not in names.MEASURED:
            raise RequestError(
                f"phase {phase!r} can be traced only; on a device run {', '.join(names.MEASURED)}"
            )
        training, inputs = phase == "training", self.inputs
        if training:
            inputs = inputs.trained(self.module)
        self.module.train(training)
        if training:
            kwargs = {**inputs.kwargs, **self._taken(inputs.labels)}
            return PlainCall(self.module, inputs.args, kwargs, self.device, self.losses)
        extras = {} if phase == "forward" else self._taken(inputs.cached)
        if phase != "decode":
            return PlainCall(
                self.module, inputs.args, {**inputs.kwargs, **extras}, self.device, None
            )
        prompt = inputs.kwargs if inputs.cached_kwargs is None else inputs.cached_kwargs
        with torch.no_grad():
            output, state = self.prompted(prompt)
        if not state:
            raise RequestError(self.without_cache(phase, output))
        kwargs = {**(inputs.decode or {}), **state, **extras}
        return PlainCall(self.module, (), kwargs, self.device, None)

    def losses(self, output: Any) -> tuple[list[Tensor], bool]:
        """The tensors where backward starts, and whether they are a loss.

        They are the user's loss, the module's, or every floating output.  Raises RequestError
        where none needs a gradient."""
        module_loss = (
            output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        )
        if self.loss is not None:
            losses = [self.loss(output)]
        elif isinstance(module_loss, Tensor) and module_loss.requires_grad:
            losses = [module_loss]
        else:
            state = self._named_state(output, self.inputs.kwargs, {})
            state.pop("encoder_outputs", None)
            kept = {id(t) for t in tensors_in(state)}
            floating = [t for t in tensors_in(output) if t.requires_grad]
            # A cache is for the next call, not for a loss; unless there is nothing else.
            losses = [t for t in floating if id(t) not in kept] or floating
        losses = [t for t in losses if isinstance(t, Tensor) and t.requires_grad]
        if not losses:
            raise RequestError(
                f"training of {type(self.module).__name__}: no output needs a gradient; pass loss="
            )
        scalar = isinstance(output, Tensor) and not output.dim()
        is_loss = self.loss is not None or losses[0] is module_loss or scalar
        return losses, is_loss

    def without_cache(self, phase: str, output: Any = None) -> str:
        """The message for a phase that needs a cache.  output: the result of a prompt."""
        name = type(self.module).__name__
        generates = getattr(
            self.module, "can_generate", lambda: arguments.cache_arguments(self.module)
        )
        if self.inputs.decode is None and generates():
            return (
                f"{phase} of {name}: pass the prompt as token ids, for example input_ids=ids; "
                "what keeps no cache has --phase forward and training"
            )
        if output is not None:
            return (
                f"{phase} of {name}: its forward returned {shown(output)}, in which no cache is "
                f"recognised{self._tried}.  A cache is an output with the name of an argument "
                'that defaults to None, as in {"past_key_values": ...}, or an item of a tuple, '
                "(logits, cache), whose tensors come back one longer when it is passed to such an "
                "argument with the next token.  Without a cache use --phase forward or training"
            )
        return (
            f"{phase} of {name}: its forward takes and returns no cache; "
            "use --phase forward or training"
        )

    def call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        extras: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the module, with those of `extras` (use_cache, labels) that its forward takes."""
        with torch.device(self.device):
            return _call(self.module, args, {**kwargs, **self._taken(extras or {})})

    def _taken(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Those of these arguments that forward takes."""
        parameters = parameters_of(self.module)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {k: v for k, v in extras.items() if k in parameters or open_ended}

    def prompted(
        self,
        prompt: Mapping[str, Any],
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[Any, dict[str, Any]]:
        """The output of a call with the prompt, and the arguments by which the next call continues.

        aside: where a call runs that only looks for a cache without a name.
        """
        prompt = {name: _unshared(item) for name, item in prompt.items()}
        objects = {name: item for name, item in prompt.items() if _may_be_filled(item)}
        before = {id(tensor) for tensor in tensors_in(objects)}
        output = self.call(self.inputs.args, prompt, self.inputs.cached)
        filled = {
            name: item
            for name, item in objects.items()
            if any(id(tensor) not in before for tensor in tensors_in(item))
        }
        state = self._named_state(output, prompt, filled)
        if not state and self._place is None:
            with aside():
                self._place, self._tried = find_place(output, self._unused(prompt), self._next)
        return output, state or self._unnamed_state(output)

    def places(self, cached: int | None, count: int) -> dict[str, Tensor]:
        """Positions of `count` tokens after a cache, for a module that takes them.

        That is Mamba in transformers 4; other modules with `cache_position` count by themselves.
        """
        if cached is None or not {"cache_params", "cache_position"} <= {
            *parameters_of(self.module)
        }:
            return {}
        positions = torch.empty(count, dtype=torch.long, device=META)
        positions.__dict__[REAL_VALUE] = torch.arange(cached, cached + count, device="cpu")
        return {"cache_position": positions}

    def _unused(self, passed: Mapping[str, Any]) -> list[str]:
        """The arguments that could take a cache, in the order of forward."""
        names = list(parameters_of(self.module))
        cached = arguments.cache_arguments(self.module)
        taken = {*names[: len(self.inputs.args)], *(self.inputs.decode or {}), *passed}
        return [name for name in names if name in cached and name not in taken]

    def _next(self, state: Mapping[str, Any]) -> Any:
        """The output of a call with the next token."""
        return self.call((), {**(self.inputs.decode or {}), **state}, self.inputs.cached)

    def state(self, output: Any) -> dict[str, Any]:
        """The outputs of a call with a cache that the next call takes."""
        return self._named_state(output, {}, {}) or self._unnamed_state(output)

    def _unnamed_state(self, output: Any) -> dict[str, Any]:
        place = self._place
        return {} if place is None else {place.argument: output[place.index]}

    def _named_state(
        self, output: Any, passed: Mapping[str, Any], filled: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The outputs that the next call takes: those named like parameters of forward.

        passed: the arguments of the call.  filled: arguments into which the call wrote tensors.
        """
        names = list(parameters_of(self.module))
        taken = {*names[: len(self.inputs.args)], *(self.inputs.decode or {})}
        named = _named_outputs(output)
        state = {
            key: value
            for key, value in named.items()
            if key in names
            and key not in taken
            and not isinstance(passed.get(key), Tensor)
            and tensors_in(value)
        }
        state |= {key: item for key, item in filled.items() if key not in {*state, *taken}}
        hidden = named.get("encoder_last_hidden_state")
        if state and hidden is not None and "encoder_outputs" in names:
            state["encoder_outputs"] = EncoderOutputs((hidden,))
        return state


def _named_outputs(output: Any) -> dict[str, Any]:
    """The named outputs of a module; empty for a tensor or a plain tuple."""
    if isinstance(output, Mapping):
        return dict(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return dict(output._asdict())
    return {}


def _may_be_filled(item: Any) -> bool:
    """Whether an argument is an object that a call may write into, as into a cache."""
    plain = (Tensor, nn.Module, Mapping, str, bytes, int, float, list, tuple, set, type(None))
    return not isinstance(item, plain) and not callable(item) and hasattr(item, "__dict__")


def _unshared(item: Any) -> Any:
    """A copy of such an object that holds the same tensors."""
    return with_tensors(item, lambda tensor: tensor) if _may_be_filled(item) else item


# -- a cache in a plain tuple, which has no name ---------------------------------------------------
# Only a trial can tell a cache from hidden states: it is passed back with the next token, and each
# tensor of a cache comes back one longer.

_LIKELY = re.compile(r"past|cache|kv|mem")
"""Parts of the names of arguments that take a cache; if one matches, no other is tried."""
_SHOWN = 200  # letters of an output in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Where a cache without a name is."""

    index: int  # of the item in the tuple that forward returns
    argument: str  # of forward, that takes it in the next call


def find_place(
    output: Any, arguments: Sequence[str], call: Callable[[Mapping[str, Any]], Any]
) -> tuple[CachePlace | None, str]:
    """The place of a cache in an output, or None and the attempts.

    arguments: names of those that default to None and were not passed.  call: runs the next token
    with one more argument.  It gets copies, as it may write into them.
    """
    if type(output) not in (tuple, list):
        return None, ""
    likely = [name for name in arguments if _LIKELY.search(name)]
    tried = ""
    for index, item in enumerate(output):
        tensors = tensors_in(item)
        if index == 0 or not tensors or any(tensor.dim() < 3 for tensor in tensors):
            continue
        if not likely and len(arguments) != 1:
            return None, f"; which of {', '.join(arguments)} takes it, no name says"
        for name in likely or arguments:
            try:
                again = call({name: with_tensors(item, torch.empty_like)})
            except Exception as error:  # whatever a user's module raises for a non-cache
                first_line = str(error).partition("\n")[0]
                result = f"raises {type(error).__name__}: {first_line:.{_SHOWN}}"
            else:
                if _comes_back_longer(index, output, again):
                    return CachePlace(index=index, argument=name), ""
                result = f"returns {shown(again)}"
            tried = tried or f"; item {index} passed back as {name} {result}"
    return None, tried


def _comes_back_longer(index: int, before: Sequence[Any], after: Any) -> bool:
    """Whether each tensor of an item is one longer along one dimension."""
    if type(after) is not type(before) or len(after) != len(before):
        return False
    old, new = tensors_in(before[index]), tensors_in(after[index])
    return len(old) == len(new) and all(
        a.dim() == b.dim()
        and [n - m for m, n in zip(a.shape, b.shape, strict=True) if n != m] == [1]
        for a, b in zip(old, new, strict=True)
    )


def shown(output: Any) -> str:
    """An output in a message: "(float32[2, 16, 100], (float32[2, 4, 16, 8], ...))"."""
    text = _shown(output)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _shown(item: Any) -> str:
    if isinstance(item, Tensor):
        return trees.label_of(item)
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(value)}' for key, value in item.items())}}}"
    if type(item) in (tuple, list):
        inside = ", ".join(map(_shown, item))
        return f"({inside})" if type(item) is tuple else f"[{inside}]"
    return "None" if item is None else type(item).__name__
