"""Work that the code could leave out: the graph without it, with the same results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.rewrites.dataflow import ValueFlow, dense_like, reads_across
from rooftrace.costmodels.rewrites.editing import (
    Editor,
    cast_weights,
    operand,
    reading_others,
    released,
    without_left_behind,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor


def without_waits(graph: OpGraph) -> OpGraph:
    """The graph without ops at which the host asks the device for a value."""
    return graph.with_ops(op for op in graph.ops if op.kind != "sync")


def without_checks(graph: OpGraph) -> OpGraph:
    """The graph without conditions that the host waits for, and what only they read."""
    rest = [op for op in graph.ops if op.kind != "sync" or not is_condition(graph, op)]
    if len(rest) == len(graph.ops):
        return graph
    return released(without_left_behind(graph.with_ops(rest), graph), graph)


def is_condition(graph: OpGraph, op: Op) -> bool:
    """Whether the host waits for one boolean."""
    return [(graph.values[v].dtype, graph.values[v].elements) for v in op.inputs] == [("bool", 1)]


def without_repeated_work(graph: OpGraph) -> OpGraph:
    """Ops of forward that make the same as an earlier one go, and those of all iterations too.

    The latter run once, before the first iteration.  torch.compile does the same to the steps that
    it differentiates (`fx_graph_cse` of functorch's partitioners).
    """
    edit, flow = Editor(graph), ValueFlow(graph)
    begins, front = dict[int, int](), dict[int, list[Op]]()
    first, instead = dict[Any, Op](), dict[int, int]()
    for op in graph.ops:
        for repeat in op.repeats:
            begins.setdefault(repeat, len(edit.ops))
        op = reading_others(op, instead)
        if not _is_pure(flow, op):
            edit.ops.append(op)
            continue
        read = [repeat for value in op.inputs for repeat in _repeats_of(edit, value)]
        depth = max((op.repeats.index(r) + 1 for r in read if r in op.repeats), default=0)
        inner = op.repeats if op.steps else op.repeats[:depth]
        same = first.setdefault((op.target, inner, key_of(op.arguments)), op)
        if (same is op and inner == op.repeats) or is_random(op):
            edit.ops.append(op)
            continue
        if same is not op:
            instead |= dict(zip(op.outputs, same.outputs, strict=True))
            edit.moved |= {v: edit.values[instead[v]].storage for v in op.outputs}
            continue
        for value in op.outputs:
            edit.values[value] = replace(edit.values[value], repeats=inner)
        place = begins[op.repeats[depth]]
        front.setdefault(place, []).append(replace(op, repeats=inner))
    edit.ops = [op for n, own in enumerate(edit.ops) for op in (*front.get(n, ()), own)]
    return released(edit.done(), graph).verify()


def _repeats_of(edit: Editor, value: int) -> tuple[int, ...]:
    """The repeats in whose iterations a value differs."""
    tensor = edit.values[value]
    return tensor.repeats + edit.values[tensor.storage].repeats


def _is_pure(flow: ValueFlow, op: Op) -> bool:
    """Whether an op of forward makes the same wherever it reads the same."""
    storages = {flow.values[value].storage for value in (*op.inputs, *op.outputs)}
    away = flow.escaping.isdisjoint(flow.values[value].storage for value in op.outputs)
    return (
        op.part == "forward" and is_plain(flow, op) and storages.isdisjoint(flow.writers) and away
    )


def is_plain(flow: ValueFlow, op: Op) -> bool:
    """Whether an op reads values of its iteration alone, and writes into none of them."""
    return (
        op.kind in ("kernel", "view")
        and op.collective is None
        and "writes" not in op.facts
        and not reads_across(op)
        and all(flow.values[value].then is None for value in (*op.inputs, *op.outputs))
    )


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers."""
    space, _, name = op.name.partition(".")
    drawn = name.removesuffix("_") in _RANDOM if space == "aten" else "random" in op.facts
    return drawn and op.kind != "view"


_NAMES = """
_cudnn_attention_backward _cudnn_attention_forward _cudnn_init_dropout_state _cudnn_rnn
_efficient_attention_forward _fill_mem_eff_dropout_mask _flash_attention_forward
_flash_attention_forward_no_dropout_inplace _fused_dropout _fused_sdp_choice _lstm_mps
_nested_tensor_softmax_with_shape _sample_dirichlet _scaled_dot_product_attention_math
_scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention
_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
_standard_gamma _triton_scaled_dot_attention alpha_dropout bernoulli binomial cauchy dropout
exponential feature_alpha_dropout feature_dropout geometric gru log_normal lstm miopen_rnn
multinomial native_dropout normal normal_functional poisson rand rand_like randint
randint_like randn randn_like random randperm rnn_relu rnn_tanh rrelu rrelu_with_noise
rrelu_with_noise_functional scaled_dot_product_attention uniform
"""
_RANDOM = frozenset(_NAMES.split())
"""ATen's ops that draw random numbers, or may, by their tags and generators."""


def key_of(item: Argument) -> Argument:
    """An argument as a key of a mapping."""
    if isinstance(item, Mapping):
        return tuple(sorted((name, key_of(value)) for name, value in item.items()))
    return tuple(map(key_of, item)) if isinstance(item, tuple) else (type(item), repr(item))


# -- what can be made before the steps, and what need not be multiplied ----------------------------


def made_before(graph: OpGraph) -> OpGraph:
    """The graph whose ops on weights alone, or on sizes alone, ran before the step.

    In training weights change; with a cache, or in a decode, so do sizes.
    """
    flow, values = ValueFlow(graph), graph.values
    casts, wide = cast_weights(graph), graph.phase in ("prefill", "decode", "requests")
    fixed = dict[int, bool]()  # by value, whether weights are among what it is made of
    if graph.phase != "training":
        weights = {v for v in graph.external if values[v].role == "weights"} - {*graph.inputs}
        fixed = {v: True for v in weights if values[v].storage not in flow.writers}
    before = set[int]()
    for op in graph.ops:
        is_fixed = all(v in fixed for v in op.inputs) and (op.inputs or not wide)
        if not is_fixed or not _is_pure(flow, op) or is_random(op) or op.assumptions:
            continue
        if op.kind == "kernel" and not casts.keys().isdisjoint(op.inputs):
            continue  # stored as it is cast: told apart
        fixed |= dict.fromkeys(op.outputs, any(fixed[v] for v in op.inputs))
        if op.kind == "kernel":
            before.add(op.id)
    if not before:
        return graph
    rest = graph.with_ops(op for op in graph.ops if op.id not in before)
    return released(without_left_behind(rest, graph), graph)


def looked_up(graph: OpGraph) -> OpGraph:
    """Products with rows that are one at an index and else zero look rows up; so do gradients."""
    edit = Editor(graph)
    for op in graph.ops:
        rows_read = _one_hot(edit.flow, op) if op.name == "aten.mm" else None
        if rows_read is None:
            edit.ops.append(op)
            continue
        indices, is_first = rows_read
        (out,), other = op.outputs, operand(op, "mat2" if is_first else "self")
        of = graph.values[other.id]
        rows = _flat(edit, op, indices)
        if is_first and edit.values[rows.id].elements == graph.values[out].shape[0]:
            edit.emit(op, "aten.embedding.default", {"weight": other, "indices": rows}, (out,))
            continue
        # the gradient of such a table: rows of gradients are added up by index
        turned = not is_first
        grad = edit.view_op(op, "aten.t.default", other, {}, of.shape[::-1], of.stride[::-1])
        shape = graph.values[out].shape
        how: dict[str, Argument] = {
            "grad_output": grad if turned else other,
            "indices": rows,
            "num_weights": shape[1 if turned else 0],
            "padding_idx": -1,
            "scale_grad_by_freq": False,
        }
        table = shape[::-1] if turned else shape
        made = edit.made(
            op, "aten.embedding_dense_backward.default", how, table, of.dtype, "gradients"
        )
        edit.becomes(op, out, made)
    return edit.mended()


def _one_hot(flow: ValueFlow, op: Op) -> tuple[Ref, bool] | None:
    """The indices of an operand of a product with one 1 in each row, and whether it is first."""
    for name in ("self", "mat2"):
        by = flow.kernel_of(operand(op, name).id)
        while by is not None and by.name == "aten._to_copy":
            by = flow.kernel_of(by.inputs[0])
        if by is not None and by.name == "aten.eq" and len(by.inputs) == 2 and not reads_across(by):
            counted = flow.kernel_of(by.inputs[1])
            if counted is not None and counted.name == "aten.arange":
                return Ref(by.inputs[0]), name == "self"
        if by is not None and by.name in ("aten.scatter", "aten.scatter_"):
            empty = flow.kernel_of(operand(by, "self").id)
            zeros = empty is not None and "zeros" in empty.name
            if zeros and by.arguments.get("value") == 1 and "index" in by.arguments:
                return operand(by, "index"), name == "self"
    return None


def _flat(edit: Editor, like: Op, indices: Ref) -> Ref:
    """Indices as one row."""
    return edit.viewed(like, indices, (edit.values[indices.id].elements,))


# -- equal work, one call after the other ----------------------------------------------------------

FEW = 4
"""Independent, equal products from which on one call for all is worth telling."""
_PRODUCTS = {
    "aten.mm": ("aten.bmm.default", ("self", "mat2")),
    "aten.addmm": ("aten.baddbmm.default", ("self", "batch1", "batch2")),
}
"""Products of matrices, and those of batches of them."""
_COUNTED = frozenset({*_PRODUCTS, "aten.bmm", "rooftrace.attention"})
"""Ops that are worth it, at least one."""
_SIMPLE = (Ref, int, float, str, tuple, type(None))
_ROWWISE = frozenset({"aten._softmax", "aten._log_softmax", "aten._safe_softmax"})


def batched(graph: OpGraph) -> OpGraph:
    """Equal ops that do not read each other are one op, with a dimension for them in front.

    Operands have to lie at equal distances, or be weights, which are stored as one tensor then.
    Sums over such results, term after term, are one sum.  The same graph where there are none.
    """
    if graph.processes > 1 or not _has_lanes(graph):
        return graph
    edit = _Batcher(graph.expand())
    if not edit.made_one:
        return graph
    whole = edit.done()
    return released(without_left_behind(_summed(whole, edit.lanes), edit.graph), edit.graph)


def _depths(ops: Sequence[Op]) -> list[int]:
    """By op, the length of the longest chain of ops that lead to it."""
    of_value, depths = dict[int, int](), []
    for op in ops:
        depths.append(1 + max((of_value.get(value, 0) for value in op.inputs), default=0))
        of_value |= dict.fromkeys(op.outputs, depths[-1])
    return depths


def _likeness(graph: OpGraph, op: Op, depth: int) -> object:
    """The target, sizes and options of an op: equal ops have no path from one to another."""
    sizes = [(t.shape, t.stride, t.dtype) for t in map(graph.values.__getitem__, op.inputs)]
    rest = {name: None if type(a) is Ref else key_of(a) for name, a in op.arguments.items()}
    return depth, op.target, op.source, op.part, op.repeats, *sizes, *rest.items()


def _has_lanes(graph: OpGraph) -> bool:
    """Whether some products of a graph are equal and do not read each other."""
    later = dict[int, set[int]]()  # by value, the repeats whose iterations follow one another
    alike = Counter[object]()
    for op, depth in zip(graph.ops, _depths(graph.ops), strict=True):
        after = {ref.then.repeat for ref in op.reads if ref.then is not None}
        after.update(*(later.get(graph.values[v].storage, ()) for v in op.inputs))
        after.update(*(later.get(v, ()) for v in op.inputs))
        for value in op.outputs:
            later.setdefault(value, set()).update(after)
            later.setdefault(graph.values[value].storage, set()).update(after)
        if op.name in _COUNTED and not op.assumptions:
            times = (1 if repeat in after else graph.repeats[repeat].count for repeat in op.repeats)
            alike[_likeness(graph, op, depth)] += math.prod(times)
    return any(count >= FEW for count in alike.values())


def _can_be_lane(flow: ValueFlow, op: Op) -> bool:
    """Whether an op can be one of many in a batch: it writes nothing, and its rows do not mix."""
    rule = find_rule(op.target)
    if op.assumptions or op.collective is not None or "writes" in op.facts or op.kind == "sync":
        return False
    known = op.kind == "view" or op.name in _COUNTED | _ROWWISE
    if not known and (rule is None or rule.fusion != "pointwise" or is_random(op)):
        return False
    if not op.inputs or any(not isinstance(a, _SIMPLE) for a in op.arguments.values()):
        return False
    written = [flow.writers.get(flow.values[v].storage, ()) for v in (*op.inputs, *op.outputs)]
    return all(writer.part == "optimizer" for writers in written for writer in writers)


class _Batcher(Editor):
    """A flat graph, written again with one op for each group of equal ones."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self.lanes: dict[int, tuple[int, int]] = {}
        """By old value, the value of all lanes and its place among them."""
        self.made_one = 0
        self._there, self._stored = set(graph.external), set[int]()
        groups = dict[object, list[Op]]()
        for op, depth in zip(graph.ops, _depths(graph.ops), strict=True):
            if _can_be_lane(self.flow, op):
                groups.setdefault(_likeness(graph, op, depth), []).append(op)
        firsts = {ops[0].id: ops for ops in groups.values() if len(ops) >= FEW}
        gone = set[int]()
        for op in graph.ops:
            if op.id in gone:
                continue
            lanes = firsts.get(op.id, ())
            if lanes and self._as_one(lanes):
                gone.update(lane.id for lane in lanes)
                self.made_one += op.name in _COUNTED
            elif not self._as_view(op):
                self.ops.append(op)
                self._there.update(op.outputs)
                self._lay(op)

    def _lay(self, op: Op) -> None:
        """Elementwise results lie as the first operand does (TensorIterator)."""
        rule = find_rule(op.target)
        if not op.inputs or rule is None or rule.fusion != "pointwise":
            return
        like = self.values[op.inputs[0]]
        for value in op.outputs:
            if like.stride != self.graph.values[op.inputs[0]].stride:
                old = self.values[value]
                fits = old.shape == like.shape and old.storage == value
                viewed = any(user.kind == "view" for user in self.flow.users.get(value, ()))
                if fits and not viewed and value not in self.flow.escaping:
                    self.values[value] = replace(old, stride=dense_like(old.shape, like.stride))

    def _as_one(self, lanes: Sequence[Op]) -> bool:
        """One op for all lanes; whether there is one."""
        like = lanes[0]
        tensors = [name for name, item in like.arguments.items() if type(item) is Ref]
        columns = {name: [lane.arguments[name].id for lane in lanes] for name in tensors}
        if like.kind == "view" and not any(self._is_held(column) for column in columns.values()):
            return False  # views of one storage stay, and are read as one below
        if not all(self._is_stackable(column) for column in columns.values()):
            return False
        stacked = {name: self._stacked(like, column) for name, column in columns.items()}
        count, start = len(lanes), len(self.ops)
        outs = [
            self._output(value, count, stacked[tensors[0]] if like.kind == "view" else None)
            for value in like.outputs
        ]
        if not self._emitted(like, stacked, outs, count):
            del self.ops[start:]
            return False
        for place, lane in enumerate(lanes):
            for value, whole in zip(lane.outputs, outs, strict=True):
                self.lanes[value] = whole, place
                self._there.add(value)
                if self.graph.values[value].storage == value:
                    self.moved[value] = whole
                at: dict[str, Argument] = {"self": Ref(whole), "dim": 0, "index": place}
                self.emit(lane, "aten.select.int", at, (value,), kind="view")
        return True

    def _is_held(self, column: Sequence[int]) -> bool:
        """Whether the values are lanes of one at equal steps, or weights, each with its storage."""
        if column[0] in self.lanes:
            whole, first = self.lanes[column[0]]
            step = self.lanes.get(column[1], (whole, first))[1] - first
            steps = [(whole, first + n * step) for n in range(len(column))]
            return step > 0 and [*map(self.lanes.get, column)] == steps
        tensors = [self.graph.values[value] for value in column]
        weights = all(
            t.role == "weights" and t.storage == v for t, v in zip(tensors, column, strict=True)
        )
        return weights and len({*column}) == len(column) and len({t.dtype for t in tensors}) == 1

    def _is_stackable(self, column: Sequence[int]) -> bool:
        """Whether the values are one value, lanes, weights, or lie at equal distances."""
        if self._is_held(column):
            return True
        places = [self.flow.location(value) for value in column]
        if self.graph.values[column[0]].storage in self.lanes or not self._there >= {*column[:1]}:
            return False
        first = places[0]
        if first is None or any(p is None or p.storage != first.storage for p in places):
            return False
        starts = [p.offset for p in places if p is not None]
        return len({b - a for a, b in pairwise(starts)}) == 1 and first.storage in self._there

    def _stacked(self, like: Op, column: Sequence[int]) -> Ref:
        """All lanes of an operand as one value."""
        first = self.values[column[0]]
        if column[0] in self.lanes:
            whole, start = self.lanes[column[0]]
            of, step = self.values[whole], self.lanes[column[1]][1] - start
            if len(column) == of.shape[0]:
                return Ref(whole)
            shape, stride = (len(column), *of.shape[1:]), (of.stride[0] * step, *of.stride[1:])
            how: dict[str, Argument] = {"dim": 0, "start": start, "step": step}
            return self.view_op(like, "aten.slice.Tensor", Ref(whole), how, shape, stride)
        if self._is_held(column):
            whole = self.value((len(column), *first.shape), first.dtype, first.role, ())
            self.lanes |= {value: (whole, place) for place, value in enumerate(column)}
            self.moved |= dict.fromkeys(column, whole)
            self._there.add(whole)
            self._stored.add(whole)
            return Ref(whole)
        a, b = (self.flow.location(value) for value in column[:2])
        assert a is not None and b is not None
        shape, stride = (len(column), *first.shape), (b.offset - a.offset, *first.stride)
        how = {"size": shape, "stride": stride}
        return self.view_op(like, "aten.as_strided.default", Ref(column[0]), how, shape, stride)

    def _output(self, value: int, count: int, source: Ref | None) -> int:
        """The value of all lanes of a result."""
        old = self.graph.values[value]
        shape = (count, *old.shape)
        if source is not None:
            step = self.values[source.id].stride[0]
            return self.view(source, shape, (step, *old.stride), ())
        return self.value(shape, old.dtype, old.role, (), stride=(old.elements, *old.stride))

    def _emitted(
        self, like: Op, stacked: Mapping[str, Ref], outs: Sequence[int], count: int
    ) -> bool:
        """The op of all lanes; whether there is one."""
        rank = len(self.graph.values[like.outputs[0]].shape)
        arguments: dict[str, Argument] = {**like.arguments, **stacked}
        target = like.target
        if like.name in _PRODUCTS:
            target, names = _PRODUCTS[like.name]
            operands = [*stacked.values()]
            if set(arguments) - set(stacked):
                return False
            if self.values[operands[-1].id].stride[0] == 0:
                return self._in_rows(like, [*stacked.values()], outs[0])
            if len(operands) == 3:
                operands[0] = self._aligned(like, operands[0], 3)
            arguments = dict(zip(names, operands, strict=True))
        elif like.name == "aten.bmm":
            for name, ref in stacked.items():
                of = self.values[ref.id]
                if of.stride[0] != of.stride[1] * of.shape[1]:
                    return False
                shape = (count * of.shape[1], *of.shape[2:])
                arguments[name] = self.viewed(like, ref, shape, of.stride[1:])
            out = self.values[outs[0]]
            shape = (count * out.shape[1], *out.shape[2:])
            outs = [self.view(Ref(outs[0]), shape, Tensor.contiguous(shape), ())]
        elif like.name in _ROWWISE:
            dim = like.arguments["dim"]
            arguments["dim"] = dim + 1 if dim >= 0 else dim
        elif like.kind != "view" and like.name != "rooftrace.attention":
            for name, ref in stacked.items():
                arguments[name] = self._aligned(like, ref, rank + 1)
        elif like.kind == "view":
            if self._stored >= {ref.id for ref in stacked.values()}:
                self._stored.update(outs)  # as it is read
                return True
            target = "aten.as_strided.default"
            arguments = {"self": next(iter(stacked.values()))}
        facts = like.facts if like.kind == "kernel" else {}
        self.emit(like, target, arguments, tuple(outs), kind=like.kind, facts=facts)
        return True

    def _in_rows(self, like: Op, operands: Sequence[Ref], out: int) -> bool:
        """A product with one matrix for all lanes, whose rows follow one another."""
        rows, matrix = (self.values[ref.id] for ref in operands[-2:])
        if rows.stride[0] == 0 or (len(operands) == 3 and self.values[operands[0].id].stride[0]):
            return False
        count, length, width = rows.shape
        shape, step = (count * length, width), min(rows.stride[:2])
        flat = self.viewed(like, operands[-2], shape, (step, rows.stride[2]))
        of = self.viewed(like, operands[-1], matrix.shape[1:], matrix.stride[1:])
        names = [name for name, item in like.arguments.items() if type(item) is Ref]
        items = [flat, of]
        if len(operands) == 3:
            bias = self.values[operands[0].id]
            items.insert(0, self.viewed(like, operands[0], bias.shape[1:], bias.stride[1:]))
        shape = (count * length, matrix.shape[2])
        made = self.view(Ref(out), shape, Tensor.contiguous(shape), ())
        self.emit(like, like.target, dict(zip(names, items, strict=True)), (made,))
        return True

    def _aligned(self, like: Op, ref: Ref, rank: int) -> Ref:
        """Lanes of fewer dimensions with ones behind the first."""
        of = self.values[ref.id]
        missing = rank - len(of.shape)
        if not missing:
            return ref
        shape = (of.shape[0], *(1,) * missing, *of.shape[1:])
        stride = (of.stride[0], *(0,) * missing, *of.stride[1:])
        if ref.id in self._stored:
            self.values[ref.id] = replace(of, shape=shape, stride=stride)  # as it is stored
            return ref
        return self.viewed(like, ref, shape, stride)

    def _as_view(self, op: Op) -> bool:
        """A stack, or a row, of all lanes is a view of them; whether it is one."""
        items, dim = op.arguments.get("tensors"), op.arguments.get("dim", 0)
        if op.name not in ("aten.stack", "aten.cat") or not isinstance(items, tuple):
            return False
        ids = [ref.id for ref in items]
        if ids[0] not in self.lanes or not self._is_held(ids) or any(r.then for r in items):
            return False
        whole, (out,) = self.lanes[ids[0]][0], op.outputs
        of, old = self.values[whole], self.graph.values[out]
        if len(ids) < of.shape[0]:
            return False
        dim %= len(old.shape)
        order, stride = [*range(1, len(of.shape))], old.stride
        free = any(
            whole in made.outputs and made.name == "rooftrace.attention" for made in self.ops
        )
        if free and all([user.id for user in self.flow.users[v]] == [op.id] for v in ids):
            # the kernel writes rows at any distance
            step = old.stride[dim] * (of.shape[dim + 1] if op.name == "aten.cat" else 1)
            inner = (
                old.stride if op.name == "aten.cat" else old.stride[:dim] + old.stride[dim + 1 :]
            )
            self.values[whole] = replace(of, stride=(step, *inner))
        elif op.name == "aten.stack":
            order.insert(dim, 0)
            stride = tuple(of.stride[d] for d in order)
        viewed = any(user.kind == "view" for user in self.flow.users.get(out, ()))
        if stride != old.stride and (viewed or out in self.flow.crossing):
            return False
        if not free and op.name == "aten.cat" and dim:
            return False
        self.values[out] = replace(old, stride=stride, storage=of.storage)
        self.moved[out] = self.moved.get(of.storage, of.storage)
        self.emit(op, "aten.as_strided.default", {"self": Ref(whole)}, (out,), kind="view")
        self._there.add(out)
        return True


def _summed(graph: OpGraph, lanes: Mapping[int, tuple[int, int]]) -> OpGraph:
    """Chains of additions of all lanes of one value are one sum."""
    flow, ends, gone = ValueFlow(graph), dict[int, tuple[int, Ref | None]](), set[int]()
    chains = dict[int, tuple[Op, ...]]()  # by result
    for op in graph.ops:
        if (
            op.name not in ("aten.add", "aten.add_")
            or len(op.inputs) != 2
            or op.inputs[1] not in lanes
        ):
            continue
        before = chains.pop(op.inputs[0], ())
        if len(flow.users[op.inputs[0]]) > 1 and op.name == "aten.add":
            before = ()
        chains[op.outputs[0]] = (*before, op)
    for chain in chains.values():
        terms = [op.inputs[1] for op in chain]
        first = chain[0].inputs[0]
        start = None if first in lanes else Ref(first)
        if start is None:
            terms = [first, *terms]
        whole = lanes[terms[0]][0]
        if [lanes[t] for t in terms] == [(whole, n) for n in range(graph.values[whole].shape[0])]:
            ends[chain[-1].id] = whole, start
            gone.update(op.id for op in chain[:-1])
    edit = Editor(graph)
    for op in graph.ops:
        if op.id in ends:
            whole, start = ends[op.id]
            out = edit.values[op.outputs[0]]
            how: dict[str, Argument] = {"self": Ref(whole), "dim": (0,)}
            if start is None:
                edit.emit(op, "aten.sum.dim_IntList", how, op.outputs)
            else:
                total = edit.made(op, "aten.sum.dim_IntList", how, out.shape, out.dtype, out.role)
                edit.emit(op, op.target, {"self": start, "other": total}, op.outputs)
        elif op.id not in gone:
            edit.ops.append(op)
    return released(edit.done(), graph)
