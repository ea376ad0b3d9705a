"""`likwid-perfctr -O`: its tables, the bytes of its groups, and what is wrong with them.

The tables are those of LIKWID 5 (printOutput of src/applications/likwid.lua), with the metrics of
groups/skylakeX/MEM.txt and others; four decimals, and commas to the length of the longest line.
"""

from pathlib import Path

import pytest

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles import read_likwid, source_of

pytestmark = pytest.mark.quick

INFO = """\
STRUCT,Info,3,,
CPU name:,Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz,,,
CPU type:,Intel Skylake SP processor,,,
CPU clock:,2.3940 GHz,,,
"""
METRICS = """\
Metric,HWThread 0,HWThread 1,,
Runtime (RDTSC) [s],0.5012,0.5013,,
Memory read bandwidth [MBytes/s],4000.5000,0,,
Memory read data volume [GBytes],2.0053,0,,
Memory write data volume [GBytes],0.5000,0,,
Memory data volume [GBytes],2.5053,0,,
"""
STATS = """\
Metric,Sum,Min,Max,Avg
Runtime (RDTSC) [s] STAT,1.0025,0.5012,0.5013,0.5013
Memory read bandwidth [MBytes/s] STAT,4000.5000,0,4000.5000,2000.2500
Memory read data volume [GBytes] STAT,2.0053,0,2.0053,1.0027
Memory write data volume [GBytes] STAT,0.5000,0,0.5000,0.2500
Memory data volume [GBytes] STAT,2.5053,0,2.5053,1.2527
"""
WHOLE = (
    f"{INFO}TABLE,Group 1 Raw,MEM,3,\n"
    "Event,Counter,HWThread 0,HWThread 1,\n"
    "INSTR_RETIRED_ANY,FIXC0,123456,123457,\n"
    "CAS_COUNT_RD,MBOX0C0,15666406,0,\n"
    "CAS_COUNT_RD,MBOX1C0,15666407,0,\n"
    f"TABLE,Group 1 Metric,MEM,5,\n{METRICS}TABLE,Group 1 Metric STAT,MEM,5,\n{STATS}"
)


def region(name: str, times: str, calls: str, metrics: str = METRICS) -> str:
    begin = f"TABLE,Region {name},Group 1"
    return (
        f"{INFO}{begin} Raw,MEM,2\n"
        "Region Info,HWThread 0,HWThread 1,,\n"
        f"RDTSC Runtime [s],{times},,\ncall count,{calls},,\n"
        "Event,Counter,HWThread 0,HWThread 1,\n"
        "CAS_COUNT_RD,MBOX0C0,15666406,0,\n"
        "CAS_COUNT_RD,MBOX1C0,15666407,0,\n"
        f"{begin} Metric,MEM,5\n{metrics}{begin} Metric STAT,MEM,5\n{STATS}"
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "likwid.csv"
    path.write_text(text, encoding="utf-8")
    return path


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["", "step 1, loss 0.5\n{done}\n"])
def test_a_whole_command(tmp_path: Path, before: str) -> None:
    path = written(tmp_path, before + WHOLE)
    (count,) = read_likwid(path)
    assert source_of(path).name == "likwid" and source_of(path).gives == "totals"
    assert count.read == 2_005_300_000 and count.written == 500_000_000
    assert count.bytes == 2_505_300_000 and count.together is None
    assert count.seconds == pytest.approx(0.5013) and (count.name, count.calls) == ("", None)


def test_regions(tmp_path: Path) -> None:
    second = METRICS.replace("2.0053,0", "2.0053,1.0000").replace("0.5000,0", "0.5000,7.5e-01")
    text = region("load", "0.250000,0.240000", "10,10") + region(
        "step, 2", "1.5,2.5", "3,4", second
    )
    load, step = read_likwid(written(tmp_path, text))
    assert (load.name, load.calls, load.seconds) == ("load", 10, 0.25)
    assert (load.read, load.written) == (2_005_300_000, 500_000_000)
    # Thread 1 stands on the second socket: what both sockets moved is added.
    assert (step.name, step.calls, step.seconds) == ("step, 2", 4, 2.5)
    assert (step.read, step.written) == (3_005_300_000, 1_250_000_000)


def test_one_thread_has_no_statistics(tmp_path: Path) -> None:
    rows = (line.rsplit(",", 3)[0] for line in METRICS.splitlines())
    text = INFO + "TABLE,Group 1 Metric,MEM,5,,\n" + "\n".join(rows)
    (count,) = read_likwid(written(tmp_path, text.replace("HWThread", "Core")))
    assert count.bytes == 2_505_300_000 and count.seconds == pytest.approx(0.5012)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("Memory load data volume", "Memory evict data volume"), (2, 1, None)),
        (("Memory read data volume", "Memory writeback data volume"), (2, 1, None)),
        (("HBM read data volume", "HBM write data volume"), (2, 1, None)),
        (("Memory data volume", "L3 evict data volume"), (None, None, 2)),  # AMD Zen
        (("Memory data volume", "Memory read data volume"), (None, None, 2)),
        (("DDR data volume", "HBM data volume"), (None, None, 3)),
    ],
)
def test_volumes_have_many_names(
    tmp_path: Path, names: tuple[str, str], sizes: tuple[int | None, ...]
) -> None:
    rows = [f"{name} [GBytes],{size},0" for name, size in zip(names, (2, 1), strict=True)]
    text = "TABLE,Group 1 Metric,X,2\nMetric,HWThread 0,HWThread 4\n" + "\n".join(rows)
    (count,) = read_likwid(written(tmp_path, text))
    expected = tuple(None if size is None else size * 1_000_000_000 for size in sizes)
    assert (count.read, count.written, count.together) == expected


def test_both_memories_of_a_socket_are_added(tmp_path: Path) -> None:
    names = [f"{memory} {side}" for memory in ("DDR", "HBM") for side in ("read", "write")]
    rows = [f"{name} data volume [GBytes],{n}" for n, name in enumerate(names, start=1)]
    text = "TABLE,Group 1 Metric,DDR_HBM,4\nMetric,HWThread 0\n" + "\n".join(rows)
    (count,) = read_likwid(written(tmp_path, text))
    assert (count.read, count.written) == (4_000_000_000, 6_000_000_000)


# -- what is wrong ---------------------------------------------------------------------------------

STEP = region("step", "1,2", "3,3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table of metrics of LIKWID; make it with `likwid-perfctr"),
        (INFO, "no table of metrics of LIKWID"),
        (WHOLE.partition("TABLE,Group 1 Metric")[0], "no table of metrics of LIKWID"),
        (
            WHOLE.replace("Memory", "L3"),
            r"line 10: group 'MEM' tells no DRAM bytes \(of volumes it has L3 read data volume "
            r"\[GBytes\], .*: expected 'Memory data volume",
        ),
        (
            WHOLE.replace("data volume [", "data volume (channels 0-3) ["),
            r"tells no DRAM bytes \(of volumes it has Memory read data volume \(channels 0-3\)",
        ),
        (
            WHOLE.replace("Memory write", "L3 write").replace("Memory data", "L3 data"),
            r"tells DRAM bytes of one side only \(Memory read data volume \[GBytes\]\): measure",
        ),
        (WHOLE.replace("2.0053,0", "nan,0"), "line 14, column 'HWThread 0 of Memory read data"),
        (WHOLE.replace("2.0053,0", "2.0053,-"), "line 14, column 'HWThread 1 of .*: '-': expected"),
        (WHOLE.replace("2.0053,0", "2.0053,"), "line 14, column 'HWThread 1 of .*cell is empty"),
        (WHOLE.replace("2.0053,0", "-2,0"), "line 14, .*: '-2': expected a number of at least 0"),
        (WHOLE.replace("2.0053,0", "1e300,0"), "line 14, .*'1e300': expected a number of at most"),
        (WHOLE.replace("2.0053,0,,", "2.0053"), "line 14: 2 cells, the header has 3: Memory read"),
        (WHOLE.replace("0.5012,", "slow,"), "line 12, column 'HWThread 0 of Runtime .*: 'slow'"),
        (
            WHOLE[: WHOLE.index("Memory write data")],
            "line 10: the table of the whole command has 3 lines of the 5 that are announced",
        ),
        (
            WHOLE.replace("Metric,HWThread 0,HWThread 1,,", "HWThread 0"),
            "line 10: no line 'Metric'",
        ),
        (WHOLE.replace("TABLE,Group 1 Metric,", "TABLE,Metric,"), "line 10: 'TABLE,Metric,MEM,5,'"),
        (
            WHOLE.replace("Memory read bandwidth [MBytes/s]", "Memory data volume [GBytes]"),
            r"line 16: 'Memory data volume \[GBytes\]' is there twice",
        ),
        (WHOLE + WHOLE, "line 33: a second table of the whole command, the first is in line 10"),
        (STEP + STEP, "a second table of region 'step', the first is in line 12"),
        (
            WHOLE + WHOLE.replace("Group 1", "Group 2").replace(",MEM,", ",L3,"),
            r"2 groups \(MEM, L3\): LIKWID takes turns, so none counts the whole run; measure one",
        ),
        (
            STEP.replace("call count,3,3", "call count,3,x"),
            "column 'HWThread 1 of call count': 'x'",
        ),
        (STEP.replace("call count,3,3", "call count,1e40,3"), "expected a number of at most 9.22e"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ProfileError, match=words) as caught:
        read_likwid(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
