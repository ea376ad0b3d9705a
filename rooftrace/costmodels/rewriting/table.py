"""The named rewrites: what a server runs in place of what a module's code says.

A rewrite is a line of REWRITES.  It is found by structure (ops, shapes, the wiring of values, their
roles), never by the name of a model or a module, and it gives the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftrace.costmodels.rewriting.caches import append_in_place
from rooftrace.costmodels.rewriting.causal_convs import fuse_causal_convs
from rooftrace.costmodels.rewriting.duals import fuse_dual_scans
from rooftrace.costmodels.rewriting.experts import route_experts
from rooftrace.costmodels.rewriting.fused_products import fuse_gate_up, fuse_qkv
from rooftrace.costmodels.rewriting.latent import absorb_latent
from rooftrace.costmodels.rewriting.logits import last_logits
from rooftrace.costmodels.rewriting.parallel_scans import fuse_selective_scans
from rooftrace.tracer.graph import OpGraph

INFERENCE = ("forward", "prefill", "decode", "requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A named change of the graph that leaves its results as they are."""

    name: str  # as in `ExecutionModel.rewrites`
    meaning: str  # one sentence for who asks what it does
    apply: Callable[[OpGraph], tuple[OpGraph, int]]  # the new graph, and how many places changed
    noun: str  # what is changed, in the singular
    phases: tuple[str, ...] = INFERENCE  # where it applies


REWRITES = (
    Rewrite(
        name="causal-conv1d",
        meaning="A causal convolution of each channel runs as one kernel, with its state and SiLU.",
        apply=fuse_causal_convs,
        noun="causal convolution",
    ),
    Rewrite(
        name="selective-scan",
        meaning="A recurrence whose state numbers decay each by itself runs as one kernel.",
        apply=fuse_selective_scans,
        noun="selective scan",
    ),
    Rewrite(
        name="ssd",
        meaning="A recurrence with one decay for each head runs as the kernels of state-space "
        "duality.",
        apply=fuse_dual_scans,
        noun="state-space layer",
    ),
    Rewrite(
        name="absorb-latent",
        meaning="Attention runs on the cached latents: the projection of the cache is multiplied "
        "into query and output.",
        apply=absorb_latent,
        noun="attention",
    ),
    Rewrite(
        name="routed-experts",
        meaning="Experts that compute every token, and weigh most by zero, compute the tokens "
        "routed to them.",
        apply=route_experts,
        noun="expert layer",
    ),
    Rewrite(
        name="fused-qkv",
        meaning="Products of one input that all reach one attention are one product.",
        apply=fuse_qkv,
        noun="qkv projection",
    ),
    Rewrite(
        name="fused-gate-up",
        meaning="Two products of one input whose results are multiplied are one product.",
        apply=fuse_gate_up,
        noun="gate-up projection",
    ),
    Rewrite(
        name="last-logits",
        meaning="A prompt has the logits of its last position only.",
        apply=last_logits,
        noun="head",
        phases=("prefill",),
    ),
    Rewrite(
        name="static-cache",
        meaning="New rows are written into a cache that has room, where a `cat` copies the cache.",
        apply=append_in_place,
        noun="cache append",
        phases=("prefill", "decode", "requests"),
    ),
)
"""Every rewrite, in the order in which they are applied."""
