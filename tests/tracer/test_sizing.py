"""Sizes of a source: their names, what they change, and the traces that are kept on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.costmodels.ops import own_rules
from rooftrace.errors import RequestError
from rooftrace.graph import graphs_bytes, load_graphs
from rooftrace.reporting.commands.sweeps import level_values, levels_of
from rooftrace.tracer import Job
from rooftrace.tracer.phases import SizedSource

pytestmark = pytest.mark.quick

CODE = """
import torch
from torch import nn


def build(width: int = 16):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.{activation}())


def example_inputs(width: int = 16):
    return (torch.empty(3, width),)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROOFTRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE.format(activation="ReLU"))
    return path


def sized(path: Path, *names: str) -> SizedSource:
    inputs = {"input": "rows,16" if "rows" in names else "3,16"}
    job = Job.of(rt.tools.form, f"{path}:build", (), {"inputs": inputs}).of_one_phase()
    return SizedSource(job, names)


def op_names(source: SizedSource, *numbers: int) -> list[str]:
    (graph,) = source.graphs(numbers).values()
    return [op.name for op in graph.ops]


# -- levels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("1..4", [1, 2, 3, 4]),
        ("1..9:4", [1, 5, 9]),
        ("3..40:x2", [3, 6, 12, 24]),
        ("8,2,8", [2, 8]),
        ("7", [7]),
        (7, [7]),
        ([4, 2, 4, 4], [2, 4]),
        ((2, 5), [2, 3, 4, 5]),
        ((5, 5), [5]),
        (range(9, 0, -4), [1, 5, 9]),
        ([2.0, 3], [2, 3]),
        ("1_000", [1000]),
        ("1..10:x1.5", [1, 2, 3, 5, 8]),
    ],
)
def test_values_of_a_size(values: Any, expected: list[int]) -> None:
    assert list(level_values("batch", values)) == expected


@pytest.mark.parametrize(
    "values",
    ["4..1", "1..0", (5, 2), [], range(3, 3), "0..4", 0, -3, [-1, 2], "1..9:0", "1..9:-1",
     "1..9:x1",
     "1..9:x0.5", "1..9:xinf", "1..9:xnan", "1..9:x1.0000000001", "a", "1..b", "", ",", "1,,2", 1.5,
     [1, 2.5], ["a"], object(), True, float("nan"), float("inf"), 10**30, "1.." + "9" * 40,
     "9" * 5000],
)  # fmt: skip
def test_a_strange_range_is_quoted(values: Any) -> None:
    with pytest.raises(RequestError, match="batch=") as raised:
        level_values("batch", values)
    assert len(str(raised.value)) < 400


def test_a_huge_range_takes_no_room() -> None:
    levels = level_values("batch", "1..9_000_000_000")
    assert len(levels) == 9_000_000_000 and levels[-1] == len(levels)
    with pytest.raises(RequestError, match="lines: expected"):
        rt.sweep("deepseek-v3", over={"batch": "1..9_000_000_000"}, phase="decode")


@pytest.mark.parametrize("over", [{}, (), []])
def test_a_size_is_needed(over: Any) -> None:
    with pytest.raises(RequestError, match="over is empty"):
        levels_of(over)


# -- names -----------------------------------------------------------------------------------------


def test_an_unknown_size_is_an_error_with_the_nearest_name(code: Path) -> None:
    import torch

    module = torch.nn.Linear(8, 8)
    with pytest.raises(RequestError, match=r"size 'bacth'.*batch"):
        rt.tools.form(module, torch.empty(2, 8), over={"bacth": "1..4"})
    with pytest.raises(RequestError, match=r"size '3\.0'"):
        rt.tools.form(module, torch.empty(2, 8), over={"3.0": "1..4"})
    with pytest.raises(RequestError, match=r"no such dimension"):
        rt.tools.form(module, torch.empty(2, 8), over={"0.5": "1..4"})
    with pytest.raises(RequestError, match=r"say its values"):
        rt.tools.form(module, torch.empty(2, 8), over=["0.0"])
    with pytest.raises((RequestError, rt.types.TargetError), match="depth"):
        rt.tools.form(f"{code}:build", inputs={"input": "3,16"}, over={"depth": "1..4"})


def test_a_script_has_no_size_that_is_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trains')\n")
    for ask in (rt.tools.form, rt.sweep):
        with pytest.raises(RequestError, match=r"size 'batch': .*train\.py is a script"):
            ask(str(script), over={"batch": "1..4"})


def test_a_size_that_the_source_cannot_take_is_quoted() -> None:
    import torch

    module = torch.nn.Linear(8, 8)
    with pytest.raises((ValueError, RuntimeError), match="8") as raised:
        rt.tools.form(module, torch.empty(2, 8), over={"0.1": (7, 9)})
    assert isinstance(raised.value, (RequestError, rt.types.TraceError))


def test_a_keyword_and_a_name_in_a_shape_are_sizes(code: Path, cache: Path) -> None:
    job = Job.of(
        rt.tools.form, f"{code}:build", (), {"inputs": {"input": "rows,width"}}
    ).of_one_phase()
    source = SizedSource(job, ("rows", "width"))
    (graph,) = source.graphs((5, 16)).values()
    assert graph.values[graph.ops[-1].outputs[0]].shape == (5, 64)


# -- the cache -------------------------------------------------------------------------------------


def test_a_trace_is_kept_and_made_again_when_its_file_changes(code: Path, cache: Path) -> None:
    first = sized(code, "width")
    relu = op_names(first, 16)
    assert first.traces == 1
    again = sized(code, "width")
    assert op_names(again, 16) == relu and again.traces == 0
    code.write_text(CODE.format(activation="Tanh"))
    changed = sized(code, "width")
    assert op_names(changed, 16) != relu and changed.traces == 1


READS = """
import json, os
from pathlib import Path
from torch import nn

HERE = Path(__file__).parent
KINDS = json.loads((HERE / "kinds.json").read_text())  # when it is imported: once for all sizes


def build(width: int = 16):
    kind = KINDS[os.environ.get("KIND", "usual")]
    layers = [nn.Linear(width, 4 * width), getattr(nn, kind)()]
    try:
        layers += [getattr(nn, name)() for name in open(HERE / "more.txt").read().split()]
    except OSError:
        pass
    return nn.Sequential(*layers)
"""


def test_a_trace_is_made_again_when_what_its_code_reads_changes(
    code: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, one that was not there before, and a variable; at the second size, too."""
    code.write_text(READS)
    kinds = tmp_path / "kinds.json"
    kinds.write_text('{"usual": "ReLU", "other": "GELU"}')

    def last(rows: int) -> tuple[str, int]:
        source = sized(code, "rows")
        if rows != 16:
            op_names(source, 16)
        before = source.traces
        return op_names(source, rows)[-1], source.traces - before

    assert [last(rows) for rows in (16, 8)] == [("aten.relu", 1)] * 2
    assert [last(rows) for rows in (16, 8)] == [("aten.relu", 0)] * 2
    kinds.write_text('{"usual": "Tanh", "other": "GELU"}')
    assert [last(rows) for rows in (16, 8)] == [("aten.tanh", 1)] * 2
    (tmp_path / "more.txt").write_text("Sigmoid")
    assert [last(rows) for rows in (16, 8)] == [("aten.sigmoid", 1)] * 2
    assert [last(rows) for rows in (16, 8)] == [("aten.sigmoid", 0)] * 2
    (tmp_path / "more.txt").unlink()
    monkeypatch.setenv("KIND", "other")
    assert [last(rows) for rows in (16, 8)] == [("aten.gelu", 1)] * 2
    monkeypatch.setenv("COLUMNS", "71")  # of the terminal: no code asks for it
    assert last(16) == ("aten.gelu", 0)


BRINGS = """
from rooftrace.extend import Cost, rule


@rule("sized::op")
def own(op):
    return Cost.of(vector=1)
"""


def test_a_trace_of_code_that_brings_rules_is_not_kept(code: Path, cache: Path) -> None:
    """The rules would be missing where it is priced."""
    code.write_text(CODE.format(activation="ReLU") + BRINGS)
    with own_rules():
        for _ in range(2):
            source = sized(code, "rows")
            op_names(source, 16)
            op_names(source, 8)  # its module is not imported again
            assert source.traces == 2
    code.write_text(CODE.format(activation="ReLU") + "import rooftrace.extend")
    for traces in (1, 0):
        source = sized(code, "rows")
        op_names(source, 16)
        assert source.traces == traces


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"[1]", b'"x"', b"\xff\xfe", b"\x1f\x8b\x00"])
@pytest.mark.parametrize("suffix", [".json", ".files"])
def test_a_damaged_trace_is_made_again(code: Path, cache: Path, damage: bytes, suffix: str) -> None:
    names = op_names(sized(code, "width"), 16)
    for path in cache.glob(f"*{suffix}"):
        path.write_bytes(damage)
    again = sized(code, "width")
    assert op_names(again, 16) == names and again.traces == 1
    whole = sized(code, "width")
    assert op_names(whole, 16) == names and whole.traces == 0


def test_a_trace_beside_the_files_of_another_is_made_again(code: Path, cache: Path) -> None:
    """Two writers at the same time: the graphs of one, and what the other says they are from."""
    op_names(sized(code, "width"), 16)
    (trace,) = cache.glob("*.json")
    old = trace.read_bytes()
    code.write_text(CODE.format(activation="Tanh"))
    tanh = op_names(sized(code, "width"), 16)
    trace.write_bytes(old)
    again = sized(code, "width")
    assert op_names(again, 16) == tanh and again.traces == 1


def test_writers_at_the_same_time_leave_whole_files(code: Path, cache: Path) -> None:
    source = sized(code, "width")
    job = source.job_at((16,))
    from rooftrace.tracer.phases import traced
    from rooftrace.tracer.phases.sizing import TraceCache

    made, kept = traced(job), TraceCache.usual()
    told = graphs_bytes(made.graphs), made.files, job
    threads = [threading.Thread(target=kept.keep, args=told) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = kept.look_up(job)
    assert known is None or load_graphs(known.file) == made.graphs
    for path in cache.glob("*.files"):
        assert json.loads(path.read_bytes())


def test_code_of_the_same_name_in_another_folder_is_another_source(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for activation in ("ReLU", "Tanh"):
        folder = tmp_path / activation
        folder.mkdir()
        (folder / "net.py").write_text(CODE.format(activation=activation))
        monkeypatch.chdir(folder)
        names.append(op_names(sized(Path("net.py"), "width"), 16))
    assert names[0] != names[1]


def test_off_keeps_nothing(code: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTRACE_CACHE", "off")
    for _ in range(2):
        source = sized(code, "width")
        op_names(source, 16)
        assert source.traces == 1
    assert not cache.exists()


# -- forms ----------------------------------------------------------------------------------------


def noted_sizes(
    monkeypatch: pytest.MonkeyPatch, after_first: Callable[[], object] = lambda: None
) -> list[tuple[int, ...]]:
    """The sizes that sources are asked for from now on.  after_first: called after the first."""
    asked: list[tuple[int, ...]] = []
    graphs = SizedSource.graphs

    def told(source: SizedSource, numbers: tuple[int, ...]) -> Any:
        made = graphs(source, numbers)
        if not asked:
            after_first()
        asked.append(numbers)
        return made

    monkeypatch.setattr(SizedSource, "graphs", told)
    return asked


def test_a_form_is_kept_for_the_next_command(
    code: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again where its file is damaged, in another range, and of other code."""
    asked = noted_sizes(monkeypatch)

    def made(last: int = 64) -> tuple[rt.types.Form, int]:
        asked.clear()
        inputs, over = {"input": "rows,16"}, {"rows": range(8, last)}
        form = rt.tools.form(f"{code}:build", over=over, inputs=inputs)
        return form, len(asked)

    first, traces = made()
    second, none = made()
    assert traces > 0 and none == 0 and second.where() == first.where()
    assert second.graph(rows=24) == first.graph(rows=24)
    (kept,) = (path for path in cache.glob("*.json") if b"rooftrace.form/1" in path.read_bytes())
    kept.write_bytes(kept.read_bytes()[:-9])
    assert made()[1] == traces and made(80)[1] > 0 == made()[1]
    code.write_text(CODE.format(activation="Tanh"))
    changed, again = made()
    assert again == traces and [op.name for op in changed.graph(rows=24).ops][-1] == "aten.tanh"


def test_a_form_whose_code_changes_while_it_is_traced_is_made_again(
    code: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of the old code and of the new: it holds for neither."""
    changed = CODE.format(activation="Tanh")
    asked = noted_sizes(monkeypatch, after_first=lambda: code.write_text(changed))
    for _ in range(2):
        asked.clear()
        inputs, over = {"input": "rows,16"}, {"rows": range(8, 64)}
        rt.tools.form(f"{code}:build", over=over, inputs=inputs)
        assert asked
