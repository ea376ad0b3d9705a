"""The names of the rewrites that an execution model can ask for; `rewriting` applies them."""

KERNELS: tuple[str, ...] = (
    "written-attention",
    "shared-heads",
    "mask-numbers",
    "causal-conv1d",
    "selective-scan",
    "ssd",
    "gated-delta-rule",
    "linear-attention",
    "fused-routing",
    "fused-experts",
    "index-scores",
)
"""Rewrites that put the kernel of a library in place of what its fallback writes out."""

REWRITES = (
    "routed-experts",  # before the kernels: what it makes runs in these
    *KERNELS,
    "absorb-latent",
    "fused-qkv",
    "fused-gate-up",
    "narrow-operands",
    "last-logits",
    "static-cache",
)
"""Names of rewrites of the graph, in the order in which they are applied."""
