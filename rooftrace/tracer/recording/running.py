"""Running one op on meta: its values are followed, and it is recorded.

Ops that a meta run alone cannot do are in `by_value` (they depend on values) and in `substitutes`
(they have no meta kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from rooftrace.tracer.ops import Call, groups, info_of, traits
from rooftrace.tracer.recording.by_value import by_value
from rooftrace.tracer.recording.exchanged_counts import expect_counts_of_others
from rooftrace.tracer.recording.exchanged_values import (
    after_exchange,
    before_exchange,
    exchanged_on_host,
)
from rooftrace.tracer.recording.facts import learn_facts, learn_mask_facts
from rooftrace.tracer.recording.kernel_checks import check_kernel
from rooftrace.tracer.recording.reached import expect_counts
from rooftrace.tracer.recording.routing import route
from rooftrace.tracer.recording.sizes import SizeCache, writes_lists
from rooftrace.tracer.recording.sparse import run_sparse
from rooftrace.tracer.recording.substitutes import off_host, without_meta_kernel
from rooftrace.tracer.sharded import meshes
from rooftrace.tracer.tape import Tape, records
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values import Values
from rooftrace.tracer.whole import whole_entry

_LIFT = torch.ops.aten.lift_fresh.default
"""The op by which numbers of Python, or of numpy, become a tensor."""


class Runner:
    """Runs the ops of one recording, one at a time.

    again: switches the recorder's mode on, which torch switches off while it handles an op.
    device: for which tensors on meta stand, where those of the host are apart from it.
    """

    def __init__(self, tape: Tape, again: Callable[[], AbstractContextManager[None]]) -> None:
        self._tape, self._again = tape, again
        self._sizes = SizeCache()
        self.device: torch.device | None = None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op, follow its values, record it; returns what the op returns."""
        tape, info = self._tape, info_of(func)
        name = info.name
        if name in traits.QUESTIONS or name.startswith("profiler."):
            return func(*args, **kwargs)
        if info.composite or (
            tape.here.inside and func.has_kernel_for_dispatch_key(traits.COMPOSITE)
        ):
            # PyTorch has taken such ops apart before a mode sees them, but those that run inside of
            # an op: of ours, or of a tensor subclass.
            with self._again():
                whole = whole_entry(func)
                return (whole or func.decompose)(*args, **kwargs)
        call = Call.of(func, *args, **kwargs)
        tape.tags.recognise(call.tensors)
        if _on_host(call.tensors, kwargs.get("device")):
            tape.rolling.depends()
            if not _of_the_step(tape, call):
                if tape.generators is not None and traits.is_random(func):
                    return tape.generators.run(func, args, kwargs)
                if meshes.running and groups.is_collective(func):
                    return exchanged_on_host(tape, call)
                return func(*args, **kwargs)
        out = run_sparse(tape, call, self._again)
        if out is not NotImplemented:
            return out
        if name in traits.IDENTITIES and call.tensors:
            return _same_value(tape, call)
        check_kernel(call, self.device)
        out = by_value(tape, call)
        return self._on_meta(call) if out is NotImplemented else out

    def _on_meta(self, call: Call) -> Any:
        """Run and record an op that depends on no value."""
        tape, facts = self._tape, dict[str, Any]()
        sent = before_exchange(tape, call)
        try:
            out = self._computed(call)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            out = without_meta_kernel(tape, call, error)
            facts["fallback"] = type(error).__name__
        else:
            out = off_host(tape, call, out)
        single = isinstance(out, Tensor)
        outputs = [out] if single else trees.listed(out)
        taint = _propagate(tape, call, outputs)
        taint |= learn_facts(tape.values, call, facts)
        taint |= learn_mask_facts(tape.values, call, outputs, facts)
        taint |= expect_counts(tape, call, facts)
        together = groups.communicates(call.func, call.args, call.kwargs, outputs)
        if together is not None:
            facts["group_size"] = together[1].size
            taint |= expect_counts_of_others(tape, call, outputs, together)
            taint |= after_exchange(tape, call, outputs, sent, together)
        if outputs and call.info.mutated and call.func.namespace != "aten":
            facts["writes"] = tuple(name for _, name in call.info.mutated)  # beside what it returns
        tape.record(call, outputs, single=single, facts=facts, taint=taint, together=together)
        return out

    def _computed(self, call: Call) -> Any:
        """The result of an op on meta."""
        generators = self._tape.generators
        if generators is not None and traits.is_random(call.func) and _on_host(call.tensors, None):
            return generators.run(call.func, call.args, call.kwargs)
        if not call.info.may_alias:
            return self._sizes.run(call.func, call.args, dict(call.kwargs))
        return None if writes_lists(call.name, call.args) else call.run()


def _on_host(tensors: list[Tensor], device: Any) -> bool:
    """Whether an op reads and makes CPU tensors only."""
    if device is not None and torch.device(device).type != "cpu":
        return False
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return False
    return bool(tensors) or device is not None


def _of_the_step(tape: Tape, call: Call) -> bool:
    """Whether an op on CPU tensors is work of the step, and not bookkeeping of the host.

    Ops on weights or on floats of the step are work of the step; so is every matrix product.
    """
    plain = (Tensor, nn.Parameter)
    if not tape.recording or any(type(tensor) not in plain for tensor in call.tensors):
        return False  # of fake tensors only the sizes are asked
    if call.func._overloadpacket in flop_registry:
        return True
    for tensor in call.tensors:
        if isinstance(tensor, nn.Parameter):
            return True
        if tape.tags.has(tensor) and tensor.is_floating_point():
            entry = tape.entries.entry_of(tensor)
            if entry is None or entry.kind != "constant":
                return True
    return False


def _same_value(tape: Tape, call: Call) -> Tensor:
    """detach and its like: a new Python object for the same value."""
    tensor, out = call.tensors[0], call.run()
    tape.tags.same_as(out, tensor)
    if call.func is _LIFT and tape.recording and not tape.tags.has(out):
        tape.entries.constant(out)
    entry = tape.values.held(tensor)
    if entry is not None:
        tape.values.learn(out, entry.value, entry.taint)
    return out  # type: ignore[no-any-return]


def _settle_tests(values: Values, call: Call) -> None:
    """Results of tests for inf and nan that go on as numbers (a count of them) become known."""
    for tensor in call.tensors:
        if tensor.dtype != torch.bool or tensor.numel() != 1 or values.known(tensor) is not None:
            continue
        finite = values.finite(tensor)
        if finite is not None and values.decision("branch") is None:
            text = f"{call.name} reads a test for inf and nan: unknown numbers are taken as finite"
            taint = frozenset([values.assume("finite", text, finite)])
            values.learn(tensor, torch.full(tuple(tensor.shape), finite), taint)


def _propagate(tape: Tape, call: Call, outputs: Sequence[Tensor]) -> frozenset[int]:
    """Follow known values through one op; returns the assumptions that its outputs rest on."""
    values, info = tape.values, call.info
    if outputs and outputs[0].dtype != torch.bool:
        _settle_tests(values, call)
    all_known = True
    for tensor in call.tensors:
        if values.key not in tensor.__dict__ and tensor.device.type != "cpu":
            all_known = False
            break
    if (
        all_known
        and (outputs or info.mutated)
        and (not outputs or outputs[0].device.type == "meta")
    ):
        taint = values.propagate(call, outputs)
        if taint is not None:
            return taint
    else:
        taint = values.imply(call, outputs)
        if taint is not None:
            return taint
    if info.name in traits.DECIDING and not info.mutated and len(outputs) == 1:
        decided = values.decide(info.name, call.tensors, outputs[0])
        if decided is not None:
            return decided
    if not call.tensors:
        return records.NO_TAINT
    position = traits.index_output(call.func, call.tensors[0], outputs)
    if position is not None and outputs[0].is_meta:
        return route(tape, call, outputs[position], position)
    return records.NO_TAINT
