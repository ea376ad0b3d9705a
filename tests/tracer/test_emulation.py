"""The CUDA device that is not there: what a script asks of torch.cuda, and what is left of it."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rooftrace.errors import RequestError
from rooftrace.hardware import available_chips, load_chip
from rooftrace.tracer.emulation import Device, DeviceError
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
        kept = torch.Generator
        assert torch.Generator().device.type == "cpu"
    assert cuda.default_generators == () and torch.Generator is torch._C.Generator
    with pytest.raises(RuntimeError):
        kept(device="cuda")


# -- what is left ----------------------------------------------------------------------------------

PARTS = (
    torch,
    torch._C,
    torch.version,
    torch.accelerator,
    torch.amp,
    torch.autograd.profiler,
    backends.cuda,
    backends.cudnn.m,
    torch.distributed,
    torch.serialization,
    cuda,
    cuda.graphs,
    cuda.memory,
    cuda.nvtx,
    cuda.profiler,
    cuda.random,
    cuda.streams,
)
KINDS = (
    torch.Tensor,
    cuda.Stream,
    cuda.Event,
    cuda.CUDAGraph,
    cuda.graph,
    cuda.CudaError,
    torch.amp.GradScaler,
    torch.autograd.profiler.profile,
    torch.UntypedStorage,
    threading.Thread,
    type(cuda.nvtx._nvtx),
    type(torch.ops),
)


def names_of(home: Any) -> dict[str, Any]:
    """What a module or class has, but for modules that something has imported since."""
    return {name: item for name, item in {**vars(home)}.items() if type(item) is not type(torch)}


def test_afterwards_torch_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own test helpers, which another test may have imported, freeze the flags
    flags = backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    switches = torch.get_float32_matmul_precision(), backends.cudnn.benchmark
    before = [names_of(home) for home in (*PARTS, *KINDS)]
    with h100(2):
        stream = cuda.Stream()
        with cuda.stream(stream), cuda.graph(cuda.CUDAGraph()):
            backends.cuda.matmul.allow_tf32 = True
        backends.cudnn.benchmark = not backends.cudnn.benchmark
        torch.set_float32_matmul_precision("high")
        torch.version.cuda = "99"
        cuda.set_stream(stream)
        cuda.get_rng_state_all()
        meanwhile = names_of(cuda)
    for home, then in zip((*PARTS, *KINDS), before, strict=True):
        now = names_of(home)
        left = {name for name in then.keys() | now.keys() if then.get(name) is not now.get(name)}
        assert not left - {"__getattr__"} and ("__getattr__" in then) == ("__getattr__" in now), (
            home,
            left,
        )
    assert meanwhile != names_of(cuda)
    assert switches == (torch.get_float32_matmul_precision(), backends.cudnn.benchmark)
    assert backends.cuda.matmul.allow_tf32 is False
    assert not cuda.is_available() and not hasattr(torch._C, "_cuda_getDeviceCount")
    with pytest.raises((RuntimeError, AssertionError)):
        cuda.Stream()


def test_another_thread_sees_no_device() -> None:
    found: list[Any] = []
    go, done = threading.Event(), threading.Event()

    def look() -> None:
        go.wait()
        try:
            found.extend(
                (
                    cuda.is_available(),
                    cuda.device_count(),
                    cuda.is_initialized(),
                    hasattr(torch._C, "_cuda_getDeviceCount"),
                    bool(torch.version.cuda),
                    backends.cuda.is_built(),
                    torch.accelerator.is_available(),
                    torch.ones(1).pin_memory if torch.ones(1).is_pinned() else False,
                    bool(cuda.default_generators),
                    torch.Generator is not torch._C.Generator,
                )
            )
            for call in (cuda.current_device, cuda.synchronize, cuda.Stream, cuda.Event):
                try:
                    found.append(call())
                except (AssertionError, RuntimeError, AttributeError):
                    found.append(False)
        finally:
            done.set()

    thread = threading.Thread(target=look)  # it is started before: nobody emulates for it
    thread.start()
    with h100():
        go.set()
        done.wait()
        inside: list[bool] = []
        started = threading.Thread(target=lambda: inside.append(cuda.is_available()))
        started.start()
        started.join()
    thread.join()
    assert inside == [True] and len(found) == 14 and not any(found)


def test_two_threads_may_emulate_two_devices() -> None:
    both = threading.Barrier(2, timeout=60)

    def seen(chip: str) -> str:
        try:
            with h100(chip=chip):
                both.wait()
                name: str = cuda.get_device_name()
                both.wait()
                return name
        except BaseException:
            both.abort()  # the other one does not wait for what has failed here
            raise

    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(seen, ("l4", "h200-sxm")))
    assert names == ["NVIDIA L4", "NVIDIA H200"]
    assert not cuda.is_available()


def test_a_device_inside_of_another_is_the_one_that_is_seen() -> None:
    with h100(8, 5):
        cuda.manual_seed_all(5)
        with h100(chip="l4"):
            assert cuda.get_device_name() == "NVIDIA L4" and cuda.device_count() == 1
            assert cuda.memory_stats()["num_ooms"] == 0 and cuda.memory_allocated() == 0
            assert torch.ones(1).pin_memory().is_pinned() and cuda.Stream().device.index == 0
            cuda.synchronize()
        assert cuda.get_device_name() == "NVIDIA H100 80GB HBM3" and cuda.current_device() == 5
        assert cuda.initial_seed() == 5
    assert not cuda.is_available()


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


def test_an_error_inside_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), h100():
        cuda.synchronize()
        _ = 1 / 0
    assert not cuda.is_available() and torch.version.cuda is None
