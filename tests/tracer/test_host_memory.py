"""Copies between the memories of device and host, and tensors that lie in that of the host."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.graph.file import load_graphs, save_graphs
from rooftrace.hardware import load_chip
from rooftrace.hardware.chip import COPIED

H100 = load_chip("h100-sxm")
ROWS, WIDTH = 512, 256


class Layers(nn.Module):
    """Perceptrons whose saved tensors may go to the host."""

    def __init__(self, away: bool | None = None) -> None:
        super().__init__()
        self.away = away
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.away is None:
            return self.run(x)
        with torch.autograd.graph.save_on_cpu(pin_memory=self.away):
            return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def bytes_of(graph: rt.types.OpGraph, name: str) -> int:
    """Bytes that ops of this name copy."""
    ops = [op for op in graph.expand().ops if op.name == name]
    return sum(graph.expand().values[op.outputs[0]].nbytes for op in ops)


@pytest.mark.parametrize("pinned", [True, False])
def test_tensors_that_autograd_saves_on_the_host_are_copied_twice(pinned: bool) -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.nbytes)
        return tensor

    x = torch.randn(ROWS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Layers()(x).sum().backward()
    graphs = [rt.trace(Layers(away), x, phase="training") for away in (None, pinned)]
    here, away = graphs
    assert bytes_of(away, "rooftrace.to_host") == sum(packed)
    assert bytes_of(away, "rooftrace.from_host") == sum(packed)
    assert bytes_of(here, "rooftrace.to_host") == 0
    before, after = (rt.estimate(graph, H100) for graph in graphs)
    saved = sum(packed) - sum(p.nbytes for p in Layers().parameters() if p.dim() == 2)
    assert before.memory.saved == pytest.approx(saved, rel=0.1)
    assert after.memory.saved < 0.05 * saved
    frame = after.to_frame()
    copies = frame[frame.name.isin(["copy to the host", "copy from the host"])]
    assert copies.t_net.sum() == pytest.approx(2 * sum(packed) / (64e9 * COPIED))
    assert after.flops == before.flops


class Back(nn.Module):
    """A product whose result goes to the host and comes back in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        kept = made.to("cpu", torch.bfloat16) if self.way == "narrow" else made.cpu()
        match self.way:
            case "to":
                back = kept.to(x.device, non_blocking=True)
            case "like":
                back = kept.to(x)
            case "cuda":
                back = kept.cuda()
            case "narrow":
                back = kept.to(device=x.device, dtype=torch.float32)
            case _:
                back = torch.empty_like(x)
                back.copy_(kept)
        return self.last(back)


@pytest.mark.parametrize("way", ["to", "like", "cuda", "narrow", "copy"])
def test_a_tensor_comes_back_from_the_host_however_that_is_written(way: str) -> None:
    graph = rt.trace(Back(way), torch.randn(ROWS, WIDTH))
    moved = [(op.name, op.kind) for op in graph.ops if "_host" in op.name]
    assert moved == [("rooftrace.to_host", "kernel"), ("rooftrace.from_host", "kernel")]
    assert bytes_of(graph, "rooftrace.from_host") == ROWS * WIDTH * 4
    width = 2 if way == "narrow" else 4  # converted on the host
    assert bytes_of(graph, "rooftrace.to_host") == ROWS * WIDTH * width
    assert sum(op.kind == "sync" for op in graph.ops) == 1
    frame = rt.estimate(graph, H100).to_frame()
    copies = frame[frame.name.isin(["copy to the host", "copy from the host"])]
    assert copies.t_net.sum() == pytest.approx(2 * ROWS * WIDTH * 4 / (64e9 * COPIED))


@pytest.mark.parametrize("name", ["cpu", "to"])
def test_what_the_code_computes_afterwards_is_counted_on_any_device(name: str) -> None:
    """Code that runs on a CPU names it as its device: its work is no less."""

    class There(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x, weight = (t.cpu() if name == "cpu" else t.to("cpu") for t in (x, self.lin.weight))
            return torch.relu(nn.functional.linear(x, weight))

    graph = rt.trace(There(), torch.randn(ROWS, WIDTH))
    assert rt.estimate(graph, H100).flops_matrix == 2 * ROWS * WIDTH**2
    assert not any(a.kind == "unrecorded" for a in graph.assumptions)


def test_what_goes_to_the_host_and_stays_takes_no_memory(tmp_path: Path) -> None:
    class Out(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).cpu()

    graph = rt.trace(Out(), torch.randn(ROWS, WIDTH))
    step = rt.estimate(graph, H100)
    assert graph.values[graph.outputs[0]].host
    assert step.memory.peak == 2 * ROWS * WIDTH * 4
    assert step.t_est > ROWS * WIDTH * 4 / 64e9
    path = save_graphs({"forward": graph}, tmp_path / "step.graph.json")
    assert load_graphs(path)["forward"].values == graph.values


def test_copies_follow_the_link_of_the_chip() -> None:
    """PCIe 4.0 has half of the bandwidth of PCIe 5.0; the memory of a CPU is the host's."""
    assert load_chip("a100-sxm-80").host_link == H100.host_link / 2
    assert replace(H100, kind="cpu").host_link == float("inf")
