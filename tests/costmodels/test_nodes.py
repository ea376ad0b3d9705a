"""The nodes of a step: their bytes add up, and are those of the tensors that a call has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt

EXECUTIONS = ("naive", "eager", "efficient", "serving", "seed-efficient")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.unused = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nodes_add_up_to_the_step(phase: str, execution: str) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    step = rt.estimate(Net(), tokens, chip="h200-sxm", phase=phase, execution=execution)
    table = step.by_node()
    assert table.bytes == step.bytes_hbm and table.flops == step.flops
    assert sum(node.calls for node in table.nodes) == step.kernels
    assert sum(node.seconds for node in table.nodes) == pytest.approx(step.times.t_serial)
    for node in table.nodes:
        assert node.weights + node.inputs + node.outputs == node.bytes
        assert min(node.weights, node.inputs, node.outputs) >= 0


def test_a_product_reads_its_weights_and_input_and_writes_its_result() -> None:
    x, layer = torch.randn(32, 128), nn.Linear(128, 256, bias=False)
    (node,) = rt.estimate(layer, x, chip="h200-sxm", execution="eager").by_node().nodes
    assert node.weights == 4 * layer.weight.numel()
    assert node.inputs == 4 * x.numel() and node.outputs == 4 * layer(x).numel()
    assert node.flops == 2 * 32 * 128 * 256
    assert node.intensity == node.flops / (node.weights + node.inputs + node.outputs)


def test_equal_layers_are_one_node(tmp_path: Path) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    table = rt.estimate(Net(), tokens, chip="h200-sxm", execution="efficient").by_node()
    products = [node for node in table.nodes if node.module == "blocks.*" and node.flops > 5000]
    assert sum(node.calls for node in products) == 4 and len(products) < 4
    assert sum(node.weights for node in products) == 4 * 4 * (64 * 64 + 64)


def test_what_is_stored_is_more_than_what_is_read() -> None:
    """Rows of a table that are not looked up, and layers that are not called, lie there too."""
    tokens = torch.arange(16).view(2, 8)
    table = rt.estimate(Net(), tokens, chip="h200-sxm", execution="eager").by_node()
    touched = 4 * (1000 * 64 + 4 * (64 * 64 + 64))
    read = 4 * (16 * 64 + 4 * (64 * 64 + 64))  # sixteen rows are looked up
    assert sum(node.weights for node in table.nodes) == read
    assert table.storage["weights"] >= touched
    assert table.weights_unread == table.storage["weights"] - read


@pytest.mark.slow
def test_a_cache_is_stored_and_is_an_input() -> None:
    pytest.importorskip("transformers")
    graphs = rt.tools.priced_graphs("gpt2", phases=["decode"], batch=2, kv=100)
    step = rt.estimate(graphs["decode"], chip="h200-sxm", execution="serving")
    table = step.by_node()
    cache = 12 * 2 * 2 * 100 * 768 * 4  # layers, keys and values, sequences, positions, numbers
    assert table.storage["kv"] == cache
    attention = [node for node in table.nodes if "attention" in node.name]
    assert sum(node.inputs for node in attention) >= cache
    assert all(node.weights == 0 for node in attention)


def test_as_a_frame_and_as_a_dict() -> None:
    step = rt.estimate(nn.Linear(8, 8), torch.randn(4, 8), chip="h200-sxm")
    table = step.by_node()
    frame = table.to_frame()
    assert int(frame["bytes"].sum()) == step.bytes_hbm
    assert json.loads(json.dumps(table.to_dict()))["bytes"] == step.bytes_hbm
    assert "addmm" in repr(table)
    assert "stored at least" in str(table)
