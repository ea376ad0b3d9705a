"""Which op of our graph each op is that a compiler was given.

Both are the same program, captured twice: the sequences are matched in order by name and module,
then by name alone between two pairs, then out of order inside of a module.  A compiler is given
some ops in parts that stay one op in our graph (RMS norm, recurrent networks): between two pairs
the parts belong to the op of the same module that has no partner.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from rooftrace.costmodels.registry import find_rule
from rooftrace.measured.alignment import calls, keys
from rooftrace.measured.fused.compiled import CompiledGraph, ProgramOp
from rooftrace.tracer.graph import Op, OpGraph

_TURNS = (
    ("forward", False, False),
    ("backward", True, True),
    ("recompute", True, False),
    ("forward", True, False),
)
"""Parts of our graph in turn: whether theirs is looked for in graphs with a backward, and among
ops of a backward."""


def matched(graphs: Sequence[CompiledGraph], graph: OpGraph) -> list[dict[int, int]]:
    """For each compiled graph: our op by the position of theirs.

    What a backward graph computes of the forward is looked for among ops of checkpoints that run
    again, then among those that no forward graph has.
    """
    result: list[dict[int, int]] = [{} for _ in graphs]
    taken: set[int] = set()
    for part, in_backward, backward in _TURNS:
        theirs = [
            (number, place)
            for number, compiled in enumerate(graphs)
            if compiled.backward == in_backward
            for place, op in enumerate(compiled.ops)
            if op.backward == backward
            and place not in result[number]
            and not calls.on_host(op.name)
        ]
        ours = [
            op for op in graph.ops if op.part == part and op.id not in taken and is_launched(op)
        ]
        program = [graphs[number].ops[place] for number, place in theirs]
        for i, op in _pairs(program, ours):
            number, place = theirs[i]
            result[number][place] = op.id
            taken.add(op.id)
    return result


def is_launched(op: Op) -> bool:
    """Whether an op of our graph launches anything."""
    rule = find_rule(op.target)
    return op.kind == "kernel" and (rule is None or rule.fusion != "free")


def _pairs(theirs: Sequence[ProgramOp], ours: Sequence[Op]) -> Iterator[tuple[int, Op]]:
    """(position of theirs, our op); several of theirs may be one of ours."""
    names = [keys.common_name(op.name) for op in theirs]
    own_names = [keys.common_name(op.name.replace(".", "::", 1)) for op in ours]
    exact = keys.common(
        [(f"{name} in {op.module}", ()) for name, op in zip(names, theirs, strict=True)],
        [(f"{name} in {op.module}", ()) for name, op in zip(own_names, ours, strict=True)],
    )
    pairs = sorted((*exact, *keys.between(exact, names, own_names)))
    swapped = _swapped(theirs, ours, names, own_names, pairs)
    yield from ((a, ours[b]) for a, b in (*pairs, *swapped))
    placed, taken = {a for a, _ in swapped}, {b for _, b in swapped}
    for mine, other in keys.gaps(pairs, len(theirs), len(ours)):
        left = [ours[number] for number in other if number not in taken]
        for place in mine:
            whole = next((op for op in left if _is_inside(theirs[place], op)), None)
            if whole is not None and place not in placed:
                yield place, whole


def _swapped(
    theirs: Sequence[ProgramOp],
    ours: Sequence[Op],
    names: Sequence[str],
    own_names: Sequence[str],
    pairs: Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    """More pairs: ops of one name in one module that stand in another order, as the two products
    in the backward of a linear layer."""
    done, taken = {a for a, _ in pairs}, {b for _, b in pairs}
    left: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for number, op in enumerate(ours):
        if number not in taken:
            left[own_names[number], op.module].append(number)
    return [
        (place, left[names[place], op.module].popleft())
        for place, op in enumerate(theirs)
        if place not in done and left[names[place], op.module]
    ]


def _is_inside(part: ProgramOp, op: Op) -> bool:
    """Whether a part of an op may be of this one: both run in the same module."""
    return part.module == op.module or part.module.startswith(f"{op.module}.")
