"""The names of the rewrites that an execution model can ask for; `rewriting` applies them."""

KERNELS: tuple[str, ...] = (
    "causal-conv1d",
    "selective-scan",
    "ssd",
)
"""Rewrites that put the kernel of a library in place of what its fallback writes out."""

REWRITES = (
    *KERNELS,
    "absorb-latent",
    "routed-experts",
    "fused-qkv",
    "fused-gate-up",
    "last-logits",
    "static-cache",
)
"""Names of rewrites of the graph, in the order in which they are applied."""
