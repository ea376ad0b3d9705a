"""What other counters say of the same call of the same module: FlopCounterMode and fvcore.

They see the module as it is: nothing of ours is active while they run.  Where they cannot run it on
meta tensors, it is copied to real ones of any value, if it is small.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

from rooftrace.tracer.asking import Inputs, Options, RequestError
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.phases.before import as_before
from rooftrace.tracer.phases.workload import PlainCall, Run, trace_phases
from rooftrace.tracer.tensors import own_tensors, tensors_in
from rooftrace.tracer.twins import replaced
from rooftrace.tracer.values import META, REAL_VALUE

MOST_REAL_BYTES = 2 * 1024**3
"""A module with more is not made real."""
REAL = "cpu"
_ROOT = "Global"
"""What torch's tracker calls everything."""
_FORWARD_HOOKS = (
    "the hooks of FlopCounterMode's module tree fail here: counted with hooks of ours on modules"
)


@dataclass(frozen=True)
class PeerCount:
    """What one counter says of one call.

    peer, version: who.  device: where it ran ("meta", "cpu"; "" where it could not).  flops: FLOP,
    a multiply-add as 2, by module path and the peer's own name of the op; a module's own, without
    its children.  scale: FLOP per unit that the peer reports (2 where it calls a multiply-add one).
    uncounted: calls that it saw and has no formula for, likewise.  note: what else to know.
    error: why there is no count.
    """

    peer: str
    version: str = ""
    device: str = ""
    flops: Mapping[tuple[str, str], int] = field(default_factory=dict)
    scale: int = 1
    uncounted: Mapping[tuple[str, str], int] = field(default_factory=dict)
    note: str = ""
    error: str = ""

    @property
    def total(self) -> int:
        """FLOP of all modules."""
        return sum(self.flops.values())


def count_with(
    peer: str, module: nn.Module, inputs: Inputs, phase: str, options: Options | None = None
) -> PeerCount:
    """What `peer` counts when `phase` of `module` runs.  Raises RequestError where there is no such
    peer."""
    check_peers((peer,))
    options = options or Options()
    errors = []
    for (where, prepared), counter in itertools.product(
        _attempts(module, inputs, phase), _PEERS[peer]
    ):
        try:
            made, given = prepared()
            with as_before(made):
                device = where.partition(",")[0]
                call = Run(made, given, options, device=device).plain_call(phase)
                return replace(counter(call), peer=peer, device=where)
        except _CannotCount as error:
            return PeerCount(peer, error=str(error))
        except Exception as error:  # whatever a module or another counter may raise
            first = str(error).strip().splitlines()
            errors.append(f"on {where}: {type(error).__name__}: {first[0] if first else ''}")
    return PeerCount(peer, error="; ".join(dict.fromkeys(errors)))


class _CannotCount(Exception):
    """The peer does not do such a thing at all."""


def _attempts(
    module: nn.Module, inputs: Inputs, phase: str
) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Inputs]]]]:
    """Where to run, and how to get there: the module as it is; if that is on meta and small, with
    real tensors; on meta without labels, whose loss may ask for their values."""
    own = [tensor for part in module.modules() for tensor in own_tensors(part)]
    if any(not tensor.is_meta for tensor in own):
        yield REAL, lambda: (module, _real_inputs(inputs))
        return
    yield META.type, lambda: (module, inputs)
    if sum(tensor.numel() * tensor.element_size() for tensor in own) <= MOST_REAL_BYTES:
        yield REAL, lambda: (_real_module(module, own), _real_inputs(inputs))
    elif phase == "training" and inputs.labels:
        yield f"{META.type}, without labels", lambda: (module, replace(inputs, labels={}))


def _real_module(module: nn.Module, own: list[Tensor]) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in own:
        if id(tensor) not in memo:
            made = _real(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            memo[id(tensor)] = made
    return copy.deepcopy(module, memo)


def _real_inputs(inputs: Inputs) -> Inputs:
    """The same calls with real tensors."""
    names = ("args", "kwargs", "labels", "decode", "cached", "cached_kwargs")
    return replace(inputs, **{name: replaced(getattr(inputs, name), _real) for name in names})


def _real(tensor: Tensor) -> Tensor:
    """A real tensor of this size: its value where that is known, ones of a float, else zeros."""
    if not tensor.is_meta:
        return tensor
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        return torch.as_tensor(value).clone()
    number = 1 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0
    made = torch.full(tensor.shape, number, dtype=tensor.dtype, device=REAL)
    return made.requires_grad_(tensor.requires_grad)


def count_phases(
    module: nn.Module,
    inputs: Inputs,
    peers: Sequence[str],
    phases: Sequence[str] | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
    target: str = "",
) -> list[tuple[OpGraph, PeerCount]]:
    """The graph of each phase with each peer's count of it.  Raises as `trace_phases` does, and
    RequestError for an unknown peer."""
    check_peers(peers)
    tell = progress or (lambda _: None)
    found = []
    for phase, graph in trace_phases(module, inputs, phases, options, progress, target).items():
        for peer in peers:
            tell(f"counting {phase} with {peer}")
            found.append((graph, count_with(peer, module, inputs, phase, options)))
    return found


def check_peers(peers: Sequence[str]) -> None:
    """Raise RequestError for a counter that we do not know."""
    for peer in peers or ("",):
        if peer not in _PEERS:
            raise RequestError(f"--with {peer!r}: expected some of {', '.join(_PEERS)}")


# -- FlopCounterMode -------------------------------------------------------------------------------


def _flopcounter(call: PlainCall) -> PeerCount:
    """torch.utils.flop_counter: formulas for the ops that reach the dispatcher."""
    return _counted(call, ModuleTracker)


def _flopcounter_forward(call: PlainCall) -> PeerCount:
    """The same where torch's hooks on tensors fail: modules are known while their forward runs."""
    counted = _counted(call, lambda: _ForwardTracker(call.module))
    return replace(counted, note=_FORWARD_HOOKS)


def _counted(call: PlainCall, tracker: Callable[[], Any]) -> PeerCount:
    seen = _Uncounted(tracker())
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = tracker()
    # The mode entered last sees ops first: what FlopCounterMode takes apart comes to `seen` after.
    with seen.tracker, seen, counter:
        call()
    root = type(call.module).__name__
    inclusive = {
        _own_path(name, root): {str(op): int(n) for op, n in counts.items()}
        for name, counts in counter.get_flop_counts().items()
        if name != root  # Global has what it has, and what backward does outside of every module
    }
    uncounted: Counter[tuple[str, str]] = Counter()
    for (name, op), calls in seen.calls.items():
        uncounted[_own_path(name, root), op] += calls
    version = torch.__version__.partition("+")[0]
    return PeerCount("", version, flops=_exclusive(inclusive), uncounted=uncounted)


class _Uncounted(TorchDispatchMode):
    """Calls of ops that torch's registry has no formula for, by module."""

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

    def __enter__(self) -> _ForwardTracker:
        self._handles = [
            register_module_forward_pre_hook(lambda part, args: self._enter(part)),
            register_module_forward_hook(lambda part, args, output: self._leave(part)),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, part: nn.Module) -> None:
        if part in self._names:
            self.parents.add(self._names[part])

    def _leave(self, part: nn.Module) -> None:
        self.parents.discard(self._names.get(part, ""))


def _own_path(name: str, root: str) -> str:
    """ "GPT2.h.0" as "h.0"; what torch calls Global is the root too."""
    if name in (_ROOT, root):
        return ""
    return name.removeprefix(f"{root}.")


def _exclusive(inclusive: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    """Counts of a module's own ops from counts that include those of its children."""
    own: Counter[tuple[str, str]] = Counter()
    for path, counts in inclusive.items():
        above = path
        while above:
            above = above.rpartition(".")[0]
            if above in inclusive:
                break
        for op, count in counts.items():
            own[path, op] += count
            if path:
                own[above, op] -= count
    return {key: count for key, count in own.items() if count}


# -- fvcore ----------------------------------------------------------------------------------------


def _fvcore(call: PlainCall) -> PeerCount:
    """fvcore's FlopCountAnalysis: formulas for the nodes of a torch.jit trace.  It counts a
    multiply-add as 1."""
    if call.losses is not None:
        raise _CannotCount("fvcore counts no backward")
    try:
        from fvcore.nn import FlopCountAnalysis
    except ImportError:
        raise _CannotCount("fvcore is not installed: pip install 'rooftrace[compare]'") from None
    from importlib.metadata import version

    wrapped = _Positional(call)
    analysis = FlopCountAnalysis(wrapped, tuple(wrapped.given))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    analysis.tracer_warnings("none")
    with torch.no_grad(), torch.device(call.device), _quiet("fvcore"):
        found = analysis.by_module_and_operator()
    inclusive = {_inside(path): counts for path, counts in found.items()}
    uncounted = {
        (_inside(path), op): calls
        for path in found
        for op, calls in _own_unsupported(analysis, path).items()
    }
    doubled = {key: 2 * round(count) for key, count in _exclusive(inclusive).items()}
    return PeerCount("", version("fvcore"), flops=doubled, scale=2, uncounted=uncounted)


class _Positional(nn.Module):
    """The call as a function of its tensors alone, as torch.jit.trace wants it."""

    def __init__(self, call: PlainCall) -> None:
        super().__init__()
        self.module = call.module
        self.arguments = (tuple(call.args), dict(call.kwargs))
        self.given = tensors_in(self.arguments)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        instead = {id(old): new for old, new in zip(self.given, tensors, strict=True)}
        args, kwargs = replaced(self.arguments, lambda tensor: instead[id(tensor)])
        return tuple(tensors_in(self.module(*args, **kwargs)))


def _inside(path: str) -> str:
    """A path in the wrapper as one in the module."""
    return path.removeprefix("module").removeprefix(".")


def _own_unsupported(analysis: Any, path: str) -> Mapping[str, int]:
    """Ops without a formula in a module alone."""
    own = Counter(analysis.unsupported_ops(path))
    for child, _ in _named(analysis, path).named_children():
        below = f"{path}.{child}" if path else child
        with contextlib.suppress(KeyError):
            own.subtract(analysis.unsupported_ops(below))
    return +own


def _named(analysis: Any, path: str) -> nn.Module:
    module: nn.Module = analysis._model
    return module.get_submodule(path)


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Without the warnings of a library, and those that Python gives about it."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        found.setLevel(level)


_PEERS: Mapping[str, tuple[Callable[[PlainCall], PeerCount], ...]] = {
    "flopcounter": (_flopcounter, _flopcounter_forward),
    "fvcore": (_fvcore,),
}
"""How each counts; a second way is for where the first one fails."""
