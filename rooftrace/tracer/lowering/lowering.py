"""Lowers the recorded fx graph to an OpGraph, with the assumptions that its ops rest on."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor as TorchTensor, fx
from torch.utils.flop_counter import flop_registry, shape_wrapper

from rooftrace.graph import (
    Argument,
    Assumption,
    Group,
    Op,
    OpGraph,
    Ref,
    Tensor,
    assumptions,
    axis_of,
    in_order,
    marks,
    one_nan,
    refs,
)
from rooftrace.tracer.lowering.blocks import NotAlikeError
from rooftrace.tracer.lowering.inline import (
    Template,
    fold,
    inline,
    made_role,
    repeated_call,
    template,
    with_filled_roles,
)
from rooftrace.tracer.lowering.stacks import roll_loops, roll_stacks
from rooftrace.tracer.recording import META_KEY, Entry, Recorded, Recorder, ops, taperecords
from rooftrace.tracer.repeats import RecordedCall, RepeatedCall, Twin, repeated
from rooftrace.tracer.sharding import fsdp
from rooftrace.tracer.values import dtype_name, trees

# -- assumptions -----------------------------------------------------------------------------------
# Assumptions of a graph: those that nothing rests on, and those on fallbacks, which say
# in which lines the function stands that runs in place of a package's kernel.


def without_unused(graph: OpGraph, asides: Collection[int]) -> OpGraph:
    """The graph without those assumptions that nothing rests on which it tells.

    They are `asides`, which were made while nothing was recorded, as in the prefill whose cache a
    decode step reads, and choices that nothing reads, as the places of maxima by which a softmax
    shifts its scores: the op that chose costs the same whatever it chose.
    """
    chosen = {item.id: item.op for item in graph.assumptions if item.kind == assumptions.ROUTING}
    read = {*graph.outputs, *(value for op in graph.ops for value in op.inputs)}

    def uses(op: Op, number: int) -> bool:
        places = (v for v in op.outputs if graph.values[v].dtype == "int64")
        return chosen.get(number) != op.name or not read.isdisjoint(places)

    used = {n for op in graph.ops for n in op.assumptions if uses(op, n)}
    for repeat in graph.repeats:
        used.update(n for key, ids in repeat.assumptions.items() if key in used for n in ids)
    left = {*asides, *chosen} - used
    if not left:
        return graph
    kept = [item for item in graph.assumptions if item.id not in left]
    ids = {item.id: number for number, item in enumerate(kept)}

    def renamed(numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(ids[number] for number in numbers if number in ids)

    return graph.replace(
        assumptions=tuple(replace(item, id=ids[item.id]) for item in kept),
        ops=tuple(
            replace(op, assumptions=renamed(op.assumptions)) if op.assumptions else op
            for op in graph.ops
        ),
        repeats=tuple(
            replace(
                repeat,
                assumptions={
                    ids[key]: renamed(many)
                    for key, many in repeat.assumptions.items()
                    if key in ids
                },
            )
            for repeat in graph.repeats
        ),
    )


# -- fallbacks -------------------------------------------------------------------------------------


def with_fallbacks(graph: OpGraph) -> OpGraph:
    """The graph with its ops resting on the fallbacks in whose lines they were called."""
    spans = [
        (item.id, *_span(str(item.value)))
        for item in graph.assumptions
        if item.kind == assumptions.FALLBACK and item.value
    ]
    if not spans:
        return graph
    ops = []
    for op in graph.ops:
        file, _, line = op.source.rpartition(":")
        resting = [
            number
            for number, other, first, last in spans
            if file == other and first <= int(line) <= last
        ]
        ops.append(replace(op, assumptions=(*op.assumptions, *resting)) if resting else op)
    return graph.replace(ops=tuple(ops))


def _span(text: str) -> tuple[str, int, int]:
    file, _, numbers = text.rpartition(":")
    first, _, last = numbers.partition("-")
    return file, int(first), int(last)


# -- lowering --------------------------------------------------------------------------------------
# `lower` is where fx's `node.meta` ends: it takes a graph made by `capture`, and returns
# an OpGraph that verifies.

_ENTRY_ROLES = {
    "parameter": "weights",
    "buffer": "weights",
    "table": "constants",
    "input": "activations",
    "constant": "constants",
    "kv": "kv",
    "optimizer": "optimizer",
    "gradient": "gradients",
    "kept": "activations",
}
MAX_CONSTANT = 4096
"""Constants of up to this many bytes are kept in the graph, so that it can be run."""


def lower(
    recorder: Recorder,
    outputs: Sequence[TorchTensor],
    *,
    phase: str,
    kv_storages: Collection[int] = (),
    gradients: Mapping[int, str] | None = None,
    stored: Mapping[str, str] | None = None,
    assumptions: Sequence[Assumption] = (),
    model: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    repeats: bool = True,
) -> OpGraph:
    """The OpGraph of everything that `recorder` recorded, verified.

    outputs: the tensors that the step returns.  kv_storages: storages that are handed to the next
    call.  gradients: names of gradients of parameters by storage.  stored: formats of weights that
    a checkpoint declares, by name.  repeats: whether modules that are alike stand once.  What leads
    to no output, but is still held at the end of the step (by an attribute, a list, an object of
    the user's), is an output too.  Raises NotAlikeError where the
    turns of a loop differ after all.
    """
    results = [recorder.node_of(tensor) for tensor in outputs]
    builder = _Builder(frozenset(kv_storages), gradients or {}, recorder.shards.unsharded)
    for node in recorder.graph.nodes:
        builder.add(node)
    outlets = builder.outputs(results, recorder.tags.survivors)
    builder.hold(recorder.tags.last_held, recorder.tags.survivors, outlets)
    flat = OpGraph(
        phase=phase,
        values=_declared(with_filled_roles(builder.values, builder.ops), stored or {}),
        ops=tuple(builder.ops),
        inputs=tuple(builder.inputs),
        outputs=outlets,
        modules=dict(recorder.paths.kinds),
        calls=dict(recorder.paths.lines),
        assumptions=tuple(assumptions),
        constants=_constants(recorder.entries.constants),
        schemas=builder.schemas,
        groups=_on_axes(recorder.shards.groups, recorder.shards.mesh),
        mesh=recorder.shards.mesh,
        model=dict(model or {}),
        workload=dict(workload or {}),
        provenance=dict(provenance or {}),
    )
    rolled, ids = roll_loops(flat, builder.turns, recorder.loops)
    templates = [builder.template(rolled, ids, block) for block in builder.blocks]
    if repeats:
        twins = list(builder.twins(rolled, ids, recorder.twins()))
        with contextlib.suppress(NotAlikeError):
            return inline(roll_stacks(fold(rolled, templates, twins)), templates).verify()
    return inline(rolled, templates).verify()


def _declared(values: Sequence[Tensor], stored: Mapping[str, str]) -> tuple[Tensor, ...]:
    """The values, weights with the formats that are declared for their names."""
    if not stored:
        return tuple(values)
    return tuple(replace(v, stored=stored[v.name]) if v.name in stored else v for v in values)


def _on_axes(groups: Mapping[str, Group], mesh: Mapping[str, int]) -> dict[str, Group]:
    """Groups, each with the axes of the mesh along which it lies."""
    return {
        name: Group(group.ranks, fsdp.axes.get(name) or axis_of(group.ranks, mesh))
        for name, group in groups.items()
    }


def _constants(constants: Mapping[str, TorchTensor]) -> dict[str, str]:
    """The bytes of small constants, as hexadecimal text."""
    return {
        name: bytes(_dense(value).reshape(-1).view(torch.uint8).tolist()).hex()
        for name, value in constants.items()
        if value.device.type == "cpu" and value.numel() * value.element_size() <= MAX_CONSTANT
    }


def _dense(value: TorchTensor) -> TorchTensor:
    dense = value.to_dense() if trees.is_sparse(value) else value
    return dense.clone(memory_format=torch.contiguous_format)  # one element may have the stride 0


class _Builder:
    """Accumulates values and ops while walking the fx graph once."""

    def __init__(
        self, kv: frozenset[int], gradients: Mapping[int, str], unsharded: Mapping[int, str]
    ) -> None:
        self.values: list[Tensor] = []
        self.ops: list[Op] = []
        self.inputs: list[int] = []
        self._entries: list[int] = []
        self.turns: list[tuple[int, int] | None] = []
        self.blocks: list[RecordedCall] = []
        self._blocks: dict[int, int] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._owners: dict[int, int] = {}
        self._single: dict[fx.Node, int] = {}
        self._multiple: dict[fx.Node, tuple[int, ...]] = {}
        self._kv, self._gradients, self._unsharded = kv, gradients, unsharded
        self._flops = _TorchFlops()
        self._names: dict[Any, tuple[str, tuple[str, ...]]] = {}

    def value_of(self, node: fx.Node) -> int:
        """The value id of an fx node that stands for one tensor."""
        return self._single[node]

    @property
    def schemas(self) -> dict[str, tuple[str, ...]]:
        """The names of the arguments of every op that was added, by target."""
        return dict(self._names.values())

    def outputs(self, results: Sequence[fx.Node], kept: Collection[int]) -> tuple[int, ...]:
        """The value ids of the step's results, and of other kept values without readers."""
        returned = [self.value_of(node) for node in results]
        storage = [value.storage for value in self.values]
        live = {storage[value] for value in (*returned, *self._entries)}
        for op in reversed(self.ops):
            made = [storage[value] for value in op.outputs]
            if op.kind == "sync" or not made or not live.isdisjoint(made):
                live.update(made)
                live.update(storage[value] for value in op.inputs)
        owners = [self._owners[number] for number in sorted(kept) if number in self._owners]
        return (*returned, *(owner for owner in owners if owner not in live))

    def add(self, node: fx.Node) -> None:
        """Translate one fx node."""
        if node.op in ("placeholder", "get_attr"):
            entry: Entry = node.meta[META_KEY]
            value = self._value(entry.spec, self._entry_role(entry), entry.name)
            self._single[node] = value
            self._entries.append(value)
            if node.op == "placeholder":
                self.inputs.append(value)
        elif node.op == "call_function":
            if node.target is not operator.getitem:
                self._numbers[node] = len(self.ops)
            if node.target is repeated:
                self._repeated(node, node.meta[META_KEY])
            elif node.target is operator.getitem:
                base, index = node.args
                assert isinstance(base, fx.Node) and isinstance(index, int)
                self._single[node] = self._multiple[base][index]
            else:
                self._op(node, node.meta[META_KEY])

    def _repeated(self, node: fx.Node, call: RepeatedCall) -> None:
        """One op for a call that repeats a block; `inline` writes it out."""
        block = call.block
        number = self._blocks.setdefault(id(block), len(self.blocks))
        if number == len(self.blocks):
            self.blocks.append(block)
        specs = [replace(spec, storage=call.storage(spec)) for _, _, spec in block.made]
        roles = [self.values[value].role for value in self._results(block)]
        roles = ["activations" if role == "kv" else role for role in roles]  # unless kept, too
        outputs = tuple(map(self._output, specs, roles))
        self._multiple[node] = outputs
        self.turns.append(None)
        inputs = tuple(self._argument(item) for item in node.args)
        taken = tuple(call.assumptions.get(a, a) for a in block.assumptions)
        where = call.path, block.call, block.part, call.source
        self.ops.append(repeated_call(len(self.ops), number, inputs, outputs, *where, taken))

    def hold(
        self, last: Mapping[int, fx.Node], kept: Collection[int], outputs: Collection[int]
    ) -> None:
        """Let ops hold values alive as they ran, where no op reads them then or later.

        last: the last node at which each storage was there.  kept: those that are there at the end;
        of `outputs`, no op needs to.
        """
        lasting = {self.values[value].storage for value in outputs}
        used: dict[int, int] = {}
        for op in self.ops:
            for value in (*op.inputs, *op.outputs):
                used[self.values[value].storage] = op.id
        held: dict[int, list[Ref]] = {}
        for storage, node in last.items():
            owner, number = self._owners.get(storage), self._numbers.get(node)
            if owner not in used or number is None or (storage in kept and owner in lasting):
                continue
            # Of a call that repeats a block, some op in the middle may be the last that reads it.
            if number > used[owner] or (number == used[owner] and _is_called(node)):
                held.setdefault(number, []).append(Ref(owner))
        for number, owners in held.items():
            self.ops[number] = replace(self.ops[number], holds=in_order(owners))

    def _results(self, block: RecordedCall) -> list[int]:
        """The values that the recorded call of a block returned."""
        return [self._result(node, index) for node, index, _ in block.made]

    def _result(self, node: fx.Node, index: int | None) -> int:
        return self._single[node] if index is None else self._multiple[node][index]

    def twins(
        self, graph: OpGraph, ids: Mapping[int, int], twins: Iterable[Twin]
    ) -> Iterator[tuple[int, Template]]:
        """The ops that were recorded again as a block, each with the number of the block."""
        for twin in twins:
            numbers = [self._numbers[node] for node in twin.nodes if node in self._numbers]
            span = range(numbers[0], numbers[-1] + 1)
            block = self._blocks.get(id(twin.block))
            if block is not None and len(span) == len(numbers):
                yield (
                    block,
                    template(
                        graph,
                        twin.path,
                        twin.call,
                        twin.source,
                        span,
                        [ids[self._result(*item)] for item in twin.inputs],
                        [ids[self._result(*item)] for item in twin.results],
                        twin.assumptions,
                    ),
                )

    def template(self, graph: OpGraph, ids: Mapping[int, int], block: RecordedCall) -> Template:
        """The ops that a block recorded, in `graph`.  ids: ids of this builder -> new ids.

        `graph` has the ops of this builder one by one.
        """
        numbers = [self._numbers[node] for node in block.nodes if node in self._numbers]
        return template(
            graph,
            block.path,
            block.call,
            block.source,
            range(numbers[0], numbers[-1] + 1),
            [ids[self._single[node]] for node in block.inputs],
            [ids[value] for value in self._results(block)],
            block.assumptions,
        )

    def _entry_role(self, entry: Entry) -> str:
        return "kv" if entry.spec.storage in self._kv else _ENTRY_ROLES[entry.kind]

    def _value(self, spec: taperecords.Spec, role: str, name: str = "") -> int:
        index = len(self.values)
        owner = self._owners.setdefault(spec.storage, index)
        if owner != index:
            role = self.values[owner].role
        self.values.append(
            Tensor(
                spec.shape, dtype_name(spec.dtype), spec.stride, role, owner, name, host=spec.host
            )
        )
        return index

    def _op(self, node: fx.Node, recorded: Recorded) -> None:
        target, names = self._schema(node.target)
        arguments: dict[str, Argument] = {}
        for name, item in zip(names, node.args, strict=False):
            arguments[name] = self._argument(item)
        for key, item in node.kwargs.items():
            arguments[key] = self._argument(item)
        inputs = tuple(refs(arguments))
        roles = {self.values[i].role for i in inputs}
        role = made_role(target, recorded.origin.part, roles)
        outputs = tuple(self._output(spec, role) for spec in recorded.specs)
        if len(outputs) == 1:
            self._single[node] = outputs[0]
        self._multiple[node] = outputs
        allocates = target.rpartition(".")[0] in ops.UNINITIALISED
        kind = (
            "sync"
            if recorded.sync
            else "view"
            if target.rpartition(".")[0] in marks.MARKS
            or (outputs and (recorded.view or allocates or _empty(node.target, recorded.specs)))
            else "kernel"
        )
        origin = recorded.origin
        self.turns.append(origin.loop)
        made = [spec.shape for spec in recorded.specs]
        flops, override = self._flops(node, self._tensor, made)
        self.ops.append(
            Op(
                id=len(self.ops),
                target=target,
                arguments=arguments,
                inputs=inputs,
                outputs=outputs,
                module=origin.module,
                call=origin.call,
                part=origin.part,
                kind=kind,
                family="other",
                function=origin.function,
                source=origin.source,
                flops_torch=flops,
                facts={**recorded.facts, **override},
                assumptions=tuple(sorted(recorded.taint)),
                stream=recorded.stream,
                collective=recorded.collective,
            )
        )

    def _output(self, spec: taperecords.Spec, role: str) -> int:
        """The value of one output; a storage that is kept past the step has another role."""
        if spec.storage in self._kv:
            return self._value(spec, "kv")
        if spec.storage in self._gradients:
            first = spec.storage not in self._owners
            return self._value(spec, "gradients", self._gradients[spec.storage] if first else "")
        if spec.storage in self._unsharded:
            return self._value(spec, "weights", self._unsharded[spec.storage])
        return self._value(spec, role)

    def _tensor(self, node: fx.Node) -> Tensor:
        return self.values[self._single[node]]

    def _schema(self, func: Any) -> tuple[str, tuple[str, ...]]:
        schema = self._names.get(func)
        if schema is None:
            names = tuple(a.name for a in func._schema.arguments)
            full = f"{func.namespace}.{func._opname}.{func._overloadname}"
            schema = self._names[func] = (full, names)
        return schema

    def _argument(self, item: Any) -> Argument:
        if isinstance(item, fx.Node):
            return Ref(self._single[item])
        if isinstance(item, (list, tuple)):
            return tuple(self._argument(x) for x in item)
        if item is None or isinstance(item, (bool, int, float, str)):
            return one_nan(item)
        return _text(item)


def _text(item: Any) -> str:
    """An argument that is no tensor and no number, in words that are the same in every run."""
    if isinstance(item, complex):
        return f"complex:{item.real!r},{item.imag!r}"
    if isinstance(item, torch.dtype):
        return f"dtype:{dtype_name(item)}"
    if isinstance(item, torch.Generator):  # its text has its address in memory
        return f"Generator:{item.initial_seed()}"
    if isinstance(item, torch.UntypedStorage):  # its text has its bytes
        return f"UntypedStorage:{item.nbytes()}"
    return f"{type(item).__name__}:{item}"


def _is_called(node: fx.Node) -> bool:
    """Whether a node stands for a call that repeats a block: variables of its caller hold the
    arguments meanwhile."""
    recorded = node.meta.get(META_KEY)
    return isinstance(recorded, RepeatedCall) and recorded.block.part == "forward"


class _TorchFlops:
    """FLOPs of an op by torch's registry; None without a formula.

    Most formulas take sizes, and torch wraps them in a function of tensors: they are called
    without it, which would look for tensors in every argument.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, bool, bool]] = {}

    def _formula(self, packet: Any) -> tuple[Any, bool, bool]:
        """The formula of an op, whether it takes sizes, and whether it is torch's own."""
        formula = flop_registry.get(packet)
        if formula is None:
            return None, False, True
        sized = getattr(formula, "__code__", None) is _OF_SIZES
        own = inspect.unwrap(formula).__module__.partition(".")[0] == "torch"
        return (formula.__wrapped__ if sized else formula), sized, own

    def __call__(
        self, node: fx.Node, tensor_of: Callable[[fx.Node], Tensor], made: Sequence[Any]
    ) -> tuple[int | None, dict[str, int]]:
        """The FLOPs of a node whose outputs have the sizes `made`, and the count of a formula that
        somebody registered with torch, which stands above any rule."""
        target: Any = node.target
        packet = target.overloadpacket
        known = self._known.get(packet)
        if known is None:
            known = self._known[packet] = self._formula(packet)
        formula, sized, own = known
        if formula is None:
            return None, {}
        change = _size if sized else _stub
        outputs = (
            [*map(torch.Size, made)] if sized else [torch.empty(s, device="meta") for s in made]
        )
        out = {"out_shape" if sized else "out_val": _in_place(target, node.args, outputs)}
        named = {name: _with(item, tensor_of, change) for name, item in node.kwargs.items()}
        try:
            flops = int(formula(*_with(node.args, tensor_of, change), **named, **out))
        except _REFUSED:
            return None, {}
        return flops, ({} if own else {"flops_given": flops})


_OF_SIZES = shape_wrapper(len).__code__  # type: ignore[no-untyped-call]
"""The code of torch's function around a formula that takes sizes."""
_REFUSED = (AssertionError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
"""What a formula raises for sizes that it refuses."""


def _empty(target: Any, specs: Sequence[taperecords.Spec]) -> bool:
    """Whether all that an op makes has no elements, so that it returns at once.

    Where the values decide how many there are, it has to look at them first.
    """
    return all(0 in spec.shape for spec in specs) and _LOOKS.isdisjoint(getattr(target, "tags", ()))


_LOOKS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _in_place(target: Any, args: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """The result of an op, tensors or sizes: one, or several, None where output_mask wants none."""
    names = [argument.name for argument in target._schema.arguments]
    place = names.index("output_mask") if "output_mask" in names else len(args)
    if place < len(args) and sum(args[place]) == len(outputs):
        left = iter(outputs)
        return tuple(next(left) if wanted else None for wanted in args[place])
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _with(
    item: Any, tensor_of: Callable[[fx.Node], Tensor], change: Callable[[Tensor], Any]
) -> Any:
    """Arguments with something else in place of their nodes."""
    if isinstance(item, fx.Node):
        return change(tensor_of(item))
    if isinstance(item, (list, tuple)):
        return [_with(x, tensor_of, change) for x in item]
    return item


def _size(tensor: Tensor) -> Any:
    return torch.Size(tensor.shape)


def _stub(tensor: Tensor) -> TorchTensor:
    return torch.empty_strided(tensor.shape, tensor.stride, device="meta")
