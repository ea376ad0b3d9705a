"""Small models, traced once: forward and training steps, prefill and decode."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.graph.graph import OpGraph

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
TEXT = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4,
            num_hidden_layers=2)  # fmt: skip
DEEPSEEK = dict(
    vocab_size=96, num_hidden_layers=2, first_k_dense_replace=1, hidden_size=32,
    intermediate_size=48, moe_intermediate_size=16, num_attention_heads=4, num_key_value_heads=4,
    n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
    experts_implementation="grouped_mm")  # fmt: skip


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def language_model(family: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**settings)
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, head)._from_config(config, dtype=torch.bfloat16)
    return model


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    tokens = torch.randint(0, 96, (2, 7))
    if name == "gpt2":
        model = language_model("GPT2", vocab_size=96, n_positions=32, n_embd=32, n_layer=2,
                               n_head=4, bos_token_id=0, eos_token_id=0)  # fmt: skip
        return model, (), {"input_ids": tokens}
    if name == "llama":
        return language_model("Llama", **TEXT, num_key_value_heads=2), (), {"input_ids": tokens}
    if name == "deepseek":
        return language_model("DeepseekV3", **DEEPSEEK), (), {"input_ids": tokens}
    if name == "resnet":
        return example("resnet").ResNet((1, 1, 5, 1)), (torch.empty(2, 3, 64, 64),), {}
    module = example("lstm_tagger")
    return module.LSTMTagger(50, 3, 8, 16), (torch.randint(0, 50, (2, 5)),), {}


@pytest.fixture(scope="session")
def traced() -> Callable[[str, str], OpGraph]:
    """`traced("llama", "decode")`: each model is traced once per phase."""
    known: dict[tuple[str, str], OpGraph] = {}

    def graph(name: str, phase: str = "forward") -> OpGraph:
        if (name, phase) not in known:
            torch.manual_seed(0)
            model, args, kwargs = build(name)
            known[name, phase] = rt.trace(model, *args, phase=phase, **kwargs)
        return known[name, phase]

    return graph
