"""Steps on real tensors: built from a target, timed, profiled, with their memory.

They run the steps that the tracer captures: the same phases, the same start of backward, and an
optimizer that keeps fp32 masters of low-precision weights.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.measured.bench.clock import Bench
from rooftrace.measured.bench.runfile import OpTime
from rooftrace.tracer import Request, torch_private
from rooftrace.tracer.inputs import Inputs, call_inputs
from rooftrace.tracer.phases import ModuleCalls, PlainCall, stepping as optimizers
from rooftrace.tracer.targets import load_target
from rooftrace.tracer.values import REAL_VALUE, parameters_of, with_tensors

_PLAIN = (Tensor, int, float, bool, str, type(None))


@dataclass(frozen=True)
class RealStep:
    """One step of a module on real tensors."""

    ready: Callable[[], Any]  # makes the state that the step consumes (a cache); not timed
    run: Callable[[Any], object]  # the step, called with that state
    module: nn.Module
    inputs: Inputs

    def __call__(self) -> object:
        return self.run(self.ready())


def real_inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
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

    compiled: through torch.compile, with these options of Inductor.

    Raises RequestError for a phase that the module does not have, and the errors of
    the module while the prompt of a decode runs.
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
    """The arguments as new objects (a cache grows by every call) around the same tensors."""
    return {
        name: item if isinstance(item, _PLAIN) else with_tensors(item, lambda tensor: tensor)
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
                    torch_private.foreach_copy_(wide, [p.grad for p in low if p.grad is not None])
                    for master, gradient in zip(masters, wide, strict=True):
                        master.grad = gradient
                self.optimizer.step()
                if low:
                    torch_private.foreach_copy_(list[Tensor](low), masters)
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
    resident_bytes: int | None  # byte of tensors between steps


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


# -- realize ---------------------------------------------------------------------------------------


def realized(
    target: str, bench: Bench, request: Request | None = None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module of a target with random data on a device, and the arguments of a call.

    Weights are small; integers have their traced value, or zero.  Raises TargetError or
    RequestError for a target or inputs that make no sense.
    """
    with torch.no_grad():
        made = load_target(target, request).filled(lambda tensor: _filled(tensor, bench))
    return made.module.eval(), tuple(made.inputs.args), dict(made.inputs.kwargs)


def _filled(tensor: Tensor, bench: Bench) -> Tensor:
    """A real tensor for one on meta: its traced value, small random numbers, or zero."""
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        real: Tensor = value.to(bench.device)
        return real
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=bench.device)
    return bench.random(*tensor.shape).mul_(0.02).to(tensor.dtype)


# -- profiler --------------------------------------------------------------------------------------

RANGE = "op "
"""A range of the host around one op of a graph is called "op 12"."""


def profiler(device: torch.device, shapes: bool = True) -> Any:
    """A torch profiler for the host and the device."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # acc_events: torch 2.11 warns that others are cleared, as if there were several cycles.
    return profile(activities=activities, record_shapes=shapes, acc_events=True)


def profiled(bench: Bench, run: Callable[[], object], shapes: bool = True) -> tuple[Any, float]:
    """The events of the profiler during one `run`, and its wall seconds, profiler included."""
    with profiler(bench.device, shapes) as recorded:
        wall = bench.wall(run)
    return recorded.events(), wall


@dataclass(frozen=True)
class StepProfile:
    """The time of one step by op."""

    ops: tuple[OpTime, ...]  # longest first; calls with equal shapes together
    seconds: float  # s, of the device in all
    unattributed: float  # s of these that belong to no op


def by_op(events: Any, on_cuda: bool) -> StepProfile:
    """Sums over equal ops, longest first.

    On CUDA kernels count for the innermost op that launched them; on a CPU an op counts without the
    ops inside of it.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[Any]] = {}
    for event in events:
        seconds, total, kernels = _times(event, on_cuda)
        if total <= 0 or (seconds <= 0 and "::" not in event.name):  # a range of the host
            continue
        shapes = json.dumps(list(event.input_shapes or ()))
        entry = groups.setdefault((event.name, shapes, kernels), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += seconds
        entry[2] += total
    ops = [
        OpTime(
            target=name,
            seconds=seconds,
            count=count,
            shapes=_frozen(json.loads(shapes)),
            kernels=kernels,
            total=total if total > seconds else None,
        )
        for (name, shapes, kernels), (count, seconds, total) in groups.items()
    ]
    ops.sort(key=lambda op: (-op.seconds, -op.inclusive))
    attributed = sum(op.seconds for op in ops)
    total = on_device(events) if on_cuda else attributed
    return StepProfile(tuple(ops), max(total, attributed), max(0.0, total - attributed))


def _times(event: Any, on_cuda: bool) -> tuple[float, float, tuple[str, ...]]:
    """Seconds of an event without and with the events inside of it, and its kernels' names."""

    if event.device_type != torch_private.DeviceType.CPU:
        return 0.0, 0.0, ()
    if on_cuda:
        kernels = event.kernels
        names = tuple(sorted({str(kernel.name)[:120] for kernel in kernels}))
        seconds = sum(kernel.duration for kernel in kernels) * 1e-6
        inside = sum(_times(child, True)[1] for child in event.cpu_children)
        return seconds, seconds + inside, names
    if event.is_async or "::" not in event.name:  # a range of Python code, not an op
        return 0.0, 0.0, ()
    return event.self_cpu_time_total * 1e-6, event.cpu_time_total * 1e-6, ()


def on_device(events: Any) -> float:
    """Seconds of everything that ran on the device: kernels, copies, fills."""

    return sum(
        float(event.time_range.elapsed_us()) * 1e-6
        for event in events
        if event.device_type != torch_private.DeviceType.CPU and not _is_range(event)
    )


def _is_range(event: Any) -> bool:
    """Whether a device event only repeats a range of the host."""
    named = event.name.startswith((RANGE, "Optimizer.", "ProfilerStep"))
    return named or bool(getattr(event, "is_user_annotation", False))


def _frozen(item: Any) -> Any:
    return tuple(_frozen(part) for part in item) if isinstance(item, list) else item
