"""Random numbers and dropout.  Making random bits is integer work; using them counts."""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import total, vector


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

    `self` of an in-place form, or beside a given `p`, only says the shape.
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
