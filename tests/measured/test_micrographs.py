"""Operations that a run measured alone, as graphs: they cost what the run says that they cost."""

import math

import pytest

from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops.cost import MATRIX
from rooftrace.errors import ProfileError
from rooftrace.measured.bench.operations import micro_cases, traced_micro as traced
from rooftrace.measured.bench.runfile import MicroRow


def rows(on_cuda: bool):
    """One row of each kind of operation and precision, no larger than it has to be."""
    found = {}
    for case in micro_cases(on_cuda):
        if not case.sampler and case.bytes > 1e4:
            mark = (
                case.kind,
                case.sizes.get("op"),
                case.sizes.get("dtype"),
                case.sizes.get("causal"),
            )
            found.setdefault(mark, case)
    return [
        MicroRow(
            key=case.key,
            kind=case.kind,
            sizes=case.sizes,
            seconds=(1e-3,),
            flops=case.flops,
            bytes=case.bytes,
        )
        for case in found.values()
    ]


@pytest.mark.parametrize("on_cuda", [False, True])
def test_the_graph_computes_and_moves_what_the_case_says(on_cuda):
    for row in rows(on_cuda):
        planned = plan(traced(row, on_cuda), "eager")
        moved = sum(planned.bytes.to_dict().values())
        # Cases leave out small results; of an op that runs as several, each reads and writes.
        several = len(planned.groups) > 1
        assert moved >= 0.99 * row.bytes, row.key
        assert several or moved <= 1.2 * row.bytes, row.key
        if row.kind in ("matmul", "batched_matmul", "grouped_matmul", "convolution"):
            assert planned.total.flops(MATRIX) == row.flops, row.key
        if row.kind.startswith("attention"):
            assert math.isclose(
                planned.total.flops(MATRIX, ("useful",)), row.flops, rel_tol=0.01
            ), row.key


def test_a_launch_has_no_graph():
    with pytest.raises(ProfileError, match="launch what=eager op"):
        traced(
            MicroRow(key="launch what=eager op", kind="launch", sizes={}, seconds=(1e-6,)), False
        )
