"""Tables of many rows are folded: every turn stands in one row, and ranges hold all numbers."""

from dataclasses import dataclass

import pytest

from rooftrace.reporting.renderers import units, view
from rooftrace.reporting.views.folding import Folding, span


@dataclass
class Row:
    called: str
    shape: tuple[int, ...]
    t_est: float
    turns: int = 1
    kind: str = "inference"


COLUMNS = (
    view.Column("turns", units.COUNT, "turns"),
    view.Column("t_est", units.SECOND, "each"),
    view.Column("shape", units.TEXT, "input", of=lambda row: str(list(row.shape))),
)
FOLDING = Folding(
    columns=COLUMNS,
    name=("shape", lambda row: f"{row.called}({list(row.shape)})"),
    seconds=lambda row: row.t_est * row.turns,
    merged={"turns": lambda rows: sum(row.turns for row in rows)},
    few=3,
    parts=1,
)


@pytest.mark.parametrize("modules", [1, 2, 7, 90])
def test_a_folded_table_has_all_turns_in_few_rows(modules: int) -> None:
    rows = [
        Row(f"Net{number % modules}", (number % 4 + 1, number), number * 1e-6, turns=2)
        for number in range(1, 361)
    ]
    lines = FOLDING.of(rows)
    assert len(lines) <= 21
    turns = [line["turns"] if isinstance(line, dict) else line.turns for line in lines]
    assert sum(turns) == sum(row.turns for row in rows)
    if modules == 1:
        assert lines == [{"turns": 720, "t_est": "1.00..360.0 us", "shape": "Net0([1..4, 1..360])"}]


def test_few_rows_stay_as_they_are() -> None:
    rows = [Row("Net", (number,), 1e-6) for number in range(12)]
    assert FOLDING.of(rows) == rows
    assert FOLDING.of([*rows, Row("Other", (3, 3), 1.0)])[-1] == Row("Other", (3, 3), 1.0)
    assert [span("1", "1"), span("1 us", "2 us"), span("1 us", "2 ms")] == [
        "1", "1..2 us", "1 us..2 ms"
    ]  # fmt: skip
