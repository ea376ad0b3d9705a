"""The CUDA device that is not there: what a script asks of torch.cuda, and what is left of it."""

import re
import threading
from typing import Any

import pytest
import torch

from rooftrace.errors import RequestError
from rooftrace.hardware import available_chips, load_chip
from rooftrace.scripts.fake_cuda import Device, DeviceError
from tests.tracer.emulated_device import h100

pytestmark = pytest.mark.quick

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

cuda: Any = torch.cuda
backends: Any = torch.backends
MIB = 1 << 20


# -- facts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in available_chips() if load_chip(n).kind == "gpu"])
def test_a_chip_is_called_what_its_driver_calls_it(name: str) -> None:
    chip = load_chip(name)
    device = Device.of(chip)
    spelled = re.sub(r"[ _]", "-", device.name.lower())  # chip files have the driver's names so
    assert spelled in chip.aliases and not device.guessed
    assert device.memory == chip.memory_capacity.value
    rates = {(8, 0): "bf16", (8, 6): "bf16", (7, 0): "fp16", (7, 5): "fp16"}
    assert chip.has_peak("matrix", rates.get(device.capability, "fp8"))
    assert device.properties(0).gcnArchName == (
        chip.architecture if device.is_rocm else device.name
    )


def test_a_chip_of_the_user_keeps_its_name_and_what_was_inferred_is_said() -> None:
    from dataclasses import replace

    chip = replace(load_chip("h100-sxm"), name="next-gpu", sm_count=None, architecture="")
    device = Device.of(chip)
    assert (device.name, device.guessed) == ("next-gpu", ("capability", "multiprocessors"))
    assert device.capability >= (9, 0)  # it has fp8
    with pytest.raises(RequestError, match="count=0: expected one device"):
        Device.of(chip, 0)
    with pytest.raises(RequestError, match="is a CPU"):
        Device.of(replace(chip, kind="cpu"))


def test_properties_are_those_of_the_chip() -> None:
    with h100(8, 3) as own:
        found = cuda.get_device_properties(0)
        assert found.total_memory == 81559 * MIB
        assert (found.major, found.minor, found.multi_processor_count) == (9, 0, 132)
        assert found.L2_cache_size == 50 * MIB and found.warp_size == 32
        assert "name='NVIDIA H100 80GB HBM3'" in repr(found)
        assert cuda.get_device_name() == found.name and cuda.get_device_capability() == (9, 0)
        assert "sm_90" in cuda.get_arch_list() and "sm_90" in cuda.get_gencode_flags()
        assert cuda.is_bf16_supported() and cuda.current_device() == 3
        with pytest.raises(DeviceError, match=r"get_device_properties\(\)\.persisting_l2"):
            _ = found.persisting_l2_cache_max_size
        with pytest.raises(AssertionError, match="Invalid device id"):
            cuda.get_device_properties(8)
    assert own.assumed.keys() == {"CUDA"}


def test_a_device_of_amd_is_one_of_rocm() -> None:
    with h100(chip="mi300x"):
        assert torch.version.hip and torch.version.cuda is None
        assert cuda.get_device_properties().gcnArchName.startswith("gfx942")
        assert cuda.is_available() and cuda.get_arch_list() == ["gfx942"]


# -- devices ---------------------------------------------------------------------------------------


def test_a_process_chooses_its_device() -> None:
    with h100(4, 1):
        assert (cuda.device_count(), cuda.current_device()) == (4, 1)
        with cuda.device(2):
            assert cuda.current_device() == 2
            with cuda.device("cuda:3"):
                assert torch.accelerator.current_device_index() == 3
        with cuda.device_of(torch.ones(1)):
            assert cuda.current_device() == 1
        cuda.set_device(torch.device("cuda", 3))
        assert cuda.current_device() == 3 and cuda.can_device_access_peer(0, 3)
        with pytest.raises(RuntimeError, match="invalid device ordinal: device 4 of 4"):
            cuda.set_device(4)
        assert torch.device(2) == torch.device("cuda:2")
    assert torch.utils._device.CURRENT_DEVICE is None


def test_the_code_may_hide_devices_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the shell: it hides real devices
    with h100(4):
        assert cuda.device_count() == 4
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
        assert cuda.device_count() == 2
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,9,2")  # an unknown one ends the list
        assert cuda.device_count() == 1
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
        assert cuda.device_count() == 0


def test_it_is_initialized_by_the_first_call_or_the_first_tensor() -> None:
    with h100():
        assert cuda.is_available() and not cuda.is_initialized()
        cuda.init()
        assert cuda.is_initialized()
    with h100() as own:
        own.bytes.grow(1)
        assert cuda.is_initialized() and cuda.memory_allocated() == 1
    assert not cuda.is_initialized()


def test_the_general_names_say_the_same() -> None:
    with h100(2, 1) as own:
        accelerator = torch.accelerator
        assert accelerator.is_available() and accelerator.device_count() == 2
        assert accelerator.current_accelerator() == torch.device("cuda")
        assert accelerator.current_device_index() == 1
        accelerator.synchronize()
        assert own.ticks.waits == 1
        assert torch.get_device_module("cuda") is cuda and torch.get_device_module() is cuda
        assert accelerator.current_stream() == cuda.current_stream()
        own.bytes.grow(3 * MIB)
        if hasattr(accelerator, "memory_allocated"):
            assert accelerator.memory_allocated() == 3 * MIB
            accelerator.empty_cache()
            accelerator.reset_peak_memory_stats()
    assert torch.accelerator.current_accelerator() is None


def test_libraries_of_cuda_are_there() -> None:
    with h100() as own:
        assert backends.cuda.is_built() and backends.cudnn.is_available()
        assert backends.cudnn.version() > 90000 and "cuDNN" in own.assumed
        assert torch.version.cuda and torch.version.cuda[:2] in ("12", "13")
        assert cuda.nccl.version() > (2, 20) and torch.distributed.is_nccl_available()
        assert backends.cuda.is_flash_attention_available()
        with cuda.nvtx.range("step {}", 1):
            cuda.nvtx.range_push("forward")
            cuda.nvtx.mark("here")
            cuda.nvtx.range_pop()
        cuda.nvtx.range_end(cuda.nvtx.range_start("apart"))
        with cuda.profiler.profile():
            cuda.check_error(cuda.cudart().cudaProfilerStart())
        with pytest.raises(cuda.CudaError, match=r"\(2\)"):
            cuda.check_error(2)
    assert not torch.distributed.is_nccl_available() and torch.version.cuda is None


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_what_the_recording_has() -> None:
    with h100() as own:
        own.bytes.grow(3 * MIB + 512)
        own.bytes.now = MIB
        assert (cuda.memory_allocated(), cuda.max_memory_allocated()) == (MIB, 3 * MIB + 512)
        assert cuda.memory_reserved() == cuda.max_memory_reserved() == 4 * MIB  # whole segments
        free, total = cuda.mem_get_info()
        assert total == 81559 * MIB and free == total - 512 * MIB - 4 * MIB  # a context of 0.5 GiB
        cuda.empty_cache()
        assert cuda.memory_reserved() == 2 * MIB and cuda.max_memory_reserved() == 4 * MIB
        cuda.reset_peak_memory_stats()
        assert cuda.max_memory_allocated() == MIB and cuda.max_memory_reserved() == 2 * MIB
        found = cuda.memory_stats()
        assert found["active_bytes.all.current"] == MIB and found["num_ooms"] == 0
        with pytest.raises(DeviceError, match=r"memory_stats\(\)\['segment.all.peak'\]"):
            found["segment.all.peak"]
        assert found.get("segment.all.peak") is None
        assert "0.001 GiB" in cuda.memory_summary() and "H100" in cuda.memory_summary()
        assert "those of the tensors" in own.assumed["memory"]


# -- random numbers --------------------------------------------------------------------------------


def test_seeds_and_states_are_kept() -> None:
    with h100(2):
        torch.manual_seed(7)
        assert cuda.initial_seed() == 7
        states = cuda.get_rng_state_all()
        cuda.manual_seed(11)
        assert not torch.equal(cuda.get_rng_state(), states[0])
        cuda.set_rng_state_all(states)
        assert torch.equal(cuda.get_rng_state(), states[0])
        with torch.random.fork_rng():
            cuda.manual_seed_all(1)
        assert torch.equal(cuda.get_rng_state("cuda:1"), states[1])
        own = torch.Generator(device="cuda").manual_seed(3)
        assert own.device == torch.device("cuda:0") and own.initial_seed() == 3
        assert isinstance(own, torch.Generator) and isinstance(
            torch.default_generator, torch.Generator
        )
        assert torch.Generator().device.type == "cpu"


# -- who sees it -----------------------------------------------------------------------------------


def test_every_thread_of_the_process_sees_it() -> None:
    seen: list[Any] = []
    go = threading.Event()

    def look() -> None:
        go.wait(60)
        seen.append((cuda.is_available(), torch.ones(1).pin_memory().is_pinned()))

    threads = [threading.Thread(target=look)]  # it is started before
    threads[0].start()
    with h100():
        threads.append(threading.Thread(target=look))
        threads[1].start()
        go.set()
        for thread in threads:
            thread.join()
    assert seen == [(True, True)] * 2


def test_what_was_imported_before_answers_too() -> None:
    from torch.cuda import device_count, is_available, max_memory_allocated, synchronize

    before = is_available()
    with h100(2) as own:
        own.bytes.grow(7)
        synchronize()
        assert (is_available(), device_count(), max_memory_allocated()) == (True, 2, 7)
        assert own.ticks.waits == 1
    assert is_available() is before


def test_history_of_memory_is_refused_and_may_be_switched_off() -> None:
    with h100():
        cuda.memory._record_memory_history(enabled=None)
        with pytest.raises(
            DeviceError, match=r"memory\._record_memory_history at .*test_emulation"
        ):
            cuda.memory._record_memory_history(max_entries=100_000)
        with pytest.raises(DeviceError, match="memory_snapshot"):
            cuda.memory._snapshot()
