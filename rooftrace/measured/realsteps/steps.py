"""Steps that really run: a phase of a module on real tensors, timed, profiled, with its memory.

They run the steps that the tracer captures: the same phases, the same start of backward, and an
optimizer that keeps fp32 masters of low-precision weights.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.measured.bench import Bench
from rooftrace.tracer.inputs import Inputs, call_inputs
from rooftrace.tracer.phases import ModuleCalls, PlainCall, optimizer as optimizers
from rooftrace.tracer.tensors import parameters_of
from rooftrace.tracer.twins import replaced

_PLAIN = (Tensor, int, float, bool, str, type(None))


@dataclass(frozen=True)
class RealStep:
    """One step of a module on real tensors."""

    ready: Callable[[], Any]  # makes what the step uses up (a cache); not timed
    run: Callable[[Any], object]  # the step, called with what `ready` made
    module: nn.Module
    inputs: Inputs

    def __call__(self) -> object:
        return self.run(self.ready())


def real_inputs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], phase: str
) -> Inputs:
    """`Inputs` of real tensors for a plain call; for decode the arguments are the prompt."""
    inputs = call_inputs(module, tuple(args), dict(kwargs))
    decode = None
    if inputs.decode is not None:
        (name,) = inputs.decode
        prompt = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}[name]
        decode = {name: prompt[:, -1:]}
    return replace(inputs, args=tuple(args), kwargs=dict(kwargs), decode=decode)


def real_step(
    module: nn.Module,
    inputs: Inputs,
    phase: str,
    optimizer: str = "adamw",
    loss: Callable[[Any], Any] | None = None,
    compiled: bool = False,
    options: Mapping[str, Any] | None = None,
) -> RealStep:
    """The step of `phase`, on the module's device.

    compiled: through torch.compile, with these options of Inductor's.

    Raises RequestError (NoCacheError) for a phase that the module does not have, and the module's
    errors while a decode's prompt runs.
    """
    device = str(next((t.device for t in module.parameters()), torch.device("cpu")))
    call = ModuleCalls(module, inputs, loss, device).plain_call(phase)
    called: Callable[..., Any] = module
    if compiled:
        settings: dict[str, Any] = {"options": dict(options)} if options else {}
        called = torch.compile(module, **settings)
    if phase == "training":
        stepped = Stepped.of(module, optimizer)
        return RealStep(lambda: call.kwargs, _training(call, called, stepped), module, inputs)

    def forward(kwargs: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            return called(*call.args, **kwargs)

    return RealStep(lambda: _fresh(call.kwargs), forward, module, inputs)


def _fresh(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with objects of their own (a cache grows by every call) around the same
    tensors."""
    return {
        name: item if isinstance(item, _PLAIN) else replaced(item, lambda tensor: tensor)
        for name, item in kwargs.items()
    }


def _training(
    call: PlainCall, called: Callable[..., Any], stepped: Stepped
) -> Callable[[Mapping[str, Any]], Any]:
    assert call.losses is not None
    losses_of = call.losses

    def train(kwargs: Mapping[str, Any]) -> None:
        with torch.enable_grad():
            losses, _ = losses_of(called(*call.args, **kwargs))
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        stepped.step()

    return train


@dataclass
class Stepped:
    """An optimizer on the parameters of a module; those below fp32 are stepped as fp32 masters."""

    parameters: list[nn.Parameter]
    kind: Any
    masters: dict[int, Tensor] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None

    @staticmethod
    def of(module: nn.Module, name: str) -> Stepped:
        """The optimizer `name` (or "none").  Raises RequestError for another name."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise RequestError(
                f"training of {type(module).__name__}: no parameter requires a gradient"
            )
        return Stepped(parameters, None if name == "none" else optimizers.optimizer_class(name))

    def step(self) -> None:
        """Step with the gradients of the weights, and set them to None."""
        trained = [p for p in self.parameters if p.grad is not None]
        if self.kind is not None:
            if self.optimizer is None:
                self._make(trained)
            assert self.optimizer is not None
            low = [p for p in trained if id(p) in self.masters]
            masters = [self.masters[id(p)] for p in low]
            with torch.no_grad():
                if low:
                    wide = [torch.empty_like(master) for master in masters]
                    torch._foreach_copy_(wide, [p.grad for p in low if p.grad is not None])
                    for master, gradient in zip(masters, wide, strict=True):
                        master.grad = gradient
                self.optimizer.step()
                if low:
                    torch._foreach_copy_(list[Tensor](low), masters)
        for parameter in trained:
            parameter.grad = None
        for master in self.masters.values():
            master.grad = None

    def _make(self, trained: Sequence[nn.Parameter]) -> None:
        for parameter in trained:
            if parameter.element_size() < 4:
                self.masters[id(parameter)] = parameter.detach().float()
        stepped = [self.masters.get(id(p), p) for p in trained]
        self.optimizer = optimizers.made_optimizer(self.kind, stepped)


# -- timing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedStep:
    """The times of a step, and its memory; None where the device does not report it."""

    seconds: tuple[float, ...]  # s, on the wall, every repetition
    peak_bytes: int | None  # byte, the most that tensors took
    resident_bytes: int | None  # byte, what tensors take between steps


def timed(
    bench: Bench, step: RealStep, seconds: float, warmups: int = 2, least: int = 3, most: int = 20
) -> TimedStep:
    """Time `step` for about so many seconds, after warm-ups, without garbage collection."""
    for _ in range(warmups):
        step()
    bench.synchronize()
    resident = peak = None
    if bench.on_cuda:
        torch.cuda.reset_peak_memory_stats(bench.device)
        resident = int(torch.cuda.memory_allocated(bench.device))

    def once() -> float:
        state = step.ready()
        return bench.wall(lambda: step.run(state))

    enabled = gc.isenabled()
    gc.disable()
    try:
        samples = bench.repetitions(once, seconds, least, most)
    finally:
        if enabled:
            gc.enable()
    if bench.on_cuda:
        peak = int(torch.cuda.max_memory_allocated(bench.device))
    return TimedStep(tuple(samples), peak, resident)
