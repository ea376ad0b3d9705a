"""What other counters say of the same call of the same module.

They see the module as it is: nothing of ours is active while they run.  A peer that cannot run on
meta tensors gets a copy with real ones of any value, if the module is small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.tracer.asking import Job, Options, names
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.inputs import Inputs, Loaded, as_before
from rooftrace.tracer.patches import contexts
from rooftrace.tracer.peers import flopcounter, fvcore_counter
from rooftrace.tracer.peers.counts import CannotCountError, PeerCount
from rooftrace.tracer.phases import ModuleCalls, PlainCall, trace_phases
from rooftrace.tracer.sources import loaded
from rooftrace.tracer.targets import isolation
from rooftrace.tracer.tensors import own_tensors
from rooftrace.tracer.values import META, REAL_VALUE

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
    with contexts.apart(), isolation.own_imports():
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
            raise RequestError(f"--with {peer!r}: expected some of {', '.join(_PEERS)}")


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
        _attempts(module, inputs, phase), _PEERS[peer]
    ):
        try:
            made = prepared()
            with as_before(made.module, (made.inputs.args, made.inputs.kwargs)):
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
    module: nn.Module, inputs: Inputs, phase: str
) -> Iterator[tuple[str, Callable[[], Loaded]]]:
    """Where to run, and a function that makes the module and its inputs for it; in order of trial.

    A module with real tensors runs as it is.  One on meta runs there first; then, if it is small,
    with real tensors; a large one runs without labels, because its loss may ask for their values.
    """
    own = [tensor for part in module.modules() for tensor in own_tensors(part)]
    if any(not tensor.is_meta for tensor in own):
        yield REAL, lambda: Loaded(module, inputs.filled(_real))
        return
    yield META.type, lambda: Loaded(module, inputs)
    if sum(tensor.numel() * tensor.element_size() for tensor in own) <= MOST_REAL_BYTES:
        yield REAL, lambda: Loaded(module, inputs).filled(_real)
    elif phase == "training" and inputs.labels:
        yield f"{META.type}, without labels", lambda: Loaded(module, replace(inputs, labels={}))


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


_PEERS: Mapping[str, tuple[Callable[[PlainCall], PeerCount], ...]] = {
    "flopcounter": (flopcounter.by_tensor_hooks, flopcounter.by_module_hooks),
    "fvcore": (fvcore_counter.by_trace,),
}
"""The ways in which each peer counts; a later way is tried where the ones before it fail."""
