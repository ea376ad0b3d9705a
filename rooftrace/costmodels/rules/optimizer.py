"""Rules of optimizer steps and of torch's primitive ops."""

from __future__ import annotations

from collections.abc import Iterable

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import axes, extent, is_complex, total, vector
from rooftrace.costmodels.rules.elementwise import FORMULAS, pointwise
from rooftrace.costmodels.rules.linalg import fft_flop

# -- optimizers ------------------------------------------------------------------------------------
# Optimizer steps: _foreach_ ops that elementwise has no namesake for, and the fused kernels.
#
# The plain and most _foreach_ forms are priced where their names are (`elementwise`, `creation`,
# `copying`).


def adam_flop(decoupled: bool, decay: bool, amsgrad: bool) -> int:
    """Flop per parameter of Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101).

    Decay: 1 decoupled, 2 into the gradient.  m + (1 - b1) (g - m): 3.  b2 v + (1 - b2) g g: 4.
    Maximum of v for amsgrad: 1.  sqrt(v) / c2 + eps: 3.  p - step m / that: 3.
    """
    return (0 if not decay else 1 if decoupled else 2) + 3 + 4 + amsgrad + 3 + 3


def _fused(op: OpView, flop: int, states: Iterable[str]) -> Cost:
    """Every list read once; parameters and states written (gradients too where unscaled)."""
    parameters = op.tensors("self")
    changed: list[TensorView] = [*parameters, *(t for name in states for t in op.tensors(name))]
    if op.tensor("grad_scale") is not None:
        changed += op.tensors("grads")
        flop += 1
    return (vector(op, flop * total(parameters)) + op.read_all((t for _, t in op.operands()))
            + op.write_all(changed))


@builtin("aten._fused_adam_", "aten._fused_adam", "aten._fused_adamw_", "aten._fused_adamw",
         fusion="pointwise", family="optimizer")
def fused_adam(op: OpView) -> Cost:
    """One pass over parameter, gradient and two moments: see `adam_flop`."""
    flop = adam_flop("adamw" in op.target, op.attribute("weight_decay", 0.0) != 0,
                     bool(op.attribute("amsgrad", False)))
    return _fused(op, flop, ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"))


@builtin("aten._fused_sgd_", "aten._fused_sgd", fusion="pointwise", family="optimizer")
def fused_sgd(op: OpView) -> Cost:
    """p - lr d: 2.  Decay into the gradient: 2.  b = momentum b + (1 - dampening) d: 2, or 3.

    Nesterov looks ahead, d + momentum b: 2.
    """
    momentum = op.attribute("momentum", 0.0) != 0
    flop = 2 + 2 * (op.attribute("weight_decay", 0.0) != 0)
    if momentum:
        flop += 2 + (op.attribute("dampening", 0.0) != 0)
        flop += 2 * bool(op.attribute("nesterov", False))
    return _fused(op, flop, ("momentum_buffer_list",) if momentum else ())


@builtin("aten._fused_adagrad_", "aten._fused_adagrad", fusion="pointwise")
def fused_adagrad(op: OpView) -> Cost:
    """s + g g: 2.  p - lr g / (sqrt(s) + eps): 5.  Decay into the gradient: 2."""
    return _fused(op, 7 + 2 * (op.attribute("weight_decay", 0.0) != 0), ("state_sums",))


@builtin("aten._amp_foreach_non_finite_check_and_unscale_",
         "aten._amp_foreach_non_finite_check_and_unscale", fusion="pointwise")
def unscale(op: OpView) -> Cost:
    """Gradients tested and multiplied by 1 / scale in place: 2 flop."""
    gradients = op.tensors("self")
    return (vector(op, 2 * total(gradients)) + op.read_all((t for _, t in op.operands()))
            + op.write_all(gradients) + op.write(op.tensor("found_inf")))


@builtin("aten._amp_update_scale_", "aten._amp_update_scale")
def update_scale(op: OpView) -> Cost:
    """A scalar and its counter."""
    return (op.read_all((t for _, t in op.operands())) + op.write(op.tensor("self"))
            + op.write(op.tensor("growth_tracker")))


# -- prims -----------------------------------------------------------------------------------------
# torch's primitive ops, which forward-mode derivatives and decompositions are written in.
#
# Each has the formula of an op of aten (`elementwise`).

AS_IN_ATEN: tuple[str, ...] = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "digamma",
    "erf", "erfc", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2",
    "neg", "reciprocal", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
    "atan2", "fmax", "fmin", "fmod", "igamma", "igammac", "maximum", "minimum", "nextafter",
    "remainder", "mul", "eq", "ne", "lt", "le", "gt", "ge", "hypot", "isfinite", "signbit",
)
OTHERS: dict[str, str] = {  # a function by another name, or one that aten has no formula for
    "add": "x + y", "sub": "x - y", "div": "x / y", "pow": "pow(x, y)",
    "bessel_i0": "i0(x)", "bessel_i0e": "i0e(x)", "bessel_i1": "i1(x)", "bessel_i1e": "i1e(x)",
    "bessel_j0": "j0(x)", "bessel_j1": "j1(x)", "spherical_bessel_j0": "j0(x)",
    "cbrt": "cbrt(x)", "erf_inv": "erfinv(x)", "erfcx": "erfcx(x)", "ndtri": "ndtri(x)",
    "zeta": "zeta(x, y)",
}


def _register(name: str, formula: str) -> None:
    @builtin(f"prims.{name}", fusion="pointwise")
    def price(op: OpView) -> Cost:
        return pointwise(op, formula)

    price.__doc__ = f"{formula} for every element."


for _name in AS_IN_ATEN:
    _register(_name, FORMULAS[_name])
for _name, _formula in OTHERS.items():
    _register(_name, _formula)


@builtin("prims.bitwise_and", "prims.bitwise_not", "prims.bitwise_or", "prims.bitwise_xor",
         "prims.shift_left", "prims.shift_right_arithmetic", "prims.gcd", "prims.where",
         "prims.conj_physical", fusion="pointwise")
def logical(op: OpView) -> Cost:
    """Bits, truth values and choices: bytes only."""
    return op.streamed()


@builtin("prims.sum", "prims.prod", "prims.amax", "prims.amin", "prims.xor_sum",
         fusion="reduction", fused="reduction")
def reduction(op: OpView) -> Cost:
    """n - 1 adds, products or comparisons for rows of n."""
    x, rows = op.inputs[0], op.outputs[0].elements
    parts = 2 if is_complex(x) else 1
    return vector(op, parts * max(x.elements - rows, 0)) + op.streamed()


@builtin("prims.var", fusion="reduction", fused="reduction")
def variance(op: OpView) -> Cost:
    """Mean (n), differences (n), squares (n), n - 1 adds and a division."""
    return vector(op, 4 * op.inputs[0].elements) + op.streamed()


@builtin("prims.clone", "prims.device_put", "prims.cat", "prims.rev", "prims.collapse",
         "prims.reshape", "prims.copy_strided", "prims.as_strided_scatter", "prims.frexp",
         fusion="pointwise", kind="copy")
def copied(op: OpView) -> Cost:
    """Read once, written once; free where the output is the input's bytes."""
    if op.inputs and all(t.storage == op.inputs[0].storage for t in op.outputs):
        return Cost()
    return op.streamed()


@builtin("prims.convert_element_type", fusion="pointwise", kind="cast", fused="cast")
def converted(op: OpView) -> Cost:
    """A copy in another type."""
    return op.streamed()


@builtin("prims.copy_to", fusion="pointwise", kind="cast")
def copy_to(op: OpView) -> Cost:
    """The source is read, the destination written."""
    return op.reading("b")


@builtin("prims.iota", "prims.normal", "prims.uniform", fusion="pointwise")
def made(op: OpView) -> Cost:
    """A scale and an offset for every element; of integers bytes only."""
    return vector(op, 2 * op.outputs[0].elements) + op.write_all(op.outputs)


@builtin("prims.fft_c2c", "prims.fft_r2c", "prims.fft_c2r")
def fft(op: OpView) -> Cost:
    """5 N log2 N flop for each transform, half of it where one side is real."""
    name = op.target.split(".")[1]
    x = op.outputs[0] if name == "fft_c2r" else op.needed("self")
    n = extent(x.shape, axes(op, x.dim))
    flop = fft_flop(x.elements // n if n else 0, n)
    return vector(op, flop if name == "fft_c2c" else flop // 2) + op.streamed()


@builtin("prims.item")
def item(op: OpView) -> Cost:
    """A value that the host waits for."""
    return op.reading("a")


@builtin("prims.as_strided", "prims.broadcast_in_dim", "prims.collapse_view", "prims.conj",
         "prims.real", "prims.imag", "prims.split_dim", "prims.squeeze", "prims.transpose",
         "prims.view_of", "prims.view_of_dtype", "prims.view_element_type", "prims.slice",
         "prims.select", "prims.resize", "prims.empty", "prims.empty_strided",
         "prims.empty_permuted", "prims.maximum_value", "prims.minimum_value", "prims._make_token",
         "prims._sink_tokens", fusion="free")
def free(op: OpView) -> Cost:
    """Views, allocations and bookkeeping."""
    return Cost()
