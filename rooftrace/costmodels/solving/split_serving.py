"""From an estimate of prefill and one of decode to what both serve together, and their balance.

In: two estimates, each of one process of its own mesh.  Out: a row for each, the bytes of the cache
that a request sends from the chips of one to those of the other, and how many chips of each it
takes so that neither waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.timing import link_seconds
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import System


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSide:
    """One of the two phases on the chips of its mesh."""

    phase: str
    chips: int  # of one mesh
    replicas: int  # batches that they work on at a time
    batch: int  # requests of each
    seconds: float  # of a step
    requests_per_s_per_chip: float
    tokens_per_s_per_chip: float  # of the prompt, or of the answer
    exposed: float  # seconds of a step for which computing waits for other chips
    peak: int  # bytes alive on a chip
    fits: bool  # whether the chip holds them
    kv_bytes_per_token: float  # of the cache on one chip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Disaggregated(Shown):
    """Prefill and decode on chips of their own."""

    prefill: ServingSide
    decode: ServingSide
    prompt: int  # tokens of a request
    output: int  # tokens of its answer
    system: str
    kv_bytes: float  # of a request's cache, sent or received by one chip: the larger
    transfer: float  # seconds of that over the network, at least
    first_token: float  # seconds until the cache has arrived: a step of prefill and the transfer
    prefill_per_decode: float  # chips of prefill for each chip of decode, so that none waits
    output_tokens_per_s_per_chip: float  # of all chips, in this balance
    transfer_share: float  # of a step of prefill that sending its caches takes; above 1 it limits
    assumed: tuple[str, ...]  # what is taken for granted, a sentence each

    def __repr__(self) -> str:
        """ "Disaggregated(1.5 chips of prefill for each of decode, 840 tokens/s per chip)"."""
        text = f"{self.prefill_per_decode:.3g} chips of prefill for each of decode, "
        return short(self, f"{text}{self.output_tokens_per_s_per_chip:,.0f} tokens/s per chip")


def disaggregated(
    prefill: Estimate, decode: Estimate, *, output: int, system: System | None = None
) -> Disaggregated:
    """What prefill and decode serve together, each on a mesh of its own.

    output: tokens of an answer; a prompt has as many as the step of prefill.  system: whose network
    carries the cache; without one that of prefill.  Raises RequestError for estimates of other
    phases, of meshes that do not say how many batches they have, or without a network.
    """
    joined = system or prefill.chip.system
    for estimate, phase in ((prefill, "prefill"), (decode, "decode")):
        if estimate.phase != phase:
            raise RequestError(f"an estimate of {estimate.phase}: expected one of {phase}")
        if estimate.replicas is None:
            raise RequestError(
                f"the mesh of {phase} does not say how many batches it works on: name axes of data "
                "dp, of models tp, cp, ep or pp"
            )
    if not isinstance(output, int) or output < 1:
        raise RequestError(f"output={output!r}: expected a whole number of tokens of at least 1")
    if joined is None or not joined.levels:
        raise RequestError(
            "no network between prefill and decode: name a system (`rooftrace systems list`)"
        )
    if _precisions(prefill) != _precisions(decode):
        raise RequestError(
            f"caches in {_precisions(prefill)} of prefill and {_precisions(decode)} of decode: "
            "expected one precision; set kv_dtype of both"
        )
    return _together(prefill, decode, output, joined)


def _together(prefill: Estimate, decode: Estimate, output: int, system: System) -> Disaggregated:
    work, cached = prefill.graph.workload, decode.graph.workload
    prompt = int(work["seq"])
    first = _side(prefill, 1.0, prompt)
    then = _side(decode, float(output), int(cached["kv"]) + 1)
    kv_bytes = max(first.kv_bytes_per_token, then.kv_bytes_per_token) * prompt
    transfer = link_seconds(system, "send", kv_bytes, (0, _far(system, prefill.processes)))
    ratio = then.requests_per_s_per_chip / first.requests_per_s_per_chip
    served = then.requests_per_s_per_chip / (1 + ratio)
    return Disaggregated(
        prefill=first,
        decode=then,
        prompt=prompt,
        output=output,
        system=system.name,
        kv_bytes=kv_bytes,
        transfer=transfer,
        first_token=first.seconds + transfer,
        prefill_per_decode=ratio,
        output_tokens_per_s_per_chip=served * output,
        transfer_share=transfer * first.batch / first.seconds,
        assumed=(
            f"each of {output:,} tokens of an answer takes the step of decode, with "
            f"{int(cached['kv']):,} tokens in the cache",
            "prefill and decode stand on different nodes; every chip sends its part of the cache "
            "at the datasheet's bandwidth of the network, without latency",
            "no request waits in a queue, and all batches are full",
        ),
    )


def _side(estimate: Estimate, steps: float, tokens: int) -> ServingSide:
    """One phase; a request takes so many of its steps, and has so many tokens in the cache."""
    batch, replicas = int(estimate.graph.workload["batch"]), estimate.replicas or 1
    requests = batch * replicas / (estimate.t_est * steps * estimate.processes)
    per_chip = estimate.items_per_s_per_chip or 0.0
    capacity = estimate.chip.room()
    return ServingSide(
        phase=estimate.phase,
        chips=estimate.processes,
        replicas=replicas,
        batch=batch,
        seconds=estimate.t_est,
        requests_per_s_per_chip=requests,
        tokens_per_s_per_chip=per_chip,
        exposed=estimate.times.t_exposed,
        peak=estimate.memory.peak,
        fits=estimate.memory.peak <= capacity,
        kv_bytes_per_token=estimate.memory.kv / (batch * tokens),
    )


def _precisions(estimate: Estimate) -> str:
    """The precisions of the cache."""
    graph = estimate.graph
    return ", ".join(sorted({value.dtype for value in graph.values if value.role == "kv"}))


def _far(system: System, processes: int) -> int:
    """A rank in another node than rank 0, where the system has any."""
    return max(processes, system.size_of(0)) if len(system.levels) > 1 else processes
