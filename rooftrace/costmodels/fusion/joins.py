"""Joins: the named reasons why ops share a kernel.  A join is a line of JOINS, or of a user.

A condition says whether the first of two kernels can be computed inside the second.  The order of
pairs, and cycles, are the business of the code that applies joins (`grouping`, `partition`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rooftrace._extensions import load, owner, refuse_second, track
from rooftrace.costmodels.fusion.index_space import FEW_PLACED, UNROLLED
from rooftrace.costmodels.fusion.kernels import FEW_READS, SMALL, KernelView
from rooftrace.errors import RequestError

Condition = Callable[..., bool]

NEAR = 64
"""Kernels further apart in launch order are not merged for a tensor that both read."""

OP, GATHER, TAKE, MOVE, READER, PLACE, SIBLING, FINISHED = (
    "op", "gather", "take", "move", "reader", "place", "sibling", "finished",
)  # fmt: skip
"""Stages at which a join is tried.

op: an op, right before its result is used, with the kernel that makes its operands.  gather: two
kernels that make operands of one op.  take: an op of an earlier kernel, with a reduction that reads
it.  move: an op, with the only kernel that reads it.  reader, place: a kernel, with the first one
that reads it.  sibling: two kernels that read the same tensor.  finished: kernels after all of the
above, each of which only the next one reads.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A reason why two kernels are one."""

    name: str  # in reports and `FusionGroup.why`
    when: Condition  # of two kernels (or three in a row), whether they are one
    tried: tuple[str, ...] = (FINISHED,)  # stages: see above
    because: str = ""  # a sentence for who asks why
    constant: int | None = None  # the limit in its condition
    inductor: str = ""  # the option or the function of Inductor that it mirrors
    source: str = "rooftrace"
    label: str = ""  # of such a kernel in reports; empty: the names of its parts
    parts: int = 2  # how many kernels the condition takes
    on: bool = True  # off: a join of `headroom`, beyond compilers


# -- conditions ------------------------------------------------------------------------------------


def _same_elements(first: KernelView, second: KernelView) -> bool:
    return second.size == first.size and (
        first.reduced is None or second.reduced is None or first.reduced == second.reduced
    )


def _rows_of_a_reduction(first: KernelView, second: KernelView) -> bool:
    return second.reduced is None and second.size == first.reduced


def _is_repeated(first: KernelView, second: KernelView) -> bool:
    """Whether the second iterates over the result of the first an integral number of times."""
    return first.reduced is None and first.size > 0 and second.size % first.size == 0


def _small_producer(first: KernelView, second: KernelView) -> bool:
    return first.size <= SMALL and _is_repeated(first, second)


def _few_reads(first: KernelView, second: KernelView) -> bool:
    few = not first.stored and not first.long and _reads_few(first)
    return few and _is_repeated(first, second)


def _reads_few(kernel: KernelView) -> bool:
    return len(kernel.reads - kernel.made) <= FEW_READS


def _part_of_the_producer(first: KernelView, second: KernelView) -> bool:
    return (
        first.reduced is second.reduced is None
        and not first.stored
        and _reads_few(first)
        and 0 < second.size < first.size < UNROLLED * second.size
    )


def _small_consumer(first: KernelView, second: KernelView) -> bool:
    reduces = first.reduced is not None and second.reduced is None
    return reduces and 0 < second.size <= SMALL and first.size % second.size == 0


def _shared_tensor(first: KernelView, second: KernelView) -> bool:
    apart = second.reads.isdisjoint(first.reads) and second.reads.isdisjoint(first.made)
    return not apart and _same_elements(first, second)


def _input_of_a_reduction(first: KernelView, second: KernelView) -> bool:
    return first.size == second.size and "reduction" not in first.classes


def _only_consumer(first: KernelView, second: KernelView) -> bool:
    values = first.facts.graph.values
    large = (values[i].elements > SMALL for op in first.ops for i in op.inputs)
    return first.reduced is second.reduced is None and first.size == second.size and sum(large) == 1


def _placed(first: KernelView, second: KernelView) -> bool:
    if first.reduced is not None or first.stored or first.size >= second.size:
        return False
    facts, members, other = first.facts, set(first.members), set(second.members)
    return facts.wide.keys().isdisjoint(members) and all(
        user in members or (user in other and facts.has_trait(user, "places"))
        for number in members
        for user in facts.needed_by[number]
    )


def _attention(first: KernelView, second: KernelView, third: KernelView) -> bool:
    return first.is_product and "softmax" in second.labels and third.is_product


def _epilogue(first: KernelView, second: KernelView) -> bool:
    """The second goes over no more than the elements that the product writes."""
    if not first.is_product or second.classes != {"pointwise"} or second.goes_over_lists:
        return False
    written = [max((t.elements for t in kernel.results), default=0) for kernel in (first, second)]
    return written[1] <= written[0]


def _chain(first: KernelView, second: KernelView) -> bool:
    kernels = (first, second)
    return not any("opaque" in kernel.classes or kernel.goes_over_lists for kernel in kernels)


# -- the table -------------------------------------------------------------------------------------

INDUCTOR = "torch/_inductor"
AGREEMENT = "benchmarks/inductor"
"""Chosen so that our kernels are those of Inductor's scheduler, for the models compared there."""

ATTENTION, EPILOGUE, CHAIN = "attention", "epilogue", "chain"

JOINS = (
    Join(
        name="same elements",
        when=_same_elements,
        tried=(OP, GATHER, READER),
        because="both go over the same elements, so a value is used where it is made",
        inductor="SIMDScheduling.can_fuse: numel and rnumel agree",
        source=f"{INDUCTOR}/codegen/simd.py",
    ),
    Join(
        name="rows of a reduction",
        when=_rows_of_a_reduction,
        tried=(OP,),
        because="it goes over the rows that the reduction leaves",
        inductor="SIMDScheduling.can_fuse: a pointwise node of the reduction's numel",
        source=f"{INDUCTOR}/codegen/simd.py",
    ),
    Join(
        name="small producer",
        when=_small_producer,
        tried=(OP, GATHER, READER),
        because="it is small and broadcast, and computed again wherever it is used",
        constant=SMALL,
        inductor="pointwise nodes that are not realised are inlined",
        source=AGREEMENT,
    ),
    Join(
        name="few reads",
        when=_few_reads,
        tried=(OP, GATHER, READER),
        because="it is broadcast and reads little, so computing it again is cheaper than a kernel",
        constant=FEW_READS,
        inductor="config.realize_reads_threshold",
        source=f"{INDUCTOR}/config.py",
    ),
    Join(
        name="part of the producer",
        when=_part_of_the_producer,
        tried=(OP,),
        because="only a part (a half, a summand) of what is made is used here",
        constant=UNROLLED,
        inductor="config.unroll_reductions_threshold",
        source=f"{INDUCTOR}/config.py",
    ),
    Join(
        name="small consumer",
        when=_small_consumer,
        tried=(OP,),
        because="it is small and goes with the reduction before it",
        constant=SMALL,
        inductor="pointwise nodes that are not realised are inlined",
        source=AGREEMENT,
    ),
    Join(
        name="input of a reduction",
        when=_input_of_a_reduction,
        tried=(TAKE,),
        because="only this reduction needs it, so it is computed there",
        inductor="Scheduler.fuse_nodes: producers fuse with their reduction first",
        source=AGREEMENT,
    ),
    Join(
        name="only consumer",
        when=_only_consumer,
        tried=(MOVE,),
        because="only this kernel uses it, and its one large input is written anyway",
        constant=SMALL,
        inductor="pointwise nodes that are not realised are inlined",
        source=AGREEMENT,
    ),
    Join(
        name="placed",
        when=_placed,
        tried=(PLACE,),
        because="all of it is put into a larger tensor (cat, pad), so it is computed in its place",
        constant=FEW_PLACED,
        inductor="config.max_pointwise_cat_inputs",
        source=f"{INDUCTOR}/config.py",
    ),
    Join(
        name="shared tensor",
        when=_shared_tensor,
        tried=(SIBLING,),
        because="both go over the same elements and read the same tensor, which is read once",
        constant=NEAR,
        inductor="Scheduler.are_long_distant_nodes",
        source=f"{INDUCTOR}/scheduler.py",
    ),
    Join(
        name=ATTENTION,
        when=_attention,
        because="queries times keys, softmax, times values, which no pattern knew for attention",
        inductor="fx_passes/fuse_attention.py",
        source=f"{INDUCTOR}/fx_passes/fuse_attention.py",
        label="attention written by hand",
        parts=3,
        on=False,
    ),
    Join(
        name=EPILOGUE,
        when=_epilogue,
        because="element-by-element work that alone reads the result of a matrix product",
        inductor="config.epilogue_fusion, with config.max_autotune",
        source=f"{INDUCTOR}/config.py",
        on=False,
    ),
    Join(
        name=CHAIN,
        when=_chain,
        because="two generated kernels of which only the second reads the first",
        source="an upper bound",
        on=False,
    ),
)
"""Every join of this package, in the order in which they are tried."""

_OWN: list[Join] = track([])


def joins_at(stage: str) -> tuple[Join, ...]:
    """The joins of JOINS that are on and tried at a stage, in order."""
    return tuple(join for join in JOINS if join.on and stage in join.tried)


def own_joins() -> tuple[Join, ...]:
    """Joins that users and third-party packages registered, in order."""
    load("rooftrace.joins")
    return tuple(_OWN)


def because(name: str) -> str:
    """The sentence for a join of this name; empty for one that is registered no longer."""
    return next((join.because for join in (*JOINS, *_OWN) if join.name == name), "")


def fitting(joins: Sequence[Join], first: KernelView, second: KernelView) -> Join | None:
    """The first of some joins whose condition holds."""
    for join in joins:
        if join.when(first, second):
            return join
    return None


# -- joins of users --------------------------------------------------------------------------------


def fusion(
    name: str,
    *,
    because: str = "",
    source: str = "user",
    label: str = "",
    override: bool = False,
) -> Callable[[Condition], Condition]:
    """Register the decorated function `when(first, second) -> bool` as a join.

    It is called with two finished kernels where only the second reads the results of the first, and
    no wait and no write stands between them.  A function of three parameters is called with three
    kernels in a row.  If it returns True they become one kernel, in every execution model with
    `fusion="detected"`.

    name: of such a kernel in reports.  because: a sentence for `why()`, by default the first line
    of the docstring.  source: the author.  label: of the kernel in reports, by default the names of
    its parts.  A second join of one name raises RequestError, unless override=True or it is
    the same function defined again; a function of another number of parameters raises ValueError.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'fusion({name!r}): expected a name, for example "gemm epilogue"')

    def register(when: Condition) -> Condition:
        parameters = len(inspect.signature(when).parameters)
        if parameters not in (2, 3):
            raise ValueError(
                f"fusion({name!r}): {owner(when)} takes {parameters} kernels; expected "
                "when(first, second) or when(first, second, third)"
            )
        if any(name == join.name for join in JOINS):
            raise RequestError(f"{name!r} is a join of rooftrace's own; use another name")
        old = next((join.when for join in _OWN if join.name == name), None)
        refuse_second(f"{name!r} already is a join", old, when, override=override)
        join = Join(
            name=name,
            when=when,
            because=because or (inspect.getdoc(when) or "").partition("\n")[0],
            source=source,
            label=label,
            parts=parameters,
        )
        _OWN[:] = [*(other for other in _OWN if other.name != name), join]
        return when

    return register
