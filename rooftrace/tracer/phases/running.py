"""Runs the phases of a module under a recorder, and a step of a server: a graph each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace._progress import tell
from rooftrace.errors import RequestError, TraceError
from rooftrace.graph import OpGraph, assumptions
from rooftrace.tracer import Options, RequestLengths, names, torch_private
from rooftrace.tracer.inputs import Inputs, as_before, calls as arguments
from rooftrace.tracer.phases import stepping
from rooftrace.tracer.phases.attempts import (
    Step,
    attempted,
    check_traceable,
    depth_explained,
    graph_of,
    tell_freed,
)
from rooftrace.tracer.phases.calls import ModuleCalls, without_experts
from rooftrace.tracer.phases.stepping import optimizer_class, step_all, step_shares
from rooftrace.tracer.recording import Recorder, attend, overrides
from rooftrace.tracer.sharding import ddp, fsdp, zero
from rooftrace.tracer.values import (
    META,
    REAL_VALUE,
    Values,
    copies,
    on_meta,
    parameters_of,
    tensors_in,
    trees,
    twin,
    with_tensors,
)


def trace_phases(
    module: nn.Module,
    inputs: Inputs,
    phases: Sequence[str] | None = None,
    options: Options | None = None,
    target: str = "",
    behind: bool = False,
) -> dict[str, OpGraph]:
    """Capture each of `phases` of `module` as an OpGraph; the default depends on its cache.

    behind: a training step is that of a stage's last microbatch, behind others of which weights
    and gradients are still whole (see `fsdp.stage`).  The module does not run on real data and is
    not changed: a module with real parameters is copied to meta first.  Raises TraceError where its
    code fails, RequestError for an unknown phase.
    """
    options = options or Options()
    replicas = _replicas(module)
    module, inputs = _unwrapped(module, inputs)
    with depth_explained(module):
        check_request(module, phases, options)
        check_traceable(module, tensors_in((inputs.args, inputs.kwargs)))
        return _traced(module, inputs, phases, options, target, replicas, behind)


def _traced(
    module: nn.Module,
    inputs: Inputs,
    phases: Sequence[str] | None,
    options: Options,
    target: str,
    replicas: ddp.Replication | None,
    behind: bool,
) -> dict[str, OpGraph]:
    calls = ModuleCalls(on_meta(module), inputs, options.loss)
    run = PhaseRunner(calls, options, target, replicas, behind)
    keeps = inputs.decode is not None
    for phase in phases or ():
        if names.phase_of(phase).cached and not keeps:
            raise RequestError(run.calls.without_cache(phase))
    with overrides.claimed(trees.modules_in(run.module)):
        run.materialise()
    with overrides.claimed(trees.modules_in(run.module)), as_before(run.module):
        if phases is not None:
            return run.phases(phases)
        return run.usual_phases() if keeps else run.phases(names.usual(module))


def _unwrapped(module: Any, inputs: Inputs) -> tuple[Any, Inputs]:
    """The module inside a wrapper for several devices; assumptions name the parts left out."""
    while isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        text = (
            f"{type(module).__name__} is taken off: one device's share is traced, and the "
            "exchange of gradients is not counted"
        )
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            inputs = replace(inputs, assumptions=(*inputs.assumptions, ("communication", text)))
        module = module.module
    return module, inputs


def _replicas(module: Any) -> ddp.Replication | None:
    """How the replicas of a DistributedDataParallel exchange gradients; None for other modules."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return ddp.replication_of(module)
    return None


def check_request(module: Any, phases: Sequence[str] | None, options: Options) -> None:
    """Raise RequestError for a request that makes no sense for any module."""
    if not isinstance(module, nn.Module):
        raise RequestError(
            f"expected a torch.nn.Module to trace, got {type(module).__name__}: {module!r:.80}"
        )
    fsdp.refuse_flat(module)
    for phase in phases or ():
        names.phase_of(phase)
    if options.optimizer != "none":
        optimizer_class(options.optimizer)
    if options.assume:
        paths = [trees.shown_path(path) for path, _ in module.named_modules(remove_duplicate=False)]
        assumptions.check_modules(options.assume, paths, type(module).__name__)


class PhaseRunner:
    """Captures the phases of one module; each phase method records one run of it."""

    def __init__(
        self,
        calls: ModuleCalls,
        options: Options,
        target: str = "",
        replicas: ddp.Replication | None = None,
        behind: bool = False,
    ) -> None:
        self.calls, self.options, self.target = calls, options, target
        self.replicas, self.behind = replicas, behind
        self.module, self.inputs = calls.module, calls.inputs
        self.shared = zero.SHARES.get(self.module)
        self._prefilled: dict[str, Any] | None = None
        self._tokens, self._fed = 0, dict[str, Any]()  # the input of a call after a cache

    def phases(self, phases: Sequence[str]) -> dict[str, OpGraph]:
        """The graphs of these phases, in order."""
        graphs = {}
        for phase in map(names.phase_of, phases):
            tell(f"tracing {phase.name}")
            self.module.train(phase.trains)
            run = partial(self._captured, phase, partial(phase.run, self))
            graphs[phase.name] = self._with_labels(run) if phase.trains else run()
        return graphs

    def _with_labels(self, run: Callable[[], OpGraph]) -> OpGraph:
        """Run a training call with labels; where likely ones fail, others are looked for."""
        plain = self.inputs
        if self.options.loss is not None:
            return run()
        try:
            self.inputs = plain.trained(self.module)
            with contextlib.suppress(*((TraceError,) if plain.labels_likely else ())):
                return run()
            self.inputs = plain.trained(self.module, likely=False)
            return run()
        finally:
            self.inputs = plain

    def usual_phases(self) -> dict[str, OpGraph]:
        """Prefill, decode and training; the usual phases where no cache comes back."""
        tell(f"tracing {'prefill' if self.inputs.cached else 'forward'}")
        self.module.train(False)
        first = self._captured(names.phase_of("forward"), self._prompt)
        others = names.usual(self.module)[1:]
        rest = ("decode", *others) if first.phase == "prefill" else others
        return {first.phase: first, **self.phases(rest)}

    def materialise(self) -> None:
        """Give lazy parameters their shapes by one call that is not recorded."""
        if trees.is_lazy(self.module):
            recorder = Recorder(record=False)
            with torch.no_grad(), recorder:
                self.calls.call(self.inputs.args, self.inputs.kwargs)
            recorder.close()

    # -- phases ------------------------------------------------------------------------------------

    def forward(self, recorder: Recorder) -> Step:
        """Eval mode, no gradients."""
        with torch.no_grad():
            return Step(self.calls.call(self.inputs.args, self.inputs.kwargs))

    def prefill(self, recorder: Recorder) -> Step:
        """Forward that returns a cache; the outputs that the next call receives have role kv."""
        step = self._prompt(recorder)
        if not step.state:
            raise RequestError(self.calls.without_cache("prefill", step.output))
        return step

    def _prompt(self, recorder: Recorder) -> Step:
        """A call with the prompt: a prefill where it returns a cache, else a forward."""
        with torch.no_grad():
            output, state = self.calls.prompted(self.inputs.kwargs, recorder.paused)
        if not state:
            return Step(output, phase="forward")
        if self.inputs.cached_kwargs is None:
            for tensor in tensors_in(state):
                entry = recorder.values.known(tensor)
                if entry is not None and not entry.taint:
                    tensor.__dict__[REAL_VALUE] = entry.value
            self._prefilled = state
        return Step(output, state, phase="prefill")

    def decode(self, recorder: Recorder) -> Step:
        """The tokens of the phase, with the cache that a prefill of the cached length returned."""
        # The step changes the cache, so a prefill's cache serves once.
        state, self._prefilled = self._prefilled, None
        with torch.no_grad():
            if state is None:
                prompt = self.inputs.cached_kwargs
                before = len(recorder.values.assumptions)
                with recorder.paused(), without_experts(self.module, recorder.values):
                    prompt = self.inputs.kwargs if prompt is None else prompt
                    prompted, state = self.calls.prompted(prompt)
                recorder.values.asides = range(before, len(recorder.values.assumptions))
                if not state:
                    raise RequestError(self.calls.without_cache("decode", prompted))
                recorder.values.check_chosen(tensors_in(state))
            recorder.paths.counts.clear()
            recorder.storages.enter_gathered()
            encoded = state.get("encoder_outputs")
            for tensor in tensors_in(encoded):
                recorder.enter(tensor, "input", "encoder_outputs")
            for index, tensor in enumerate(tensors_in(state)):
                arguments.learn(recorder.values, tensor)
                recorder.enter(tensor, "kv", f"cache_{index}")
            output = self.calls.call((), {**self._fed, **state}, self.inputs.cached)
        batch = self.inputs.workload.get("batch")
        items = None if batch is None else batch * self._tokens
        return Step(output, self.calls.state(output), items=items)

    def requests(self, recorder: Recorder) -> Step:
        """The new tokens of several requests, behind the caches of all of them."""
        assert self.inputs.lengths is not None  # `_fed_inputs` has seen to it
        lengths, before = self.inputs.lengths, len(recorder.values.assumptions)
        with torch.no_grad():
            with recorder.paused(), without_experts(self.module, recorder.values):
                state = joined_state(self.calls, lengths)
            recorder.values.asides = range(before, len(recorder.values.assumptions))
            recorder.paths.counts.clear()
            for index, tensor in enumerate(t for t in tensors_in(state) if t.dim()):
                recorder.enter(tensor, "kv", f"cache_{index}")
            with packed(self.calls, lengths, recorder.values):
                output = self.calls.call((), {**self._fed, **state}, self.inputs.cached)
        return Step(output, self.calls.state(output), items=lengths.tokens)

    def training(self, recorder: Recorder) -> Step:
        """Train mode: forward, loss, backward, optimizer step."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        kind = type(self.module).__name__
        if not parameters:
            raise RequestError(f"training of {kind}: no parameter requires a gradient")
        for parameter in parameters:
            parameter.grad = None
        with (
            torch.enable_grad(),
            recorder.trained(),
            _exchanged(self, recorder),
            stepping.noted(recorder, self.module) as learnt,
            stepping.foreach_on_meta(),
            _behind_others(self, recorder, parameters),
        ):
            output = self.calls.call(self.inputs.args, self.inputs.kwargs, self.inputs.labels)
            self.run_backward(recorder, output)
        trained = [p for p in parameters if p.grad is not None]
        if not (trained or self.shared) and not any(map(copies.hooks_of, parameters)):
            raise RequestError(
                f"training of {kind}: no parameter got a gradient; its output does not depend on "
                "them, or an op between has no backward"
            )
        if self.shared:
            gradients, stepped = step_shares(recorder, self.shared, self.options), None
        else:
            gradients, stepped = step_all(recorder, parameters, learnt, self.options)
        # Gradients stay until somebody sets them to None: they are results of the step too.
        results = [*tensors_in(output)[:1], *(p.grad for p in trained)]
        return Step(results, gradients=gradients, optimizer=stepped)

    def run_backward(self, recorder: Recorder, output: Any) -> None:
        """Gradients of the loss, or of each output from a unit one."""
        losses, is_loss = self.calls.losses(output)
        if not is_loss:
            recorder.values.assume(
                "loss",
                "no loss was given: a unit gradient enters each of the "
                f"{len(losses)} floating outputs",
                len(losses),
            )
        recorder.here.part = "backward"
        with torch.no_grad():  # in the order in which backward takes them up
            seeds = [torch.ones_like(t) for t in reversed(losses)][::-1]
        # What torch.autograd.backward ends in; that one would switch function modes off, which
        # the forward of a checkpoint needs again.
        with torch.device(META):
            torch_private.run_backward(
                tuple(losses),
                tuple(seeds),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    # -- recording ---------------------------------------------------------------------------------

    def _captured(self, phase: names.Phase, body: Callable[[Recorder], Step]) -> OpGraph:
        """Run `body` under a recorder, and lower the recording."""

        def run(recorder: Recorder) -> OpGraph:
            self._enter_inputs(recorder, phase)
            with recorder:
                step = body(recorder)
            optimizer = step.optimizer or (self.options.optimizer if phase.trains else None)
            tell_freed(recorder, step.gradients)
            named = step.phase or phase.name
            return graph_of(recorder, named, step, self.module, self.inputs, optimizer, self.target)

        kind = type(self.module).__name__
        return attempted(run, self.options, f"{phase.name} of {kind}", kind)

    def _fed_inputs(self, phase: names.Phase) -> dict[str, Any]:
        """Arguments of a call that follows a cache, without the cache."""
        inputs, count, token = self.inputs, phase.tokens, self.inputs.decode or {}
        if phase.name == "requests":
            return step_inputs(self.calls, check_lengths(inputs.lengths, self.module))
        fed = {n: torch.cat([t] * count, 1) for n, t in token.items()} if count > 1 else {**token}
        return {**fed, **self.calls.places(inputs.workload.get("kv"), count)} if count else fed

    def _enter_inputs(self, recorder: Recorder, phase: names.Phase) -> None:
        """Enter weights and inputs as values of the graph, with their contents if they have any."""
        inputs, self._tokens = self.inputs, phase.tokens
        self._fed = self._fed_inputs(phase)
        used = (
            ((), self._fed)
            if phase.tokens or phase.name == "requests"
            else (inputs.args, {**inputs.kwargs, **(inputs.labels if phase.trains else {})})
        )
        entered = tensors_in(
            (
                inputs.args,
                inputs.kwargs,
                inputs.labels if phase.trains else {},
                inputs.decode,
                inputs.cached_kwargs,
                self._fed,
            )
        )
        for tensor in (*entered, *trees.tensors_of(self.module)):
            arguments.learn(recorder.values, tensor)
        if self.shared and phase.trains:
            self.shared.enter(recorder.enter)
            recorder.entries.name_tensors(self.shared.parts, "", recorder.recording)
        recorder.name_modules(self.module)
        for name, tensor in arguments.named_inputs(self.module, *used):
            recorder.enter(tensor, "input", name)
        for kind, text in inputs.assumptions:
            recorder.values.assume(kind, text)


@contextlib.contextmanager
def _exchanged(runner: PhaseRunner, recorder: Recorder) -> Iterator[None]:
    """Inside, a forward and a backward exchange as replicas do; nothing for one replica."""
    how, shared = runner.replicas, runner.shared
    if shared:
        with shared.exchanged(runner.module, runner.behind):
            yield
        return
    if how is None:
        yield
        return
    assume = recorder.values.assume
    with ddp.reducer_of(runner.module, how, recorder.paused, recorder.enter, assume) as reducer:
        ddp.share_buffers(runner.module, how)
        with ddp.watched(runner.module, reducer.ready):
            yield
        reducer.finish()


@contextlib.contextmanager
def _behind_others(
    runner: PhaseRunner, recorder: Recorder, parameters: Sequence[nn.Parameter]
) -> Iterator[None]:
    """Inside, the last microbatch of a stage runs behind one that is not recorded; then gradients
    are reduced, once a step.  Nothing happens to other steps."""
    if not runner.behind:
        yield
        return
    reduce = runner.shared.finish if runner.shared else fsdp.stage(runner.module)
    with recorder.paused():
        labels = runner.inputs.labels
        output = runner.calls.call(runner.inputs.args, runner.inputs.kwargs, labels)
        runner.run_backward(recorder, output)
    for tensor in tensors_in((runner.inputs.args, runner.inputs.kwargs)):
        tensor.grad = None  # each microbatch brings its own hidden states
    recorder.here.part = "forward"
    recorder.paths.counts.clear()
    recorder.storages.enter_gathered()
    held = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, gradient in (*held, *fsdp.whole_gradients(runner.module)):
        if gradient is not None:
            recorder.enter(gradient, "gradient", f"{recorder.name_of(parameter)}.grad")
    yield
    recorder.here.part = "optimizer"
    reduce()


# -- One step of a server: requests with caches of different lengths, their new tokens in one row --

_INTERFACE = "rooftrace_packed"
"""Under which transformers finds our attention."""
_PROBES = (1, 2)
"""Cached lengths that distinguish the rows of a cache from its other dimensions."""
_FREE = {"s_aux": "sinks, a score for each head beside the keys", "softcap": "the cap of scores"}
"""Changes of scores inside the kernel, in some models, that no rule counts."""


def check_lengths(lengths: RequestLengths | None, module: nn.Module) -> RequestLengths:
    """The lengths of a step of requests.  Raises RequestError where there are none."""
    if lengths is None:
        raise RequestError(
            f"phase requests of {type(module).__name__}: its requests are missing; list them, for "
            "example --cached 4096,100 --new 1,512"
        )
    return lengths


def step_inputs(calls: ModuleCalls, lengths: RequestLengths) -> dict[str, Tensor]:
    """The new tokens of all requests, and their positions if the module takes them."""
    fed = dict(calls.inputs.decode or {})
    if "position_ids" in parameters_of(calls.module):
        fed["position_ids"] = twin(torch.tensor([lengths.positions()]))
    return fed


def joined_state(calls: ModuleCalls, lengths: RequestLengths) -> dict[str, Any]:
    """The arguments by which a step continues: the caches of all requests, one behind another.

    Raises RequestError for a module without a cache, and for one whose state is no row for
    each token.
    """
    longest = max(lengths.longest, _PROBES[1] + 1)
    states = [_prompted(calls, length) for length in (*_PROBES, longest)]
    counts = {len(tensors_in(state)) for state in states}
    if len(counts) > 1:
        raise _refused(calls.module, "its cache has more tensors for longer prompts")
    joined: dict[int, Tensor] = {}
    for short, other, long in zip(*map(tensors_in, states), strict=True):
        if not long.dim():  # a scalar of the cache, as the width of a window
            joined[id(long)] = long
            continue
        dimension = _length_dimension(calls.module, short, other)
        held = long.shape[dimension]
        if held > longest:
            raise _refused(calls.module, "its cache has more rows than positions")
        rows = sum(lengths.rows(0 if held == longest else held + 1))
        shape = (*long.shape[:dimension], rows, *long.shape[dimension + 1 :])
        joined[id(long)] = torch.empty(shape, dtype=long.dtype, device=long.device)
    return with_tensors(states[-1], lambda tensor: joined[id(tensor)])  # type: ignore[no-any-return]


def _prompted(calls: ModuleCalls, length: int) -> dict[str, Any]:
    output, state = calls.prompted(calls.inputs.prompt_of(length))
    if not state:
        raise RequestError(calls.without_cache("requests", output))
    if "encoder_outputs" in state:
        raise _refused(calls.module, "it has an encoder")
    return state


def _length_dimension(module: nn.Module, short: Tensor, other: Tensor) -> int:
    """The dimension of a cache that grows with its length by one row for each token."""
    differing = [
        axis
        for axis, (a, b) in enumerate(zip(short.shape, other.shape, strict=True))
        if b - a == _PROBES[1] - _PROBES[0] and a == _PROBES[0]
    ]
    if len(differing) != 1 or short.shape[0] != 1:
        raise _refused(
            module, f"it keeps a state {list(short.shape)} that is no row for each token"
        )
    return differing[0]


@contextlib.contextmanager
def packed(calls: ModuleCalls, lengths: RequestLengths, values: Values) -> Iterator[None]:
    """Inside, attention of the module is that of packed requests.

    Raises RequestError at the end where no attention went through the interface.
    """
    module = calls.module
    parts = [part.config for part in module.modules() if hasattr(part, "config")]
    configs = {id(each): each for each in parts if hasattr(each, "_attn_implementation")}
    if not configs:
        raise _refused(module, "it does not choose its attention by a config of transformers")
    _register()
    before = {number: each._attn_implementation for number, each in configs.items()}
    step = _PackedStep(module, lengths, values)
    token = _STEP.set(step)
    try:
        for each in configs.values():
            each._attn_implementation = _INTERFACE
        yield
    finally:
        _STEP.reset(token)
        for number, each in configs.items():
            each._attn_implementation = before[number]
    if not step.attentions:
        raise _refused(module, "its attention is written out")


@dataclass(slots=True)
class _PackedStep:
    """The requests of the step that runs in this context, and how many attentions it had."""

    module: nn.Module
    lengths: RequestLengths
    values: Values
    attentions: int = 0


_STEP: ContextVar[_PackedStep | None] = ContextVar("_STEP", default=None)


def _register() -> None:
    """Tell transformers of our attention, which makes no mask.  Others do not ask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_INTERFACE, _attention)
    AttentionMaskInterface.register(_INTERFACE, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    part: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, [1, tokens, heads, width]; no probabilities."""
    step = _STEP.get()
    if step is None:
        raise RequestError(f"attention {_INTERFACE!r} is for rooftrace's phase requests alone")
    name, window = type(part).__name__, sliding_window or 0
    for option, words in _FREE.items():
        if others.get(option) is not None:
            step.values.assume("attention", f"{words}: not counted")
    if others.get("position_bias") is not None or attention_mask is not None:
        raise _refused(step.module, f"{name} adds a mask or a bias to its scores")
    lengths = step.lengths
    rows, tokens = key.shape[-2], query.shape[-2]
    if (query.shape[0], tokens, rows) != (1, lengths.tokens, lengths.keys(window)):
        raise _refused(
            step.module,
            f"{name} has {tokens:,} queries and {rows:,} keys, for {lengths.tokens:,} tokens and "
            f"{lengths.keys(window):,} rows",
        )
    step.attentions += 1
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    return attend(query, key, value, lengths, window, scale).transpose(1, 2).contiguous(), None


def _refused(module: nn.Module, reason: str) -> RequestError:
    return RequestError(
        f"phase requests of {type(module).__name__}: {reason}; it takes a decoder whose attention "
        "goes through the attention interface of transformers.  Requests of one length are "
        "--phase decode or prefill with --batch"
    )
