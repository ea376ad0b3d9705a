"""Names for groups of ops, as data: adding a pattern is adding a line.

A group gets the name of the first line whose ops it holds.  Names are what reports show; they never
change what is grouped or what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftrace.tracer.graph import Op


@dataclass(frozen=True, slots=True)
class Pattern:
    """name: what the report says.  has: at least one op of each of these sets is in the group."""

    name: str
    has: tuple[frozenset[str], ...]


def _any(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names)


_ROOT = _any("rsqrt", "sqrt", "reciprocal")
_SILU = _any(
    "silu", "gelu", "relu", "tanh", "sigmoid", "hardswish", "leaky_relu", "elu", "softplus", "mish"
)
_SILU_BACKWARD = _any(
    "silu_backward",
    "gelu_backward",
    "threshold_backward",
    "tanh_backward",
    "sigmoid_backward",
    "hardswish_backward",
)

PATTERNS = (
    Pattern(
        "optimizer step",
        (
            _any(
                "_foreach_addcdiv_",
                "_foreach_addcmul_",
                "_foreach_lerp_",
                "_foreach_addcdiv",
                "_foreach_sqrt",
            ),
        ),
    ),
    Pattern(
        "cross entropy", (_any("_log_softmax", "nll_loss_forward", "_log_softmax_backward_data"),)
    ),
    Pattern("softmax", (_any("_softmax", "_safe_softmax"),)),
    Pattern("softmax backward", (_any("_softmax_backward_data"),)),
    Pattern("layer norm", (_any("native_layer_norm"),)),
    Pattern("layer norm backward", (_any("native_layer_norm_backward"),)),
    Pattern("group norm", (_any("native_group_norm"),)),
    Pattern(
        "batch norm",
        (
            _any(
                "native_batch_norm",
                "_native_batch_norm_legit",
                "cudnn_batch_norm",
                "_native_batch_norm_legit_no_training",
                "_batch_norm_with_update",
            ),
        ),
    ),
    Pattern(
        "batch norm backward",
        (_any("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward"),),
    ),
    Pattern("rms norm", (_any("pow", "square", "mul"), _any("mean"), _ROOT)),
    Pattern("rms norm", (_any("_fused_rms_norm", "rms_norm"),)),
    Pattern("rotary embedding", (_any("cat"), _any("mul"), _any("add"), _any("neg", "sub"))),
    Pattern("rotary table", (_any("cos"), _any("sin"))),
    Pattern("gated activation", (_SILU, _any("mul"))),
    Pattern("activation", (_SILU,)),
    Pattern("activation backward", (_SILU_BACKWARD,)),
    Pattern("dropout", (_any("native_dropout", "bernoulli_"),)),
    Pattern("embedding", (_any("embedding"),)),
    Pattern("gather", (_any("index", "gather", "index_select"),)),
    Pattern(
        "reduction",
        (
            _any(
                "sum",
                "mean",
                "amax",
                "amin",
                "any",
                "all",
                "max",
                "min",
                "argmax",
                "norm",
                "linalg_vector_norm",
                "var",
                "var_mean",
                "prod",
            ),
        ),
    ),
    Pattern("concatenation", (_any("cat", "stack"),)),
    Pattern("cast", (_any("_to_copy"),)),
)

_SINGLE = {
    "rooftrace.attention": "flash attention",
    "rooftrace.attention_backward": "flash attention backward",
    "rooftrace.rnn": "rnn",
    "rooftrace.rnn_backward": "rnn backward",
    "rooftrace.cache_append": "cache append",
}


def group_name(ops: Sequence[Op]) -> str:
    """The name of a group: of its op if there is one only, else of the first pattern that fits."""
    if len(ops) == 1:
        name = ops[0].name
        return _SINGLE.get(name, name)
    names = {op.name for op in ops}
    plain = names | {name[:-1] for name in names if name.endswith("_")}
    for pattern in PATTERNS:
        if all(plain & wanted for wanted in pattern.has):
            return f"{pattern.name} (fused)"
    return "pointwise (fused)"
