"""Roles of storages that ops make, and blocks written in place of the calls that repeat them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from rooftrace.graph import Argument, Neighbour, Op, OpGraph, Ref, Tensor, in_order, refs
from rooftrace.tracer.lowering.blocks import NotAlikeError
from rooftrace.tracer.recording import ops as traits

# -- roles -----------------------------------------------------------------------------------------
# Whose bytes a value is that an op makes.


def with_filled_roles(values: Sequence[Tensor], ops: Iterable[Op]) -> tuple[Tensor, ...]:
    """The values; a tensor allocated before it was filled has the role of the filling op."""
    roles = _filled_roles(values, list(ops))
    if not roles:
        return tuple(values)
    return tuple(
        replace(value, role=roles[value.storage]) if value.storage in roles else value
        for value in values
    )


def _filled_roles(values: Sequence[Tensor], ops: Sequence[Op]) -> dict[int, str]:
    """The roles of storages that an op allocates and a later one fills, by the inputs of that one.

    A buffer that weights are gathered in, or gradients are sent from, is temporary.
    """
    allocated = {
        values[value].storage
        for op in ops
        if op.name in traits.UNINITIALISED
        for value in op.outputs
        if values[value].role == "constants"
    }
    roles: dict[int, str] = {}
    for op in ops:
        written = {values[value].storage for value in op.outputs} & allocated - roles.keys()
        if not written or op.kind == "view":
            continue
        read = {values[value].storage for value in op.inputs} - written
        kinds = {roles.get(storage, values[storage].role) for storage in read}
        for storage in written:
            copies = op.collective is not None or kinds <= {"constants", "weights", "temporary"}
            temporary = copies and "activations" not in kinds and kinds != {"constants"}
            roles[storage] = "temporary" if temporary else made_role(op.target, op.part, kinds)
    return {storage: role for storage, role in roles.items() if role != "constants"}


def made_role(target: str, part: str, inputs: Collection[str]) -> str:
    """The role of a new storage, from the op that makes it and the roles of its inputs.

    Tensors kept past the step have another role, set when the step is over.
    """
    if part in ("backward", "optimizer"):
        return "temporary"
    if traits.draws(target):
        return "activations"
    roles = set(inputs)
    if roles <= {"constants"}:
        return "constants"
    if roles <= {"constants", "weights"}:
        return "temporary"  # a cast or rearranged copy of weights, made anew every step
    return "activations"


# -- inline ----------------------------------------------------------------------------------------
# Blocks in place of the calls that repeat them: the last step of lowering a graph with `calls`.
#
# Until here a repeated call is one op, "rooftrace.repeated", and `fold` makes one of the call that
# was recorded too: equal layers are found and rolled without writing their blocks out.

REPEATED = "rooftrace.repeated.default"
_KEPT = ("kv", "gradients")
"""Roles of tensors that outlive the step; their ops do not determine them."""


@dataclass(frozen=True, slots=True)
class Template:
    """A recorded block: its ops, their external inputs, their results, its outputs.

    inputs: values, each with the one that owns its bytes.  values: the tensors made, by id.  Ids
    are those of the graph that it was recorded in.
    """

    module: str
    call: int
    source: str
    ops: tuple[Op, ...]
    inputs: tuple[tuple[int, int], ...]
    values: Mapping[int, Tensor]
    results: tuple[int, ...]
    assumptions: tuple[int, ...]
    first: int = 0

    @property
    def part(self) -> str:
        """The part of the step that it belongs to."""
        return self.ops[0].part

    @property
    def numbered(self) -> list[tuple[bool, int]]:
        """Ids of the values made, in order, and between them places of inputs (constants) that
        appear there; each with whether it is of an input."""
        start = min(self.values)
        places = [(v, (True, place)) for place, (v, _) in enumerate(self.inputs) if v > start]
        made = [(value, (False, value)) for value in self.values]
        return [item for _, item in sorted(made + places)]


def template(
    graph: OpGraph,
    module: str,
    call: int,
    source: str,
    numbers: range,
    inputs: Sequence[int],
    results: Sequence[int],
    assumptions: Sequence[int],
) -> Template:
    """The block of some ops of a graph that stand side by side."""
    ops = graph.ops[numbers.start : numbers.stop]
    return Template(
        module=module,
        call=call,
        source=source,
        ops=ops,
        inputs=tuple((value, graph.values[value].storage) for value in inputs),
        values={value: graph.values[value] for op in ops for value in op.outputs},
        results=tuple(results),
        assumptions=tuple(assumptions),
        first=numbers.start,
    )


def repeated_call(
    number: int,
    block: int,
    inputs: tuple[Argument, ...],
    outputs: tuple[int, ...],
    module: str,
    call: int,
    part: str,
    source: str,
    assumptions: tuple[int, ...],
) -> Op:
    """The op that stands for a call which repeats a block, by its number among the templates."""
    arguments: dict[str, Argument] = {"block": block, "inputs": inputs}
    return Op(
        id=number,
        target=REPEATED,
        arguments=arguments,
        inputs=tuple(refs(arguments)),
        outputs=outputs,
        module=module,
        call=call,
        part=part,
        source=source,
        assumptions=assumptions,
    )


def fold(
    graph: OpGraph, templates: Sequence[Template], twins: Sequence[tuple[int, Template]] = ()
) -> OpGraph:
    """The graph with one op for the recorded call of each block, where only its results are used.

    The graph is that which the templates were taken from.  twins: ops that stand there as in a
    block, with the number of this block.
    """
    if not templates:
        return graph
    inside: dict[int, tuple[int, Template]] = {}
    owners: dict[int, int] = {}
    for number, block in (*reversed(list(enumerate(templates))), *twins):  # an inner one ends first
        span = range(block.first, block.first + len(block.ops))
        if inside.keys().isdisjoint(span):
            hidden = _hidden(graph, block, span)
            if hidden is not None:
                inside.update(dict.fromkeys(span, (number, block)))
                owners |= hidden
    kept = [value for value in range(len(graph.values)) if value not in owners]
    ids = {value: index for index, value in enumerate(kept)}
    ids |= {value: ids[owner] for value, owner in owners.items() if owner in ids}

    ops: list[Op] = []
    for op in graph.ops:
        if op.id not in inside:
            ops.append(replace(_renumbered(op, ids), id=len(ops)))
            continue
        number, block = inside[op.id]
        if op.id == block.first:
            inputs = tuple(Ref(ids[value]) for value, _ in block.inputs)
            outputs = tuple(ids[value] for value in block.results)
            taken = block.assumptions
            where = block.module, block.call, block.part, block.source
            call = repeated_call(len(ops), number, inputs, outputs, *where, taken)
            ops.append(replace(call, holds=_held_by_caller(block, templates[number], ids)))
    return graph.replace(
        values=tuple(
            replace(
                graph.values[value],
                storage=ids[graph.values[value].storage],
                then=_moved(graph.values[value].then, ids),
            )
            for value in kept
        ),
        ops=tuple(ops),
        inputs=tuple(ids[value] for value in graph.inputs),
        outputs=tuple(ids[value] for value in graph.outputs),
    )


def _held_by_caller(block: Template, written: Template, ids: Mapping[int, int]) -> tuple[Ref, ...]:
    """Values that variables of the caller hold while the block runs: in this call alone.

    written: the block that will be written in its place, whose ops hold the same values.
    """
    inner = {*block.values, *(value for pair in block.inputs for value in pair)}
    if block is not written:
        inner = set(block.values)
    there = dict(zip(_known_to(block), _known_to(written), strict=True))
    held = (
        ref
        for op, other in zip(block.ops, written.ops, strict=True)
        for ref in op.holds
        if ref.id not in inner and ref.id in ids
        if there.get(ref.id) not in {item.id for item in other.holds}
    )
    return in_order(Ref(ids[ref.id], _moved(ref.then, ids), ref.every) for ref in held)


def _known_to(block: Template) -> list[int]:
    """The values that a block reads or makes, in an order that is that of its twins too."""
    return [*(value for pair in block.inputs for value in pair), *block.values]


def _hidden(graph: OpGraph, block: Template, span: range) -> dict[int, int] | None:
    """The values that only the block uses, each with the result that shares its bytes, or itself.

    None where something outside uses one.
    """
    results = dict.fromkeys(block.results)
    hidden = {value: value for value in block.values if value not in results}
    for value in reversed(results):
        owner = graph.values[value].storage
        if owner in hidden:
            hidden[owner] = value
    for op in graph.ops:
        if op.id not in span and any(value in hidden for value in op.inputs):
            return None
    if any(value in hidden for value in graph.outputs):
        return None
    alone = {value for value, owner in hidden.items() if value == owner}
    views = (t.storage for v, t in enumerate(graph.values) if v not in block.values)
    return None if any(storage in alone for storage in views) else hidden


def inline(graph: OpGraph, templates: Sequence[Template]) -> OpGraph:
    """The graph with every repeated call written out.

    Raises NotAlikeError where a block reads from its neighbour in two ways at once.
    """
    if not any(op.target == REPEATED for op in graph.ops):
        return graph
    filled: list[Template] = []
    for block in templates:
        filled.append(_whole(block, filled))
    return _Inlined(graph.values, graph.ops, filled).graph(graph)


def _whole(block: Template, others: Sequence[Template]) -> Template:
    """A block without inner repeated calls."""
    if not any(op.target == REPEATED for op in block.ops):
        return block
    size = 1 + max(*block.values, *(max(pair) for pair in block.inputs))
    owners = dict(block.inputs)
    absent = Tensor((), "fp32", (), "constants", 0)
    values = [block.values.get(i, replace(absent, storage=owners.get(i, i))) for i in range(size)]
    done = _Inlined(values, block.ops, others)
    return Template(
        module=block.module,
        call=block.call,
        source=block.source,
        ops=tuple(done.ops),
        inputs=tuple((done.ids[value], done.ids[owner]) for value, owner in block.inputs),
        values={value: done.values[value] for op in done.ops for value in op.outputs},
        results=tuple(done.ids[i] for i in block.results),
        assumptions=block.assumptions,
    )


class _Inlined:
    """Values and ops with the blocks written out.  ids: the new id of each old value."""

    def __init__(
        self, values: Sequence[Tensor], ops: Sequence[Op], templates: Sequence[Template]
    ) -> None:
        self._templates = templates
        self.ids, self._inner, count = self._numbered(values, ops)
        made: list[Tensor | None] = [None] * count
        for value, tensor in enumerate(values):
            made[self.ids[value]] = replace(
                tensor, storage=self.ids[tensor.storage], then=_moved(tensor.then, self.ids)
            )
        self.ops: list[Op] = []
        for op in ops:
            if op.target == REPEATED:
                call = _renumbered(op, self.ids)
                kept = {
                    self.ids[v]: (values[v].role, values[v].name)
                    for v in reversed(op.outputs)
                    if values[v].role in _KEPT
                }
                instance = _WrittenCall(self._template(op), call, self._inner[op.id], kept)
                self.ops += instance.write(made, len(self.ops))
            else:
                self.ops.append(replace(_renumbered(op, self.ids), id=len(self.ops)))
        self.values = [_owned(made, tensor) for tensor in made if tensor is not None]
        used = self._last_used()
        self.ops = [self._with_owners(op, used) if op.holds else op for op in self.ops]

    def _last_used(self) -> dict[int, int]:
        """By storage, the last op that reads or writes it in each iteration that has one."""
        used: dict[int, int] = {}
        for op in self.ops:
            for owner in {self.values[i].storage for i in (*op.inputs, *op.outputs)}:
                if set(self.values[owner].repeats) <= set(op.repeats):
                    used[owner] = op.id
        return used

    def _with_owners(self, op: Op, used: Mapping[int, int]) -> Op:
        """An op that holds the owners of its bytes; a call's argument may be a view of another.

        Values that later ops use live on anyway, and are left out.
        """
        owners = [self._with_owner(ref) for ref in op.holds]
        touched = {self.values[i].storage for i in (*op.inputs, *op.outputs)}
        touched |= {ref.id for ref in owners if ref == Ref(ref.id) and used.get(ref.id, 0) > op.id}
        return replace(op, holds=in_order(ref for ref in owners if ref.id not in touched))

    def _with_owner(self, ref: Ref) -> Ref:
        tensor = self.values[ref.id]
        then = ref.then or tensor.then
        if then is not None:
            then = replace(then, value=self.values[then.value].storage)
        return replace(ref, id=tensor.storage, then=then)

    def graph(self, graph: OpGraph) -> OpGraph:
        """`graph` with these values and ops."""
        return graph.replace(
            values=tuple(self.values),
            ops=tuple(self.ops),
            inputs=tuple(self.ids[i] for i in graph.inputs),
            outputs=tuple(self.ids[i] for i in graph.outputs),
            repeats=tuple(
                replace(r, names={self.ids[v]: names for v, names in r.names.items()})
                for r in graph.repeats
            ),
        )

    def _template(self, op: Op) -> Template:
        return self._templates[op.arguments["block"]]

    def _numbered(
        self, values: Sequence[Tensor], ops: Sequence[Op]
    ) -> tuple[dict[int, int], dict[int, dict[int, int]], int]:
        """New ids of old values, and of the values of each block by the id of its call."""
        calls = {op.outputs[0]: op for op in ops if op.target == REPEATED}
        elsewhere = {value for op in calls.values() for value in op.outputs}
        elsewhere.update(
            op.arguments["inputs"][place].id
            for op in calls.values()
            for outside, place in self._template(op).numbered
            if outside
        )
        ids: dict[int, int] = {}
        inner: dict[int, dict[int, int]] = {}
        count = 0
        for value in range(len(values)):
            if value in calls:
                op = calls[value]
                block = self._template(op)
                inner[op.id] = {}
                for outside, item in block.numbered:
                    if outside:
                        ids[op.arguments["inputs"][item].id] = count
                    else:
                        inner[op.id][item] = count
                    count += 1
                made = (inner[op.id][v] for v in block.results)
                ids.update(zip(op.outputs, made, strict=True))
            elif value not in elsewhere:
                ids[value] = count
                count += 1
        return ids, inner, count


def _owned(values: Sequence[Tensor | None], tensor: Tensor) -> Tensor:
    """The tensor with the owner of its bytes, which a result of a call may only be a view of."""
    storage, then = _owner(values, tensor.storage), tensor.then
    if then is not None:
        then = replace(then, value=_owner(values, then.value))
        owner = values[then.value]
        if owner is None or then.repeat not in owner.repeats:
            raise NotAlikeError
    if storage == tensor.storage and then == tensor.then:
        return tensor
    return replace(tensor, storage=storage, then=then)


def _owner(values: Sequence[Tensor | None], value: int) -> int:
    tensor = values[value]
    while tensor is not None and tensor.storage != value:
        value = tensor.storage
        tensor = values[value]
    return value


class _WrittenCall:
    """One block in place of one call.  ids: new ids of the values that the block makes.

    kept: role and name of those of the call's results that outlive the step, as a cache.
    """

    def __init__(
        self, block: Template, call: Op, ids: Mapping[int, int], kept: Mapping[int, tuple[str, str]]
    ) -> None:
        self._block, self._call, self._ids = block, call, ids
        self._kept = {
            block.values[value].storage: kept[output]
            for value, output in zip(block.results, call.outputs, strict=True)
            if output in kept
        }
        self._given: dict[int, Ref] = {}
        self._bytes: dict[int, Ref] = {}
        for (value, owner), ref in zip(block.inputs, call.arguments["inputs"], strict=True):
            self._given[value] = self._bytes[owner] = ref
        self._assumptions = dict(zip(block.assumptions, call.assumptions, strict=True))

    def write(self, values: list[Tensor | None], first: int) -> list[Op]:
        """Put the block's results into `values`; its ops, numbered from `first` on."""
        ops = [self._op(op, first + position) for position, op in enumerate(self._block.ops)]
        ops[-1] = replace(ops[-1], holds=in_order((*ops[-1].holds, *self._call.holds)))
        for old, op in zip(self._block.ops, ops, strict=True):
            roles = {tensor.role for v in op.inputs if (tensor := values[v]) is not None}
            role = made_role(op.target, op.part, roles)
            for value, new in zip(old.outputs, op.outputs, strict=True):
                values[new] = self._tensor(value, role, values)
        return ops

    def _tensor(self, value: int, role: str, values: Sequence[Tensor | None]) -> Tensor:
        """A value that the block makes.  role: that of a new storage which nothing keeps."""
        tensor = self._block.values[value]
        then = _moved(tensor.then, self._ids)
        if tensor.storage in self._ids:
            storage = self._ids[tensor.storage]
        else:
            storage, neighbour = self._outside(self._bytes[tensor.storage], values)
            if then is not None and neighbour is not None:
                raise NotAlikeError
            then = then or neighbour
        owner = values[storage] if tensor.storage != value else None
        name = self._path(tensor.name)
        if tensor.storage in self._kept:
            role, own_name = self._kept[tensor.storage]
            name = own_name if own_name and owner is None else name
        return replace(
            tensor,
            name=name,
            role=role if owner is None else owner.role,
            storage=storage,
            repeats=(*self._call.repeats, *tensor.repeats),
            then=then,
        )

    @staticmethod
    def _outside(ref: Ref, values: Sequence[Tensor | None]) -> tuple[int, Neighbour | None]:
        """The storage of an argument, also in iterations that get it from a neighbour."""
        argument = values[ref.id]
        assert argument is not None
        if ref.then is not None and argument.then is not None:
            raise NotAlikeError
        return argument.storage, ref.then or argument.then

    def _op(self, op: Op, index: int) -> Op:
        arguments = {k: self._argument(v) for k, v in op.arguments.items()}
        return replace(
            op,
            id=index,
            arguments=arguments,
            inputs=tuple(refs(arguments)),
            outputs=tuple(self._ids[v] for v in op.outputs),
            module=self._path(op.module),
            source=self._call.source if op.source == self._block.source else op.source,
            assumptions=tuple(sorted(self._assumptions[a] for a in op.assumptions)),
            repeats=(*self._call.repeats, *op.repeats),
            holds=in_order(self._holds(op)),
        )

    def _holds(self, op: Op) -> Iterator[Ref]:
        for ref in op.holds:
            if ref.id in self._ids or ref.id in self._given:
                with contextlib.suppress(NotAlikeError):
                    yield self._argument(ref)
            elif ref.id in self._bytes:
                yield self._bytes[ref.id]

    def _argument(self, item: Argument) -> Argument:
        if type(item) is tuple:
            return tuple(self._argument(x) for x in item)
        if type(item) is not Ref:
            return item
        then = _moved(item.then, self._ids)
        if item.id in self._ids:
            return Ref(self._ids[item.id], then, item.every)
        ref = self._given[item.id]
        if (then and ref.then) or ref.every:
            raise NotAlikeError
        return Ref(ref.id, then or ref.then, item.every)

    def _path(self, path: str) -> str:
        """A module path below the recorded module, below this one."""
        old = self._block.module
        if path == old or path.startswith(f"{old}."):
            return self._call.module + path[len(old) :]
        return path


def _renumbered(op: Op, ids: Mapping[int, int]) -> Op:
    """The op on values that have other ids."""
    arguments = {name: _with_ids(item, ids) for name, item in op.arguments.items()}
    outputs = tuple([ids[value] for value in op.outputs])
    holds = in_order(_with_ids(ref, ids) for ref in op.holds if ref.id in ids)
    inputs = tuple(refs(arguments))
    return replace(op, arguments=arguments, inputs=inputs, outputs=outputs, holds=holds)


def _with_ids(item: Argument, ids: Mapping[int, int]) -> Argument:
    if type(item) is Ref:
        return Ref(ids[item.id], _moved(item.then, ids), item.every)
    return tuple([_with_ids(x, ids) for x in item]) if type(item) is tuple else item


def _moved(then: Neighbour | None, ids: Mapping[int, int]) -> Neighbour | None:
    return then and then.renumbered(ids)
