"""Rewrites of caches and products: growth, narrow operands, fused projections, autocast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.rewrites.dataflow import (
    Location,
    ValueFlow,
    reads_across,
)
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    LATENT_ATTENTION,
    PACKED_ATTENTION,
    PACKED_LATENT_ATTENTION,
    Editor,
    operand,
    reading_others,
    rewritten,
    taking,
    with_matches,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import precision, storage_bytes

CACHE_APPEND = "rooftrace.cache_append.default"


def append_in_place(graph: OpGraph) -> tuple[OpGraph, int]:
    """`cat` of a cache with new rows becomes a write of the new rows into a cache that has room.

    The result of the `cat` is then another view of the cache.  A cache that is still empty
    (prefill) is made by its first `cat` as before; in a step of requests it is a part of the
    server's.
    """
    values, ops = graph.values, []
    moved: dict[int, int] = {}
    grown: set[int] = set()
    count = 0
    for op in graph.ops:
        # By name: of all ops that join tensors, `cat` is the one by which caches grow.
        if op.name == "aten.cat" and op.outputs and values[op.outputs[0]].role == "kv":
            before, *new = op.reads
            old = before.id
            cache = moved.get(values[old].storage, values[old].storage)
            exists = values[old].elements or graph.phase == "requests"
            is_cache = values[old].role == "kv" and exists and not before.every
            if is_cache and new and old not in grown:
                grown.add(old)
                moved[values[op.outputs[0]].storage] = cache
                count += graph.times(op)
                arguments: dict[str, Argument] = {
                    "cache": before,
                    "new": tuple(new),
                    "dim": op.arguments.get("dim", 0),
                }
                op = taking(op, arguments, target=CACHE_APPEND)
        ops.append(op)
    if not moved:
        return graph, 0
    shared = tuple(
        replace(t, storage=moved[t.storage]) if t.storage in moved else t for t in values
    )
    return graph.replace(values=shared, ops=tuple(ops)), count


def static_caches(graph: OpGraph) -> tuple[OpGraph, int]:
    """`append_in_place`; and a cache with a window keeps the last rows of a prompt, not all.

    As written, a view leaves the step, which keeps the rows of the entire prompt alive.
    """
    graph, appended = append_in_place(graph)
    views = {value: graph.producers[value] for value in graph.outputs if _is_window(graph, value)}
    if not views:
        return graph, appended
    edit, count = Editor(graph), 0
    made = {op: value for value, op in views.items()}
    for op in graph.ops:
        edit.ops.append(op)
        if op.id in made:
            view = graph.values[made[op.id]]
            kept = edit.made(op, "aten.clone.default", {"self": Ref(made[op.id])}, view.shape,
                             view.dtype, "kv")  # fmt: skip
            edit.replaced[made[op.id]] = kept.id
            count += graph.times(op)
    return edit.done(), appended + count


def _is_window(graph: OpGraph, value: int) -> bool:
    """Whether a value is a part of a cache that a `cat` of this step made, and its only output."""
    tensor = graph.values[value]
    owner = graph.producers.get(tensor.storage)
    if tensor.role != "kv" or owner is None or graph.ops[owner].name != "aten.cat":
        return False
    leaving = [v for v in graph.outputs if graph.values[v].storage == tensor.storage]
    return leaving == [value] and tensor.elements < graph.values[tensor.storage].elements


# -- narrow products -------------------------------------------------------------------------------
# Products of widened operands as products of the narrow ones.
#
# A router in fp32 over tokens and weights in bf16 is written as two casts and a product on the
# vector engine.  A matrix engine multiplies bf16 exactly and accumulates in fp32, and writes the
# result as it is accumulated (SGLang's and vLLM's `dsv3_router_gemm`, `torch.mm` with `out_dtype`).

_OPERANDS = ("self", "mat2")
_PRODUCTS = ("aten.mm", "aten.bmm")


@dataclass(frozen=True, slots=True)
class _Widened:
    """An operand that was widened."""

    source: int  # before the cast
    views: tuple[Op, ...]  # of the wide copy, in order


@dataclass(frozen=True, slots=True)
class _WidenedProduct:
    """A product, and its operands before they were widened."""

    op: Op
    sides: tuple[_Widened, ...]
    inside: frozenset[int] = frozenset()


def narrow_operands(graph: OpGraph) -> tuple[OpGraph, int]:
    """Products of two operands that were widened to the result's precision read the narrow ones."""
    return rewritten(graph, _PRODUCTS, _match, _emit)


def _match(flow: ValueFlow, op: Op) -> _WidenedProduct | None:
    if reads_across(op):
        return None
    sides = [_widened(flow, operand(op, name).id, op) for name in _OPERANDS]
    narrow = [side for side in sides if side is not None]
    kinds = {flow.values[side.source].dtype for side in narrow}
    fits = len(narrow) == len(sides) and len(kinds) == 1
    return _WidenedProduct(op, tuple(narrow)) if fits else None


def _widened(flow: ValueFlow, value: int, product: Op) -> _Widened | None:
    values, views = flow.values, list[Op]()
    while True:
        op = flow.producer(value)
        if op is None or len(op.inputs) != 1 or reads_across(op) or op.repeats != product.repeats:
            return None
        if op.name == "aten._to_copy":
            break
        if op.kind != "view" or len(op.outputs) != 1:
            return None
        views.append(op)
        value = op.inputs[0]
    wide, source = values[value], values[op.inputs[0]]
    kinds = [precision(tensor.dtype) for tensor in (wide, source)]
    narrower = all(kind.kind == "float" for kind in kinds) and kinds[1].bits < kinds[0].bits
    if not narrower or (wide.shape, wide.stride) != (source.shape, source.stride):
        return None
    if flow.overwritten(op.inputs[0], op.id, product.id):
        return None
    return _Widened(op.inputs[0], tuple(reversed(views)))


def _emit(edit: Editor, product: _WidenedProduct) -> None:
    op, sides = product.op, product.sides
    arguments: dict[str, Argument] = {}
    for name, side in zip(_OPERANDS, sides, strict=True):
        now = Ref(side.source)
        for view in side.views:
            old = edit.values[view.outputs[0]]
            rest = {name: item for name, item in view.arguments.items() if name != "self"}
            now = edit.view_op(view, view.target, now, rest, old.shape, old.stride)
        arguments[name] = now
    arguments["out_dtype"] = f"dtype:{edit.values[op.outputs[0]].dtype}"
    edit.emit(op, f"{op.name}.dtype", arguments, op.outputs, facts=op.facts)


# -- fused products --------------------------------------------------------------------------------
# Products of one input with several weights as one product with concatenated weights, as servers
# keep those of query, key and value, and of gate and up.  The parts of the result are views.

_ATTENTIONS = (ATTENTION, LATENT_ATTENTION, PACKED_ATTENTION, PACKED_LATENT_ATTENTION)
PRODUCTS = {"aten.mm": "self", "aten.addmm": "mat1"}
"""Products with a weight -> the argument name of their input."""
_ANY_PRODUCT = frozenset({
    *PRODUCTS, "aten.bmm", "aten.baddbmm", "aten._grouped_mm", "rooftrace.expert_mm",
    "rooftrace.index_scores",
})  # fmt: skip
_WALK = 64
"""The most ops between a product and an attention or multiplication."""


def fuse_qkv(graph: OpGraph) -> tuple[OpGraph, int]:
    """Products of one input whose results all reach one attention become one product.

    At most one more product may be in between, if another of them reaches it without: the two down
    projections of latent attention count, and nothing of the layer before.
    """
    return _fuse(graph, _reaching_attention)


def fuse_gate_up(graph: OpGraph) -> tuple[OpGraph, int]:
    """Two products of one input whose results meet in one multiplication become one product."""
    return _fuse(graph, _meeting)


# -- groups of products ----------------------------------------------------------------------------


def _reaching_attention(flow: ValueFlow) -> Iterator[list[Op]]:
    for op in flow.graph.ops:
        if op.target in _ATTENTIONS:
            reached = _products_of(flow, op.inputs, 1)
            by_input: dict[Location, list[Op]] = defaultdict(list)
            for number in sorted(reached):
                product = flow.graph.ops[number]
                place = _input(flow, product)
                if place is not None and product.repeats == op.repeats:
                    by_input[place].append(product)
            for products in by_input.values():
                if any(reached[product.id] == 0 for product in products):
                    yield products


def _meeting(flow: ValueFlow) -> Iterator[list[Op]]:
    for op in flow.graph.ops:
        if op.name in ("aten.mul", "aten.mul_") and len(op.inputs) == 2:
            sides = [_products_of(flow, (value,), 0, only_way=True) for value in op.inputs]
            if all(len(side) == 1 for side in sides):
                products = [flow.graph.ops[number] for side in sides for number in side]
                inputs = {_input(flow, product) for product in products}
                if len(inputs) == 1 and None not in inputs and products[0] is not products[1]:
                    yield sorted(products, key=lambda product: product.id)


def _input(flow: ValueFlow, product: Op) -> Location | None:
    """The location of the rows that a product multiplies with a weight."""
    name = PRODUCTS.get(product.name)
    return None if name is None else flow.location(operand(product, name).id)


def _products_of(
    flow: ValueFlow, values: Iterable[int], through: int, only_way: bool = False
) -> dict[int, int]:
    """The products on which values depend, by id, with how many more products are in between.

    through: the most of these.  only_way: empty if an op on the way reads two tensors.
    """
    graph, reached = flow.graph, dict[int, int]()
    seen: dict[int, int] = {}
    front = [(value, 0) for value in values]
    for _ in range(_WALK):
        following = []
        for value, between in front:
            op = flow.producer(value)
            if op is None or seen.get(op.id, through + 1) <= between:
                continue
            seen[op.id] = between
            written = () if only_way else flow.writers.get(graph.values[value].storage, ())
            copied = (o for o in written if o.name == "aten.copy_")  # part by part
            sources = [
                i for o in (op, *copied) for i in o.inputs if graph.values[i].role != "weights"
            ]
            if op.name in _ANY_PRODUCT:
                reached[op.id] = min(between, reached.get(op.id, between))
                between += 1
            elif only_way and len({graph.values[i].storage for i in sources}) != 1:
                return {}
            if between <= through:
                following += [(source, between) for source in sources]
        front = following
    return reached


# -- one product -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the products that become one."""

    product: Op
    weight: int  # the external value
    bias: int | None
    transposed: bool  # whether the weight is stored as [N, K], and read transposed

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for parts that can be one product."""
        other = {k: v for k, v in self.product.arguments.items() if not isinstance(v, Ref)}
        return self.product.target, self.transposed, tuple(sorted(other.items()))


def _fuse(graph: OpGraph, gather: Callable[[ValueFlow], Iterable[list[Op]]]) -> tuple[OpGraph, int]:
    flow = ValueFlow(graph)
    groups: dict[int, list[_Part]] = {}
    taken: set[int] = set()
    for products in gather(flow):
        parts = [p for op in products if op.id not in taken and (p := _part(flow, op))]
        for alike in _alike(flow, parts):
            groups[alike[0].product.id] = alike
            taken |= {part.product.id for part in alike}
    return with_matches(graph, groups, _emit_fused, taken)


def _alike(flow: ValueFlow, parts: list[_Part]) -> Iterator[list[_Part]]:
    """Parts that can be one product: of one kind, with no write to their input in between."""
    graph = flow.graph
    by_kind: dict[tuple[object, ...], list[_Part]] = defaultdict(list)
    for part in parts:
        weight = graph.values[part.weight]
        by_kind[(part.kind, part.product.repeats, weight.dtype)].append(part)
    for alike in by_kind.values():
        first, last = alike[0].product, alike[-1].product
        rows = operand(first, PRODUCTS[first.name]).id
        written = flow.overwritten(rows, first.id, last.id)
        if len(alike) > 1 and not written and _fit_side_by_side(flow, alike):
            yield alike


def _fit_side_by_side(flow: ValueFlow, parts: list[_Part]) -> bool:
    """Whether every view of a part, as of complex numbers, is aligned among the others."""
    made = [part.product.outputs[0] for part in parts]
    results = [flow.values[out] for out in made]
    widths = [tensor.shape[1] for tensor in results]
    views = [flow.values[index] for out in made for index in flow.members[out]]
    return not any(
        width % _several(view, results[0]) for view in views for width in (*widths, sum(widths))
    )


def _several(view: Tensor, result: Tensor) -> int:
    """How many elements one element of a view takes; more than a row has if not an integer."""
    several, rest = divmod(storage_bytes(view.dtype, 8), storage_bytes(result.dtype, 8))
    return several if several and not rest else result.shape[1] + 1


def _part(flow: ValueFlow, op: Op) -> _Part | None:
    """A product of which a part can be made: its weight is read by nothing else."""
    graph = flow.graph
    if reads_across(op):
        return None
    if any(op.arguments.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    seen = operand(op, "mat2").id
    place = flow.location(seen)
    if place is None or place.offset or graph.values[place.storage].role != "weights":
        return None
    weight = graph.values[place.storage]
    if place.storage not in flow.graph.external or weight.elements != graph.values[seen].elements:
        return None
    transposed = place.stride != weight.stride
    if weight.stride != Tensor.contiguous(weight.shape) or weight.repeats != op.repeats:
        return None
    if transposed and (place.shape, place.stride) != (weight.shape[::-1], weight.stride[::-1]):
        return None
    bias = _bias(flow, op) if op.name == "aten.addmm" else None
    if (op.name == "aten.addmm" and bias is None) or not _can_be_a_view(flow, op):
        return None
    readers = {
        reader.id
        for owner in (place.storage, bias)
        if owner is not None
        for reader in flow.storage_users[owner]
        if reader.kind != "view"
    }
    if readers != {op.id} or place.storage in flow.escaping or bias in flow.escaping:
        return None
    return _Part(op, place.storage, bias, transposed)


def _bias(flow: ValueFlow, op: Op) -> int | None:
    """The external value that is the bias of a product, which may read it through views."""
    place = flow.location(operand(op, "self").id)
    if place is None or place.offset or place.storage not in flow.graph.external:
        return None
    bias, width = flow.graph.values[place.storage], flow.graph.values[op.outputs[0]].shape[1]
    plain = bias.shape == place.shape == (width,) and bias.repeats == op.repeats
    return place.storage if plain and bias.role == "weights" else None


def _can_be_a_view(flow: ValueFlow, op: Op) -> bool:
    """Whether every view of a product's result can be a view of columns of a wider result."""
    (out,) = op.outputs
    result = flow.values[out]
    if result.storage != out or result.stride != Tensor.contiguous(result.shape):
        return False
    if out in flow.escaping:
        return False
    views = [flow.values[index] for index in flow.members[out]]
    return all(_wider(view, result, 2 * result.shape[1]) is not None for view in views)


def _wider(view: Tensor, result: Tensor, wider: int) -> tuple[int, ...] | None:
    """The strides of a view of [T, N] once rows are `wider` elements apart.

    None where a dimension runs over rows and columns, or an element (a complex number) takes
    several and crosses rows.
    """
    several = _several(view, result)
    if result.shape[1] % several or wider % several:
        return None
    columns, wider = result.shape[1] // several, wider // several
    stride, reach = [], 0
    for size, step in zip(view.shape, view.stride, strict=True):
        if size > 1 and step < columns:
            reach += (size - 1) * step
        elif size > 1 and step % columns:
            return None
        stride.append(step // columns * wider if step >= columns else step)
    return tuple(stride) if reach < columns else None


def _emit_fused(edit: Editor, parts: list[_Part]) -> None:
    """Emit the product of all parts, and its columns as the results of the parts."""
    like, values = parts[0].product, edit.values
    widths = [values[part.product.outputs[0]].shape[1] for part in parts]
    rows, dtype = values[like.outputs[0]].shape[0], values[like.outputs[0]].dtype
    weight = _side_by_side(edit, [part.weight for part in parts], 0 if parts[0].transposed else 1)
    if parts[0].transposed:
        stored = values[weight.id]
        shape, stride = stored.shape[::-1], stored.stride[::-1]
        weight = edit.view_op(like, "aten.t.default", weight, {}, shape, stride)
    arguments: dict[str, Argument] = {**like.arguments, "mat2": weight}
    biases = [part.bias for part in parts if part.bias is not None]
    if biases:
        arguments["self"] = _side_by_side(edit, biases, 0)
    role = values[like.outputs[0]].role
    made = edit.made(like, like.target, arguments, (rows, sum(widths)), dtype, role)
    start = 0
    for part, width in zip(parts, widths, strict=True):
        out = part.product.outputs[0]
        result = values[out]
        for index in edit.flow.members[out]:
            strides = _wider(values[index], result, sum(widths))
            if strides is not None:  # ensured by `_fit_side_by_side`
                values[index] = replace(values[index], storage=made.id, stride=strides)
        cut: dict[str, Argument] = {"self": made, "dim": 1, "start": start, "end": start + width}
        edit.emit(part.product, "aten.slice.Tensor", cut, (out,), kind="view")
        start += width


def _side_by_side(edit: Editor, parts: list[int], dim: int) -> Ref:
    """An external weight that concatenates weights along one dimension."""
    first = edit.values[parts[0]]
    size = sum(edit.values[part].shape[dim] for part in parts)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    name = joined_name([edit.values[part].name for part in parts])
    index = edit.value(shape, first.dtype, first.role, first.repeats, name)
    edit.named_like(index, parts, joined_name)
    return Ref(index)


def joined_name(names: list[str]) -> str:
    """The name of several tensors as one: "attn.q+k.weight" for attn.q.weight, attn.k.weight."""
    paths = [name.split(".") for name in names]
    shortest = min(map(len, paths))
    first = next((i for i in range(shortest) if len({p[i] for p in paths}) > 1), shortest)
    backwards = [path[first:][::-1] for path in paths]
    least = min(map(len, backwards))
    last = next((i for i in range(least) if len({p[i] for p in backwards}) > 1), least)
    end = paths[0][len(paths[0]) - last :]
    middle = "+".join(".".join(path[first : len(path) - last]) for path in paths)
    return ".".join([*paths[0][:first], middle, *end])


# -- autocast --------------------------------------------------------------------------------------

_IN_HALF = frozenset({
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.mv", "aten.convolution",
    "aten.convolution_backward", "rooftrace.attention", "rooftrace.attention_backward",
})  # fmt: skip
"""Ops that autocast runs in a half, and their backward (AT_FORALL_LOWER_PRECISION_FP of ATen's
autocast_mode.h)."""
_WIDENED = frozenset({"rooftrace.rms_norm"}) | {
    f"aten.{name}" for name in (
        "native_layer_norm", "native_group_norm", "_fused_rms_norm", "nll_loss_forward",
        "nll_loss2d_forward", "pow", "exp", "expm1", "log", "log10", "log1p", "log2", "rsqrt",
        "reciprocal", "logsumexp", "mse_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "softplus", "binary_cross_entropy_with_logits", "_cdist_forward", "upsample_nearest2d",
        "upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest1d", "upsample_trilinear3d",
    )
}  # fmt: skip
_SOFTMAX = frozenset({"aten._softmax", "aten._safe_softmax", "aten._log_softmax"})
_SUMMED_WIDE = _SOFTMAX | {"aten.sum", "aten.cumsum", "aten.prod", "aten.cumprod"}
"""Ops that autocast runs in fp32: those that read a copy (AT_FORALL_FP32), and those that widen
what they read (AT_FORALL_FP32_SET_OPT_DTYPE)."""


def under_autocast(graph: OpGraph, half: str) -> OpGraph:
    """A step of fp32 as torch.autocast runs it: products in a half, norms and sums in fp32.

    Weights are cast once, others for each reader; the optimizer reads gradients that are cast back.
    """
    return _Autocast(graph.expand(), half).mended()


class _Autocast(Editor):
    """A graph whose ops read and make other precisions, op by op."""

    def __init__(self, graph: OpGraph, half: str) -> None:
        super().__init__(graph)
        self.half = half
        self.casts: dict[tuple[int, int, str], int] = {}  # by storage, numbers and precision
        self.narrow: set[int] = set()  # results of sums that read the half
        for op in graph.ops:
            op = self._casted(op, self._wanted(op))
            self.ops.append(op)
            self._set(op)
        for value in dict.fromkeys(graph.outputs):
            if self._dtype(value) == half and graph.values[value].role == "gradients":
                self.replaced[value] = self._cast(self.ops[-1], value, "fp32")

    def _dtype(self, value: int) -> str:
        return self.values[value].dtype

    def _wanted(self, op: Op) -> str:
        """The precision in which an op reads its operands; "" where it takes them as they are."""
        if op.name in _IN_HALF:
            return self.half
        name = op.name.removesuffix("_backward").removesuffix("_")
        wide = name in _WIDENED or name.replace("nll_loss", "nll_loss_forward") in _WIDENED
        if op.name in _OF_SUMS:
            return self._dtype(operand(op, "output").id)
        wide |= self._is_wide(op) and op.name in _SOFTMAX and self.half != "fp16"
        return "fp32" if op.part == "optimizer" or wide else ""

    def _is_wide(self, op: Op) -> bool:
        """Whether a sum of forward is in fp32; that of a cross entropy names its precision.

        CUDA's softmax widens fp16 itself (`half_to_float` of ATen's SoftMax.cpp).
        """
        named = op.function == "cross_entropy"
        return op.part == "forward" and op.name in _SUMMED_WIDE and not named

    def _casted(self, op: Op, wanted: str) -> Op:
        """An op that reads casts of what has another precision than it wants."""
        now = {}
        for value in op.inputs if op.kind == "kernel" else ():
            tensor = self.values[value]
            if wanted and tensor.dtype in (self.half, "fp32") and tensor.dtype != wanted:
                now[value] = self._cast(op, value, wanted)
        return reading_others(op, now)

    def _cast(self, like: Op, value: int, dtype: str) -> int:
        """A value in another precision; one that was cast before is read again by backward."""
        tensor = self.values[value]
        key = tensor.storage, tensor.elements, dtype
        again = tensor.role == "weights" or like.part != "forward"
        if key in self.casts and again:
            done = self.values[self.casts[key]]
            if done.shape == tensor.shape:
                return self.casts[key]
            return self.viewed(like, Ref(self.casts[key]), tensor.shape, tensor.stride).id
        how: dict[str, Argument] = {"self": Ref(value), "dtype": f"dtype:{dtype}"}
        role = "gradients" if like.part != "forward" else "activations"
        made = self.made(like, "aten._to_copy.default", how, tensor.shape, dtype, role)
        self.values[made.id] = replace(self.values[made.id], stride=tensor.stride)
        self.casts[key] = made.id
        return made.id

    def _set(self, op: Op) -> None:
        """Let what an op makes have its precision."""
        old, read = self.graph.values, [self._dtype(v) for v in op.inputs if self.values[v].shape]
        floats = [dtype for dtype in read if dtype in (self.half, "fp32")]
        widest = "fp32" if "fp32" in floats else self.half
        rule, made = find_rule(op.target), floats[0] if floats else "fp32"
        if op.name in _IN_HALF:
            made = self.half
        elif self._is_wide(op) or (op.part == "forward" and op.name in _WIDENED):
            self.narrow |= {*op.outputs} if self.half in floats else set()
            made = "fp32"
        elif op.name in _OF_SUMS and not self.narrow.isdisjoint(op.inputs):
            made = self.half  # `input_dtype`
        elif floats and (op.name == "aten.cat" or (rule and rule.fusion == "pointwise")):
            made = widest
        every = op.name in _IN_HALF and op.part == "backward"
        for place, value in enumerate(op.outputs):
            tensor = self.values[value]
            if old[value].dtype != "fp32" or (place and not every and tensor.storage == value):
                continue
            shared = tensor.storage != value
            dtype = self._dtype(tensor.storage) if shared else made
            self.values[value] = replace(tensor, dtype=dtype)


_OF_SUMS = frozenset({"aten._softmax_backward_data", "aten._log_softmax_backward_data"})
