"""What is run: the phases forward, training, prefill and decode of a module, captured one by one."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import platform
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from rooftrace.hardware.precision import bytes_per_element
from rooftrace.tracer import values as known_values
from rooftrace.tracer.capture import META, Recorder, TraceError, no_recording, tensors_in
from rooftrace.tracer.family import with_families
from rooftrace.tracer.graph import Assumption, OpGraph
from rooftrace.tracer.lower import dtype_name, lower
from rooftrace.tracer.values import REAL_VALUE, UnknownValueError, Values

PHASES = ("forward", "training", "prefill", "decode")
MAX_BRANCH_RETRIES = 6

Loss = Callable[[Any], Tensor]
Progress = Callable[[str], None]


class RequestError(ValueError):
    """A request that makes no sense for this module: it quotes what was asked and says what to do."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of the module.  item and items: what a step produces (for items per second).

    decode: the arguments of a step that continues from a cache (without the cache); None where the
    module has no such step.  labels: extra arguments of a training call.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] | None = None
    cached: Mapping[str, Any] = field(default_factory=dict)
    cached_kwargs: Mapping[str, Any] | None = None
    items: int | None = None
    item: str | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Options:
    """How to trace.

    loss: maps the output to a scalar; None takes the module's own or a unit gradient into each floating
    output.  optimizer: adamw, adam, sgd, none, or the name of any torch.optim class.  dtype: the
    precision that the step will be priced in (low precision weights get fp32 masters).  branches:
    decisions for unknown conditions, by number.
    """

    loss: Loss | None = None
    optimizer: str = "adamw"
    dtype: str | None = None
    branches: Mapping[int, bool] = field(default_factory=dict)


def trace_phases(module: nn.Module, inputs: Inputs, phases: Sequence[str] | None = None,
                 options: Options | None = None, progress: Progress | None = None,
                 target: str = "") -> dict[str, OpGraph]:
    """Capture `phases` of `module` (default: by whether it returns a cache) as one OpGraph each.

    The module is not run on real data and not changed: a module with real parameters is copied to
    meta first.  Raises TraceError where its code fails, RequestError for a phase that it has not.
    """
    options = options or Options()
    if phases is not None:
        for phase in phases:
            if phase not in PHASES:
                raise RequestError(f"phase {phase!r}: expected one of {', '.join(PHASES)}")
    if not isinstance(module, nn.Module):
        raise RequestError(f"expected a torch.nn.Module to trace, got {type(module).__name__}: {module!r:.80}")
    tell = progress or (lambda _: None)
    run = _Run(on_meta(module), inputs, options, target)
    wanted = tuple(phases) if phases is not None else None
    has_cache = inputs.decode is not None
    if wanted is None:
        wanted = ("prefill", "decode", "training") if has_cache else ("forward", "training")
    for phase in ("prefill", "decode"):
        if phase in wanted and not has_cache:
            raise RequestError(
                f"{phase} of {type(module).__name__}: its forward takes and returns no cache; "
                "use --phase forward or training")
    graphs: dict[str, OpGraph] = {}
    with _modes_restored(run.module):
        for phase in wanted:
            tell(f"tracing {phase}")
            graphs[phase] = getattr(run, phase)()
    return graphs


def call_inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], phase: str) -> Inputs:
    """`Inputs` of a plain call.  For decode the arguments are the prompt, of which the last token is the
    step's own input."""
    names = list(inspect.signature(module.forward).parameters)
    args, named = meta_inputs(tuple(args)), meta_inputs(dict(kwargs))
    named = {**dict(zip(names, args, strict=False)), **named} if phase in ("prefill", "decode") else named
    first = next(iter(tensors_in((args, named))), None)
    tokens = first is not None and not first.dtype.is_floating_point and first.dim() == 2
    workload: dict[str, Any] = {"batch": int(first.shape[0]) if first is not None and first.dim() else 1}
    if tokens and first is not None:
        workload["seq"] = int(first.shape[1])
    item = "token" if tokens else "sample"
    items = first.numel() if tokens and first is not None else None
    if phase not in ("prefill", "decode"):
        return Inputs(args, named, items=items, item=item, workload=workload)
    key = next((k for k in ("decoder_input_ids", "input_ids") if k in named), next(iter(named), None))
    if key is None:
        raise RequestError(f"{phase} of {type(module).__name__}: pass the prompt, for example input_ids=ids")
    keeps = {"past_key_values", "cache_params"} & set(names)
    step = None
    if keeps:
        value = named[key]
        last = value[:, -1:] if value.device.type != "meta" else torch.empty(
            (value.shape[0], 1), dtype=value.dtype, device=META)
        if REAL_VALUE in value.__dict__:
            last.__dict__[REAL_VALUE] = value.__dict__[REAL_VALUE][:, -1:]
        step = {key: last}
        workload["kv"] = int(value.shape[1])
    return Inputs((), named, decode=step, cached={"use_cache": True}, items=items, item=item,
                  workload=workload)


def on_meta(module: nn.Module) -> nn.Module:
    """The module itself if all its tensors are on meta, else a copy with meta tensors.

    The copy shares no state with the original, and no weight is copied.
    """
    memo: dict[int, Any] = {}
    for owner in module.modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values(),
                       *(v for v in vars(owner).values() if isinstance(v, Tensor))):
            if tensor is None or tensor.device.type == "meta" or id(tensor) in memo:
                continue
            empty = torch.empty_like(tensor, device=META)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            elif known_values.small(tensor) and tensor.device.type == "cpu":
                empty.__dict__[REAL_VALUE] = tensor.detach()
            memo[id(tensor)] = empty
    if not memo:
        return module
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, ValueError) as error:
        raise TraceError(
            f"{type(module).__name__} cannot be copied to the meta device ({error}): build it under "
            "`with torch.device('meta'):` and pass that") from error


def with_value(value: Tensor) -> Tensor:
    """A meta tensor whose value is known while tracing."""
    empty = torch.empty_like(value, device=META)
    if known_values.small(value):
        empty.__dict__[REAL_VALUE] = value.detach()
    return empty


@contextlib.contextmanager
def _modes_restored(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for parameter in module.parameters():
            parameter.grad = None


class _Run:
    """One module and its inputs; each phase method captures and lowers one graph."""

    def __init__(self, module: nn.Module, inputs: Inputs, options: Options, target: str) -> None:
        self.module, self.inputs, self.options, self.target = module, inputs, options, target
        self._prefilled: dict[str, Any] | None = None

    # -- phases ------------------------------------------------------------------------------------

    def forward(self) -> OpGraph:
        """Eval mode, no gradients."""
        self.module.eval()
        return self._captured("forward", lambda r: self._call(r, self.inputs.kwargs), grad=False)

    def prefill(self) -> OpGraph:
        """Forward that returns a cache; what of it the next call receives has role kv."""
        self.module.eval()

        def body(recorder: Recorder) -> tuple[Any, Any]:
            output = self._call(recorder, {**self.inputs.kwargs, **self.inputs.cached})
            state = self._state(output)
            if self.inputs.cached_kwargs is None:
                self._prefilled = state
            return output, state
        return self._captured("prefill", body, grad=False, stateful=True)

    def decode(self) -> OpGraph:
        """One more token with the cache that a prefill of the cached length returned."""
        self.module.eval()
        assert self.inputs.decode is not None
        decode_kwargs = self.inputs.decode

        def body(recorder: Recorder) -> tuple[Any, Any]:
            # The step changes the cache, so a prefill's cache serves once.
            state, self._prefilled = self._prefilled, None
            if state is None:
                prompt = (self.inputs.kwargs if self.inputs.cached_kwargs is None
                          else self.inputs.cached_kwargs)
                with no_recording(recorder):
                    state = self._state(self._call(recorder, {**prompt, **self.inputs.cached}))
            if not state:
                raise RequestError(f"decode of {type(self.module).__name__}: its prefill returned no cache; "
                                   "use --phase forward or training")
            recorder.reset_calls()
            for index, tensor in enumerate(tensors_in(state)):
                recorder.enter(tensor, "kv", f"cache_{index}")
            output = self._call(recorder, {**decode_kwargs, **self.inputs.cached, **state})
            return output, self._state(output)
        return self._captured("decode", body, grad=False, stateful=True,
                              items=self.inputs.workload.get("batch"))

    def training(self) -> OpGraph:
        """Train mode: forward, loss, backward, optimizer step."""
        self.module.train()
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not parameters:
            raise RequestError(f"training of {type(self.module).__name__}: no parameter requires a gradient")

        def body(recorder: Recorder) -> tuple[Any, Any]:
            for parameter in parameters:
                parameter.grad = None
            output = self._call(recorder, {**self.inputs.kwargs, **self.inputs.labels})
            self.run_backward(recorder, output)
            gradients = {recorder.storage_of(p.grad) for p in parameters if p.grad is not None}
            run_optimizer(recorder, [p for p in parameters if p.grad is not None], self.options)
            return output, {s for s in gradients if s is not None}
        return self._captured("training", body, grad=True)

    def run_backward(self, recorder: Recorder, output: Any) -> None:
        """Gradients of the loss: the user's, the module's own, or a unit gradient into each output."""
        if self.options.loss is not None:
            losses = [self.options.loss(output)]
        else:
            own = getattr(output, "loss", None)
            if own is None and isinstance(output, Mapping):
                own = output.get("loss")
            if isinstance(own, Tensor) and own.requires_grad:
                losses = [own]
            elif isinstance(output, Tensor) and output.dim() == 0 and output.requires_grad:
                losses = [output]
            else:
                losses = [t for t in tensors_in(output) if t.requires_grad and t.dtype.is_floating_point]
                recorder.values.assume(
                    "loss", f"no loss was given: a unit gradient enters each of the {len(losses)} floating "
                            "outputs", len(losses))
        losses = [t for t in losses if t.requires_grad]
        if not losses:
            raise RequestError(
                f"training of {type(self.module).__name__}: no output needs a gradient; pass loss=")
        recorder.part = "backward"
        seeds = [torch.ones_like(t) for t in losses]
        torch.autograd.backward(losses, seeds)

    # -- running -----------------------------------------------------------------------------------

    def _call(self, recorder: Recorder, kwargs: Mapping[str, Any]) -> Any:
        accepted = _accepted(self.module, kwargs)
        with torch.device(META):
            return self.module(*self.inputs.args, **accepted)

    def _state(self, output: Any) -> dict[str, Any]:
        """What of the output the next call takes as an argument: entries named like parameters of forward."""
        if not isinstance(output, Mapping):
            return {}
        names = inspect.signature(self.module.forward).parameters
        given = {**self.inputs.kwargs}
        state = {key: value for key, value in output.items()
                 if key in names and key not in given and tensors_in(value)}
        hidden = output.get("encoder_last_hidden_state")
        if state and hidden is not None and "encoder_outputs" in names:
            state["encoder_outputs"] = (hidden,)
        return state

    def _captured(self, phase: str, body: Callable[[Recorder], tuple[Any, Any]] | Callable[[Recorder], Any], *,
                  grad: bool, stateful: bool = False, items: int | None = None) -> OpGraph:
        """Run `body` under a recorder, with branch retries, and lower what was recorded."""
        branches = dict(self.options.branches)
        for attempt in range(MAX_BRANCH_RETRIES + 1):
            values = Values(branches=branches)
            recorder = Recorder(values)
            try:
                return self._attempt(recorder, phase, body, grad, stateful, items)
            except (RequestError, TraceError):
                raise
            except Exception as error:
                last = values.decisions - 1
                if 0 <= last and last not in branches and attempt < MAX_BRANCH_RETRIES:
                    branches[last] = True
                    continue
                raise _explained(error, recorder, self.module, phase) from error
            finally:
                recorder.close()
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, recorder: Recorder, phase: str, body: Any, grad: bool, stateful: bool,
                 items: int | None) -> OpGraph:
        recorder.name_modules(self.module)
        for tensor in (*self.module.buffers(), *tree_flatten(
                (self.inputs.args, dict(self.inputs.kwargs), dict(self.inputs.labels),
                 dict(self.inputs.decode or {})))[0]):
            if isinstance(tensor, Tensor) and REAL_VALUE in tensor.__dict__:
                recorder.values.learn(tensor, tensor.__dict__[REAL_VALUE].clone())
        used = self.inputs.decode if phase == "decode" else {
            **self.inputs.kwargs, **(self.inputs.labels if phase == "training" else {})}
        for name, value in _named_inputs(self.module, self.inputs.args, used or {}):
            recorder.enter(value, "input", name)
        for kind, text in self.inputs.assumptions:
            recorder.values.assume(kind, text)
        with torch.set_grad_enabled(grad), recorder:
            result = body(recorder)
        if phase in ("prefill", "decode"):
            output, state = result
            kv = {recorder.storage_of(t) for t in tensors_in(
                {k: v for k, v in state.items() if k != "encoder_outputs"})}
            gradients: Collection[int] = ()
        elif phase == "training":
            output, gradients = result
            kv = set()
        else:
            output, kv, gradients = result, set(), ()
        outputs = [t for t in tensors_in(output) if t.device.type == "meta"]
        if phase == "training":
            outputs = outputs[:1]
        count = self.inputs.items if items is None else items
        item = self.inputs.item or "sample"
        graph = lower(
            recorder, outputs, phase=phase, kv_storages={s for s in kv if s is not None},
            gradient_storages=gradients, assumptions=recorder.values.assumptions,
            model=describe(self.module),
            workload={**self.inputs.workload, "item": item,
                      "items": count if count is not None else _batch(self.inputs),
                      "optimizer": self.options.optimizer if phase == "training" else None},
            provenance=provenance(self.target))
        return with_families(graph)


def run_optimizer(recorder: Recorder, parameters: Sequence[nn.Parameter], options: Options) -> None:
    """One step of the optimizer in the state it has after many steps.

    A first step, not recorded, makes the states.  Weights below fp32 (as run, or as they will be
    priced) get fp32 masters: gradients are cast up, the step is taken on the masters, and the result
    is cast back.
    """
    if options.optimizer == "none":
        return
    kind = _optimizer_class(options.optimizer)
    recorder.part, recorder.function = "optimizer", kind.__name__
    low = options.dtype is not None and bytes_per_element(options.dtype) < 4
    mixed = low or any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    with torch.no_grad():
        recorder.recording = False
        stepped: list[Tensor] = list(parameters)
        if mixed:
            stepped = [torch.empty_like(p, dtype=torch.float32) for p in parameters]
            for master in stepped:
                master.grad = torch.empty_like(master)
        accepts = inspect.signature(kind.__init__).parameters
        settings: dict[str, Any] = {"foreach": True} if "foreach" in accepts else {}
        if "lr" in accepts:
            settings["lr"] = 1e-3
        optimizer = kind(stepped, **settings)
        optimizer.step()
        recorder.recording = True
        for index, (parameter, tensor) in enumerate(zip(parameters, stepped, strict=True)):
            if mixed:
                recorder.enter(tensor, "optimizer", f"master.{index}")
            for name, state in optimizer.state.get(tensor, {}).items():
                if isinstance(state, Tensor):
                    recorder.enter(state, "optimizer", f"{name}.{index}")
            del parameter
        if mixed:
            wide = [torch.empty_like(m) for m in stepped]
            torch._foreach_copy_(wide, grads)
            for master, gradient in zip(stepped, wide, strict=True):
                master.grad = gradient
        optimizer.step()
        if mixed:
            torch._foreach_copy_(list(parameters), stepped)
    recorder.function = ""


def _optimizer_class(name: str) -> Any:
    wanted = name.lower()
    kinds = {n.lower(): c for n, c in vars(torch.optim).items()
             if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer}
    if wanted not in kinds:
        raise RequestError(f"optimizer {name!r}: expected none or one of {', '.join(sorted(kinds))}")
    return kinds[wanted]


def describe(module: nn.Module) -> dict[str, Any]:
    """Name, parameter counts, the model's own precision, and the bytes of parameters and buffers."""
    parameters = list(module.parameters())
    buffers = list(module.buffers())
    sizes: dict[str, int] = {}
    for parameter in parameters:
        if parameter.dtype.is_floating_point:
            name = dtype_name(parameter.dtype)
            sizes[name] = sizes.get(name, 0) + parameter.numel()
    config = getattr(module, "config", None)
    return {
        "name": getattr(config, "name_or_path", "") or type(module).__name__,
        "class": type(module).__name__,
        "params": sum(p.numel() for p in parameters),
        "params_trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": max(sizes, key=lambda n: sizes[n]) if sizes else "fp32",
        "bytes_parameters": sum(p.numel() * p.element_size() for p in parameters),
        "bytes_buffers": sum(b.numel() * b.element_size() for b in buffers),
    }


def provenance(target: str) -> dict[str, Any]:
    """Versions of what made the graph."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("rooftrace", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return {"target": target, "versions": found, "python": platform.python_version()}


def _accepted(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` without optional extras (use_cache) that this forward does not take."""
    parameters = inspect.signature(module.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in kwargs.items() if k in parameters or open_ended}


def _named_inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    names = [n for n, p in inspect.signature(module.forward).parameters.items()
             if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for position, item in enumerate(args):
        label = names[position] if position < len(names) else f"input_{position}"
        yield from _tensors_named(label, item)
    for label, item in kwargs.items():
        yield from _tensors_named(label, item)


def _tensors_named(label: str, item: Any) -> Iterator[tuple[str, Tensor]]:
    found = tensors_in(item)
    for index, tensor in enumerate(found):
        yield (label if len(found) == 1 else f"{label}_{index}"), tensor


def _batch(inputs: Inputs) -> int:
    found = tensors_in((inputs.args, dict(inputs.kwargs)))
    return int(found[0].shape[0]) if found and found[0].dim() else 1


def meta_inputs(tree: Any) -> Any:
    """Tensors of a nested structure as meta tensors; small ones keep their value."""
    return tree_map_only(Tensor, lambda t: t if t.device.type == "meta" else with_value(t), tree)


def _explained(error: Exception, recorder: Recorder, module: nn.Module, phase: str) -> TraceError:
    """The user's own traceback, shortened to their code, and the module that it happened in."""
    here = os.path.dirname(os.path.abspath(__file__))
    library = os.path.dirname(os.path.abspath(torch.__file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if not f.filename.startswith((here, library)) and not f.filename.startswith("<")]
    lines = "".join(traceback.format_list(frames[-4:])).rstrip()
    path, kind = recorder.failed_in or ("", type(module).__name__)
    where = f"module {path!r} ({kind})" if path else f"module {kind}"
    hint = ""
    if isinstance(error, UnknownValueError):
        hint = "\nIts code needs a value that only real weights give; pass inputs that avoid that path."
    text = f"{phase} of {type(module).__name__} failed in {where}: {type(error).__name__}: {error}"
    return TraceError(f"{text}\n{lines}{hint}" if lines else text + hint)


def user_assumptions(assumptions: Sequence[Assumption]) -> dict[str, int]:
    """How many assumptions there are of each kind."""
    counts: dict[str, int] = {}
    for assumption in assumptions:
        counts[assumption.kind] = counts.get(assumption.kind, 0) + 1
    return counts
