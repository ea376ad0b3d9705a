"""FLOP counts of a call by other counters (PyTorch's FlopCounterMode, fvcore), by module."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

from rooftrace._progress import tell
from rooftrace.errors import RequestError, one_of
from rooftrace.graph import OpGraph
from rooftrace.tracer import Job, Options, names, torch_private
from rooftrace.tracer.inputs import Inputs, Loaded, as_before
from rooftrace.tracer.phases.calls import ModuleCalls, PlainCall
from rooftrace.tracer.phases.running import trace_phases
from rooftrace.tracer.phases.tracing import loaded
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.targets import isolation
from rooftrace.tracer.values import META, REAL_VALUE, own_tensors, tensors_in, with_tensors


@dataclass(frozen=True)
class PeerCount:
    """The count of one counter for one call."""

    peer: str  # its name
    version: str = ""
    device: str = ""  # where it ran: "meta", "cpu"; "" where it could not
    # FLOP, a multiply-add as 2, by module path and the peer's name of the op; a module's,
    # without its children.
    flops: Mapping[tuple[str, str], int] = field(default_factory=dict)
    scale: int = 1  # FLOP per unit that the peer reports; 2 where a multiply-add is one
    # Calls for which the counter has no formula, by module path and op.
    uncounted: Mapping[tuple[str, str], int] = field(default_factory=dict)
    note: str = ""  # further remarks
    error: str = ""  # why there is no count

    @property
    def total(self) -> int:
        """FLOP of all modules."""
        return sum(self.flops.values())


class CannotCountError(Exception):
    """The peer cannot count this kind of call at all."""


def exclusive(inclusive: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    """Counts of a module's ops from counts that include those of its children."""
    self_counts: Counter[tuple[str, str]] = Counter()
    for path, counts in inclusive.items():
        above = path
        while above:
            above = above.rpartition(".")[0]
            if above in inclusive:
                break
        for op, count in counts.items():
            self_counts[path, op] += count
            if path:
                self_counts[above, op] -= count
    return {key: count for key, count in self_counts.items() if count}


# -- flopcounter -----------------------------------------------------------------------------------
# PyTorch's FlopCounterMode: formulas for the ops that reach the dispatcher.

_ROOT = "Global"
"""The name under which torch's tracker counts everything."""
_FORWARD_HOOKS = (
    "the hooks of FlopCounterMode's module tree fail here: counted with hooks of ours on modules"
)


def by_tensor_hooks(call: PlainCall) -> PeerCount:
    """FlopCounterMode's counts, with torch's tensor hooks that tell the modules of a backward."""
    return _counted(call, ModuleTracker)


def by_module_hooks(call: PlainCall) -> PeerCount:
    """FlopCounterMode's counts without tensor hooks: it sees only the modules of a forward."""
    counted = _counted(call, lambda: _ForwardTracker(call.module))
    return replace(counted, note=_FORWARD_HOOKS)


def _counted(call: PlainCall, tracker: Callable[[], Any]) -> PeerCount:
    seen = _Uncounted(tracker())
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = tracker()
    # The mode entered last sees ops first: the parts by FlopCounterMode come to `seen` after.
    with seen.tracker, seen, counter:
        call()
    root = type(call.module).__name__
    inclusive = {
        _own_path(name, root): {str(op): int(n) for op, n in counts.items()}
        for name, counts in counter.get_flop_counts().items()
        if name != root  # Global has all of it, and backward outside of every module
    }
    uncounted: Counter[tuple[str, str]] = Counter()
    for (name, op), calls in seen.calls.items():
        uncounted[_own_path(name, root), op] += calls
    version = torch.__version__.partition("+")[0]
    return PeerCount("", version, flops=exclusive(inclusive), uncounted=uncounted)


class _Uncounted(torch_private.TorchDispatchMode):
    """The calls of ops without a formula in torch's registry, counted by module."""

    def __init__(self, tracker: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "_overloadpacket", func)
        if packet not in flop_registry:
            where = max(self.tracker.parents - {_ROOT}, key=len, default=_ROOT)
            self.calls[where, str(func)] += 1
        return func(*args, **(kwargs or {}))


class _ForwardTracker:
    """The modules whose forward runs, by the names that torch's tracker gives them.

    It puts no hooks on tensors, as torch's does to know them in backward too: those fail on a
    tensor that requires a gradient and was made without one, such as a view of a parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        root = type(module).__name__
        self.parents = {_ROOT}
        self._names = {
            part: f"{root}.{path}" if path else root for path, part in module.named_modules()
        }
        self._handles: list[Any] = []
        self._thread = 0  # the hooks are of the process, and act in this thread only

    def __enter__(self) -> _ForwardTracker:
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(lambda part, args: self._enter(part)),
            register_module_forward_hook(lambda part, args, output: self._leave(part)),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, part: nn.Module) -> None:
        if part in self._names and threading.get_ident() == self._thread:
            self.parents.add(self._names[part])

    def _leave(self, part: nn.Module) -> None:
        if threading.get_ident() == self._thread:
            self.parents.discard(self._names.get(part, ""))


def _own_path(name: str, root: str) -> str:
    """ "GPT2.h.0" as "h.0"; torch's "Global" is the root too."""
    if name in (_ROOT, root):
        return ""
    return name.removeprefix(f"{root}.")


# -- fvcore counter --------------------------------------------------------------------------------
# fvcore's FlopCountAnalysis: formulas for the nodes of a torch.jit trace.


def by_trace(call: PlainCall) -> PeerCount:
    """fvcore's counts of a forward; it counts a multiply-add as 1."""
    if call.losses is not None:
        raise CannotCountError("fvcore counts no backward")
    try:
        from fvcore.nn import FlopCountAnalysis
    except ImportError:
        raise CannotCountError(
            "fvcore is not installed: pip install 'rooftrace[compare]'"
        ) from None
    from importlib.metadata import version

    wrapped = _Positional(call)
    analysis = FlopCountAnalysis(wrapped, tuple(wrapped.tensors))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    analysis.tracer_warnings("none")
    with torch.no_grad(), torch.device(call.device):
        by_module = analysis.by_module_and_operator()
    inclusive = {_inside(path): counts for path, counts in by_module.items()}
    uncounted = {
        (_inside(path), op): calls
        for path in by_module
        for op, calls in _own_unsupported(analysis, path).items()
    }
    doubled = {key: 2 * round(count) for key, count in exclusive(inclusive).items()}
    return PeerCount("", version("fvcore"), flops=doubled, scale=2, uncounted=uncounted)


class _Positional(nn.Module):
    """The call as a function of its tensors alone, as torch.jit.trace wants it."""

    def __init__(self, call: PlainCall) -> None:
        super().__init__()
        self.module = call.module
        self.arguments = (tuple(call.args), dict(call.kwargs))
        self.tensors = tensors_in(self.arguments)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        instead = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        args, kwargs = with_tensors(self.arguments, lambda tensor: instead[id(tensor)])
        return tuple(tensors_in(self.module(*args, **kwargs)))


def _inside(path: str) -> str:
    """A path in the wrapper as one in the module."""
    return path.removeprefix("module").removeprefix(".")


def _own_unsupported(analysis: Any, path: str) -> Mapping[str, int]:
    """The unsupported ops of a module itself, without those of its children."""
    unsupported = Counter(analysis.unsupported_ops(path))
    for child, _ in _named(analysis, path).named_children():
        below = f"{path}.{child}" if path else child
        with contextlib.suppress(KeyError):
            unsupported.subtract(analysis.unsupported_ops(below))
    return +unsupported


def _named(analysis: Any, path: str) -> nn.Module:
    module: nn.Module = analysis._model
    return module.get_submodule(path)


# -- counting --------------------------------------------------------------------------------------
# Counts of other counters for the same call of the same module.
#
# They see the module as it is: nothing of ours is active while they run.  A peer that cannot run
# on meta tensors gets a copy with PyTorch's fake ones, which tell the module's code that they have
# no values, and then one with real ones of any value, if the module is small.

MOST_REAL_BYTES = 2 * 1024**3
"""The most bytes of a module that is copied to real tensors."""
REAL = "cpu"


def count_phases(job: Job, peers: Sequence[str]) -> list[tuple[OpGraph, PeerCount]]:
    """The graph of each phase of a job with each peer's count of it.

    The source is a module or names one.  Raises the errors of tracing it, and RequestError for an
    unknown peer.
    """
    check_peers(peers)
    usual = None if job.is_named else names.usual(job.source)
    with overrides.apart(), isolation.own_imports():
        made = loaded(job)
        module, inputs, options = made.module, made.inputs, job.options
        graphs = trace_phases(module, inputs, job.phases or usual, options, made.name)
        counts = []
        for phase, graph in graphs.items():
            for peer in peers:
                tell(f"counting {phase} with {peer}")
                counts.append((graph, count_with(peer, module, inputs, phase, options)))
    return counts


def check_peers(peers: Sequence[str]) -> None:
    """Raise RequestError for a counter that we do not know."""
    for peer in peers or ("",):
        if peer not in _PEERS:
            raise RequestError(f"--with {peer!r}: {one_of(peer, _PEERS, 'some')}")


def count_with(
    peer: str, module: nn.Module, inputs: Inputs, phase: str, options: Options | None = None
) -> PeerCount:
    """The count of `peer` for one run of `phase` of `module`.  Raises RequestError for an unknown
    peer."""
    check_peers((peer,))
    options = options or Options()
    if phase == "training" and options.loss is None:
        inputs = inputs.trained(module)
    errors = []
    for (where, prepared), counter in itertools.product(
        _attempts(module, inputs, phase, by_trace in _PEERS[peer]), _PEERS[peer]
    ):
        try:
            with prepared() as made, as_before(made.module, (made.inputs.args, made.inputs.kwargs)):
                device = where.partition(",")[0]
                calls = ModuleCalls(made.module, made.inputs, options.loss, device)
                call = calls.plain_call(phase)
                return replace(counter(call), peer=peer, device=where)
        except CannotCountError as error:
            return PeerCount(peer, error=str(error))
        except Exception as error:  # whatever a module or another counter may raise
            first = str(error).strip().splitlines()
            errors.append(f"on {where}: {type(error).__name__}: {first[0] if first else ''}")
    return PeerCount(peer, error="; ".join(dict.fromkeys(errors)))


def _attempts(
    module: nn.Module, inputs: Inputs, phase: str, traces: bool
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Loaded]]]]:
    """Where to run, and a function that makes the module and its inputs for it; in order of trial.

    A module with real tensors runs as it is.  One on meta runs there first; then with fake tensors;
    then, if it is small, with real tensors; a large one runs without labels, because its loss may
    ask for their values.  traces: whether torch.jit.trace runs it, which fake tensors break.
    """
    made = Loaded(module, inputs)
    tensors = [tensor for part in module.modules() for tensor in own_tensors(part)]
    if any(not tensor.is_meta for tensor in tensors):
        yield REAL, lambda: nullcontext(Loaded(module, inputs.filled(_real)))
        return
    yield META.type, lambda: nullcontext(made)
    if not traces:
        yield f"{META.type}, as fake tensors", lambda: _faked(made)
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= MOST_REAL_BYTES:
        yield REAL, lambda: nullcontext(made.filled(_real))
    elif phase == "training" and inputs.labels:
        unlabelled = Loaded(module, replace(inputs, labels={}))
        yield f"{META.type}, without labels", lambda: nullcontext(unlabelled)


@contextlib.contextmanager
def _faked(made: Loaded) -> Iterator[Loaded]:
    """A copy of a module and its inputs with fake tensors, in their mode."""
    with torch_private.FakeTensorMode() as mode:
        yield made.filled(mode.from_tensor)


def _real(tensor: Tensor) -> Tensor:
    """A real tensor of this size: its value if there is one, ones of a float, else zeros."""
    if not tensor.is_meta:
        return tensor
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        return torch.as_tensor(value).clone()
    number = 1 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0
    made = torch.full(tensor.shape, number, dtype=tensor.dtype, device=REAL)
    return made.requires_grad_(tensor.requires_grad)


_PEERS: Mapping[str, tuple[Callable[[PlainCall], PeerCount], ...]] = {
    "flopcounter": (by_tensor_hooks, by_module_hooks),
    "fvcore": (by_trace,),
}
"""The ways in which each peer counts; a later way is tried where the ones before it fail."""
