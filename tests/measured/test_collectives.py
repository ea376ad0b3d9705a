"""Measured collectives: files of nccl-tests, constants that are found again, and gloo."""

from pathlib import Path

import numpy as np
import pytest

from rooftrace.costmodels.timing import collective_seconds
from rooftrace.errors import ProfileError
from rooftrace.hardware.systems import dump_system, load_system
from rooftrace.measured.fit import calibrate_collectives, read_collectives
from rooftrace.measured.fit.cases import errors
from rooftrace.measured.fit.collectives import seconds_of
from tests.reporting.conftest import Run

pytestmark = pytest.mark.quick

# As all_reduce_perf prints it; figures rounded.
PRINTED = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid  100 on  node0 device  0 [0x18] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  101 on  node0 device  1 [0x2a] NVIDIA H100 80GB HBM3
#    size   count    type  redop   root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#     (B)  (elements)                     (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
        0       0  float    sum     -1   0.10   0.00   0.00      0   0.10   0.00   0.00      0
     1024     256  float    sum     -1   6.10   0.17   0.17      0   6.20   0.17   0.17      0
  1048576  262144  float    sum     -1  14.60  71.82  71.82      0  14.70  71.00  71.00      0
# Out of bounds values : 0 OK
"""


def test_what_nccl_tests_print_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(PRINTED)
    first, second = read_collectives(path)
    assert (first.op, first.ranks, first.nbytes, first.dtype) == ("all_reduce", 2, 1024, "float")
    assert (first.seconds, second.seconds) == pytest.approx((6.1e-6, 14.6e-6))


def test_a_table_without_a_root_and_a_name_is_read_by_the_name_of_its_file(tmp_path: Path) -> None:
    rows = "# nThread 1 nGpus 8 minBytes 8\n 1024 256 float none 9.5 0.11 0.09 0 9.6 0.1 0.1 0\n"
    path = tmp_path / "alltoall_h100.txt"
    path.write_text(rows)
    (point,) = read_collectives(path)
    assert (point.op, point.ranks, point.seconds) == ("all_to_all", 8, pytest.approx(9.5e-6))
    other = tmp_path / "log.txt"
    other.write_text(rows)
    with pytest.raises(ProfileError, match="does not say which collective ran"):
        read_collectives(other)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("nothing here\n", "no measured collective in it"),
        ("op,ranks,bytes\nall_reduce,2,1\n", "no column seconds"),
        ("op,ranks,bytes,seconds\nallreduces,2,1,1\n", "op 'allreduces': expected one of"),
        ("op,ranks,bytes,seconds\nall_reduce,1,1,1\n", "1 ranks: expected 2 or more"),
        ("op,ranks,bytes,seconds\nall_reduce,2,1,-1\n", "'-1': expected a number above 0"),
        ("op,ranks,bytes,seconds\nall_reduce,2,1\n", "3 cells, the header has 4"),
        ("op,ranks,bytes,seconds,library\nall_reduce,2,1,1,mpi\n", "library 'mpi'"),
        ("all_reduce_perf\n 8 2 float sum -1 6.1 0 0 0\n", "0 ranks"),
    ],
)
def test_a_file_that_holds_none_says_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ProfileError, match=said):
        read_collectives(path)


SIZES = [1 << power for power in range(10, 29)]


def table(folder: Path, op: str = "all_reduce", ranks: tuple[int, ...] = (2, 4, 8)) -> Path:
    """What dgx-h100 predicts, as if it had been measured."""
    system = load_system("dgx-h100")
    lines = ["op,dtype,ranks,bytes,seconds"]
    for n in ranks:
        for size in SIZES:
            taken = collective_seconds(system, op, size, range(n)).seconds
            lines.append(f"{op},half,{n},{size},{taken:.9g}")
    path = folder / "points.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_constants_are_found_again_in_what_they_predict(op: str, tmp_path: Path) -> None:
    result = calibrate_collectives(table(tmp_path, op), load_system("dgx-h100"))
    (fitted,) = result.fitted
    assert fitted.errors.mean < 0.02
    for size in SIZES[::4]:
        ours = collective_seconds(result.system, op, size, range(8)).seconds
        theirs = collective_seconds(load_system("dgx-h100"), op, size, range(8)).seconds
        assert ours == pytest.approx(theirs, rel=0.08)


def test_a_table_and_a_single_prediction_are_one_formula() -> None:
    system = load_system("dgx-h100")
    fit = system.fit_of("nccl", "all_reduce", "nvlink")
    assert fit is not None
    constants = (fit.alpha, fit.step, fit.efficiency, fit.p, fit.fall)
    wire = np.array([2 * 7 / 8 * size / 450e9 for size in SIZES])
    ours = seconds_of(constants, np.full(len(SIZES), 14.0), wire, np.full(len(SIZES), 8.0))
    single = [collective_seconds(system, "all_reduce", size, range(8)).seconds for size in SIZES]
    assert ours == pytest.approx(single)
    assert errors([""] * len(single), ours, single).p90 == pytest.approx(0)


def test_ranks_beyond_a_node_tell_the_network_and_too_few_sizes_are_told(tmp_path: Path) -> None:
    path = table(tmp_path, ranks=(8, 16))
    path.write_text(path.read_text() + "broadcast,half,2,8,1e-5\n")
    result = calibrate_collectives(path, load_system("dgx-h100"))
    assert [(each.fit.level, each.fit.ranks) for each in result.fitted] == [
        ("nvlink", 8),
        ("network", 16),
    ]
    assert "broadcast: not fitted: expected 4 sizes or more" in " ".join(result.notes)
    for size in SIZES[::4]:  # the constants of the network are found again
        ours = collective_seconds(result.system, "all_reduce", size, range(16)).seconds
        theirs = collective_seconds(load_system("dgx-h100"), "all_reduce", size, range(16)).seconds
        assert ours == pytest.approx(theirs, rel=0.08)
    lone = tmp_path / "lone.csv"
    lone.write_text("op,ranks,bytes,seconds\nall_reduce,2,8,1e-5\n")
    with pytest.raises(ProfileError, match="nothing can be fitted"):
        calibrate_collectives(lone, load_system("dgx-h100"))


def log(hosts: list[str], each: int = 4, mark: str = "{}", rate: float = 60e9) -> str:
    """What all_reduce_perf prints with `each` ranks on every host; mark: of the launcher."""
    lines = ["# Collective test starting: all_reduce_perf", "# nThread 1 nGpus 1 minBytes 8"]
    for rank in range(len(hosts) * each):
        place = f"on {hosts[rank // each]:>10} device {rank % each:2d} [0009:01:00] NVIDIA H100"
        lines.append(f"#  Rank {rank:2d} Group  0 Pid {9000 + rank} {place}")
    for size in SIZES:
        us = 30 + size / rate * 1e6
        lines.append(f"{size:12d} {size // 4:12d} float sum -1 {us:.2f} 0 0 0 {us:.2f} 0 0 0")
    return "".join(mark.format(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    "mark",
    ["{}", "[1,0]<stdout>:{}", "[1,0]<stdout>: {}", "0: {}", "[default0]:{}", "[rank0]: {}",
     "Thu Mar  7 10:00:00 2024[1,0]<stdout>:{}", "worker-0  | {}"],
)  # fmt: skip
def test_ranks_on_two_hosts_are_of_the_network_whatever_started_them(
    mark: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log(["hosta", "hostb"], mark=mark))
    points = read_collectives(path)
    assert [(p.ranks, p.hosts, p.nbytes) for p in points] == [
        (8, ("hosta", "hostb"), size) for size in SIZES
    ]
    system = load_system("dgx-h100")
    result = calibrate_collectives(path, system)
    assert [each.fit.level for each in result.fitted] == ["network"]
    kept = result.system.fit_of("nccl", "all_reduce", "nvlink")
    assert kept == system.fit_of("nccl", "all_reduce", "nvlink") is not None


def test_hosts_of_one_name_are_told_by_their_devices_and_of_a_rack_share_nvlink(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log(["localhost", "localhost"]))
    assert read_collectives(path)[0].hosts == ("localhost", "localhost (2)")
    rack = load_system("gb200-nvl72")
    assert {p.nodes(rack) for p in read_collectives(path)} == {1}


def test_a_second_run_in_a_file_has_its_own_ranks(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log(["hosta", "hostb"]) + log(["hosta"]))
    assert [len(p.hosts) for p in read_collectives(path)] == [2] * len(SIZES) + [1] * len(SIZES)


@pytest.mark.parametrize(
    ("system", "hosts", "rate", "said"),
    [
        ("l40s-pcie", ["hosta", "hostb"], 60e9, "ranks on hosta and hostb, and l40s-pcie joins"),
        (
            "dgx-h100",
            ["hosta", "hostb"],
            900e9,
            "and hostb, .* as fast as the network of dgx",
        ),
    ],
)
def test_what_several_hosts_cannot_tell_is_refused_with_their_names(
    system: str, hosts: list[str], rate: float, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log(hosts, rate=rate))
    with pytest.raises(ProfileError, match=said):
        calibrate_collectives(path, load_system(system))


def test_a_calibrated_system_is_a_file_that_loads(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points = table(tmp_path)
    asked = ("calibrate", "--collectives", str(points), "--system", "dgx-h100")
    done = run(*asked, "-o", "mine.toml")
    assert done.code == 0 and "nccl all_reduce: alpha" in done.out
    mine = load_system("mine.toml")
    assert dump_system(mine) == run(*asked, "-o", "-").out
    assert "fitted by rooftrace calibrate to points.csv" in {f.source for f in mine.collectives}
    assert run(*asked, "--chip", "l4", "-o", "-").code == 2
    assert run("calibrate", "--system", "dgx-h100", "-o", "-").code == 2
    assert run("calibrate", "--collectives", str(points), "-o", "-").code == 2


def test_gloo_is_timed_in_a_group_of_one() -> None:
    import torch.distributed as dist

    from rooftrace.measured.bench import time_ops

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rows = time_ops(0, 1, [1024])
    finally:
        dist.destroy_process_group()
    assert [(op, ranks, size) for op, _, ranks, size, _ in rows] == [
        ("all_reduce", 1, 1024),
        ("all_gather", 1, 1024),
        ("broadcast", 1, 1024),
    ]
    assert all(seconds > 0 for *_, seconds in rows)


def test_what_is_measured_can_be_fitted(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        (op, "float", 2, size, 1e-4 + size / 1e9)
        for op in ("all_reduce", "broadcast")
        for size in SIZES
    ]
    monkeypatch.setattr("rooftrace.measured.bench.gloo._run", lambda *_: rows)
    monkeypatch.chdir(tmp_path)
    assert run("measure", "--collectives", "--ranks", "2").code == 0
    done = run(
        *("calibrate", "--collectives", "collectives.csv"),
        *("--system", "workstation-2x4090", "-o", "mine.toml"),
    )
    assert done.code == 0, done.err
    assert {f.library for f in load_system("mine.toml").collectives} == {"nccl", "gloo"}


@pytest.mark.parametrize(
    "asked",
    [
        ("--collectives", "--ranks", "1"),
        ("--ranks", "2"),
        ("--collectives", "--chip-only"),
        ("--collectives", "gpt2"),
    ],
)
def test_a_measurement_that_makes_no_sense_is_refused(asked: tuple[str, ...], run: Run) -> None:
    assert run("measure", *asked).code == 2
