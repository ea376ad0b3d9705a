"""Scripts for CUDA as they are written, under a recorder, on a device that is not there."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rooftrace.scripts.fake_cuda import DeviceError
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.recording.recorder import Recorder
from tests.tracer.emulated_device import Emulation, h100
from tests.tracer.script_oracle import its_own_garbage

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

cuda: Any = torch.cuda
backends: Any = torch.backends.cuda
amp: Any = torch.amp


@contextlib.contextmanager
def recorded() -> Iterator[tuple[Emulation, Recorder]]:
    """A recorder inside of an emulated device, as a run has them."""
    with h100() as own, Recorder(own_step=True, roll_loops=False) as recorder:
        yield own, recorder


def ops(recorder: Recorder) -> list[str]:
    """The names of the recorded ops, views and copies left out."""
    skipped = ("aten.t.", "aten.view.", "aten.detach.", "aten._to_copy.")
    names = [str(node.target) for node in recorder.graph.nodes if node.op == "call_function"]
    return [name.rpartition(".")[0] for name in names if not name.startswith(skipped)]


def parts_of(recorder: Recorder) -> list[str]:
    """The parts of the step of the recorded ops."""
    from rooftrace.tracer.recording import META_KEY

    nodes = [node for node in recorder.graph.nodes if node.op == "call_function"]
    return [node.meta[META_KEY].origin.part for node in nodes]


# -- streams and events ----------------------------------------------------------------------------


def test_work_is_put_on_the_stream_that_is_chosen() -> None:
    from rooftrace.tracer.recording import META_KEY

    with recorded() as (_, recorder):
        x = torch.ones(3, device="cuda")
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            assert cuda.current_stream() == side != cuda.default_stream()
            y = x * 2
            y.record_stream(side)
        with side:
            z = x * 3
        cuda.current_stream().wait_stream(side)
        assert cuda.current_stream() == cuda.default_stream()
        _ = y + z
        found = [
            (str(node.target), node.meta[META_KEY].stream)
            for node in recorder.graph.nodes
            if META_KEY in node.meta and node.op == "call_function"
        ]
    assert found == [
        ("aten.ones.default", ""),
        ("rooftrace.record_event.default", ""),
        ("rooftrace.wait_event.default", "stream 1"),
        ("aten.mul.Tensor", "stream 1"),
        ("aten.mul.Tensor", "stream 1"),
        ("rooftrace.record_event.default", "stream 1"),
        ("rooftrace.wait_event.default", ""),
        ("aten.add.Tensor", ""),
    ]


def test_events_measure_time_of_the_device() -> None:
    with recorded() as (own, recorder):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        with pytest.raises(ValueError, match="must be recorded before"):
            start.elapsed_time(end)
        start.record()
        torch.ones(3, device="cuda")
        own.ticks.seconds = 0.25
        end.record()
        end.synchronize()
        cuda.synchronize()
        assert own.ticks.waits == 2 and end.query() and "queries" in own.assumed
        assert start.elapsed_time(end) == 250.0  # ms
        assert end.elapsed_time(end) > 0  # scripts divide by it
        with pytest.raises(ValueError, match="enable_timing=True"):
            start.elapsed_time(cuda.Event())
        assert ops(recorder) == ["aten.ones"]  # a timer orders nothing
        assert isinstance(start, cuda.Event) and isinstance(cuda.Stream(), cuda.Stream)
        external = cuda.ExternalStream(0x77)
        assert external.cuda_stream == 0x77 and hash(external) == hash(cuda.ExternalStream(0x77))


class FromC(int):
    """`object.__new__` makes none of these, as it makes no stream in builds for CUDA."""

    __slots__ = ()


def test_in_builds_for_cuda_streams_stand_for_those_of_their_class() -> None:
    class Face:
        def wait(self) -> str:
            return "waited"

    made: Any = overrides.made(FromC, Face)
    assert made.wait() == "waited" and isinstance(made, FromC)


# -- graphs ----------------------------------------------------------------------------------------


def test_a_replay_runs_the_captured_ops_again() -> None:
    """The whole step of PyTorch's documentation on CUDA graphs."""
    with recorded() as (own, recorder):
        model, loss = nn.Linear(8, 8).cuda(), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        static_input, static_target = (torch.ones(4, 8, device="cuda") for _ in range(2))
        graph = cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        before = len(ops(recorder))
        with cuda.graph(graph):
            assert cuda.is_current_stream_capturing()
            loss(model(static_input), static_target).backward()
            optimizer.step()
        assert not cuda.is_current_stream_capturing()
        captured, parts = ops(recorder)[before:], parts_of(recorder)[-3:]
        assert parts == ["backward", "optimizer", "optimizer"] and own.told == [
            "capture",
            "captured",
        ]
        assert captured.count("aten.addmm") == 1 and captured.count("aten.mse_loss") == 1
        for _ in range(2):
            static_input.copy_(torch.zeros(4, 8))
            before = len(ops(recorder))
            graph.replay()
            assert ops(recorder)[before:] == captured
            assert parts_of(recorder)[-3:] == parts
        assert own.told[2:] == ["replay", "replayed"] * 2
        assert recorder.here.part == "forward" and "graph replays" in own.assumed
        with pytest.raises(RuntimeError, match="captured nothing"):
            cuda.CUDAGraph().replay()


def test_a_capture_keeps_alive_only_what_a_real_one_reads() -> None:
    import gc
    import weakref

    with its_own_garbage(), recorded():
        x, graph = torch.ones(1024, device="cuda"), cuda.CUDAGraph()
        with cuda.graph(graph):
            middle = x * 2
            gone = weakref.ref(middle)
            result = middle + 1
            del middle
        gc.collect()
        assert gone() is None and result.shape == (1024,)
        graph.replay()


def test_graphed_callables_run_as_they_are() -> None:
    with recorded() as (own, recorder):
        model = nn.Linear(8, 8).cuda()
        graphed = cuda.make_graphed_callables(model, (torch.ones(4, 8, device="cuda"),))
        graphed(torch.ones(4, 8, device="cuda")).sum().backward()
        assert ops(recorder).count("aten.addmm") == 1
        assert "graphed callables" in own.assumed


# -- mixed precision -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["torch.amp", "torch.cuda.amp"])
def test_the_scale_of_gradients_grows_and_no_step_is_skipped(kind: str) -> None:
    with recorded() as (own, recorder):
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        made: Any = torch.amp.GradScaler if kind == "torch.amp" else cuda.amp.GradScaler
        scaler = made(init_scale=2.0**10, growth_interval=2)
        assert scaler.is_enabled()
        for _ in range(4):
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(torch.ones(4, 8, device="cuda"))
                assert output.dtype == torch.float16
            scaler.scale(output.float().sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**12  # twice in four steps
        assert scaler.state_dict()["_growth_tracker"] == 0
        updates = [name for name in ops(recorder) if "lerp" in name]
        assert len(updates) == 4 * 2  # two parameters, four steps
        assert "no inf" in own.assumed["found_inf"]


def test_functions_with_casts_of_their_own() -> None:
    function: Any = torch.autograd.Function

    class Double(function):  # type: ignore[misc]
        @staticmethod
        @amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype == torch.float16
            return x * 2

        @staticmethod
        @amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    with recorded():
        x = torch.ones(4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
            result: Any = Double.apply(x)
        result.sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32


# -- the host --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_pins_what_it_gives(workers: int) -> None:
    data = torch.arange(24.0).reshape(6, 4)
    with its_own_garbage(), recorded():  # a worker walks through no more, either
        loader = DataLoader(TensorDataset(data), batch_size=3, pin_memory=True, num_workers=workers)
        batches = [batch for (batch,) in loader]
        assert all(batch.is_pinned() for batch in batches)
        assert torch.cat(batches).tolist() == data.tolist()  # the host's data are real
        moved = batches[0].to("cuda", non_blocking=True)
        assert moved.shape == (3, 4) and not moved.is_pinned()


def test_memory_of_the_host_is_pinned() -> None:
    with recorded():
        plain = torch.arange(4.0, device="cpu")
        assert not plain.is_pinned()
        pinned = plain.pin_memory()
        assert pinned.is_pinned() and pinned[1:].is_pinned() and not plain.is_pinned()
        assert pinned.tolist() == plain.tolist() and pinned.pin_memory() is pinned
        assert torch.empty(3, device="cpu", pin_memory=True).is_pinned()
        assert not torch.empty(3, device="cpu", pin_memory=False).is_pinned()
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            torch.ones(3, device="cuda").pin_memory()
    assert not pinned.is_pinned()  # of this build


def test_checkpoints_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "checkpoint.pt"
    with recorded() as (own, recorder):
        model = nn.Linear(4, 4).cuda()
        host = torch.arange(3.0, device="cpu")
        before = len(ops(recorder))
        torch.save({"model": model.state_dict(), "host": host, "step": 7}, file)
        for location in (None, "cuda", torch.device("cuda", 0), {"cpu": "cuda:0"}, "cpu"):
            back = torch.load(file, map_location=location)
            model.load_state_dict(back["model"])
            assert back["step"] == 7 and back["model"]["weight"].is_meta == (location != "cpu")
            assert back["host"].is_meta == (location not in (None, "cpu"))
        assert back["host"].tolist() == [0, 1, 2]  # what is on the host is real
        assert ops(recorder)[before:].count("aten.copy_") == 5 * 2  # only loading into the model
        assert "without numbers" in own.assumed["torch.save"]


def test_checkpoints_of_a_real_gpu_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "checkpoint.pt"
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"weight": torch.ones(4, 4)}, file)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(file)
    with recorded():
        assert torch.load(file)["weight"].is_meta
        assert torch.load(file, map_location="cpu")["weight"].tolist() == [[1] * 4] * 4
        to_cuda: Any = lambda storage, location: storage.cuda(0)  # noqa: E731
        moved = torch.load(file, map_location=to_cuda)
        assert moved["weight"].shape == (4, 4) and moved["weight"].is_meta


def test_tensors_of_the_device_are_pickled_by_their_shapes() -> None:
    import pickle

    with recorded():
        x = torch.ones(2, 3, device="cuda")
        for item in (x, nn.Linear(2, 3).cuda().weight):
            back = pickle.loads(pickle.dumps(item))
            assert back.is_meta and back.shape == item.shape
        host = torch.arange(3.0, device="cpu")
        assert pickle.loads(pickle.dumps(host)).tolist() == [0, 1, 2]


def test_copies_between_devices_of_one_process() -> None:
    with recorded():
        comm: Any = torch.nn.parallel.comm
        x = torch.ones(4, 2, device="cpu")
        (moved,) = comm.scatter(x, [0])
        assert moved.is_meta and moved.shape == (4, 2)
        assert comm.broadcast_coalesced([moved], [0])[0][0] is moved
        assert torch._C._gather([moved], 0, 0) is moved
        with pytest.raises(DeviceError, match=r"_scatter .*one device is emulated.*torchrun"):
            comm.scatter(x, [0, 1])


def test_devices_have_numbers() -> None:
    with recorded():
        assert torch.device(0) == torch.device("cuda", 0)
        model = nn.Linear(2, 2).to(0)
        assert model(torch.ones(1, 2).to(0)).shape == (1, 2)


def test_constructors_of_old_scripts() -> None:
    with recorded():
        made = cuda.FloatTensor(2, 3)
        assert made.shape == (2, 3) and made.dtype == torch.float32 and made.is_meta
        assert cuda.LongTensor([1, 2]).dtype == torch.int64
        host = torch.ones(2, device="cpu")
        assert host.type(cuda.HalfTensor).dtype == torch.float16
        assert host.type("torch.cuda.DoubleTensor").is_meta
        assert host.type(torch.float64).dtype == torch.float64
        assert host.type() == "torch.FloatTensor"


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_defaults_may_name_the_device() -> None:
    with recorded():
        torch.set_default_device("cuda")
        assert torch.ones(2).is_meta
        assert torch.tensor([1, 2]).tolist() == [1, 2] and nn.Linear(2, 2).weight.is_meta
        torch.set_default_device("cpu")
        assert torch.ones(2).tolist() == [1, 1]
        with torch.device("cuda"):
            assert torch.zeros(2).is_meta
        torch.set_default_tensor_type("torch.cuda.HalfTensor")
        made = torch.ones(2)
        assert made.is_meta and made.dtype == torch.float16
        torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.ones(2).tolist() == [1, 1]
        torch.set_default_tensor_type(cuda.DoubleTensor)
    assert torch.ones(2).device.type == "cpu" and torch.ones(2).dtype == torch.float32


def test_a_product_may_give_and_fill_another_type() -> None:
    with recorded():
        a, b = (torch.ones(n, m, dtype=torch.float16, device="cuda") for n, m in ((2, 3), (3, 4)))
        sums = torch.zeros(2, 4, device="cuda")
        assert torch.mm(a, b, out_dtype=torch.float32).dtype == torch.float32
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            torch.addmm(sums, a, b)


def test_the_profiler_sees_the_host() -> None:
    from torch.profiler import ProfilerActivity, profile

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with recorded() as (own, _), profile(activities=both) as trace:
        torch.ones(3, device="cuda").add(1)
    assert any(event.key == "aten::add" for event in trace.key_averages())
    assert "no kernels" in own.assumed["profiler"]


def test_threads_of_a_recorded_run_see_the_device() -> None:
    seen: list[Any] = []

    def work() -> None:
        cuda.synchronize()
        seen.append((cuda.is_available(), torch.ones(2, device="cpu").pin_memory().is_pinned()))

    with recorded() as (own, _):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert own.ticks.waits == 1
    assert seen == [(True, True)]


def test_attention_backends_can_be_chosen() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with recorded() as (_, recorder):
        q = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.float16)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert backends.flash_sdp_enabled()
            assert not backends.math_sdp_enabled()
            nn.functional.scaled_dot_product_attention(q, q, q)
        assert len(ops(recorder)) == 2  # it stays one op


def test_static_outputs_hold_what_the_last_replay_computed() -> None:
    with recorded() as (_, recorder):
        a, graph = torch.ones(3, device="cuda"), cuda.CUDAGraph()
        with cuda.graph(graph):
            twice = a * 2
            loss = twice.sum()
        for values in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
            a.copy_(torch.tensor(values, device="cpu"))
            graph.replay()
            assert twice.tolist() == [2 * value for value in values]
            assert loss.item() == 2 * sum(values)
        reads = [n for n in recorder.graph.nodes if "_local_scalar_dense" in str(n.target)]
        sums = [n for n in recorder.graph.nodes if str(n.target).startswith("aten.sum")]
        assert len(sums) == 3 and reads[-1].args == (sums[-1],)  # the first is the capture's
