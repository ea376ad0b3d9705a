import math
import os

import pytest

torch = pytest.importorskip("torch")

from rooftrace.hardware.chipfile import dump_chip, load_chip  # noqa: E402  (after the skip)
from rooftrace.measured.bench import clock, machine, machine as module  # noqa: E402
from rooftrace.measured.bench.clock import MeasureError  # noqa: E402
from rooftrace.measured.bench.machine import measure_chip  # noqa: E402


@pytest.fixture(scope="module")
def chip():
    return measure_chip("cpu", budget_s=0.2)


def test_every_rate_is_positive_and_measured(chip):
    assert chip.kind == "cpu"
    assert chip.has_peak("vector", "fp32") and chip.has_peak("matrix", "bf16")
    for place, fact in chip.facts():
        assert math.isfinite(fact.value), place
        # Only a compiler could tell the one; the other is of GPUs, and nothing on a CPU takes it.
        if place in ("graph_entry", "context"):
            assert fact.kind != "measured"
            continue
        assert fact.kind in ("measured", "derived"), place
        assert fact.value > 0 or place == "kernel_gap"
    assert torch.__version__ in chip.memory_bandwidth.source
    assert "median of" in chip.memory_bandwidth.source


def test_the_numbers_are_of_this_world(chip):
    assert 1e8 < chip.peak("vector", "fp32") < 1e15
    assert 1e8 < chip.memory_bandwidth.value < 1e13
    assert 1e-8 < chip.dispatch_compiled.value < 1e-1
    assert 2**27 < chip.memory_capacity.value < 2**47
    assert chip.sm_count.value >= 1


def test_it_claims_no_engine_that_was_not_measured(chip):
    assert not chip.has_peak("matrix", "tf32")


def test_it_passes_as_a_chip_file(chip, tmp_path):
    path = tmp_path / "cpu.toml"
    path.write_text(dump_chip(chip), encoding="utf-8")
    assert load_chip(path) == chip


def test_nothing_stays_changed():
    def masks():
        return {name: os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}

    linux = hasattr(os, "sched_getaffinity") and os.path.isdir("/proc/self/task")
    torch.ones(2**20).add_(1)
    before = masks() if linux else {}
    precision = torch.get_float32_matmul_precision()
    state = torch.random.get_rng_state()
    lines = []
    measure_chip("cpu", budget_s=0.05, progress=lines.append)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.equal(torch.random.get_rng_state(), state)
    assert any(line.startswith("fp32 matmul") for line in lines)
    if linux:
        after = masks()
        assert all(after.get(name, mask) == mask for name, mask in before.items())


@pytest.mark.parametrize("device", ["abacus", "meta", "cuda:99"])
def test_a_device_it_cannot_measure_is_quoted(device):
    with pytest.raises(MeasureError, match=f'device "{device}"'):
        measure_chip(device)


def test_a_budget_must_be_positive():
    with pytest.raises(MeasureError, match="budget_s = 0: expected"):
        measure_chip("cpu", budget_s=0)


def test_caches_of_one_level_add_up_and_shared_ones_count_once(tmp_path):
    def cache(cpu, index, level, kind, size, shared):
        folder = tmp_path / f"cpu{cpu}/cache/index{index}"
        folder.mkdir(parents=True)
        texts = {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}
        for name, text in texts.items():
            (folder / name).write_text(f"{text}\n")

    for cpu in range(4):
        cache(cpu, 0, 1, "Data", "32K", str(cpu))
        cache(cpu, 1, 3, "Unified", "16M", "0-1" if cpu < 2 else "2-3")
    fact = module.cpu_cache(tmp_path)
    assert fact.value == 2 * 16 * 2**20
    assert fact.source.startswith("2 x L3 of 16384 KiB")
    assert module.cpu_cache(tmp_path / "nowhere") is None


def test_a_container_limit_is_the_memory(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{512 * 2**20}\n")
    assert module._cpu_memory(limit).value == 512 * 2**20
    limit.write_text("max\n")
    assert "physical" in module._cpu_memory(limit).source


def test_hyperthread_siblings_come_last(tmp_path):
    for cpu, siblings in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert clock.spread_cores({0, 1, 2, 3}, tmp_path) == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200-measured"),
        ("Intel(R) Xeon(R) Platinum 8480C @ 2.00GHz", "intel-xeon-platinum-8480c-2.00ghz-measured"),
        ("", "chip-measured"),
    ],
)
def test_a_name_that_can_be_typed(name, slug):
    assert machine.slug(name) == slug


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured():
    chip = measure_chip("cuda", budget_s=2.0)
    assert chip.kind == "gpu" and chip.has_peak("matrix", "fp16")
    assert 1e-7 < chip.kernel_gap.value < 1e-4
