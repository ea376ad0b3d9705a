"""The names of the rewrites that an execution model can ask for; `rewriting` applies them."""

REWRITES = (
    "absorb-latent",
    "routed-experts",
    "fused-qkv",
    "fused-gate-up",
    "last-logits",
    "static-cache",
)
"""Names of rewrites of the graph, in the order in which they are applied."""
