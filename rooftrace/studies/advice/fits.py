"""Changes after which a step fits its chip: checkpoints, narrow states, smaller batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.rewrites import layer_lists, with_checkpoints, with_small_states
from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph
from rooftrace.hardware.units import listed
from rooftrace.studies.advice.variants import Study, Variant
from rooftrace.studies.advice.whatifs import StepChange, WhatIf, all_of, priced_change

AtBatch = Callable[[int], OpGraph]
"""A trace of the step at another batch size; it raises RequestError where there is none."""


def fitting(step: Estimate, at_batch: AtBatch | None = None) -> tuple[WhatIf, ...]:
    """Changes after which a step fits its chip, the shortest first; none where it fits already.

    Checkpoints of layers and states of 8 bits are of training, which adds gradients of smaller
    batches up; several at once are tried where none of them is enough.
    """
    room = step.chip.room()
    if step.memory.peak <= room:
        return ()
    single = _smaller(step) if step.phase == "training" else ()
    both = (all_of(single, ", ".join(change.action for change in single)),) * (len(single) > 1)
    batch = partial(_smaller_batch, step, at_batch)
    for whole, in_batches in ((single, (_AS_IT_IS,)), (both, (*single, *both))):
        ways = [*map(partial(priced_change, step), whole), *map(batch, in_batches)]
        if fit := [way for way in ways if way is not None and way.fits]:
            return tuple(sorted(fit, key=lambda way: way.t_after))
    return ()


def _smaller(step: Estimate) -> tuple[StepChange, ...]:
    """Checkpoints of layers, and narrow states of the optimizer, where there are some."""
    source = step.plan.source
    lists = layer_lists(source)
    checkpoints = StepChange(
        lever="memory",
        action=f"run each layer of {listed(lists)} again in backward (torch.utils.checkpoint)",
        needs="a checkpoint around the call of each of them",
        edits=(with_checkpoints,),
    )
    states = StepChange(
        lever="memory",
        action="keep the states of the optimizer in 8 bits",
        needs="an optimizer such as bitsandbytes' AdamW8bit; accuracy is not checked",
        edits=(with_small_states,),
    )
    return ((checkpoints,) if lists else ()) + ((states,) if step.memory.optimizer else ())


_AS_IT_IS = StepChange(lever="memory", action="", needs="")


def _smaller_batch(step: Estimate, at_batch: AtBatch | None, change: StepChange) -> WhatIf | None:
    """The step in several smaller batches, with another change; None where no batch fits.

    The number of batches is the least power of two for which the peak should fit, or twice that.
    """
    batch, memory = int(step.graph.workload.get("batch") or 1), step.memory
    edited = priced_change(step, change) if change.edits else None
    peak = memory.peak if edited is None else edited.peak
    held = memory.weights + memory.gradients + (edited.after if edited else step).memory.optimizer
    runs = 2
    while runs < batch and held + (peak - held) / runs > step.chip.room():
        runs *= 2
    for number in (runs, 2 * runs):
        if at_batch is None or batch % number or held > step.chip.room():
            continue
        try:
            graph = at_batch(batch // number)
        except RequestError:
            return None
        after = Study(step).estimate(Variant(graph=change.edited(graph) or graph))
        also = f"{change.action[:1].upper()}{change.action[1:]}, in " if change.action else "In "
        adding = " whose gradients add up" if step.phase == "training" else ""
        way = WhatIf(
            lever="memory",
            action=f"{also}{number} batches of {batch // number}{adding}",
            option=f"--batch {batch // number}" if not change.edits else "",
            needs=change.needs or "the same samples, a part at a time",
            before=step,
            after=after,
            runs=number,
        )
        if way.fits:
            return way
    return None
