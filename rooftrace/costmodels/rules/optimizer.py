"""Optimizer steps: _foreach_ ops that elementwise has no namesake for, and the fused kernels.

The plain and most _foreach_ forms are priced where their names are (`elementwise`, `creation`,
`copying`).
"""

from __future__ import annotations

from collections.abc import Iterable

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import total, vector


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
