"""Graph edits: an editor, matches replaced by new ops, dead ops and needless work removed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.rewrites.dataflow import ValueFlow, reads_across
from rooftrace.graph import Argument, GraphError, Op, OpGraph, Ref, Tensor, assumptions, marks, refs

Match = TypeVar("Match")

ATTENTION = "rooftrace.attention.default"
ATTENTION_BACKWARD = "rooftrace.attention_backward.default"
LATENT_ATTENTION = "rooftrace.latent_attention.default"
PACKED_ATTENTION = "rooftrace.packed_attention.default"
PACKED_LATENT_ATTENTION = "rooftrace.packed_latent_attention.default"
_SWAP: Mapping[str, Argument] = {"dim0": 1, "dim1": 2}


class Editor:
    """A graph being rebuilt: new values are appended, ops go to a new list and are renumbered."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.repeats = list(graph.repeats)
        self.replaced: dict[int, int] = {}
        """Inputs and outputs of the step -> the values in their place."""
        self.moved: dict[int, int] = {}
        """Storages -> the storages that their values move to."""
        self._masks: dict[str, int] = {}

    @cached_property
    def flow(self) -> ValueFlow:
        """The dataflow of the graph before the edits."""
        return ValueFlow(self.graph)

    def value(
        self,
        shape: tuple[int, ...],
        dtype: str,
        role: str,
        repeats: tuple[int, ...],
        name: str = "",
        stride: tuple[int, ...] | None = None,
    ) -> int:
        """A new value, contiguous by default."""
        index = len(self.values)
        stride = Tensor.contiguous(shape) if stride is None else stride
        self.values.append(Tensor(shape, dtype, stride, role, index, name=name, repeats=repeats))
        return index

    def view(
        self, of: Ref, shape: tuple[int, ...], stride: tuple[int, ...], repeats: tuple[int, ...]
    ) -> int:
        """A new value in the storage of another one."""
        index, source = len(self.values), self.values[of.id]
        then = source.then if source.then and source.then.repeat in repeats else None
        if of.then is not None:
            then = replace(of.then, value=self.values[of.then.value].storage)
        self.values.append(
            replace(source, shape=shape, stride=stride, name="", repeats=repeats, then=then)
        )
        return index

    def named_like(
        self, value: int, parts: Sequence[int], join: Callable[[list[str]], str]
    ) -> None:
        """Name a value in each iteration by the names of its parts there."""
        for position, repeat in enumerate(self.repeats):
            if all(part in repeat.names for part in parts):
                columns = zip(*(repeat.names[part] for part in parts), strict=True)
                names = {**repeat.names, value: tuple(join(list(column)) for column in columns)}
                self.repeats[position] = replace(repeat, names=names)

    def kernel_for(self, op: Op) -> Op:
        """The op as a library's kernel: without the assumption that it is a fallback."""
        noted = self.graph.assumptions
        rest = tuple(n for n in op.assumptions if noted[n].kind != assumptions.FALLBACK)
        return op.relabelled(assumptions=rest)

    def emit(
        self,
        like: Op,
        target: str,
        arguments: Mapping[str, Argument],
        outputs: tuple[int, ...],
        kind: str = "kernel",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Append an op of the module, part and family of `like`."""
        self.ops.append(
            taking(
                like,
                arguments,
                target=target,
                outputs=outputs,
                kind=kind,
                facts=dict(facts or {}),
                flops_torch=None,
            )
        )

    def made(
        self,
        like: Op,
        target: str,
        arguments: Mapping[str, Argument],
        shape: tuple[int, ...],
        dtype: str,
        role: str = "activations",
        facts: Mapping[str, Any] | None = None,
    ) -> Ref:
        """The new value of a new kernel."""
        out = self.value(shape, dtype, role, like.repeats)
        self.emit(like, target, arguments, (out,), facts=facts)
        return Ref(out)

    def constant_mask(self, name: str, *sizes: int) -> int:
        """A constant bool[S, L] of this name and sizes, shared by all attention of these sizes."""
        full_name = f"{name}_mask_{'x'.join(map(str, sizes))}"
        if full_name not in self._masks:
            self._masks[full_name] = self.value(sizes[:2], "bool", "constants", (), full_name)
        return self._masks[full_name]

    # -- views -------------------------------------------------------------------------------------

    def view_op(
        self,
        like: Op,
        target: str,
        of: Ref,
        arguments: Mapping[str, Argument],
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Ref:
        """The new value of a view op on `of`."""
        out = self.view(of, shape, stride, like.repeats)
        self.emit(like, target, {"self": of, **arguments}, (out,), kind="view")
        return Ref(out)

    def viewed(
        self, like: Op, of: Ref, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> Ref:
        """A value in another shape, contiguous by default."""
        stride = Tensor.contiguous(shape) if stride is None else stride
        return self.view_op(like, "aten.reshape.default", of, {"shape": shape}, shape, stride)

    def reshape(self, like: Op, of: Ref, value: int) -> None:
        """Emit the reshape of `of` that makes an existing value."""
        shape = self.values[value].shape
        self.emit(like, "aten.reshape.default", {"self": of, "shape": shape}, (value,), kind="view")

    def sliced(self, like: Op, of: Ref, dim: int, start: int, end: int) -> Ref:
        """Elements `start` to `end` along one dimension; the value itself if these are all."""
        source = self.values[of.id]
        if (start, end) == (0, source.shape[dim]):
            return of
        shape = (*source.shape[:dim], end - start, *source.shape[dim + 1 :])
        cut: dict[str, Argument] = {"dim": dim, "start": start, "end": end}
        return self.view_op(like, "aten.slice.Tensor", of, cut, shape, source.stride)

    def permuted(self, like: Op, of: Ref, dims: tuple[int, ...]) -> Ref:
        """A value with its dimensions in another order."""
        source = self.values[of.id]
        shape, stride = (tuple(t[d] for d in dims) for t in (source.shape, source.stride))
        return self.view_op(like, "aten.permute.default", of, {"dims": dims}, shape, stride)

    def transposed(self, like: Op, item: Ref) -> Ref:
        """The [H, b, a] view of an [H, a, b] value."""
        source = self.values[item.id]
        shape, stride = ((t[0], t[2], t[1]) for t in (source.shape, source.stride))
        return self.view_op(like, "aten.transpose.int", item, _SWAP, shape, stride)

    def transpose(self, like: Op, item: Ref, value: int) -> None:
        """Emit the swap of dimensions 1 and 2 of `item` that makes an existing value."""
        swap: dict[str, Argument] = {"self": item, **_SWAP}
        self.emit(like, "aten.transpose.int", swap, (value,), kind="view")

    # -- values of the graph, made in another way --------------------------------------------------

    def move(self, value: int, storage: int) -> None:
        """Move a value, and all others of its storage, to another storage."""
        for member in self.flow.members[self.graph.values[value].storage]:
            self.values[member] = replace(self.values[member], storage=storage)

    def becomes(self, like: Op, value: int, made: Ref) -> None:
        """Let a value be a reshape of a new one."""
        self.move(value, made.id)
        self.reshape(like, made, value)

    def mended(self) -> OpGraph:
        """The new graph, verified, without what the edits left without a use; the same graph where
        nothing was edited."""
        graph, others = self.graph, (self.replaced, self.moved)
        if not any(others) and (self.ops, self.values) == ([*graph.ops], [*graph.values]):
            return graph
        return released(without_left_behind(self.done(), graph), graph).verify()

    def done(self) -> OpGraph:
        """The new graph."""
        graph, moved = self.graph, self.moved
        fields = {
            "values": tuple(
                replace(t, storage=moved[t.storage]) if t.storage in moved else t
                for t in self.values
            ),
            "repeats": tuple(self.repeats),
            "inputs": tuple(self.replaced.get(value, value) for value in graph.inputs),
            "outputs": tuple(self.replaced.get(value, value) for value in graph.outputs),
        }
        return graph.with_ops(self.ops, **fields)


def reading_others(op: Op, now: Mapping[int, int]) -> Op:
    """An op that reads and holds other values in place of some; those of neighbours stay."""
    if now.keys().isdisjoint((*op.inputs, *(ref.id for ref in op.holds))):
        return op

    def read(item: Argument) -> Argument:
        if isinstance(item, tuple):
            return tuple(map(read, item))
        if isinstance(item, Ref) and item.then is None and item.id in now:
            return replace(item, id=now[item.id])
        return item

    arguments = {name: read(item) for name, item in op.arguments.items()}
    return taking(op, arguments, holds=read(op.holds))


def taking(op: Op, arguments: Mapping[str, Argument], **fields: Any) -> Op:
    """The op with other arguments, and so other inputs; fields: others of it that change."""
    return replace(op, arguments=dict(arguments), inputs=tuple(refs(arguments)), **fields)


def operand(op: Op, name: str) -> Ref:
    """A tensor argument by schema name.  Raises GraphError where it is none."""
    item = op.arguments.get(name)
    if not isinstance(item, Ref):
        raise GraphError(f"op {op.id} ({op.target}): expected a tensor as {name!r}, got {item!r}")
    return item


# -- replacement -----------------------------------------------------------------------------------


class Region(Protocol):
    """Ops that a rewrite replaces.  inside: their ids, without that of the op at the end."""

    @property
    def inside(self) -> frozenset[int]: ...


AnyRegion = TypeVar("AnyRegion", bound=Region)


def rewritten(
    graph: OpGraph,
    names: Collection[str],
    find: Callable[[ValueFlow, Op], AnyRegion | None],
    emit: Callable[[Editor, AnyRegion], object],
) -> tuple[OpGraph, int]:
    """Replace the regions that `find` sees at the end of ops of these names; how often they ran."""
    flow = ValueFlow(graph)
    candidates = (op for op in graph.ops if op.name in names)
    regions = {op.id: region for op in candidates if (region := find(flow, op)) is not None}
    inside = frozenset[int]().union(*(region.inside for region in regions.values()))
    return with_matches(graph, regions, emit, inside)


def with_matches(
    graph: OpGraph,
    matches: Mapping[int, Match],
    emit: Callable[[Editor, Match], object],
    dropped: Container[int] = (),
) -> tuple[OpGraph, int]:
    """`edited`, without the ops that are left without a use, and how often the matched ops ran."""
    if not matches:
        return graph, 0
    count = sum(graph.times(graph.ops[number]) for number in matches)
    return without_left_behind(edited(graph, matches, emit, dropped), graph), count


def edited(
    graph: OpGraph,
    matches: Mapping[int, Match],
    emit: Callable[[Editor, Match], object],
    dropped: Container[int],
) -> OpGraph:
    """The graph with what `emit` writes for each match, by the id of its op, and without others."""
    edit = Editor(graph)
    for op in graph.ops:
        if op.id in matches:
            emit(edit, matches[op.id])
        elif op.id not in dropped:
            edit.ops.append(op)
    return edit.done()


# -- dead ops --------------------------------------------------------------------------------------


def without_dead_ops(graph: OpGraph) -> tuple[OpGraph, int]:
    """Remove ops that neither make an output nor write into something that outlives the step.

    Returns the graph and how many kernels were left out.
    """
    kept = _used(graph)
    if len(kept) == len(graph.ops):
        return graph, 0
    smaller = graph.with_ops(kept)
    before, after = (sum(map(side.times, side.kernels())) for side in (graph, smaller))
    return smaller, before - after


def without_left_behind(graph: OpGraph, before: OpGraph) -> OpGraph:
    """Remove the ops that a rewrite of `before` left without a use; unused ones of `before` stay.

    Values keep their ids in a rewrite, so ops are compared by the values that they make.
    """
    kept = _used(graph)
    if len(kept) < len(graph.ops):
        used = {op.id for op in kept}
        unused_before = {op.outputs for op in before.ops} - {op.outputs for op in _used(before)}
        kept = [op for op in graph.ops if op.id in used or op.outputs in unused_before]
    read_before = _read(before, before.ops)
    kept, read = _without_unread_views(graph, kept, read_before)
    gone = before.producers.keys() - {value for op in kept for value in op.outputs}
    gone |= set(before.external) & read_before - read
    return graph.with_ops(_released(op, gone) for op in kept)


def released(graph: OpGraph, before: OpGraph) -> OpGraph:
    """Ops hold no values that an op made in `before` and that no op makes any more."""
    gone = before.producers.keys() - graph.producers.keys()
    return graph.replace(ops=tuple(_released(op, gone) for op in graph.ops)) if gone else graph


def _released(op: Op, gone: Collection[int]) -> Op:
    """The op without the values in `gone` among those that it holds."""
    if not op.holds or not any(ref.id in gone for ref in op.holds):
        return op
    return op.relabelled(holds=tuple(ref for ref in op.holds if ref.id not in gone))


def _read(graph: OpGraph, ops: Sequence[Op]) -> set[int]:
    """The values that ops read, of this iteration or of another one, and outputs of the step."""
    read = {value for op in ops for value in op.inputs} | set(graph.outputs)
    neighbours = [ref.then for op in ops for ref in op.reads]
    neighbours += [tensor.then for tensor in graph.values if tensor.then is not None]
    return read | {then.value for then in neighbours if then is not None}


def _without_unread_views(
    graph: OpGraph, ops: list[Op], before: Collection[int]
) -> tuple[list[Op], set[int]]:
    """Ops without the views that nothing reads any more, among those read `before`; what they read.

    `_used` keeps views of external values, since they may be written.
    """
    while True:
        read = _read(graph, ops)
        kept = [
            op
            for op in ops
            if op.kind != "view"
            or not any(value in before for value in op.outputs)
            or any(i in read or graph.values[i].storage == i for i in op.outputs)
        ]
        if len(kept) == len(ops):
            return kept, read
        ops = kept


def _used(graph: OpGraph) -> list[Op]:
    """The ops that make an output, or write into something that outlives the step.

    An iteration also makes what the next iteration reads, up to its last op.
    """
    storage, ops = [t.storage for t in graph.values], graph.ops
    makers, last = defaultdict[int, list[int]](list), dict[int, int]()
    for op in ops:
        for value in op.outputs:
            makers[storage[value]].append(op.id)
        for repeat in op.repeats:
            last[repeat] = op.id
    eager = marks.eager_ops(ops)
    stack = [
        op.id
        for op in ops
        if not op.outputs or op.kind == "sync" or "writes" in op.facts or op.id in eager
    ]
    used = set(stack)
    ends = dict[int, int]()  # by storage: the ops before this one that make it are used
    reads = [(storage[value], len(ops)) for value in (*graph.outputs, *graph.external)]
    while True:
        for made, end in reads:
            if ends.get(made, 0) < end:
                ends[made] = end
                newly = [maker for maker in makers[made] if maker < end and maker not in used]
                used.update(newly)
                stack += newly
        if not stack:
            return [op for op in ops if op.id in used]
        op = ops[stack.pop()]
        reads = [(storage[value], op.id) for value in op.inputs]
        if op.repeats:
            reads += [(made, last.get(of, -1) + 1) for of, made in _read_across(graph, op)]


def _read_across(graph: OpGraph, op: Op) -> Iterator[tuple[int, int]]:
    """(repeat, storage) that an op reads of a neighbouring iteration, or that iterations share."""
    values = graph.values
    neighbours = [ref.then for ref in op.reads]
    neighbours += [values[i].then for i in (*op.inputs, *op.outputs)]
    for then in neighbours:
        if then is not None:
            yield then.repeat, values[then.value].storage
    for repeat in op.repeats:
        for storage in (values[i].storage for i in op.inputs):
            if repeat not in values[storage].repeats:
                yield repeat, storage


# -- other precisions ------------------------------------------------------------------------------


DOUBLES: Mapping[str, str] = {"fp64": "fp32", "complex128": "complex64"}
"""Precisions of 64 bits a number, and those of 32."""


def without_doubles(graph: OpGraph) -> OpGraph:
    """The graph whose values in fp64 are in fp32, without the casts between the two."""
    doubles = enumerate(t.dtype for t in graph.values)
    return recast(graph, {value: DOUBLES[was] for value, was in doubles if was in DOUBLES})


def cast_weights(graph: OpGraph) -> Mapping[int, str]:
    """Weights that are only read by casts to one precision, and that precision."""
    flow, casts = ValueFlow(graph), dict[int, str]()
    for value in graph.external:
        users, tensor = flow.users[value], graph.values[value]
        made = {graph.values[v].dtype for op in users for v in op.outputs} - {tensor.dtype}
        alone = flow.storage_users[tensor.storage] == users and value not in flow.escaping
        if tensor.role == "weights" and alone and {op.name for op in users} == {"aten._to_copy"}:
            casts |= dict.fromkeys([value], *made) if len(made) == 1 else {}
    return casts


def without_weight_casts(graph: OpGraph) -> OpGraph:
    """The graph whose weights are stored as each step casts them."""
    return recast(graph, cast_weights(graph))


def recast(graph: OpGraph, dtypes: Mapping[int, str]) -> OpGraph:
    """The graph with values in other precisions, without the casts that then change nothing."""
    edit, flow = Editor(graph), ValueFlow(graph)
    edit.values = [replace(t, dtype=dtypes.get(i, t.dtype)) for i, t in enumerate(graph.values)]
    casts = dict[int, int]()
    for op in graph.ops:
        if op.name == "aten._to_copy" and not reads_across(op):
            (made,), (source,) = op.outputs, op.inputs
            was, now = (
                [side[v].dtype for v in (source, made)] for side in (graph.values, edit.values)
            )
            strides = [edit.values[v].stride for v in (source, made)]
            written = {made, graph.values[source].storage} & flow.writers.keys()
            alike = now[0] == now[1] and strides[0] == strides[1]
            if was[0] != was[1] and alike and not written and made not in flow.escaping:
                casts[made] = source
    return without_values(edit, casts)


def without_values(edit: Editor, copies: Mapping[int, int]) -> OpGraph:
    """The graph whose readers of copies read the originals; elementwise results lie as these do."""
    graph, instead = edit.graph, dict[int, int]()
    for op in graph.ops:
        if not copies.keys().isdisjoint(op.outputs):
            (made,) = op.outputs
            instead[made] = source = instead.get(copies[made], copies[made])
            storage = edit.values[source].storage
            edit.moved[made] = edit.moved.get(storage, storage)
            continue
        pairs = [(graph.values[v], edit.values[instead.get(v, v)]) for v in op.inputs]
        op, rule = reading_others(op, instead), find_rule(op.target)
        if rule and rule.fusion == "pointwise" and any(a.stride != b.stride for a, b in pairs):
            like = pairs[0][1]
            for value in op.outputs:
                if edit.values[value].shape == like.shape and graph.values[value].storage == value:
                    edit.values[value] = replace(edit.values[value], stride=like.stride)
        edit.ops.append(op)
    return released(edit.done(), graph).verify()


HALVES = ("bf16", "fp16")
LOSSES = frozenset({"aten._log_softmax"})
NORMS = frozenset({"aten.native_layer_norm", "aten._fused_rms_norm", "aten.native_group_norm"})
"""Kernels that add up halves in fp32."""


def promoted(graph: OpGraph, casts: Collection[str] = ()) -> Mapping[int, str]:
    """Values that are wider than the numbers of the model, by the precision of these.

    They come from a half and a tensor in fp32 that is made of no activations, such as a buffer; or,
    with `casts`, from a cast for one of these kernels, which add up in fp32 anyway.  So are what is
    made of them up to the next cast, and their gradients.
    """
    half, flow = str(graph.model.get("dtype")), ValueFlow(graph)
    if half not in HALVES:
        return {}
    values, wide = graph.values, dict[int, str]()
    fixed = {v for v in graph.external if values[v].role in ("weights", "constants")}
    fixed |= {v for v, t in enumerate(values) if t.role == "constants"}
    for op in graph.ops:
        if op.part == "optimizer" or {values[v].dtype for v in op.outputs} != {"fp32"}:
            continue
        read = {v for v in op.inputs if values[v].shape}
        singles = {v for v in read if values[v].dtype == "fp32"}
        from_half = any(values[v].dtype == half for v in read)
        if op.name == "aten._to_copy":
            users = [u for u in flow.kernels_on(op.outputs[0]) if u.part == "forward"]
            starts = from_half and bool(users) and {user.name for user in users} <= {*casts}
            starts = starts and (casts is LOSSES or all(ends_in(flow, u, half) for u in users))
            late = flow.users[op.outputs[0]] if from_half and op.part == "backward" else ()
            starts |= any(not wide.keys().isdisjoint(user.inputs) for user in late)
        else:
            rule = find_rule(op.target)
            joins = rule is not None and rule.fusion == "pointwise" and op.part == "forward"
            starts = not casts and joins and from_half and bool(singles) and singles <= fixed
            grown = op.kind == "view" or not (singles - fixed - wide.keys())
            starts |= grown and not wide.keys().isdisjoint(op.inputs)
        if starts:
            wide |= dict.fromkeys(op.outputs, half)
    narrow = {v for v in fixed if values[v].dtype == "fp32" and flow.users.get(v)}
    wide |= {
        v: half
        for v in narrow
        if all(not wide.keys().isdisjoint(user.outputs) for user in flow.users[v])
    }
    return wide


def ends_in(flow: ValueFlow, op: Op, dtype: str, result: int | None = None) -> bool:
    """Whether a result of an op, the first by default, is only read by casts to a precision."""
    result = op.outputs[0] if result is None else result
    casts = [user for user in flow.kernels_on(result) if user.part == op.part]
    made = {flow.values[v].dtype for user in casts for v in user.outputs}
    names = {user.name for user in casts}
    return names == {"aten._to_copy"} and made == {dtype} and result not in flow.escaping


def without_promotions(graph: OpGraph, casts: Collection[str] = ()) -> OpGraph:
    """The graph whose promoted values are as narrow as the model."""
    return recast(graph, promoted(graph, casts))
