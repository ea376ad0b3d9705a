"""Steps that the user wrote: a block of code, or a function of a module and its inputs.

The code does not name the parts of such a step.  Ops that autograd runs are its backward.  Ops of a
`torch.optim.Optimizer`, and updates under no_grad after a backward, are its optimizer.  All other
ops are its forward.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from rooftrace.errors import RequestError, TraceError
from rooftrace.graph import Op, OpGraph, Ref, assumptions, in_order
from rooftrace.tracer import Options, torch_private
from rooftrace.tracer.inputs import Inputs, as_before, calls, calls as arguments
from rooftrace.tracer.phases import stepping
from rooftrace.tracer.phases.attempts import (
    OwnBackwardError as OwnBackwardError,
    Step,
    attempted,
    check_traceable,
    depth_explained,
    graph_of,
    tell_freed,
)
from rooftrace.tracer.phases.calls import drained
from rooftrace.tracer.phases.running import check_request
from rooftrace.tracer.phases.stepping import copy_optimizers, optimizers_in
from rooftrace.tracer.recording import (
    META_KEY,
    Recorded,
    Recorder,
    check_not_inside,
    original_of,
    overrides,
    replaced,
)
from rooftrace.tracer.values import (
    META,
    Twins,
    Values,
    copies,
    copies as closures,
    own_tensors,
    tensors_in,
    trees,
)


class Capture:
    """A block of code that is recorded (`rooftrace.capture`); after it, `graph` is its graph."""

    def __init__(self, modules: Sequence[nn.Module], options: Options) -> None:
        self._root = container_of(modules)
        with depth_explained(self._root):
            check_request(self._root, (), options)
            check_traceable(self._root)
        self._modules, self._is_real = modules, is_real(modules)
        self._recorder = Recorder(
            Values(assume=options.assume),
            own_step=True,
            roll_loops=False,
            repeat_calls=options.repeats,
            release=options.release,
        )
        self._exit = self._block = contextlib.ExitStack()
        self._began: int | None = None  # in this thread
        self._graph: OpGraph | None = None

    @property
    def ended(self) -> bool:
        """Whether the block has ended, so that `graph` is there."""
        return self._graph is not None

    @property
    def graph(self) -> OpGraph:
        """The graph of the block.  Raises RequestError before its end."""
        if self._graph is None:
            raise RequestError("the graph of a capture is there after its block has ended")
        return self._graph

    def __enter__(self) -> Capture:
        if self._began is not None:
            raise RequestError("a capture records one block; make another for the next block")
        check_not_inside(
            "a capture",
            "end that one first; the modules and lines of its graph say what each part costs",
        )
        fake = overrides.fake_mode()
        if fake is not None:
            raise RequestError(
                f"a {type(fake).__name__} is active around the capture: its tensors have no sizes "
                "on meta; begin the capture outside of it"
            )
        self._began = threading.get_ident()
        # An error halfway leaves nothing behind.
        with depth_explained(self._root), contextlib.ExitStack() as undo:
            undo.enter_context(overrides.claimed(list(self._root.modules())))
            undo.callback(self._recorder.close)
            memo: dict[int, Any] = {}
            if self._is_real:
                memo = undo.enter_context(lent(self._root))
            else:
                undo.enter_context(as_before(self._root))
            enter_modules(self._recorder, self._root)
            self._block = undo.enter_context(contextlib.ExitStack())
            self._block.enter_context(inputs_lent(self._modules, self._recorder))
            lend = self._block.enter_context(optimizers_lent(memo, self._recorder))
            self._learnt = self._block.enter_context(_own_step(self._recorder, self._root))
            self._block.enter_context(zeroing(lend))
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._began != threading.get_ident():
            raise RequestError("a capture ends in the thread in which it began; this is another")
        with depth_explained(self._root), self._exit:
            self._block.__exit__(*exception)
            if isinstance(exception[1], RecursionError):
                raise exception[1]
            if exception[0] is None:
                self._graph = graph_of_step(self._recorder, self._root, self._learnt)
                made = (assumption.facts for assumption in self._graph.assumptions)
                assumptions.check_histograms(self._recorder.values.choices, made)


def trace_step(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> OpGraph:
    """The graph of one call of `step`, a function whose first argument is a module.

    Modules with real weights, and their optimizers among the arguments, are copied to meta.  Raises
    TraceError where the step fails, RequestError for a step that cannot be captured.
    """
    name, tree = getattr(step, "__name__", type(step).__name__), (tuple(args), dict(kwargs))
    modules = _modules(tree)
    root = container_of(modules)
    with depth_explained(root):
        check_request(root, (), options)
        check_traceable(root, tensors_in(tree))
        try:
            step, args, kwargs = _on_meta(step, tree, modules)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise TraceError(
                f"what step {name} is called with cannot be copied to the meta device ({error}): "
                "build the modules under `with torch.device('meta'):` and pass those"
            ) from error
        return _traced_step(step, args, kwargs, options, name)


def _traced_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    name: str,
) -> OpGraph:
    root = container_of(_modules((args, kwargs)))

    def run(recorder: Recorder) -> OpGraph:
        for tensor in tensors_in((args, kwargs)):
            arguments.learn(recorder.values, tensor)
        enter_modules(recorder, root)
        for index, item in enumerate((*args, *kwargs.values())):
            for tensor in () if isinstance(item, Optimizer) else tensors_in(item):
                recorder.enter(tensor, "input", f"input_{index}")
        with _own_step(recorder, root) as learnt:
            result = _call(step, args, kwargs)
        for leaf in tensors_in((args, kwargs)):
            learnt.gradients.update(stepping.gradients_of(recorder, leaf) if leaf.is_leaf else {})
        inputs = [item for item in (*args, *kwargs.values()) if not isinstance(item, Optimizer)]
        return _graph(recorder, root, learnt, result, inputs)

    with overrides.claimed(list(root.modules())), as_before(root):
        return attempted(run, options, f"step {name}", type(args[0]).__name__)


def _call(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a step.  By this name `source.lines` knows where the user's code ends."""
    return drained(step(*args, **kwargs))


# -- modules ---------------------------------------------------------------------------------------


def _modules(arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> list[nn.Module]:
    args, kwargs = arguments
    return [item for item in (*args, *kwargs.values()) if isinstance(item, nn.Module)]


def container_of(modules: Sequence[nn.Module]) -> nn.Module:
    """The only module, or a container of several under their class names."""
    for module in modules:
        if not isinstance(module, nn.Module):
            raise RequestError(
                f"expected modules to capture, got {type(module).__name__}: {module!r:.80}"
            )
    if not modules:
        raise RequestError("no module was given to capture: pass those that the step uses")
    if len(modules) == 1:
        return modules[0]
    named: dict[str, nn.Module] = {}
    for module in modules:
        kind = type(module).__name__
        name = kind if kind not in named else f"{kind}_{len(named)}"
        named[name] = module
    training = [(part, part.training) for module in modules for part in module.modules()]
    root = nn.ModuleDict(named)
    for part, mode in training:
        part.training = mode
    return root


def _on_meta(step: Callable[..., Any], tree: Any, modules: Sequence[nn.Module]) -> Any:
    """The step and its arguments on meta tensors; only tensors not on meta yet are copied.

    References of the step to the modules (in its closure, or as a method of an object) are copied
    too.
    """
    tensors = [t for module in modules for part in module.modules() for t in own_tensors(part)]
    memo: dict[int, Any] = {}
    twins = Twins(memo)
    held = [
        copies.held_by(function)
        for function in (step, *(h for t in tensors for h in copies.hooks_of(t)))
    ]
    optimizers = optimizers_in((tree, held))
    if all(tensor.device.type == "meta" for tensor in tensors):
        memo.update({id(item): item for item in (*modules, *optimizers, *tensors)})
        optimizers = []
    else:
        for tensor in tensors:
            twins.of(tensor, owned=True)
        twins.held_by_modules(part for module in modules for part in module.modules())
        for module in modules:
            twins.handles(module)
    for tensor in tensors_in((tree, [vars(optimizer) for optimizer in optimizers])):
        twins.of(tensor)
    shapes = {tensor.shape for tensor in tensors if not isinstance(tensor, trees.LAZY)}
    for tensor in tensors_in(held):
        if _is_kept_for_weights(tensor, shapes):
            twins.of(tensor)
    twins.finish()
    copy_optimizers(optimizers, memo)
    copied = any(id(twin) != key for key, twin in memo.items())
    args, kwargs = copy.deepcopy(tree, memo)
    copies.copy_hooks(tensors, memo)
    return copies.rebound(step, memo) if copied else step, args, kwargs


def _is_kept_for_weights(tensor: Tensor, shapes: Collection[torch.Size]) -> bool:
    """Whether a tensor in a step's closure belongs to the weights, as a master copy or an average.

    Such a tensor counts as being on the device, and ops on it count as work of the step.
    """
    if tensor.device.type != "cpu" or isinstance(tensor, trees.LAZY):
        return False
    weighs = tensor.is_floating_point() and tensor.dim() > 0 and tensor.shape in shapes
    return weighs or (tensor.is_leaf and tensor.requires_grad)


def enter_modules(recorder: Recorder, root: nn.Module) -> None:
    for module in root.modules():
        for tensor in own_tensors(module):
            arguments.learn(recorder.values, tensor)
    recorder.name_modules(root)
    for parameter in root.parameters():
        if parameter.grad is not None:
            recorder.enter(parameter.grad, "gradient", f"{recorder.name_of(parameter)}.grad")


# -- while it runs ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_step(recorder: Recorder, root: nn.Module) -> Iterator[stepping.Learnt]:
    """Record the ops inside, with their parts, on the meta device."""
    recorder.entries.own_step = True
    with (
        stepping.noted(recorder, root) as learnt,
        recorder,
        stepping.foreach_on_meta(),
        torch.device(META),
    ):
        yield learnt
    stepping.note_gradients(recorder, root, learnt)
    tell_freed(recorder, learnt.gradients)


def graph_of_step(recorder: Recorder, root: nn.Module, learnt: stepping.Learnt) -> OpGraph:
    """The recorded graph of code that used `root`; later code may read its results.

    Results that it has let go of are outputs too, as those of a compiled module are, and an op
    holds them last.
    """
    graph = _graph(recorder, root, learnt, None)
    left = _left_over(graph)
    outputs = (*graph.outputs, *left, *_standing(graph))
    return graph.replace(ops=_holding(graph, left), outputs=outputs)


def _graph(
    recorder: Recorder,
    root: nn.Module,
    learnt: stepping.Learnt,
    output: Any,
    inputs: Sequence[Any] = (),
) -> OpGraph:
    recorded = [node.meta.get(META_KEY) for node in recorder.graph.nodes]
    parts = {item.origin.part for item in recorded if isinstance(item, Recorded)}
    entered = recorder.entries.inputs if not tensors_in(inputs) else inputs
    graph = graph_of(
        recorder,
        "training" if "backward" in parts else "forward",
        Step((output, [p.grad for p in root.parameters()]), gradients=learnt.gradients),
        root,
        Inputs(args=tuple(entered), workload=_sizes(entered)),
        "+".join(dict.fromkeys(learnt.optimizers)) or None,
    )
    if type(root) is not nn.ModuleDict:
        return graph
    return replace(graph, model={**graph.model, "name": " + ".join(root)})


def _left_over(graph: OpGraph) -> list[int]:
    """Results of forward ops that no op of the block reads: code after it may."""
    read = {value for op in graph.ops for value in op.inputs} | set(graph.outputs)
    first = [op.outputs[0] for op in graph.ops if op.part == "forward" and op.outputs[:1]]
    values = graph.values
    return [
        value
        for value in first
        if value not in read
        and not values[value].repeats
        and values[values[value].storage].role in ("activations", "temporary")
    ]


def _holding(graph: OpGraph, left: Sequence[int]) -> tuple[Op, ...]:
    """The ops; one whose result had no holder at the end holds it itself."""
    values = graph.values
    storages = {values[value].storage for value in graph.outputs}
    storages |= {values[ref.id].storage for op in graph.ops for ref in op.holds}
    ops = list(graph.ops)
    for value in left:
        if values[value].storage not in storages:
            maker = graph.producers[value]
            holds = in_order((*ops[maker].holds, Ref(value)))
            ops[maker] = structs.replace(ops[maker], holds=holds)
    return tuple(ops)


def _standing(graph: OpGraph) -> list[int]:
    """Tensors from before the step that no op reads or frees: they last to its end."""
    read = {value for op in graph.ops for value in op.inputs} | set(graph.outputs)
    roles = ("gradients", "activations")
    return [i for i in graph.external if i not in read and graph.values[i].role in roles]


def _sizes(inputs: Sequence[Any]) -> dict[str, Any]:
    tensors = tensors_in(inputs)
    return {"batch": int(tensors[0].shape[0])} if tensors and tensors[0].dim() else {}


# -- Modules with real weights inside of a capture: for the length of the block they stand on meta -


def is_real(modules: Sequence[nn.Module]) -> bool:
    """Whether some tensor of these modules is not on the meta device."""
    tensors = (tensor for module in modules for tensor in trees.tensors_of(module))
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
