"""rocprof's CSVs: their columns, AMD's formulas of bytes, and what is wrong with them.

The layouts are those of ROCprofiler's documentation: of rocprof (also rocprofv2 --plugin file, its
header of version 1), of rocprofv2 (header of version 2), and of rocprofv3 (counter_collection.csv,
ROCm 6.2 to 7: "Using rocprofv3", output file fields; csv of rocprofiler-sdk-tool/generateCSV.cpp).
"""

from pathlib import Path

import pytest

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles import read_rocprof, source_of

pytestmark = pytest.mark.quick

FIRST = """\
Index,KernelName,gpu-id,queue-id,queue-index,pid,tid,grd,wgr,lds,scr,arch_vgpr,accum_vgpr,sgpr,\
wave_size,sig,obj,FETCH_SIZE,WRITE_SIZE,DispatchNs,BeginNs,EndNs,CompleteNs
0,"body(Body*, float, int) [clone .kd]",2,0,0,36,36,65536,256,0,0,20,4,16,64,0x0,0x7f2b4d282500,\
9429.1875000000,7872.0000000000,1594244102859719,1594244111978746,1594244111979746,1594244138330792
1,"Cijk_Ailk.kd",2,0,0,36,36,1000,64,0,0,20,4,16,64,0x0,0x7f2b4d282500,\
0.0000000000,0.5000000000,1594244102859720,1594244138305243,1594244138308243,1594244138330799
"""
SECOND = """\
Dispatch_ID,GPU_ID,Queue_ID,PID,TID,Grid_Size,Workgroup_Size,LDS_Per_Workgroup,\
Scratch_Per_Workitem,Arch_VGPR,Accum_VGPR,SGPR,Wave_Size,Kernel_Name,Start_Timestamp,\
End_Timestamp,Correlation_ID,TCC_EA_RDREQ_sum,TCC_EA_RDREQ_32B_sum,TCC_EA_WRREQ_sum,\
TCC_EA_WRREQ_64B_sum

1,1,1,77,77,512,64,0,0,8,0,16,64,"add(float*)",1000,3500,1,100,20,50,10
"""
THIRD_HEADER = (
    '"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id","Grid_Size",'
    '"Kernel_Id","Kernel_Name","Workgroup_Size","LDS_Block_Size","Scratch_Size","VGPR_Count",'
    '"Accum_VGPR_Count","SGPR_Count","Counter_Name","Counter_Value","Start_Timestamp",'
    '"End_Timestamp"\n'
)
EPOCH = 1_750_878_545_000_000_123  # ns: more digits than a float has


def third(dispatch: int, counter: str, value: str, kernel: str = "hot(float*)") -> str:
    return (
        f'{dispatch},{dispatch},"Agent 5",1,20,20,1048576,9,"{kernel}",64,2048,0,64,0,80,'
        f'"{counter}",{value},{EPOCH},{EPOCH + 1500}\n'
    )


THIRD = (
    THIRD_HEADER
    + third(1, "FETCH_SIZE", "2048.25")
    + third(1, "WRITE_SIZE", "4.34259040e-02")
    + third(2, "FETCH_SIZE", "16")
    + third(2, "WRITE_SIZE", "32")
)


def written(folder: Path, text: str) -> Path:
    path = folder / "counters.csv"
    path.write_text(text, encoding="utf-8")
    return path


# -- what is read ----------------------------------------------------------------------------------


def test_a_line_for_each_dispatch(tmp_path: Path) -> None:
    path = written(tmp_path, FIRST)
    body, gemm = read_rocprof(path)
    assert source_of(path).name == "rocprof"
    assert (body.index, body.name, body.device) == (0, "body(Body*, float, int)", "2")
    assert body.read == 9_655_488  # 9,429.1875 kilobytes of 1,024 byte
    assert body.written == 8_060_928  # 7,872 of them
    assert body.duration == pytest.approx(1e-6)
    assert body.grid == (256,) and body.block == (256,)  # 65,536 work items, 256 in a block
    assert body.bandwidth == pytest.approx((9_655_488 + 8_060_928) / 1e-6)
    assert gemm.name == "Cijk_Ailk" and (gemm.read, gemm.written) == (0, 512)
    assert gemm.grid == (16,)  # 15 full blocks of 64, and one of 40


def test_the_second_layout_and_requests_of_an_mi200(tmp_path: Path) -> None:
    (add,) = read_rocprof(written(tmp_path, SECOND))
    assert add.read == 20 * 32 + 80 * 64  # 100 requests, 20 of them small
    assert add.written == 10 * 64 + 40 * 32  # 50 requests, 10 of them large
    assert add.duration == pytest.approx(2.5e-6) and add.grid == (8,)


def test_a_line_for_each_counter(tmp_path: Path) -> None:
    path = written(tmp_path, THIRD)
    hot, cold = read_rocprof(path)
    assert source_of(path).name == "rocprof"
    assert hot.read == 2_097_408 and hot.written == 44  # 0.0434259040 * 1,024 = 44.47
    assert hot.duration == pytest.approx(1.5e-6) and hot.device == "Agent 5"
    assert hot.grid == (16384,) and hot.block == (64,)
    assert (cold.read, cold.written) == (16_384, 32_768)


def test_requests_of_an_mi300_have_three_sizes(tmp_path: Path) -> None:
    counts = {
        "TCC_EA0_RDREQ_sum": 1000,
        "TCC_EA0_RDREQ_32B_sum": 200,
        "TCC_BUBBLE_sum": 300,
        "TCC_EA0_WRREQ_sum": 60,
        "TCC_EA0_WRREQ_64B_sum": 40,
    }
    text = THIRD_HEADER + "".join(third(1, name, str(n)) for name, n in counts.items())
    (kernel,) = read_rocprof(written(tmp_path, text))
    assert kernel.read == 200 * 32 + 500 * 64 + 300 * 128
    assert kernel.written == 20 * 32 + 40 * 64


def test_requests_of_an_mi350_are_counted_by_size(tmp_path: Path) -> None:
    sizes = {"TCC_EA0_RDREQ_32B_sum": 3, "TCC_EA0_RDREQ_64B_sum": 5, "TCC_EA0_RDREQ_128B_sum": 7}
    sizes |= {"TCC_EA0_RDREQ_sum": 15, "TCC_BUBBLE_sum": 0, "WRITE_SIZE": 1}
    text = THIRD_HEADER + "".join(third(1, name, str(n)) for name, n in sizes.items())
    (kernel,) = read_rocprof(written(tmp_path, text))
    assert kernel.read == 3 * 32 + 5 * 64 + 7 * 128


def test_passes_may_stand_in_one_file(tmp_path: Path) -> None:
    passes = [[third(n, name, "8") for n in (1, 2)] for name in ("FETCH_SIZE", "WRITE_SIZE")]
    text = "".join(THIRD_HEADER + "".join(lines) for lines in passes)
    first, second = read_rocprof(written(tmp_path, text))
    assert first.bytes == second.bytes == 2 * 8 * 1024


def test_dispatches_are_in_the_order_of_their_ids(tmp_path: Path) -> None:
    lines = (third(n, side, str(n)) for n in (10, 9) for side in ("FETCH_SIZE", "WRITE_SIZE"))
    kernels = read_rocprof(written(tmp_path, THIRD_HEADER + "".join(lines)))
    assert [(kernel.index, kernel.read) for kernel in kernels] == [(0, 9 * 1024), (1, 10 * 1024)]


def test_a_file_without_times_has_no_duration(tmp_path: Path) -> None:
    cut = [line.rsplit(",", 4)[0] for line in FIRST.splitlines()]
    body, _ = read_rocprof(written(tmp_path, "\n".join(cut)))
    assert body.duration is None and body.bandwidth is None and body.read == 9_655_488
    text = THIRD.replace(str(EPOCH + 1500), "0").replace(str(EPOCH), "0")
    assert read_rocprof(written(tmp_path, text))[0].duration is None


def test_a_duration_may_stand_alone(tmp_path: Path) -> None:
    text = 'Index,KernelName,FETCH_SIZE,WRITE_SIZE,DurationNs\n0,"a",1,1,1400\n'
    (kernel,) = read_rocprof(written(tmp_path, text))
    assert kernel.duration == pytest.approx(1.4e-6)
    assert kernel.grid is None and kernel.block is None and kernel.device == ""


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "",
            "no CSV of rocprof: line 1 has no column KernelName or Kernel_Name; make it with `roc",
        ),
        ('"Name","Calls","TotalDurationNs"\n"a",1,2\n', "line 1 has no column KernelName or"),
        (FIRST.splitlines()[0], "no kernel after the header in line 1"),
        (
            FIRST.replace("FETCH_SIZE", "GPUBusy"),
            r"line 2: no counters of the bytes read \(of the counters that tell bytes there is "
            r"WRITE_SIZE\): expected FETCH_SIZE or .*make it with `rocprofv3 --pmc FETCH_SIZE",
        ),
        (FIRST.replace("WRITE_SIZE", "x"), "no counters of the bytes written .* is FETCH_SIZE"),
        (SECOND.replace("RDREQ_32B_sum", "HIT_sum"), "no counters of the bytes read"),
        (
            THIRD_HEADER + third(1, "SQ_WAVES", "5"),
            r"line 2: no counters of the bytes read \(.* there is nothing\)",
        ),
        (FIRST.replace("9429.1875000000", ""), "line 2, column 'FETCH_SIZE': the cell is empty"),
        (FIRST.replace("9429.1875000000", "n/a"), "line 2, column 'FETCH_SIZE': 'n/a': expected a"),
        (FIRST.replace("9429.1875000000", "-1"), "line 2, column 'FETCH_SIZE': '-1'"),
        (FIRST.replace("9429.1875000000", "1e300"), "'1e300': expected a number of at most 9.01e"),
        (
            FIRST.replace(",65536,256", ",65536,0"),
            "line 2, column 'wgr': '0': expected a number of",
        ),
        (FIRST.replace(",65536,256", ",6.5,256"), "line 2, column 'grd': '6.5': expected a whole"),
        (FIRST.replace("1594244111979746", "1594244111978746"), "'EndNs': .*a time after BeginNs"),
        (
            FIRST.replace("1594244111979746", "late"),
            "line 2, column 'EndNs': 'late': expected a wh",
        ),
        (FIRST.replace("1594244111979746", "9" * 400), "column 'EndNs': '99.*expected a whole"),
        (FIRST.replace("WRITE_SIZE", "FETCH_SIZE"), "column 'fetch_size' is there 2 times"),
        (FIRST[:-30], "line 3: .* cells, the header has 23"),
        (FIRST.replace('"Cijk_Ailk.kd"', '""'), "line 3, column 'KernelName': the cell is empty"),
        (SECOND.replace(",100,20,", ",100,300,"), "line 3: TCC_EA_RDREQ_sum and .* contradict"),
        (
            THIRD + third(1, "FETCH_SIZE", "1"),
            "line 6, column 'Counter_Name': 'FETCH_SIZE' of dispatch 1 is there twice, first in "
            "line 2",
        ),
        (
            THIRD + third(2, "SQ_WAVES", "1", kernel="other"),
            r"line 6, column 'Kernel_Name': 'other': dispatch 2 is 'hot\(float\*\)' in line 4",
        ),
        (
            THIRD.replace('1,1,"Agent', '1,x,"Agent', 1),
            "line 2, column 'Dispatch_Id': 'x': expected a whole number",
        ),
        (
            THIRD.replace('"Counter_Value"', '"Value"'),
            "line 1: no column Counter_Value beside 'Counter_Name'",
        ),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ProfileError, match=words) as caught:
        read_rocprof(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
