"""Operators on quantised values: of PyTorch's namespace, fake ones, bitsandbytes'.

A packed weight is given as the tensors inside of it.  Products of int8 by int8 run on the matrix
engine in int8; a weight that is narrower than its activations is multiplied in the activations'
precision.  Scaling and unpacking are vector work in fp32, whatever the stored type.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import rows_reached, share, stored_width, total
from rooftrace.costmodels.rules.optimizer import adam_flop

REQUANTIZE = 3
"""Flop to store a result in 8 bits: scale, round, clamp."""
UNPACK = 2
"""Flop for a weight: a look-up or a zero point, and a scale."""


def _vector(flop: int) -> Cost:
    return Cost.of(vector=flop, precision="fp32")


def _matmul(m: int, n: int, k: int, precision: str, a: TensorView, width: float) -> Cost:
    return Cost.of(matmul=2 * m * k * n, precision=precision, rows=m, columns=n, inner=k,
                   widths=(stored_width(a), width))


# -- quantized:: -----------------------------------------------------------------------------------

LINEAR = tuple(f"quantized.linear{name}" for name in (
    "", "_relu", "_leaky_relu", "_tanh", "_dynamic", "_relu_dynamic", "_dynamic_fp16",
    "_relu_dynamic_fp16"))
CONVOLUTION = tuple(f"quantized.conv{name}" for name in (
    "1d", "2d", "3d", "1d_relu", "2d_relu", "3d_relu", "2d_add", "2d_add_relu", "1d_dynamic",
    "2d_dynamic", "3d_dynamic", "_transpose1d", "_transpose2d", "_transpose3d",
    "_transpose1d_dynamic", "_transpose2d_dynamic", "_transpose3d_dynamic"))


def packed_weight(op: OpView) -> tuple[TensorView, ...]:
    """(weight, bias if any) of a packed weight, whatever the schema calls it."""
    for name in ("W_prepack", "packed_weight", "weight"):
        tensors = op.tensors(name)
        if tensors:
            return tensors
    raise ValueError(f"{op.target}: its packed weight is not known")


@builtin(*LINEAR)
def quantized_linear(op: OpView) -> Cost:
    """y[M, N] = x[M, K] W[N, K]^T of int8: 2 M K N flop, then a bias and requantising y.

    Dynamic: x comes in floats, is searched for its range and quantised (5 flop each), and y is
    scaled back to floats.  In fp16 the weight is multiplied as floats.
    """
    x, weight = op.needed("X"), packed_weight(op)[0]
    (n, k), m = weight.shape, math.prod(x.shape[:-1])
    precision = "fp16" if "fp16" in op.target else "int8"
    each = 1 + (len(packed_weight(op)) > 1) + ("relu" in op.target)
    after = m * n * (each if "dynamic" in op.target else each - 1 + REQUANTIZE)
    before = 5 * x.elements if "dynamic" in op.target and precision == "int8" else 0
    return _matmul(m, n, k, precision, x, stored_width(weight)) + _vector(after + before) \
        + op.streamed()


@builtin(*CONVOLUTION)
def quantized_convolution(op: OpView) -> Cost:
    """y[N, C_out, P] of int8: 2 N P C_out (C_in / groups) R S flop, then as `quantized_linear`.

    The weight is [C_out, C_in / groups, R, S]; transposed it is [C_in, C_out / groups, R, S], and P
    are the positions of the input.
    """
    x, out = op.needed("qx"), op.outputs[0]
    weight = packed_weight(op)[0]
    transposed = "transpose" in op.target
    rows = x.shape[0] * math.prod((x if transposed else out).shape[2:])
    each = (len(packed_weight(op)) > 1) + ("relu" in op.target) + ("_add" in op.target)
    before = 5 * x.elements if "dynamic" in op.target else 0
    return (Cost.of(convolution=2 * rows * weight.elements, precision="int8", rows=rows)
            + _vector((each + REQUANTIZE) * out.elements + before) + op.streamed())


POINTWISE = {
    "add": 5, "mul": 4, "add_relu": 6, "mul_relu": 5, "add_scalar": 1, "mul_scalar": 1,
    "add_scalar_relu": 2, "mul_scalar_relu": 2, "relu6": 2, "hardswish": 7, "sigmoid": 7,
    "leaky_relu": 5, "elu": 6, "celu": 6, "clamp": 2, "threshold": 2, "prelu": 5,
    "batch_norm": 5, "batch_norm1d": 5, "batch_norm2d": 5, "batch_norm3d": 5,
    "batch_norm_relu": 6, "batch_norm1d_relu": 6, "batch_norm2d_relu": 6, "batch_norm3d_relu": 6,
}
"""Flop for each result: scaling operands, the operation, and requantising."""


@builtin(*(f"quantized.{name}" for name in POINTWISE), fusion="pointwise")
def quantized_pointwise(op: OpView) -> Cost:
    """y = quantise(f(dequantise(x), ...)): POINTWISE says how many flop per element."""
    return _vector(POINTWISE[op.target.split(".")[1]] * op.outputs[0].elements) + op.streamed()


@builtin("quantized.cat", "quantized.cat_relu", fusion="pointwise")
def quantized_cat(op: OpView) -> Cost:
    """Copies, each scaled anew."""
    return _vector((1 + REQUANTIZE) * op.outputs[0].elements) + op.streamed()


@builtin("quantized.matmul")
def quantized_matmul(op: OpView) -> Cost:
    """C[..., M, N] = A[..., M, K] B[..., K, N] of int8: 2 M K N flop each, and requantising."""
    a, b, out = op.needed("qa"), op.needed("qb"), op.outputs[0]
    flop = 2 * out.elements * a.shape[-1]
    return (Cost.of(matmul=flop, precision="int8", rows=a.shape[-2], columns=b.shape[-1],
                    inner=a.shape[-1])
            + _vector(REQUANTIZE * out.elements) + op.streamed())


@builtin("quantized.embedding_byte", "quantized.embedding_4bit", "quantized.embedding_2bit",
         "quantized.embedding_bag_byte", "quantized.embedding_bag_4bit",
         "quantized.embedding_bag_2bit", "quantized.embedding_bag_byte_rowwise_offsets",
         "quantized.embedding_bag_4bit_rowwise_offsets",
         "quantized.embedding_bag_2bit_rowwise_offsets", fusion="gather")
def quantized_embedding(op: OpView) -> Cost:
    """out[T, D] = scale * row + bias of the rows of the indices, of a bag summed: 2 or 3 flop each.

    The rows touched are read, with their scale and bias.
    """
    table, indices = packed_weight(op)[0], op.needed("indices")
    rows = min(rows_reached(op, indices.elements), table.shape[0])
    width = op.outputs[0].shape[-1]
    each = 3 if "bag" in op.target else 2
    return (_vector(each * indices.elements * width)
            + op.read(table, share(table, rows, table.shape[0]))
            + op.read_all((indices, op.tensor("offsets"), op.tensor("per_sample_weights")))
            + op.write_all(op.outputs))


# -- fake quantisation -----------------------------------------------------------------------------


@builtin("aten._fused_moving_avg_obs_fq_helper", "aten._fused_moving_avg_obs_fq_helper_functional",
         "aten.fused_moving_avg_obs_fake_quant")
def observe_and_fake_quantize(op: OpView) -> Cost:
    """The range of x (2 comparisons each), its moving average, then x through the grid.

    y = (clamp(round(x / s) + z) - z) * s and a mask of unclamped values: 8 flop each.
    """
    x = op.needed("self")
    return _vector((2 + 8) * x.elements) + op.streamed()


@builtin("aten._fake_quantize_learnable_per_tensor_affine",
         "aten._fake_quantize_learnable_per_channel_affine", fusion="pointwise")
def learnable_fake_quantize(op: OpView) -> Cost:
    """y = (clamp(round(x / s) + z) - z) * s: 7 flop each."""
    return _vector(7 * op.needed("self").elements) + op.streamed()


@builtin("aten._fake_quantize_learnable_per_tensor_affine_backward",
         "aten._fake_quantize_learnable_per_channel_affine_backward")
def learnable_fake_quantize_backward(op: OpView) -> Cost:
    """dx, and sums over dy for the scale and the zero point: 15 flop each.

    Quantising again (6), dx (1), the terms of the two sums (6), and adding them up (2).
    """
    return _vector(15 * op.needed("self").elements) + op.streamed()


# -- bitsandbytes:: --------------------------------------------------------------------------------


@builtin("bitsandbytes.gemm_4bit", "bitsandbytes.gemv_4bit")
def product_of_4bit(op: OpView) -> Cost:
    """C[M, N] = A[M, K] W[N, K]^T of 4-bit values in blocks: 2 M K N flop in the type of A.

    Each weight is looked up and scaled on the vector engine.
    """
    a = op.needed("A")
    n, k = op.attribute("shapeB")
    m = a.elements // max(k, 1)
    bias = m * n if op.tensor("bias") is not None else 0
    width = op.needed("B").nbytes / max(n * k, 1)
    return (_matmul(m, n, k, a.dtype, a, width) + _vector(UNPACK * n * k + bias) + op.streamed())


@builtin("bitsandbytes.int8_linear_matmul", "bitsandbytes.int8_scaled_mm")
def product_of_int8(op: OpView) -> Cost:
    """C[M, N] = A[M, K] B[N, K]^T of int8: 2 M K N flop; scales by row and column: 2 M N."""
    a, b = op.needed("A"), op.needed("B")
    (n, k), m = b.shape, math.prod(a.shape[:-1])
    each = (2 if "scaled" in op.target else 0) + (op.tensor("bias") is not None)
    return _matmul(m, n, k, "int8", a, stored_width(b)) + _vector(each * m * n) + op.streamed()


@builtin("bitsandbytes.int8_mixed_scaled_mm")
def product_of_int8_and_outliers(op: OpView) -> Cost:
    """A scaled int8 product, plus a product of the outlier columns in the type of A.

    2 M K N flop of int8 and 2 M N for the scales.  Each outlier column adds 2 M N, and N to scale
    its weights.
    """
    a, b = op.needed("CA"), op.needed("CB")
    wide, columns = op.needed("A"), op.tensor("outlier_cols")
    (n, k), m = b.shape, math.prod(a.shape[:-1])
    few = columns.elements if columns is not None else 0
    cost = _matmul(m, n, k, "int8", a, stored_width(b)) + _vector(2 * m * n) + op.streamed()
    if few:
        cost += Cost.of(matmul=2 * m * n * few, precision=wide.dtype) + _vector(n * few)
    return cost


@builtin("bitsandbytes.dequantize_4bit", "bitsandbytes.dequantize_blockwise",
         "bitsandbytes.int8_vectorwise_dequant", "bitsandbytes.int8_mm_dequant",
         fusion="pointwise")
def dequantize(op: OpView) -> Cost:
    """A look-up or a cast, and a scale, of each result."""
    return _vector(UNPACK * op.outputs[0].elements) + op.streamed()


@builtin("bitsandbytes.quantize_4bit", "bitsandbytes.quantize_blockwise",
         "bitsandbytes.int8_vectorwise_quant", "bitsandbytes.int8_double_quant")
def quantize(op: OpView) -> Cost:
    """The largest of each block or row (2 flop each), and each value scaled and rounded (2).

    A code of 2^b values is searched by b comparisons: 4, or 8.
    """
    a = op.needed("A")
    search = 4 if "4bit" in op.target else 8 if "blockwise" in op.target else 0
    return _vector((4 + search) * a.elements) + op.streamed()


_UPDATE = {"momentum": 4, "rmsprop": 9, "adagrad": 7, "lion": 9, "ademamix": 19}
"""Flop per weight of a step without decay; of adam and lamb see `adam_flop`.

momentum: b m + g, p - lr m.  adagrad: s + g g, p - lr g / (sqrt(s) + eps).  rmsprop: the same with
b s + (1 - b) g g.  lion: b m + (1 - b) g twice, the sign of one, p - lr sign.  ademamix: Adam with
m of two speeds, m1 + alpha m2.
"""


@builtin("bitsandbytes.optimizer_update_8bit_blockwise", "bitsandbytes.optimizer_update_32bit",
         fusion="pointwise", family="optimizer")
def update(op: OpView) -> Cost:
    """One pass over gradient, weight and states; codes of 8 bits read, written with their scales.

    A state in 8 bits is unpacked and quantised again (as in `quantize`) with the update; each
    weight decayed: 1.  The schema names the gradient and the codes as written: they are read.
    """
    weight, name = op.needed("p"), op.attribute("optimizer_name")
    states = [t for t in (op.tensor("state1"), op.tensor("state2")) if t is not None]
    scales = [t for t in (op.tensor("absmax1"), op.tensor("absmax2")) if t is not None]
    decay = op.attribute("weight_decay", 0.0) != 0
    flop = _UPDATE[name] + decay if name in _UPDATE else adam_flop(True, decay, False)
    packed = UNPACK + 12 if scales else 0
    others = [t for n, t in op.operands() if n != "unorm_vec" or op.attribute("max_unorm", 0.0) > 0]
    return (_vector(flop * weight.elements + packed * total(states)) + op.read_all(others)
            + op.write_all([weight, *states, *scales]))
