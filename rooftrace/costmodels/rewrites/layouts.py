"""Layouts: operands of attention, images with channels last, copies left out, odd sizes padded.

A width that only weights make is padded everywhere.  One that activations have of their own, such
as a number of tokens, is padded for each product: weights as they are stored, activations by a copy
that is counted, and readers of the result leave the rest out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from rooftrace.costmodels.fusion.traffic import has_channels_last, weight_shape
from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.ops.cost import UNFUSED
from rooftrace.costmodels.rewrites.dataflow import (
    IMAGES,
    BothWays,
    ValueFlow,
    dense_like,
    last_strides,
    reads_across,
    relaid,
)
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Editor,
    operand,
    reading_others,
)
from rooftrace.costmodels.rewrites.fused_products import PRODUCTS
from rooftrace.costmodels.rewrites.spread import Laid
from rooftrace.costmodels.rewrites.trained import (
    COPY,
    OF_ATTENTION,
    apart,
    emit_backward,
    padded,
    strides_of_attention,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import precision

# -- attention on the math path --------------------------------------------------------------------

_WIDTH, RANK, _ODD = "the width of an operand", "operands have 3 dimensions", "heads of"
"""How the reasons begin for which CUDA has no kernel (`recording.library.why_math`)."""
MATH = (
    (RANK, "Give query, key and value four dimensions (.unsqueeze(1))", ""),
    (
        _WIDTH,
        "Make the width of query, key and value their innermost dimension (.contiguous())",
        "a copy of each, which is counted; ",
    ),
    (
        _ODD,
        "Pad heads for attention to a width that is a multiple of 16 bytes (F.pad, scale=)",
        "zeros, whose copies are counted; ",
    ),
)
"""The beginning of a reason, the action, and what it needs."""


def is_unfused(op: Op, why: str) -> bool:
    return str(op.facts.get(UNFUSED, "")).startswith(why)


def with_contiguous_attention(graph: OpGraph, copied: bool = True, why: str = _WIDTH) -> OpGraph:
    """Attention of operands whose width is not innermost becomes copies of them, and a kernel.

    why: the beginning of the reason that is mended: operands of other dimensions become a kernel as
    those of four are, odd widths are padded.  copied: whether operands may need a copy; the same
    graph where there is nothing to mend.
    """
    flow = ValueFlow(graph)
    matches = [match for op in graph.ops if is_unfused(op, why) if (match := apart(flow, op))]
    if not copied:
        matches = [
            m for m in matches if all(graph.values[r.id].stride[-1] == 1 for r in m.operands)
        ]
    if not matches:
        return graph
    firsts = {match.forward[-1].id: match for match in matches}
    step = 16 if why == _ODD else 1  # bytes; rows of fp32 need as many (`why_math`)
    lasts = {match.backward[-1].id: match for match in matches if match.backward}
    gone = {op.id for match in matches for op in (*match.forward, *match.backward)}
    edit, kernels = Editor(graph), dict[int, Op]()
    strides = dict[int, tuple[int, ...]]()
    for op in graph.ops:
        if match := firsts.get(op.id):
            kernels[match.out] = kernel = _emit_forward(edit, match, step)
            strides[match.out] = strides_of_attention(edit.values[kernel.outputs[0]].shape)
        elif match := lasts.get(op.id):
            strides |= emit_backward(edit, match, kernels[match.out])
        elif op.id not in gone:
            edit.ops.append(op)
    mended = edit.mended()
    return Laid(mended, strides).done()


def _emit_forward(edit: Editor, match: BothWays, step: int) -> Op:
    """Copies of the operands, and the kernel, which is returned.

    step: bytes, multiples of which the heads of operands become wide.
    """
    like = match.forward[-1]
    copies = []
    for ref in match.operands:
        tensor = edit.values[ref.id]
        wide = _multiple(tensor, step)
        if wide == tensor.shape[-1] and tensor.stride[-1] == 1:
            copies.append(ref)
        elif wide == tensor.shape[-1]:
            how: dict[str, Argument] = {"self": ref}
            copies.append(edit.made(like, COPY, how, tensor.shape, tensor.dtype))
        else:
            copies.append(padded(edit, like, ref, wide, "activations"))
    edit.move(match.out, match.out)
    out = replace(edit.values[match.out], dtype=edit.values[copies[0].id].dtype)
    edit.values[match.out], whole = out, Ref(match.out)
    wide = edit.values[copies[2].id].shape[-1]
    if wide != out.shape[-1]:
        whole = Ref(edit.value((*out.shape[:-1], wide), out.dtype, out.role, like.repeats))
        edit.move(match.out, whole.id)
    logsumexp = edit.value(out.shape[:-1], "fp32", "activations", like.repeats)
    told = {"mask": match.mask, "dropout_p": 0.0, "is_causal": match.is_causal}
    arguments = {**dict(zip(OF_ATTENTION, copies, strict=False)), **told}
    edit.emit(like, ATTENTION, arguments, (whole.id, logsumexp))
    kernel = edit.ops[-1]
    if whole.id != match.out:
        cut = {"self": whole, "dim": len(out.shape) - 1, "start": 0, "end": out.shape[-1]}
        edit.emit(like, "aten.slice.Tensor", cut, (match.out,), kind="view")
    return kernel


def _multiple(tensor: Tensor, step: int) -> int:
    """The width of a tensor as the next multiple of so many bytes."""
    step = max(1, step * 8 // precision(tensor.dtype).bits)
    return -(-tensor.shape[-1] // step) * step


# -- layouts of images -----------------------------------------------------------------------------


def is_image_first(graph: OpGraph, op: Op) -> bool:
    """Whether a convolution over images reads its channels first."""
    if op.kind != "kernel" or op.name != "aten.convolution" or weight_shape(op, graph) is None:
        return False
    image = graph.values[op.inputs[0]]
    return len(image.shape) in IMAGES and not has_channels_last(image)


def with_channels_last(graph: OpGraph) -> OpGraph:
    """Images and weights have channels last, and what is made of them lies as ATen lays it.

    Attention has a kernel of its own where the width of its operands is innermost then.
    """
    values = graph.values
    ranks = {len(values[op.inputs[0]].shape) for op in graph.ops if is_image_first(graph, op)}
    own = [v for v in graph.external if values[v].storage == v and len(values[v].shape) in ranks]
    laid = Laid(
        graph, {value: last for value in own if (last := last_strides(values[value]))}
    ).done()
    return with_contiguous_attention(laid, copied=False)


_ASKED = frozenset({"contiguous", "clone"})
"""Functions by which the code asks for a copy; reshape and others make one only where they must."""


def needless_copies(graph: OpGraph) -> tuple[Op, ...]:
    """Copies that the code asks for, all of whose readers take the original as it lies."""
    flow = ValueFlow(graph)
    return tuple(
        op
        for op in graph.ops
        if op.name == "aten.clone" and op.function in _ASKED and _is_needless(flow, op)
    )


def _is_needless(flow: ValueFlow, copy: Op) -> bool:
    (made,), before = copy.outputs, operand(copy, "self")
    storage = flow.values[made].storage
    if before.then or before.every or made in flow.escaping or flow.writers.get(storage):
        return False
    last = max(op.id for op in flow.storage_users[storage])
    written = flow.overwritten(before.id, copy.id, last)
    return not written and _takes(flow, made, flow.values[before.id].stride)


def _takes(flow: ValueFlow, value: int, stride: tuple[int, ...], viewed: bool = False) -> bool:
    """Whether all readers of a value take it at other strides, without a copy.

    Elementwise ops and sums take any; products, of views too, matrices in either order (BLAS);
    kernels of attention rows of adjacent elements that begin at multiples of 16 bytes.
    """
    tensor = flow.values[value]
    for op in flow.users[value]:
        rule = find_rule(op.target)
        product = op.name in ("aten.mm", "aten.bmm") and 1 in stride[-2:] and 0 not in stride
        any_order = rule is not None and rule.fusion in ("pointwise", "reduction") and not viewed
        bits = precision(tensor.dtype).bits
        rows = stride[-1:] == (1,) and not any(n * bits % 128 for n in stride[:-1])
        attends = rows and op.target in (ATTENTION, ATTENTION_BACKWARD)
        fits = any_order or product or attends
        if op.kind == "view":
            views = [v for v in op.outputs if flow.values[v].storage == tensor.storage]
            laid = {v: relaid(flow.values[v], tensor, stride) for v in views}
            fits = all(now is not None and _takes(flow, v, now, True) for v, now in laid.items())
        if not fits and (rule is None or stride != tensor.stride):
            return False
    return bool(flow.users[value])


def without_copies(graph: OpGraph) -> OpGraph:
    """The graph without needless copies."""
    return Laid(graph, {}, {op.id for op in needless_copies(graph)}).done()


# -- odd sizes -------------------------------------------------------------------------------------


def odd_sizes(graph: OpGraph, load: int) -> Mapping[int, int]:
    """Sizes of matrices of weights whose rows begin at no multiple of `load` bytes, and padded.

    Windows with channels last have channels as rows.  Rows shorter than that are left alone.
    """
    sizes, flow = dict[int, int](), ValueFlow(graph)
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.role == "weights" and (len(tensor.shape) == 2 or has_channels_last(tensor)):
            casts = [user for user in flow.users[index] if user.name == "aten._to_copy"]
            read = {tensor.dtype, *(graph.values[op.outputs[0]].dtype for op in casts)}
            step = max(1, load * 8 // min(precision(dtype).bits for dtype in read))
            sizes |= {n: -(-n // step) * step for n in tensor.shape[:2] if n > step and n % step}
    return dict(sorted(sizes.items()))


def with_sizes(graph: OpGraph, sizes: Mapping[int, int]) -> OpGraph:
    """Every dimension of one of these sizes has another one; of images, only channels."""

    def sized(item: Argument) -> Argument:
        if isinstance(item, tuple):
            return tuple(map(sized, item))
        return sizes.get(item, item) if type(item) is int else item

    values = []
    for tensor in graph.values:
        shape = tuple(sizes.get(n, n) for n in tensor.shape)
        if has_channels_last(tensor):  # heights and widths stay, and the number of images
            first = 0 if tensor.role == "weights" else 1
            shape = (*tensor.shape[:first], *shape[first:2], *tensor.shape[2:])
        if shape != tensor.shape:
            steps = zip(tensor.stride, dense_like(shape, tensor.stride), strict=True)
            stride = tuple(s and step for s, step in steps)
            tensor = replace(tensor, shape=shape, stride=stride)
        values.append(tensor)
    ops = [
        replace(op, arguments={name: sized(item) for name, item in op.arguments.items()})
        for op in graph.ops
    ]
    return graph.replace(values=tuple(values), ops=tuple(ops))


def own_sizes(graph: OpGraph) -> frozenset[int]:
    """Sizes that activations have of their own: those of inputs but for the width of features and
    sizes of images with channels last, and those that views make of others."""
    values, sizes = graph.values, set[int]()
    for value in graph.external:
        tensor = values[value]
        if tensor.role not in _STORED and not has_channels_last(tensor):
            sizes.update(tensor.shape[:-1])
    for op in graph.ops:
        if op.kind == "view" and op.inputs and values[op.inputs[0]].role not in _STORED:
            read = {n for value in op.inputs for n in values[value].shape}
            sizes.update(n for v in op.outputs for n in values[v].shape if n not in read)
    return frozenset(sizes)


_STORED = ("weights", "gradients", "optimizer")
"""Roles of tensors that lie in memory from step to step as weights do."""


def with_padded_products(graph: OpGraph, size: int, wide: int) -> OpGraph:
    """Products with weights that have a dimension of a size have a wider one there.

    These weights, their biases, gradients and states are stored wide.  Other operands are copied
    with zeros behind their rows, once for all readers of a layer; results are parts of wide ones.
    """
    edit = _PaddedProducts(graph, size, wide)
    return Laid(edit.mended(), edit.strides).done() if edit.stored else graph


class _PaddedProducts(Editor):
    """A graph, written again with padded products."""

    def __init__(self, graph: OpGraph, size: int, wide: int) -> None:
        super().__init__(graph)
        self.size, self.to = size, wide
        self.strides: dict[int, tuple[int, ...]] = {}
        """By results that are parts of wide ones, their strides."""
        self.wide: dict[tuple[int, int, tuple[int, ...]], Ref] = {}
        """By value, dimension and repeats, the value that is wide there."""
        self.added = dict[int, Op]()
        """By product, the addition of a bias to its result, which becomes part of it."""
        self.stored = self._stored()
        for value in self.stored:
            shape = self._shape(value, range(len(self.values[value].shape)))
            stride = dense_like(shape, self.values[value].stride)
            self.values[value] = replace(self.values[value], shape=shape, stride=stride)
        gone = {op.id for op in self.added.values()}
        for op in graph.ops:
            if op.name in PRODUCTS and not self.stored.isdisjoint((*op.inputs, *op.outputs)):
                self._pad(op)
            elif op.kind == "kernel" and op.part == "backward" and self.stored & {*op.outputs}:
                others = {v for v in op.inputs if self.size in graph.values[v].shape[-1:]}
                now = {v: self._wide(op, v, len(graph.values[v].shape) - 1) for v in others}
                self.ops.append(reading_others(op, now))
            elif op.id not in gone:
                self.ops.append(op)

    def _stored(self) -> set[int]:
        """Weights of products that have the size, their biases, gradients and states."""
        values, weights = self.graph.values, set[int]()
        for op in self.graph.ops:
            if op.name not in PRODUCTS or op.part != "forward":
                continue
            added = self._bias(op)
            named = [*op.inputs, *(added.inputs[1:] if added is not None else ())]
            own = {v for v in map(self._origin, named) if values[v].role == "weights"}
            own = {v for v in own if self.size in values[v].shape}
            if any(len(values[v].shape) == 2 for v in own):
                weights |= own
                if added is not None and self.size == values[op.inputs[0]].shape[1]:
                    self.added[op.id] = added
                if reads_across(op):
                    return set()
        joined = {op.id for op in self.added.values()}
        readers = [op for v in weights for op in self._readers(v) if op.part == "forward"]
        if not all(op.name in PRODUCTS or op.id in joined for op in readers):
            return set()
        keys = {_key(values[v]) for v in weights}
        late = {v for op in self.graph.ops if op.part == "optimizer" for v in op.outputs}
        late |= {v for v, t in enumerate(values) if values[t.storage].role in _STORED[1:]}
        stored = {
            v for v, t in enumerate(values)
            if {t.storage, self._origin(v)} & weights or (v in late and _key(t) in keys)
        }  # fmt: skip
        for op in reversed(self.graph.ops):  # gradients before they are cast
            if op.name == "aten._to_copy" and stored & {*op.outputs} and op.part == "backward":
                stored |= {v for v, t in enumerate(values) if t.storage == op.inputs[0]}
        return stored

    def _origin(self, value: int) -> int:
        """The value of which a value is a view or a cast."""
        by = self.flow.producer(value)
        while by is not None and by.inputs and (by.kind == "view" or by.name == "aten._to_copy"):
            value = by.inputs[0]
            by = self.flow.producer(value)
        return value

    def _readers(self, value: int) -> Iterator[Op]:
        """The kernels that read a value, through views and casts."""
        for op in self.flow.kernels_on(value):
            yield from self._readers(op.outputs[0]) if op.name == "aten._to_copy" else [op]

    def _bias(self, op: Op) -> Op | None:
        """The addition of a bias to the product of a linear layer whose input lay with gaps."""
        users = [*self.flow.kernels_on(op.outputs[0])]
        if op.name != "aten.mm" or len(users) != 1 or len(users[0].inputs) != 2:
            return None
        (user,) = users
        bias = self.graph.values[user.inputs[1]]
        joins = user.name == "aten.add" and (user.function, user.module) == (op.function, op.module)
        return user if joins and bias.role == "weights" and len(bias.shape) == 1 else None

    def _shape(self, value: int, dims: Collection[int]) -> tuple[int, ...]:
        """The shape of a value that is wide in those of some dimensions that have the size."""
        shape = enumerate(self.values[value].shape)
        return tuple(self.to if n == self.size and dim in dims else n for dim, n in shape)

    def _pad(self, op: Op) -> None:
        """Emit a product with wide operands."""
        (out,), values = op.outputs, self.graph.values
        first, second = (operand(op, name).id for name in (PRODUCTS[op.name], "mat2"))

        def is_wide(value: int, dim: int) -> bool:
            return value in self.stored and values[value].shape[dim] == self.size

        rows = is_wide(first, 0) or is_wide(out, 0)
        inner = is_wide(first, 1) or is_wide(second, 0)
        columns = is_wide(second, 1) or is_wide(out, 1)
        a = self._widened(op, first, (rows, inner))
        b = self._widened(op, second, (inner, columns))
        arguments = {**op.arguments, PRODUCTS[op.name]: Ref(a), "mat2": Ref(b)}
        target, added = op.target, self.added.get(op.id)
        if added is not None:
            target = "aten.addmm.default"
            arguments = {"self": Ref(added.inputs[1]), "mat1": Ref(a), "mat2": Ref(b)}
        elif op.name == "aten.addmm" and columns:
            bias = operand(op, "self").id
            arguments["self"] = Ref(self._wide(op, bias, len(values[bias].shape) - 1))
        whole = out
        if (rows or columns) and out not in self.stored:
            shape = self._shape(out, [dim for dim, is_on in enumerate((rows, columns)) if is_on])
            whole = self.value(shape, values[out].dtype, values[out].role, op.repeats)
        self.emit(op, target, arguments, (whole,), facts=op.facts)
        if whole != out:
            self._cut(op, whole, out, 1 if columns else 0)
        if added is not None:
            self.becomes(op, added.outputs[0], Ref(out))

    def _cut(self, like: Op, whole: int, out: int, dim: int) -> None:
        """A result is a part of a wide one; the gradient of a copy with zeros is copied again."""
        if like.part == "backward":
            cut: dict[str, Argument] = {"self": Ref(whole), "pad": (0, self.size - self.to)}
            self.emit(like, _PAD, cut, (out,))
            return
        self.wide[out, dim, like.repeats] = Ref(whole)
        self.strides[out] = self.values[whole].stride
        self.move(out, whole)
        part: dict[str, Argument] = {"self": Ref(whole), "dim": dim, "start": 0, "end": self.size}
        self.emit(like, "aten.slice.Tensor", part, (out,), kind="view")

    def _widened(self, like: Op, value: int, are_wide: Sequence[bool]) -> int:
        """An operand that is wide in some dimensions."""
        for dim, is_on in enumerate(are_wide):
            value = self._wide(like, value, dim) if is_on else value
        return value

    def _wide(self, like: Op, value: int, dim: int) -> int:
        """A value with zeros behind one dimension, made once for the readers of a layer."""
        key = value, dim, like.repeats
        if value in self.stored or self.values[value].shape[dim] == self.to:
            return value
        if key not in self.wide:
            self.wide[key] = self._view(like, value, dim) or self._padded(like, value, dim)
        return self.wide[key].id

    def _view(self, like: Op, value: int, dim: int) -> Ref | None:
        """A view of a wide value, as a value is of a narrow one; None where it is no view."""
        by, shape = self.flow.producer(value), self._shape(value, (dim,))
        if by is None or by.kind != "view" or reads_across(by) or len(by.inputs) != 1:
            return None
        (source,), last = by.inputs, len(shape) - 1
        before = self.graph.values[source].shape
        if by.name == "aten.t":
            made = Ref(self._wide(like, source, 1 - dim))
            stride = self.values[made.id].stride[::-1]
            return self.view_op(like, by.target, made, {}, shape, stride)
        if dim != last or before[-1:] != (self.size,) or "view" not in by.name:
            return None
        return self.viewed(like, Ref(self._wide(like, source, len(before) - 1)), shape)

    def _padded(self, like: Op, value: int, dim: int) -> Ref:
        """A copy with zeros behind; of a copy, in place of that."""
        by, tensor = self.flow.producer(value), self.graph.values[value]
        source = by.inputs[0] if by is not None and by.name == "aten.clone" else value
        shape = self._shape(value, (dim,))
        if like.part == "backward":  # the gradient of a part
            how: dict[str, Argument] = {"grad_output": Ref(source), "input_sizes": shape}
            how |= {"dim": dim, "start": 0, "end": self.size, "step": 1}
            return self.made(like, _OF_PART, how, shape, tensor.dtype, tensor.role)
        behind = (0, 0) * (len(shape) - 1 - dim)
        how = {"self": Ref(source), "pad": (*behind, 0, self.to - self.size)}
        return self.made(like, _PAD, how, shape, tensor.dtype, tensor.role)


_PAD, _OF_PART = "aten.constant_pad_nd.default", "aten.slice_backward.default"


def _key(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor, in any order: gradients may be transposed, or have one row."""
    return tuple(sorted(n for n in tensor.shape if n > 1))
