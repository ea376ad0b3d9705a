"""Rules of elementwise ops and random numbers: FLOPs are counted from one formula per op.

Convention: one flop per arithmetic operation, per comparison (min and max included) and per value
of an elementary function (exp, log, sqrt, tanh, erf ...), which is how jax.roofline counts too.
How fast a special-function unit computes exp belongs to the chip.  Composites count the operations
of the formula in this file; of two branches the longer one counts.  Casts, copies and selections
are free, and integer, index and boolean work is bytes only.

In a formula lower-case names are per element (x: the first operand, y: the second or the saved
output, g: the incoming gradient, t: the target, w: a weight or mask, a, b: tensor1, tensor2),
upper-case names are numbers (the schema's name of the argument), which fold into constants.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache

from rooftrace.costmodels.ops import Cost, OpView, builtin
from rooftrace.costmodels.rules.common import is_complex, total, vector

# -- counting a formula ----------------------------------------------------------------------------

COMPLEX_FLOP: Mapping[str, int] = {
    "Add": 2, "Sub": 2, "USub": 2,
    "Mult": 6,  # four products, two sums
    "Div": 11,  # six for the product with the conjugate, three for |d|^2, two divisions
    "abs": 4,  # two squares, a sum, a root
    "angle": 1,
    "exp": 5,  # exp(re), sin(im), cos(im), two products
    "reciprocal": 6,
    "sgn": 6,
}
COMPLEX_FUNCTION = 6
"""Any other function of a complex value: of the order of an exponential and a product."""


@cache
def flop_per_element(formula: str, complex_values: bool = False) -> int:
    """Operations in a formula: binary and unary arithmetic, comparisons, function values.

    >>> flop_per_element("x / (1 + exp(-x))")
    4
    >>> flop_per_element("x * y", complex_values=True)
    6
    """
    assigned: dict[str, bool] = {}

    def price(operation: str) -> int:
        return COMPLEX_FLOP.get(operation, COMPLEX_FUNCTION) if complex_values else 1

    def count(node: ast.expr) -> tuple[int, bool]:
        """Flop of a subtree, and whether it varies by element (constants fold)."""
        if isinstance(node, ast.Constant):
            return 0, False
        if isinstance(node, ast.Name):
            return 0, assigned.get(node.id, node.id.islower())
        if isinstance(node, ast.NamedExpr):
            flop, varies = count(node.value)
            assigned[node.target.id] = varies
            return flop, varies
        if isinstance(node, ast.IfExp):
            test, then, other = count(node.test), count(node.body), count(node.orelse)
            return test[0] + max(then[0], other[0]), True
        if isinstance(node, ast.Compare):
            return _sum(map(count, [node.left, *node.comparators]), len(node.ops))
        if isinstance(node, ast.BoolOp):
            return _sum(map(count, node.values), 0)
        if isinstance(node, ast.BinOp):
            return _sum(map(count, [node.left, node.right]), price(type(node.op).__name__))
        if isinstance(node, ast.UnaryOp):
            return _sum([count(node.operand)], price(type(node.op).__name__))
        if isinstance(node, ast.Tuple):
            return _sum(map(count, node.elts), 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return _sum(map(count, node.args), price(node.func.id))
        raise ValueError(f"{formula!r}: {ast.dump(node)} is not arithmetic")

    return count(ast.parse(formula, mode="eval").body)[0]


def _sum(parts: Iterable[tuple[int, bool]], flop_here: int) -> tuple[int, bool]:
    parts = list(parts)
    varies = any(v for _, v in parts)
    return sum(flop for flop, _ in parts) + (flop_here if varies else 0), varies


def pointwise(op: OpView, formula: str, elements: int | None = None) -> Cost:
    """The formula once per output element (per element of all lists for a _foreach op)."""
    if elements is None:
        sizes = [t.elements for t in op.written()]
        elements = sum(sizes) if "._foreach_" in op.target else max(sizes, default=0)
    complex_values = any(is_complex(t) for t in (*op.inputs, *op.outputs))
    return vector(op, flop_per_element(formula, complex_values) * elements) + op.streamed()


# -- one operation or one function value per element -----------------------------------------------

UNARY: tuple[str, ...] = (
    "abs", "acos", "acosh", "angle", "arccos", "arccosh", "arcsin", "arcsinh", "arctan",
    "arctanh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "digamma", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "floor", "i0", "lgamma", "log", "log10", "log1p", "log2",
    "mvlgamma", "neg", "polygamma", "reciprocal", "round", "rsqrt", "sgn", "sign", "sin", "sinh",
    "sqrt", "tan", "tanh", "trunc", "fix", "absolute", "negative", "special_airy_ai",
    "special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1",
    "special_digamma", "special_erf", "special_erfc", "special_erfcx", "special_erfinv",
    "special_exp2", "special_expm1", "special_gammaln", "special_i0", "special_i0e", "special_i1",
    "special_i1e", "special_log1p", "special_log_ndtr", "special_modified_bessel_i0",
    "special_modified_bessel_i1", "special_modified_bessel_k0", "special_modified_bessel_k1",
    "special_ndtr", "special_ndtri", "special_psi", "special_round",
    "special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1",
    "special_spherical_bessel_j0",
)
BINARY: tuple[str, ...] = (
    "atan2", "arctan2", "copysign", "fmax", "fmin", "fmod", "igamma", "igammac", "ldexp",
    "maximum", "minimum", "nextafter", "remainder", "special_zeta", "heaviside", "clamp_min",
    "clamp_max", "float_power",
)

FORMULAS: dict[str, str] = {name: f"{name}(x)" for name in UNARY}
FORMULAS |= {name: f"{name}(x, y)" for name in BINARY}
FORMULAS |= {
    # Arithmetic and comparisons.
    "mul": "x * y", "multiply": "x * y",
    "true_divide": "x / y", "floor_divide": "floor(x / y)",
    "square": "x * x", "frac": "x - trunc(x)", "deg2rad": "x * C", "rad2deg": "x * C",
    "eq": "x == y", "ne": "x != y", "lt": "x < y", "le": "x <= y", "gt": "x > y", "ge": "x >= y",
    "not_equal": "x != y", "less": "x < y", "less_equal": "x <= y", "greater": "x > y",
    "greater_equal": "x >= y",
    "isnan": "x != x", "isinf": "abs(x) == INF", "isfinite": "abs(x) < INF", "isposinf": "x == INF",
    "isneginf": "x == INF", "signbit": "x < 0",
    "nan_to_num": "NAN if x != x else (POSINF if x == INF else (NEGINF if x == INF else x))",
    "lerp": "x + w * (y - x)", "hypot": "sqrt(x * x + y * y)",
    "logaddexp": "max(x, y) + log1p(exp(-abs(x - y)))",
    "logaddexp2": "max(x, y) + log2(1 + exp2(-abs(x - y)))",
    "xlogy": "x * log(y)", "special_xlogy": "x * log(y)", "special_xlog1py": "x * log1p(y)",
    "special_entr": "-x * log(x)", "logit": "log(x / (1 - x))", "special_logit": "log(x / (1 - x))",
    "sinc": "sin(z := C * x) / z", "special_sinc": "sin(z := C * x) / z",
    "special_expit": "1 / (1 + exp(-x))",
    "threshold": "x if x > THRESHOLD else VALUE",
    "linalg_cross": "x * y - x * y", "cross": "x * y - x * y",  # per output element
    # Activations.
    "sigmoid": "1 / (1 + exp(-x))",
    "relu": "max(x, 0)", "relu6": "min(max(x, 0), 6)", "hardtanh": "min(max(x, MIN_VAL), MAX_VAL)",
    "leaky_relu": "x if x > 0 else x * NEGATIVE_SLOPE",
    "prelu": "x if x > 0 else w * x", "_prelu_kernel": "x if x > 0 else w * x",
    "elu": "x * SCALE if x > 0 else expm1(x * INPUT_SCALE) * (ALPHA * SCALE)",
    "celu": "x if x > 0 else expm1(x / ALPHA) * ALPHA",
    "selu": "x * SCALE if x > 0 else expm1(x) * (ALPHA * SCALE)",
    "silu": "x * (1 / (1 + exp(-x)))",
    "mish": "x * tanh(log1p(exp(x)))",
    "softplus": "x if (z := x * BETA) > THRESHOLD else log1p(exp(z)) / BETA",
    "log_sigmoid_forward": "min(x, 0) - log1p(exp(-abs(x)))",
    "log_sigmoid": "min(x, 0) - log1p(exp(-abs(x)))",
    "hardswish": "x * min(max(x + 3, 0), 6) / 6", "hardsigmoid": "min(max(x + 3, 0), 6) / 6",
    "softshrink": "x - LAMBD if x > LAMBD else (x + LAMBD if x < -LAMBD else 0)",
    "hardshrink": "x if x > LAMBD or x < -LAMBD else 0",
    "glu": "x * (1 / (1 + exp(-y)))",
    "rrelu_with_noise": "x if x > 0 else x * NOISE",
    # Their gradients.
    "threshold_backward": "g if x > THRESHOLD else 0",
    "sigmoid_backward": "g * (1 - y) * y", "tanh_backward": "g * (1 - y * y)",
    "logit_backward": "g / (x * (1 - x))",
    "hardtanh_backward": "g if x > MIN_VAL and x < MAX_VAL else 0",
    "leaky_relu_backward": "g if x > 0 else g * NEGATIVE_SLOPE",
    "_prelu_kernel_backward": "(g if (m := x > 0) else w * g, 0 if m else x * g)",
    "elu_backward":
        "g * SCALE if x > 0 else g * (INPUT_SCALE * ALPHA * SCALE) * exp(x * INPUT_SCALE)",
    "silu_backward": "g * (s := 1 / (1 + exp(-x))) * (1 + x * (1 - s))",
    "mish_backward": "g * ((z := tanh(log1p(exp(x)))) + x * (1 / (1 + exp(-x))) * (1 - z * z))",
    "softplus_backward": "g if (z := x * BETA) > THRESHOLD else g * (e := exp(z)) / (e + 1)",
    "log_sigmoid_backward":
        "g * ((1 if x < 0 else 0) - (1 if x < 0 else -1) * (e := exp(-abs(x))) / (1 + e))",
    "hardswish_backward": "0 if x < -3 else (g * (x / 3 + 0.5) if x < 3 else g)",
    "hardsigmoid_backward": "g * SIXTH if x > -3 and x < 3 else 0",
    "softshrink_backward": "0 if x >= -LAMBD and x <= LAMBD else g",
    "hardshrink_backward": "0 if x >= -LAMBD and x <= LAMBD else g",
    "rrelu_with_noise_backward": "g * w",
    # Quantisation seen in training: there and back.
    "fake_quantize_per_tensor_affine_cachemask":
        "(min(max(round(x * SCALE) + ZERO, QMIN), QMAX) - ZERO) * SCALE",
    "fake_quantize_per_channel_affine_cachemask":
        "(min(max(round(x * SCALE) + ZERO, QMIN), QMAX) - ZERO) * SCALE",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams":
        "(min(max(round(x * SCALE) + ZERO, QMIN), QMAX) - ZERO) * SCALE",
}

LOGICAL: tuple[str, ...] = (
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
    "bitwise_right_shift", "logical_and", "logical_or", "logical_xor", "logical_not",
    "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__iand__", "__ior__", "__ixor__",
    "__ilshift__", "__irshift__", "isreal", "gcd", "lcm",
)
"""Bytes only: they do no floating arithmetic, whatever the type of their operands."""


NO_IN_PLACE: frozenset[str] = frozenset((
    "angle", "cross", "fmax", "fmin", "glu", "hardshrink", "isfinite", "isinf", "isnan",
    "isneginf", "isposinf", "isreal", "linalg_cross", "log_sigmoid", "log_sigmoid_forward",
    "logaddexp", "logaddexp2", "maximum", "minimum", "prelu", "_prelu_kernel", "signbit",
    "softplus", "softshrink",
))


def _in_place(name: str) -> tuple[str, ...]:
    """The op, and its in-place form where torch has one."""
    alone = (name in NO_IN_PLACE or "_backward" in name or "cachemask" in name
             or name.startswith(("special_", "__")))
    return (f"aten.{name}",) if alone else (f"aten.{name}", f"aten.{name}_")


ACTIVATIONS: frozenset[str] = frozenset((
    "silu", "relu", "tanh", "sigmoid", "hardswish", "leaky_relu", "elu", "softplus", "mish",
))
ACTIVATION_GRADIENTS: frozenset[str] = frozenset((
    "silu_backward", "threshold_backward", "tanh_backward", "sigmoid_backward",
    "hardswish_backward",
))
INPUT_TWICE: frozenset[str] = frozenset(("silu", "hardswish", "mish", "leaky_relu", "elu"))
"""Activations that use their input more than once."""
UPDATES: frozenset[str] = frozenset(("lerp", "sqrt"))
"""Over a list of tensors these are steps of an optimizer."""


def _register(name: str, formula: str) -> None:
    fused = ("activation" if name in ACTIVATIONS
             else "activation backward" if name in ACTIVATION_GRADIENTS else None)
    if name in FOREACH:
        forms = (f"aten._foreach_{name}", f"aten._foreach_{name}_")
        step = "optimizer step" if name in UPDATES else None
        builtin(*forms, fusion="pointwise", fused=step)(lambda op: pointwise(op, formula))

    @builtin(*_in_place(name), fusion="pointwise", fused=fused,
             traits=("rereads",) if name in INPUT_TWICE else ())
    def price(op: OpView) -> Cost:
        return pointwise(op, formula)


FOREACH: frozenset[str] = frozenset((
    "abs", "acos", "asin", "atan", "ceil", "clamp_max", "clamp_min", "cos", "cosh", "erf", "erfc",
    "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2", "maximum",
    "minimum", "mul", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh",
    "sqrt", "tan", "tanh", "trunc",
))

for _name, _formula in FORMULAS.items():
    _register(_name, _formula)


@builtin(*(form for name in LOGICAL for form in _in_place(name)), fusion="pointwise")
def logical(op: OpView) -> Cost:
    """Bit and truth operations: every input read, every output written, no flop."""
    return op.streamed()


# -- formulas that depend on an attribute ----------------------------------------------------------


@builtin("aten.add", "aten.add_", "aten.sub", "aten.sub_", "aten.rsub", "aten.subtract",
         "aten.subtract_", "aten._foreach_add", "aten._foreach_add_", "aten._foreach_sub",
         "aten._foreach_sub_", fusion="pointwise")
def add(op: OpView) -> Cost:
    """x + alpha y: an add, and a product if alpha is not 1."""
    return pointwise(op, "x + y" if op.attribute("alpha", 1) == 1 else "x + ALPHA * y")


@builtin("aten.div", "aten.div_", "aten.divide", "aten.divide_", "aten._foreach_div",
         "aten._foreach_div_", fusion="pointwise")
def div(op: OpView) -> Cost:
    """x / y, rounded with `rounding_mode`."""
    return pointwise(op, "x / y" if op.attribute("rounding_mode") is None else "round(x / y)")


@builtin("aten._foreach_addcmul", "aten._foreach_addcmul_", fusion="pointwise",
         fused="optimizer step")
@builtin("aten.addcmul", "aten.addcmul_", fusion="pointwise")
def addcmul(op: OpView) -> Cost:
    """x + value a b."""
    return pointwise(op, "x + a * b" if _unit_value(op) else "x + VALUE * a * b")


@builtin("aten._foreach_addcdiv", "aten._foreach_addcdiv_", fusion="pointwise",
         fused="optimizer step")
@builtin("aten.addcdiv", "aten.addcdiv_", fusion="pointwise")
def addcdiv(op: OpView) -> Cost:
    """x + value a / b."""
    return pointwise(op, "x + a / b" if _unit_value(op) else "x + VALUE * a / b")


def _unit_value(op: OpView) -> bool:
    return op.attribute("value", 1) == 1 and op.attribute("scalars") is None


@builtin("aten.pow", "aten.pow_", "aten._foreach_pow", "aten._foreach_pow_",
         fusion="pointwise")
def power(op: OpView) -> Cost:
    """x^p: 2 and 3 are products, -2 a product and a reciprocal, any other one function value."""
    formulas = {2: "x * x", 3: "x * x * x", -2: "1 / (x * x)"}
    exponent = op.attribute("exponent")
    numeric = isinstance(exponent, (int, float))
    return pointwise(op, formulas.get(exponent, "pow(x, P)") if numeric else "pow(x, P)")


@builtin("aten.clamp", "aten.clamp_", "aten.clip", "aten.clip_", fusion="pointwise")
def clamp(op: OpView) -> Cost:
    """One comparison per bound that is given."""
    bounds = sum(op.attribute(name) is not None for name in ("min", "max"))
    return pointwise(op, "min(max(x, MIN), MAX)" if bounds == 2 else "max(x, MIN)")


@builtin("aten.glu_backward", fusion="pointwise")
def glu_backward(op: OpView) -> Cost:
    """Gradients of x and y in x sigmoid(y): both halves of the output from one incoming value."""
    formula = "((s := 1 / (1 + exp(-y))) * g, (1 - s) * s * g * x)"
    return pointwise(op, formula, op.needed("grad_output").elements)


POLYNOMIALS: tuple[str, ...] = (
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v",
    "chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he",
    "laguerre_polynomial_l", "legendre_polynomial_p", "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
)


@builtin(*(f"aten.special_{name}" for name in POLYNOMIALS), fusion="pointwise")
def polynomial(op: OpView) -> Cost:
    """Each degree from the two before it: p = a x q - b r, 4 flop (of an unknown degree, once)."""
    degree = op.attribute("n", 1)
    steps = max(int(degree), 1) if isinstance(degree, (int, float)) else 1
    return vector(op, 4 * steps * op.outputs[0].elements) + op.streamed()


@builtin("aten.polar", fusion="pointwise")
def polar(op: OpView) -> Cost:
    """abs (cos(angle) + i sin(angle)): two functions, two products of real numbers."""
    return vector(op, 4 * op.outputs[0].elements) + op.streamed()


@builtin("aten.quantize_per_tensor", "aten.quantize_per_channel", "aten.dequantize",
         "aten.fake_quantize_per_tensor_affine_cachemask_backward",
         "aten.fake_quantize_per_channel_affine_cachemask_backward", fusion="pointwise")
def quantised(op: OpView) -> Cost:
    """To integers: scale, round, shift.  Back: shift, scale.  A gradient: times its mask."""
    name = op.target.split(".")[1]
    each = 1 if "backward" in name else 2 if name == "dequantize" else 3
    return vector(op, each * op.outputs[0].elements) + op.streamed()


GELU = {
    "none": "x * 0.5 * (1 + erf(x * C))",
    "tanh": "x * 0.5 * (1 + tanh(C * (x + D * x * x * x)))",
}
GELU_BACKWARD = {
    "none": "g * (0.5 * (1 + erf(x * C)) + x * exp(x * x * -0.5) * D)",
    "tanh": ("g * (0.5 * (1 + (z := tanh(C * (x + D * (q := x * x) * x))))"
             " + 0.5 * x * (1 - z * z) * (C * (1 + 3 * D * q)))"),
}


@builtin("aten.gelu", "aten.gelu_", fusion="pointwise", fused="activation", traits=("rereads",))
def gelu(op: OpView) -> Cost:
    """x Phi(x), with erf or its tanh approximation (arXiv 1606.08415)."""
    return pointwise(op, GELU[op.attribute("approximate", "none")])


@builtin("aten.gelu_backward", fusion="pointwise", fused="activation backward")
def gelu_backward(op: OpView) -> Cost:
    """g (Phi(x) + x phi(x)), or the derivative of the approximation."""
    return pointwise(op, GELU_BACKWARD[op.attribute("approximate", "none")])


@builtin("aten.complex", "aten.real", "aten.imag", "aten.conj_physical", "aten.conj_physical_",
         "aten._conj_physical", "aten.view_as_real_copy", "aten.view_as_complex_copy",
         "aten.resolve_conj", "aten.resolve_neg", fusion="pointwise")
def complex_parts(op: OpView) -> Cost:
    """Taking complex numbers apart or together: bytes only."""
    return op.streamed()


# -- random ----------------------------------------------------------------------------------------
# Random numbers and dropout.  Making random bits is integer work; using them counts.

@builtin("aten.rand", "aten.randn", "aten.randint", "aten.rand_like", "aten.randn_like",
         "aten.randint_like", "aten.uniform", "aten.uniform_", "aten.normal_", "aten.exponential",
         "aten.exponential_", "aten.log_normal", "aten.log_normal_", "aten.cauchy", "aten.cauchy_",
         "aten.geometric", "aten.geometric_", "aten.random", "aten.random_", fusion="pointwise")
def random_fill(op: OpView) -> Cost:
    """Every element written; inputs give the shape and are not read.

    Shaping a distribution is counted as 2 flop per value, a scale and an offset; its special
    functions belong to the generator.
    """
    return vector(op, 2 * total(op.written())) + op.write_all(op.written())


@builtin("aten.normal", "aten.normal_functional", fusion="pointwise")
def normal(op: OpView) -> Cost:
    """mean + std * noise: 2 flop, with mean and std read where they are tensors."""
    return vector(op, 2 * total(op.outputs)) + op.reading("mean", "std")


@builtin("aten.bernoulli_", fusion="pointwise", fused="dropout")
@builtin("aten.bernoulli", "aten.poisson", "aten.binomial",
         "aten._standard_gamma", "aten._sample_dirichlet", fusion="pointwise")
def sampled(op: OpView) -> Cost:
    """One comparison (or the like) per sample; probabilities are read where they are tensors.

    `self` of an in-place form, or together with `p`, only gives the shape.
    """
    shaped = op.target.split(".")[1].endswith("_") or op.attribute("p") is not None
    names = ("p",) if shaped else ("self", "p", "count", "prob")
    return vector(op, total(op.written())) + op.reading(*names)


@builtin("aten.randperm")
def randperm(op: OpView) -> Cost:
    """A sort of random keys: the result is written once."""
    return op.write_all(op.outputs)


@builtin("aten.multinomial")
def multinomial(op: OpView) -> Cost:
    """A running sum and its normalisation per row of n weights: 2 n; samples are index work."""
    return vector(op, 2 * op.needed("self").elements) + op.reading("self")


@builtin("aten.native_dropout", fusion="pointwise", fused="dropout")
@builtin("aten._fused_dropout", "aten.dropout", "aten.dropout_",
         "aten.feature_dropout", "aten.feature_dropout_", "aten.alpha_dropout",
         "aten.alpha_dropout_", fusion="pointwise")
def dropout(op: OpView) -> Cost:
    """y = x [u > p] / (1 - p): a comparison and two products; mask and y are written."""
    if not op.attribute("train", True):
        return op.streamed()
    return vector(op, 3 * op.inputs[0].elements) + op.streamed()


@builtin("aten.native_dropout_backward", "aten._masked_scale", fusion="pointwise")
def dropout_backward(op: OpView) -> Cost:
    """dx = dy mask scale: two products."""
    return vector(op, 2 * op.inputs[0].elements) + op.streamed()


@builtin("rngprims.philox_rand", fusion="pointwise")
def philox(op: OpView) -> Cost:
    """Random bits, written."""
    return op.write_all(op.outputs)
