"""`perf stat -x`: its columns, the bytes of memory controllers' events, and what is wrong.

The columns are those of tools/perf/Documentation/perf-stat.txt, section CSV FORMAT (Linux 6.x), and
of tools/perf/util/stat-display.c; the units of events those of the drivers and of pmu-events.
"""

from pathlib import Path

import pytest

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles import MemoryCount, read_perf_stat, source_of

pytestmark = pytest.mark.quick

MIB = 1024 * 1024
SERVER = """\
# started on Sat Jul 18 10:02:11 2026

199.50,MiB,uncore_imc/cas_count_read/,12074958183,100.00,,
89.25,MiB,uncore_imc/cas_count_write/,12070278197,100.00,,
1003627268,ns,duration_time,1003627268,100.00,,
250000,,LLC-load-misses:u,4003627268,75.00,,
"""
RUN = ",100,100.00,,\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "perf.csv"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> MemoryCount:
    (count,) = read_perf_stat(written(folder, text))
    return count


# -- layouts ---------------------------------------------------------------------------------------


def test_a_server_of_intel(tmp_path: Path) -> None:
    count = read(tmp_path, SERVER)
    assert source_of(tmp_path / "perf.csv").gives == "totals"
    assert count.read == 199.5 * MIB and count.written == 89.25 * MIB
    assert count.bytes == 288.75 * MIB and count.together is None
    assert count.seconds == pytest.approx(1.003627268)
    assert count.name == "" and count.calls is None


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators(tmp_path: Path, separator: str) -> None:
    text = SERVER.replace(",", separator)
    assert read(tmp_path, text) == read(tmp_path, SERVER)
    plain = text.partition("\n\n")[2]
    assert source_of(written(tmp_path, plain)).name == "perf"


@pytest.mark.parametrize(
    "text",
    [
        "N0,1,1.5,MiB,uncore_imc/cas_count_read/,12,100.00,,\n"
        "N1,1,2.5,MiB,uncore_imc/cas_count_read/,12,100.00,,\n"
        "N0,1,1,MiB,uncore_imc/cas_count_write/,12,100.00,,\n"
        "N1,1,0,MiB,uncore_imc/cas_count_write/,12,100.00,,\n",
        "S0,1,4.00,MiB,uncore_imc_0/cas_count_read/,12,100.00,,\n"
        "S0,1,,,,,,65.3,MB/s  read\n"  # a metric, with all earlier fields empty
        "S0,1,1.00,MiB,uncore_imc_0/cas_count_write/,12,100.00,,\n",
        "S0-D0,24,4.00,MiB,uncore_imc_0/cas_count_read/,12,100.00,,\n"
        "S0-D0,24,1.00,MiB,uncore_imc_0/cas_count_write/,12,100.00,,\n",
        "CPU0,3.00,MiB,uncore_imc_0/cas_count_read/,12,100.00,,\n"
        "CPU0,1.00,MiB,uncore_imc_1/cas_count_read/,12,100.00,,\n"
        "CPU0,16384,,uncore_imc_0/cas_count_write/,12,100.00,,\n",
        "S0-D0-C0,65536,,uncore_imc_0/cas_count_read/,12,100.00,,\n"
        "S0-D0-C0,16384,,uncore_imc_0/cas_count_write/,12,100.00,,\n",
        "4.00,MiB,uncore_imc/cas_count_read/,12,100.00,,\n"
        ",,,,,,65.3,MB/s  read\n"
        "1.00,MiB,uncore_imc/cas_count_write/,12,100.00,0.35%,,\n",
    ],
    ids=["per node", "per socket", "per die", "no merge", "per core", "metrics and variance"],
)
def test_places_before_the_value(tmp_path: Path, text: str) -> None:
    count = read(tmp_path, text)
    assert (count.read, count.written, count.seconds) == (4 * MIB, 1 * MIB, None)
    assert source_of(tmp_path / "perf.csv").name == "perf"


INTERVALS = """\
# started on Sat Jul 18 10:02:11 2026

     0.100062267,S0,1,16.25,MiB,uncore_imc/cas_count_read/,1610869735,100.00,,
     0.100062267,S0,1,2.00,MiB,uncore_imc/cas_count_write/,1610869735,100.00,,
     0.200114500,S0,1,3.75,MiB,uncore_imc/cas_count_read/,1610869735,100.00,,
     0.200114500,S0,1,1.00,MiB,uncore_imc/cas_count_write/,1610869735,100.00,,
"""


def test_intervals_are_added(tmp_path: Path) -> None:
    count = read(tmp_path, INTERVALS)
    assert (count.read, count.written) == (20 * MIB, 3 * MIB)
    assert count.seconds == pytest.approx(0.2001145)
    assert read(tmp_path, INTERVALS.replace("S0,1,", "")) == count


@pytest.mark.parametrize("begin", ["         summary,", ""])
def test_a_summary_is_not_added_to_its_intervals(tmp_path: Path, begin: str) -> None:
    sums = "20.00,MiB,uncore_imc/cas_count_read/", "3.00,MiB,uncore_imc/cas_count_write/"
    text = INTERVALS + "".join(f"{begin}{line},32,100.00,,\n" for line in sums)
    assert read(tmp_path, text) == read(tmp_path, INTERVALS)


# -- events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "writes"),
    [
        (["100,,uncore_imc_0/cas_count_read/"], ["50,,uncore_imc_0/cas_count_write/"]),
        (["100,,imc_0/cas_count_read/"], ["50,,imc_0/cas_count_write/u"]),
        (["60,,unc_m_cas_count.rd", "40,,unc_m_cas_count.rd"], ["50,,UNC_M_CAS_COUNT.WR"]),
        (["60,,unc_m_cas_count.rd [uncore_imc_0]", "40,,unc_m_cas_count.rd [uncore_imc_1]"],
         ["50,,unc_m_cas_count.wr [uncore_imc_0]"]),
        (["60,,unc_m_cas_count_sch0.rd", "40,,unc_m_cas_count_sch1.rd"],
         ["50,,unc_m_cas_count_sch0.wr"]),
        (["6400,Bytes,llc_misses.mem_read"], ["3200,Bytes,llc_misses.mem_write"]),
        (["100,,uncore_imc/data_reads/"], ["50,,uncore_imc/data_writes/"]),
        (["90,,uncore_imc_free_running_0/data_read/", "10,,uncore_imc_free_running_1/data_read/"],
         ["50,,uncore_imc_free_running_0/data_write/"]),
        (["99,,unc_mc0_rdcas_count_freerun", "1,,unc_mc1_rdcas_count_freerun"],
         ["50,,unc_mc0_wrcas_count_freerun"]),
        (["100,,amd_umc_3/umc_cas_cmd.rd/"], ["50,,amd_umc_3/umc_cas_cmd.wr/"]),
        (["100,,umc_cas_cmd.rd"], ["50,,umc_cas_cmd.wr"]),
        (["70,,local_processor_read_data_beats_cs0", "30,,remote_processor_read_data_beats_cs0"],
         ["50,,amd_df/local_processor_write_data_beats_cs11/"]),
        (["100,,local_or_remote_socket_read_data_beats_dram_0"],
         ["50,,local_or_remote_socket_write_data_beats_dram_0"]),
        (["60,,ali_drw_21000/hif_rd/", "40,,ali_drw_40021080/hif_rd/"],
         ["30,,ali_drw_21000/hif_wr/", "20,,ali_drw_21000/hif_rmw/"]),
    ],
)  # fmt: skip
def test_a_count_is_64_byte(tmp_path: Path, reads: list[str], writes: list[str]) -> None:
    count = read(tmp_path, "".join(line + RUN for line in (*reads, *writes)))
    assert (count.read, count.written) == (6400, 3200)


def test_events_that_tell_no_reads_from_writes(tmp_path: Path) -> None:
    zen = "".join(f"{n},,dram_channel_data_controller_{n}{RUN}" for n in (1, 2, 3))
    count = read(tmp_path, zen)
    assert (count.read, count.written, count.together) == (None, None, 64 * 6)
    assert count.bytes == 64 * 6
    total = "0.5,MiB,uncore_imc_free_running_0/data_total/" + RUN
    assert read(tmp_path, total).bytes == MIB // 2


def test_a_total_beside_its_parts_is_not_added(tmp_path: Path) -> None:
    parts = zip((100, 50, 150), ("rd", "wr", "all"), strict=True)
    count = read(tmp_path, "".join(f"{n},,umc_cas_cmd.{side}{RUN}" for n, side in parts))
    assert (count.read, count.written, count.bytes) == (6400, 3200, 9600)


def test_a_comma_inside_an_event_is_no_separator(tmp_path: Path) -> None:
    text = "7,,uncore_cha/event=0x35,umask=0xc001fe01/,5,100.00,,\n" + SERVER
    assert read(tmp_path, text) == read(tmp_path, SERVER)


# -- what is wrong ---------------------------------------------------------------------------------

READ, WRITE = "uncore_imc/cas_count_read/", "uncore_imc/cas_count_write/"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line has an event; make it with `perf stat -a -x, -o FILE"),
        (
            "5,,cycles,5,100.00,,\n7,,instructions,5,100.00,,\n",
            "no event tells DRAM bytes: it has cycles, instructions; expected uncore_imc/cas_count",
        ),
        ("5,,hisi_sccl1_ddrc0/flux_rd/,5,100.00,,\n", "no event tells DRAM bytes: it has hisi_"),
        (
            f"5,MiB,{READ}{RUN}",
            r"only bytes read are counted \(uncore_imc/cas_count_read/\): count",
        ),
        (f"5,MiB,{WRITE}{RUN}", "only bytes written are counted .* count those read in the same"),
        (SERVER.replace("199.50", "<not counted>"), r"line 3, value of .*<not counted>: count the"),
        (SERVER.replace("199.50", "<not supported>"), "line 3, value of .*<not supported>"),
        (SERVER.replace("199.50,MiB", "199.50,Mbit"), "line 3: unit 'Mbit' of 'uncore_imc/cas_c"),
        (SERVER.replace(",ns,", ",cycles,"), "line 5: unit 'cycles' of 'duration_time': expected"),
        (SERVER.replace("1003627268,ns", "0,ns"), "line 5, column 'duration_time': '0': expected"),
        (SERVER.replace("199.50", "9" * 400), "line 3, column .*: '999.*expected a number"),
        (SERVER.replace("199.50", "1e300"), "line 3, column .*: '1e300': expected a number of at"),
        (SERVER.replace("199.50", "-1"), "line 3: '-1,MiB,uncore_imc.*expected value, unit and"),
        (
            SERVER.replace(",", ";").replace("199.50", "199,50"),
            "line 3, value of .*: '199,50': expected digits and one dot; run perf with LC_ALL=C",
        ),
        (SERVER + "Segmentation fault\n", "line 7: 'Segmentation fault': expected value, unit"),
        (SERVER.partition(",LLC")[0], "line 6: '250000,': expected value, unit and event"),
        (INTERVALS[:-57], r"line 6: '     0.200114500,S0,1.*': expected value, unit and event"),
        (SERVER + SERVER, r"there are 2 runs \('# started on'\): write each into its own"),
        (
            SERVER + f"5,MiB,uncore_imc_0/cas_count_read/{RUN}",
            "line 7: 'uncore_imc_0/cas_count_read/' counts what 'uncore_imc/cas_count_read/' of "
            "line 3 counts: leave one of them out",
        ),
        (SERVER + f"5,,unc_m_cas_count.rd{RUN}", "line 7: 'unc_m_cas_count.rd' counts what"),
        (
            2 * f"5,,uncore_imc_0/cas_count_read/{RUN}",
            "line 2: 'uncore_imc_0/cas_count_read/' is there twice, first in line 1",
        ),
        ("Performance counter stats for 'make':\n", "line 1: .* expected value, unit and event"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ProfileError, match=words) as caught:
        read_perf_stat(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
