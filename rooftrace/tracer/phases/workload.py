"""What is run: forward, training, prefill and decode of a module, captured one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.asking import PHASES, Inputs, Options, RequestError, check_modules
from rooftrace.tracer.graph import OpGraph, dtype_name
from rooftrace.tracer.lower import NotAlikeError, lower
from rooftrace.tracer.phases.before import as_before
from rooftrace.tracer.phases.optimizer import optimizer_class, run_optimizer
from rooftrace.tracer.recording import Recorder, look_for_gaps
from rooftrace.tracer.source import TraceError, users_traceback
from rooftrace.tracer.tensors import own_tensors, owners, parameters_of, subclasses, tensors_in
from rooftrace.tracer.twins import on_meta, replaced
from rooftrace.tracer.values import META, REAL_VALUE, UnknownValueError, Values

MAX_BRANCH_RETRIES = 6
"""How many unknown conditions of one source line are turned one by one."""
MAX_LINES = 64
"""How many source lines may have their unknown conditions turned."""
UNKNOWN_NUMBERS = (1, 0)
"""What unknown numbers are taken as, one after the other while the code fails with it."""

Progress = Callable[[str], None]
_DECIDED = frozenset({"branch", "density", "value"})
"""Kinds of assumptions that a user can decide."""


class NoCacheError(RequestError):
    """A phase that continues from a cache was asked of a module that returned none."""


def trace_phases(
    module: nn.Module,
    inputs: Inputs,
    phases: Sequence[str] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    target: str = "",
) -> dict[str, OpGraph]:
    """Capture `phases` of `module` (default: by whether it returns a cache) as one OpGraph each.

    The module is not run on real data and not changed: a module with real parameters is copied to
    meta first.  Raises TraceError where its code fails, RequestError for a phase that it has not.
    """
    options = options or Options()
    module, inputs = _unwrapped(module, inputs)
    check_request(module, phases, options)
    tell = progress or (lambda _: None)
    run = Run(on_meta(module), inputs, options, target)
    keeps = inputs.decode is not None
    for phase in phases or ():
        if phase in ("prefill", "decode") and not keeps:
            raise NoCacheError(run.without_cache(phase))
    run.materialise()
    with as_before(run.module):
        if phases is not None:
            return run.phases(phases, tell)
        return run.usual_phases(tell) if keeps else run.phases(("forward", "training"), tell)


def _unwrapped(module: Any, inputs: Inputs) -> tuple[Any, Inputs]:
    """The module inside a wrapper that runs it on several devices, with what that leaves out."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(module, wrappers):
        text = (
            f"{type(module).__name__} is taken off: one device's share is traced, and the "
            "exchange of gradients is not counted"
        )
        inputs = replace(inputs, assumptions=(*inputs.assumptions, ("communication", text)))
        module = module.module
    return module, inputs


def check_request(module: Any, phases: Sequence[str] | None, options: Options) -> None:
    """Raise RequestError for what no module could do."""
    if not isinstance(module, nn.Module):
        raise RequestError(
            f"expected a torch.nn.Module to trace, got {type(module).__name__}: {module!r:.80}"
        )
    for phase in phases or ():
        if phase not in PHASES:
            raise RequestError(f"phase {phase!r}: expected one of {', '.join(PHASES)}")
    if options.optimizer != "none":
        optimizer_class(options.optimizer)
    if options.assume:
        paths = [
            owners.shown_path(path) for path, _ in module.named_modules(remove_duplicate=False)
        ]
        check_modules(options.assume, paths, type(module).__name__)


def cache_arguments(module: nn.Module) -> set[str]:
    """Names of the arguments by which a module could take a cache: the first call has none yet.

    Whether it does, a run says: what it returns under such a name is for the next call.
    """
    parameters = parameters_of(module).values()
    return {parameter.name for parameter in parameters if parameter.default is None}


class EncoderOutputs(tuple[Any, ...]):
    """What an encoder returned, for decoders that take it by place or by name; the rest is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@dataclass
class Step:
    """What one run of a phase leaves: outputs, cache, gradients by storage, and how many items.

    phase: which one it was, where that was not known before.
    """

    output: Any
    state: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[int, str] = field(default_factory=dict)
    items: int | None = None
    phase: str = ""


def drained(output: Any) -> Any:
    """What a module returned; of a generator everything that it gives, as its caller would take."""
    return list(output) if inspect.isgenerator(output) else output


@dataclass(frozen=True)
class PlainCall:
    """A call of a module as a phase makes it, with nothing recorded.

    losses: what backward starts from, given the output; None leaves backward out.
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


class Run:
    """One module and its inputs; each phase method captures and lowers one graph."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        options: Options,
        target: str = "",
        device: str = META.type,
    ) -> None:
        self.module, self.inputs, self.options, self.target = module, inputs, options, target
        self.device = device
        self._prefilled: dict[str, Any] | None = None

    def phases(self, phases: Sequence[str], tell: Progress) -> dict[str, OpGraph]:
        """The graphs of these phases, in order."""
        graphs = {}
        for phase in phases:
            tell(f"tracing {phase}")
            self.module.train(phase == "training")
            graphs[phase] = self._captured(phase, getattr(self, f"_{phase}"))
        return graphs

    def usual_phases(self, tell: Progress) -> dict[str, OpGraph]:
        """Prefill, decode and training; forward and training where no cache comes back."""
        tell(f"tracing {'prefill' if self.inputs.cached else 'forward'}")
        self.module.train(False)
        first = self._captured("forward", self._prompt)
        rest = ("decode", "training") if first.phase == "prefill" else ("training",)
        return {first.phase: first, **self.phases(rest, tell)}

    def plain_call(self, phase: str) -> PlainCall:
        """What a phase calls, without a recorder.  What comes before it (the prompt of a decode
        step) runs here.  Raises NoCacheError, and whatever the module raises."""
        training, inputs = phase == "training", self.inputs
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
            _, state = self._prompted(prompt)
        if not state:
            raise NoCacheError(self.without_cache(phase))
        kwargs = {**(inputs.decode or {}), **state, **extras}
        return PlainCall(self.module, (), kwargs, self.device, None)

    def without_cache(self, phase: str) -> str:
        """The message for a phase that needs a cache."""
        name = type(self.module).__name__
        generates = getattr(self.module, "can_generate", lambda: cache_arguments(self.module))
        if self.inputs.decode is None and generates():
            return (
                f"{phase} of {name}: pass the prompt as token ids, for example input_ids=ids; "
                "what keeps no cache has --phase forward and training"
            )
        return (
            f"{phase} of {name}: its forward takes and returns no cache; "
            "use --phase forward or training"
        )

    def materialise(self) -> None:
        """Give lazy parameters their shapes by one call that is not recorded."""
        if owners.is_lazy(self.module):
            recorder = Recorder(record=False)
            with torch.no_grad(), recorder:
                self._call(self.inputs.args, self.inputs.kwargs)
            recorder.close()

    # -- phases ------------------------------------------------------------------------------------

    def _forward(self, recorder: Recorder) -> Step:
        """Eval mode, no gradients."""
        with torch.no_grad():
            return Step(self._call(self.inputs.args, self.inputs.kwargs))

    def _prefill(self, recorder: Recorder) -> Step:
        """Forward that returns a cache; what of it the next call receives has role kv."""
        step = self._prompt(recorder)
        if not step.state:
            raise NoCacheError(self.without_cache("prefill"))
        return step

    def _prompt(self, recorder: Recorder) -> Step:
        """A call with the prompt: a prefill where it returns a cache, else a forward."""
        with torch.no_grad():
            output, state = self._prompted(self.inputs.kwargs)
        if not state:
            return Step(output, phase="forward")
        if self.inputs.cached_kwargs is None:
            for tensor in tensors_in(state):
                entry = recorder.values.known(tensor)
                if entry is not None and not entry.taint:
                    tensor.__dict__[REAL_VALUE] = entry.value
            self._prefilled = state
        return Step(output, state, phase="prefill")

    def _decode(self, recorder: Recorder) -> Step:
        """One more token with the cache that a prefill of the cached length returned."""
        # The step changes the cache, so a prefill's cache serves once.
        state, self._prefilled = self._prefilled, None
        with torch.no_grad():
            if state is None:
                prompt = self.inputs.cached_kwargs
                with recorder.paused():
                    _, state = self._prompted(self.inputs.kwargs if prompt is None else prompt)
            if not state:
                raise NoCacheError(self.without_cache("decode"))
            recorder.paths.counts.clear()
            encoded = state.get("encoder_outputs")
            for tensor in tensors_in(encoded):
                recorder.enter(tensor, "input", "encoder_outputs")
            for index, tensor in enumerate(tensors_in(state)):
                learn(recorder.values, tensor)
                recorder.enter(tensor, "kv", f"cache_{index}")
            output = self._call((), {**(self.inputs.decode or {}), **state}, self.inputs.cached)
        return Step(output, self._state(output, {}, {}), items=self.inputs.workload.get("batch"))

    def _training(self, recorder: Recorder) -> Step:
        """Train mode: forward, loss, backward, optimizer step."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not parameters:
            raise RequestError(
                f"training of {type(self.module).__name__}: no parameter requires a gradient"
            )
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            output = self._call(self.inputs.args, self.inputs.kwargs, self.inputs.labels)
            self.run_backward(recorder, output)
        trained = [p for p in parameters if p.grad is not None]
        if not trained:
            raise RequestError(
                f"training of {type(self.module).__name__}: no parameter got a gradient; its "
                "output does not depend on them, or an op between has no backward"
            )
        gradients = {}
        for parameter in trained:
            storage = recorder.storage_of(parameter.grad) if parameter.grad is not None else None
            if storage is not None:
                gradients[storage] = f"{recorder.name_of(parameter)}.grad"
        gradients |= run_optimizer(recorder, trained, self.options.optimizer, self.options.dtype)
        # Gradients stay until somebody sets them to None: they are results of the step too.
        results = [*tensors_in(output)[:1], *(p.grad for p in trained)]
        return Step(results, gradients=gradients)

    def losses(self, output: Any) -> tuple[list[Tensor], bool]:
        """What backward starts from, and whether that is a loss: the user's, the module's own, else
        every floating output.  Raises RequestError where none needs a gradient."""
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if self.options.loss is not None:
            losses = [self.options.loss(output)]
        elif isinstance(own, Tensor) and own.requires_grad:
            losses = [own]
        else:
            state = self._state(output, self.inputs.kwargs, {})
            state.pop("encoder_outputs", None)
            kept = {id(t) for t in tensors_in(state)}
            found = [t for t in tensors_in(output) if t.requires_grad]
            # A cache is for the next call, not for a loss; unless there is nothing else.
            losses = [t for t in found if id(t) not in kept] or found
        losses = [t for t in losses if isinstance(t, Tensor) and t.requires_grad]
        if not losses:
            raise RequestError(
                f"training of {type(self.module).__name__}: no output needs a gradient; pass loss="
            )
        scalar = isinstance(output, Tensor) and not output.dim()
        given = self.options.loss is not None or losses[0] is own or scalar
        return losses, given

    def run_backward(self, recorder: Recorder, output: Any) -> None:
        """Gradients of the loss, or of each output from a unit one."""
        losses, given = self.losses(output)
        if not given:
            recorder.values.assume(
                "loss",
                "no loss was given: a unit gradient enters each of the "
                f"{len(losses)} floating outputs",
                len(losses),
            )
        recorder.part = "backward"
        with torch.no_grad():  # in the order in which backward takes them up
            seeds = [torch.ones_like(t) for t in reversed(losses)][::-1]
        # What torch.autograd.backward ends in; that one would switch function modes off, which
        # the forward of a checkpoint needs again.
        engine: Any = torch.autograd.graph
        with torch.device(META):
            engine._engine_run_backward(
                tuple(losses),
                tuple(seeds),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    # -- running -----------------------------------------------------------------------------------

    def _call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        extras: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the module; of `extras` (use_cache, labels) only what its forward takes."""
        with torch.device(self.device):
            return drained(self.module(*args, **{**kwargs, **self._taken(extras or {})}))

    def _taken(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Of these arguments those that forward takes."""
        parameters = parameters_of(self.module)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {k: v for k, v in extras.items() if k in parameters or open_ended}

    def _prompted(self, prompt: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        prompt = {name: _unshared(item) for name, item in prompt.items()}
        objects = {name: item for name, item in prompt.items() if _may_be_filled(item)}
        before = {id(tensor) for tensor in tensors_in(objects)}
        output = self._call(self.inputs.args, prompt, self.inputs.cached)
        filled = {
            name: item
            for name, item in objects.items()
            if any(id(tensor) not in before for tensor in tensors_in(item))
        }
        return output, self._state(output, prompt, filled)

    def _state(
        self, output: Any, given: Mapping[str, Any], filled: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What of the output the next call takes: entries named like parameters of forward.

        given: the arguments of the call.  filled: those that it wrote tensors into.
        """
        names = list(parameters_of(self.module))
        taken = {*names[: len(self.inputs.args)], *(self.inputs.decode or {})}
        named = _named_outputs(output)
        state = {
            key: value
            for key, value in named.items()
            if key in names
            and key not in taken
            and not isinstance(given.get(key), Tensor)
            and tensors_in(value)
        }
        state |= {key: item for key, item in filled.items() if key not in {*state, *taken}}
        hidden = named.get("encoder_last_hidden_state")
        if state and hidden is not None and "encoder_outputs" in names:
            state["encoder_outputs"] = EncoderOutputs((hidden,))
        return state

    def _captured(self, phase: str, body: Callable[[Recorder], Step]) -> OpGraph:
        """Run `body` under a recorder, and lower what was recorded."""

        def run(recorder: Recorder) -> OpGraph:
            self._enter_inputs(recorder, phase)
            with recorder:
                step = body(recorder)
            optimizer = self.options.optimizer if phase == "training" else None
            named = step.phase or phase
            return graph_of(recorder, named, step, self.module, self.inputs, optimizer, self.target)

        kind = type(self.module).__name__
        return attempted(run, self.options, f"{phase} of {kind}", kind)

    def _enter_inputs(self, recorder: Recorder, phase: str) -> None:
        """Make weights and inputs values of the graph, and what is known of them known."""
        inputs = self.inputs
        used = (
            ((), inputs.decode or {})
            if phase == "decode"
            else (inputs.args, {**inputs.kwargs, **(inputs.labels if phase == "training" else {})})
        )
        known = tensors_in(
            (inputs.args, inputs.kwargs, inputs.labels, inputs.decode, inputs.cached_kwargs)
        )
        for tensor in (*known, *(t for m in self.module.modules() for t in own_tensors(m))):
            learn(recorder.values, tensor)
        recorder.name_modules(self.module)
        for name, tensor in named_inputs(self.module, *used):
            recorder.enter(tensor, "input", name)
        for kind, text in inputs.assumptions:
            recorder.values.assume(kind, text)


def attempted(
    run: Callable[[Recorder], OpGraph], options: Options, what: str, root: str
) -> OpGraph:
    """`run` under a recorder; again, where it fails, with its last unknown condition turned.

    Checks of arguments stand in one line and are asked many times, so all conditions of a line are
    turned together; where that fails too, they are turned one by one.  Where that does not help
    and a number was unknown, once more with it taken as zero.
    what, root: what is run and the class of its module, for the message of the TraceError.
    """
    first: TraceError | None = None
    repeats = options.repeats
    for number in UNKNOWN_NUMBERS:
        turns = _Turns(options.branches)
        while True:
            values = Values(
                branches=turns.branches,
                assume=options.assume,
                number=number,
                turned=turns.lines,
            )
            values.by_number = bool(options.branches)
            recorder = Recorder(values, roll_loops=repeats, repeat_calls=repeats)
            try:
                return run(recorder)
            except RequestError:
                raise
            except NotAlikeError as error:  # what was left out has to be run after all
                assert repeats, error
                repeats = False
            except Exception as error:  # whatever a user's module may raise
                first = first or _explained(error, recorder, what, root)
                first.__cause__ = first.__cause__ or error
                if not turns.turn(values):
                    break
            finally:
                recorder.close()
                with contextlib.suppress(AttributeError):  # what is private may go away
                    recorder.forget()
        if "value" in options.assume or all(a.kind != "value" for a in values.assumptions):
            break
    assert first is not None
    raise first from first.__cause__


class _Turns:
    """Which unknown conditions go the other way than usual, learnt from attempts that failed.

    lines: all those of a source line.  branches: single ones, by their number.
    """

    def __init__(self, branches: Mapping[int, bool]) -> None:
        self.branches, self.lines = dict(branches), set[str]()
        self._first: dict[str, int] = {}  # the condition with which a line was turned
        self._single: Counter[str] = Counter()

    def turn(self, values: Values) -> bool:
        """Turn the last condition of an attempt that failed; False where nothing is left to try."""
        last, line = values.decisions - 1, values.last_line
        if last < 0 or values.decided or len(self._first) > MAX_LINES:
            return False
        if line and line not in self._first:
            self._first[line] = last
            self.lines.add(line)
            return True
        if line in self.lines:  # it fails either way as a whole
            self.lines.discard(line)
            last = self._first[line]
        if last in self.branches or self._single[line] == MAX_BRANCH_RETRIES:
            return False
        self._single[line] += 1
        self.branches[last] = True
        return True


def graph_of(
    recorder: Recorder,
    phase: str,
    step: Step,
    module: nn.Module,
    inputs: Inputs,
    optimizer: str | None,
    target: str = "",
) -> OpGraph:
    """The OpGraph of what was recorded of one step of `module`."""
    kept = tensors_in({k: v for k, v in step.state.items() if k != "encoder_outputs"})
    for tensor in kept:
        recorder.node_of(tensor)  # also one that no op has read yet
    kv = {recorder.storage_of(tensor) for tensor in kept}
    items = inputs.items if step.items is None else step.items
    sizes = dict(inputs.workload)
    if phase not in ("prefill", "decode"):
        sizes.pop("kv", None)  # no cache is there
    workload = {
        **sizes,
        "item": inputs.item,
        "items": _first_size((inputs.args, inputs.kwargs)) if items is None else items,
        "optimizer": optimizer,
    }
    outputs = [
        part for t in tensors_in(step.output) for part, _ in subclasses.parts_of(t, beside=False)
    ]
    return lower(
        recorder,
        look_for_gaps(recorder, outputs, module),
        phase=phase,
        kv_storages={s for s in kv if s is not None},
        gradients=step.gradients,
        assumptions=recorder.values.assumptions,
        model=describe(module),
        workload=workload,
        provenance=provenance(target),
        repeats=recorder.repeat_calls,
    )


def learn(values: Values, tensor: Tensor) -> None:
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        values.learn(tensor, value.clone())


def describe(module: nn.Module) -> dict[str, Any]:
    """Name, parameter counts, the model's own precision, bytes of parameters and buffers."""
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
        "bytes_parameters": subclasses.stored_bytes(parameters),
        "bytes_buffers": subclasses.stored_bytes(buffers),
    }


def provenance(target: str) -> dict[str, Any]:
    """Versions of what made the graph."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("rooftrace", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return {"target": target, "versions": found, "python": platform.python_version()}


def named_inputs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a call, by the names that a graph has for them."""
    names = [
        n
        for n, p in parameters_of(module).items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    labels = [*names[: len(args)], *(f"input_{i}" for i in range(len(names), len(args)))]
    for label, item in (*zip(labels, args, strict=True), *kwargs.items()):
        found = tensors_in(item)
        for index, tensor in enumerate(found):
            yield (label if len(found) == 1 else f"{label}_{index}"), tensor


def _named_outputs(output: Any) -> dict[str, Any]:
    """The parts of what a module returned by their names; none of a tensor or a plain tuple."""
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
    """A copy of such an object around the same tensors."""
    return replaced(item, lambda tensor: tensor) if _may_be_filled(item) else item


def _first_size(tree: Any) -> int:
    """The first dimension of the first tensor: the batch."""
    found = tensors_in(tree)
    return int(found[0].shape[0]) if found and found[0].dim() else 1


def _explained(error: Exception, recorder: Recorder, what: str, root: str) -> TraceError:
    """The user's own traceback, shortened to their code, and the module that it happened in."""
    path, kind = recorder.failed_in or ("", root)
    where = f"module {path!r} ({kind})" if path else f"module {kind}"
    failed = recorder.failed_op
    if failed is not None and failed[0] is error:
        where += f" at {failed[1]}"
    lines = [
        f"{what} failed in {where}: {type(error).__name__}: {error}",
        users_traceback(error),
    ]
    asked = [a for a in recorder.values.assumptions if a.kind in _DECIDED]
    for item in list({(a.kind, a.where): a for a in asked}.values())[-3:]:
        place = f"{item.kind}@{item.where}" if item.where else item.kind
        other = str(not item.value).lower() if item.kind == "branch" else "NUMBER"
        lines.append(f"{item.text}; --assume {place}={other} takes it otherwise.")
    if isinstance(error, UnknownValueError):
        lines.append(
            "Its code needs a value that only real weights give; pass inputs that avoid that path."
        )
    else:
        lines.append(
            "If it runs on real tensors of these sizes, this is a gap of ours: please report it. "
            "Else pass inputs that it takes (in code, or with --input NAME=SHAPE:DTYPE)."
        )
    return TraceError("\n".join(line for line in lines if line))


__all__ = [
    "PHASES",
    "Inputs",
    "NoCacheError",
    "Options",
    "RequestError",
    "TraceError",
    "cache_arguments",
    "check_request",
    "describe",
    "provenance",
    "trace_phases",
]
