"""Memory of a process of FSDP2, beside the tracker of torch, which runs it on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.estimates import Estimate
from tests.conftest import in_turn

BATCH, SEQ = 3, 192


class Convolutions(nn.Module):
    """Stages of convolutions, each at half of the resolution of the one before."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [24 << n for n in range(5)]
        self.stem = nn.Conv2d(3, sizes[0], 7, stride=4, padding=3)
        self.stages = nn.ModuleList(map(self._stage, sizes, sizes[1:]))
        self.head = nn.Linear(sizes[-1], 1000)

    @staticmethod
    def _stage(before: int, after: int) -> nn.Module:
        first = nn.Conv2d(before, after, 3, stride=2, padding=1)
        second = nn.Conv2d(after, after, 3, padding=1)
        norms = nn.BatchNorm2d(after), nn.GroupNorm(8, after)
        return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def language(kind: str, head: str, path: str, **settings: Any) -> tuple[nn.Module, str]:
    """A model whose attention is written as products: that of a GPU is another than a CPU's."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=3000, attn_implementation="eager", **settings
    )
    return getattr(transformers, f"{kind}{head}")(config), path


WIDE = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 3}
MODELS: dict[str, Callable[[], tuple[nn.Module, str]]] = {
    "convolutions": lambda: (Convolutions(), "stages"),
    "llama": lambda: language(
        "Llama", "ForCausalLM", "model.layers", num_key_value_heads=2, intermediate_size=999, **WIDE
    ),
    "gpt2": lambda: language(
        *("GPT2", "LMHeadModel", "transformer.h"),
        **{"n_embd": 320, "n_head": 5, "n_layer": 2, "tie_word_embeddings": False},
    ),
    "bert": lambda: language(
        *("Bert", "ForMaskedLM", "bert.encoder.layer"), tie_word_embeddings=False, **WIDE
    ),
    "neox": lambda: language(
        "GPTNeoX", "ForCausalLM", "gpt_neox.layers", intermediate_size=1024, **WIDE
    ),
    "qwen3": lambda: language(
        *("Qwen3", "ForCausalLM", "model.layers"), num_key_value_heads=3, head_dim=32, **WIDE
    ),
}
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}


def spread(model: str, mesh: Any, policy: str) -> nn.Module:
    net, path = MODELS[model]()
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for layer in net.train().get_submodule(path):  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **POLICIES[policy])
    return fully_shard(net, mesh=mesh, **POLICIES[policy])


def input_of(model: str, device: str = "cpu") -> Tensor:
    if model == "convolutions":
        return torch.zeros(BATCH, 3, 160, 160, device=device)
    return torch.zeros(BATCH, SEQ, dtype=torch.long, device=device)


def step(net: nn.Module, x: Tensor) -> None:
    if x.is_floating_point():
        loss = F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.long, device=x.device))
    else:
        loss = net(input_ids=x, labels=x).loss
    loss.backward()


def tracked(model: str, policy: str) -> int:
    """The peak of the second forward and backward in bytes, by torch's tracker."""
    with rt.tools.fake_mesh({"dp": 4}) as mesh, FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, x = spread(model, mesh, policy), input_of(model)
        tracker = FSDPMemTracker(net)
        tracker.track_inputs((x,))
        with tracker:
            step(net, x)
            tracker.reset_mod_stats()
            net.zero_grad()
            step(net, x)
        return max(devices["Total"] for devices in tracker.get_tracker_snapshot("peak").values())


@cache
def estimated(model: str, policy: str) -> Estimate:
    with rt.tools.fake_mesh({"dp": 4}) as mesh:
        with torch.device("meta"):
            net = spread(model, mesh, policy)
        graph = rt.trace(step, net, input_of(model, "meta"))
    return rt.estimate(graph, execution="eager")


@pytest.mark.parametrize(("model", "policy"), in_turn(MODELS, POLICIES))
def test_the_peak_is_that_of_torchs_tracker(model: str, policy: str) -> None:
    assert estimated(model, policy).memory.peak == pytest.approx(tracked(model, policy), rel=5e-3)


def test_memory_says_what_is_gathered() -> None:
    kept, plain = estimated("llama", "kept").memory, estimated("llama", "plain").memory
    assert kept.gathered > plain.gathered > 0
    assert kept.peak - plain.peak == pytest.approx(kept.gathered - plain.gathered, rel=0.3)
