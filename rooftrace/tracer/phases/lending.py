"""Modules with real weights inside of a capture: for the length of the block they stand on meta.

The modules stay the user's objects.  Each gets meta twins of its tensors and copies of its
attributes, and at the end of the block everything that it had before.  An optimizer of its weights
gets the twins at its first `step` or `zero_grad`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from rooftrace.errors import RequestError
from rooftrace.tracer import torch_private
from rooftrace.tracer.inputs import calls
from rooftrace.tracer.recording import Recorder, original_of, replaced
from rooftrace.tracer.values import Twins, copies as closures, own_tensors, tensors_in, trees


def is_real(modules: Sequence[nn.Module]) -> bool:
    """Whether some tensor of these modules is not on the meta device."""
    tensors = (t for module in modules for part in module.modules() for t in own_tensors(part))
    return any(tensor.device.type != "meta" for tensor in tensors)


@contextlib.contextmanager
def lent(root: nn.Module) -> Iterator[dict[int, Any]]:
    """Inside, the modules of `root` have meta tensors; gives the twins by identity of originals.

    Raises RequestError for a module with an attribute that cannot be copied.
    """
    loan = _Loan(root)
    try:
        loan.lend()
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{type(root).__name__} cannot be moved to the meta device for a capture ({error}): "
            "build it under `with torch.device('meta'):`"
        ) from error
    try:
        yield loan.memo
    finally:
        loan.restore()


@contextlib.contextmanager
def unseen(recorder: Recorder) -> Iterator[None]:
    """Ops that run inside are no work of the step: meta copies are made."""
    with (
        torch.no_grad(),
        torch_private.DisableTorchFunction(),
        recorder.paused(),
        torch_private.disable_current_modes(),
    ):
        yield


@contextlib.contextmanager
def inputs_lent(modules: Sequence[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Inside, real tensors that these modules are called with become meta inputs of the graph."""
    twins = Twins()

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not recorder.here_recorded():
            return None
        real = [t for t in tensors_in((args, kwargs)) if t.device.type != "meta"]
        with unseen(recorder):
            made = [twins.of(tensor) for tensor in real if id(tensor) not in twins.memo]
            twins.finish()
        for tensor in made:
            calls.learn(recorder.values, tensor)
            recorder.entries.inputs.append(tensor)
            recorder.enter(tensor, "input", f"input_{len(recorder.entries.inputs)}")
        return torch_private.tree_map_only(
            Tensor, lambda t: twins.memo.get(id(t), t), (args, kwargs)
        )

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def optimizers_lent(
    memo: dict[int, Any], recorder: Recorder
) -> Iterator[Callable[[Optimizer], None]]:
    """Inside, an optimizer of real weights steps on their twins, which `memo` has by identity.

    Gives the function that lends an optimizer the twins earlier (see `zeroing`).
    """
    loans: list[tuple[Optimizer, list[list[Any]], Any]] = []

    def lend(optimizer: Optimizer, *_: Any) -> None:
        with unseen(recorder):
            give(optimizer)

    def give(optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in memo for p in parameters):
            return
        lists = [group["params"] for group in optimizer.param_groups]
        loans.append((optimizer, lists, optimizer.state))
        twins = Twins(memo)
        for tensor in tensors_in(list(optimizer.state.values())):
            calls.learn(recorder.values, twins.of(tensor))
        twins.finish()
        made = type(optimizer.state)(getattr(optimizer.state, "default_factory", None))
        for key, state in optimizer.state.items():
            made[memo.get(id(key), key)] = copy.deepcopy(state, memo)
        optimizer.state = made
        for group, real in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = [memo.get(id(p), p) for p in real]

    handle = register_optimizer_step_pre_hook(lend)
    try:
        yield lend
    finally:
        handle.remove()
        for optimizer, lists, state in reversed(loans):
            for group, real in zip(optimizer.param_groups, lists, strict=False):
                group["params"] = real
            optimizer.state = state


@contextlib.contextmanager
def zeroing(lend: Callable[[Optimizer], None]) -> Iterator[None]:
    """Inside the scope of a recording: an optimizer has the twins before it zeroes gradients."""
    original = original_of(Optimizer, "zero_grad")

    def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        lend(optimizer)
        return original(optimizer, *args, **kwargs)

    with replaced(Optimizer, {"zero_grad": zero_grad}):
        yield


class _Loan:
    """The meta twins that modules have for a while, and their tensors before."""

    def __init__(self, root: nn.Module) -> None:
        self._parts = list(root.modules())
        if any(isinstance(part, torch.jit.ScriptModule) for part in self._parts):
            raise RequestError(
                f"{type(root).__name__} has parts that TorchScript compiled, with real tensors: "
                "give the step as a function to rooftrace.trace(step, module, ...), which makes a "
                "copy"
            )
        lazy = next((p for p in root.parameters() if isinstance(p, trees.LAZY)), None)
        if lazy is not None:
            raise RequestError(
                f"{type(root).__name__} has parameters without sizes yet ({type(lazy).__name__}): "
                "call it once, then capture it"
            )
        self.memo: dict[int, Any] = {id(part): part for part in self._parts}
        self._before = [(part, type(part), dict(vars(part))) for part in self._parts]

    def lend(self) -> None:
        """Give each module the twins, and copies of its other state."""
        tensors = [tensor for part in self._parts for tensor in own_tensors(part)]
        twins = Twins(self.memo)
        for tensor in tensors:
            twins.of(tensor, owned=True)
        twins.held_by_modules(self._parts)
        for part in self._parts:
            twins.handles(part)
        twins.finish()
        copies = [
            {n: v if n == "_modules" else copy.deepcopy(v, self.memo) for n, v in state.items()}
            for _, _, state in self._before
        ]
        closures.copy_hooks(tensors, self.memo)
        for part, state in zip(self._parts, copies, strict=True):
            vars(part).update(state)

    def restore(self) -> None:
        """Give each module its tensors and state back."""
        for part, kind, state in self._before:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(state)
