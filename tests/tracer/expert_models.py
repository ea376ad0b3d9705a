"""Small models with experts, spread over processes by the plans of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.tracer.sharding import huggingface

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
MIXTRAL: dict[str, Any] = {
    **_SIZES,
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
}
DEEPSEEK: dict[str, Any] = {
    **_SIZES,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}


def _has_plans() -> bool:
    try:
        return importlib.util.find_spec("transformers.distributed.expert_parallel") is not None
    except ModuleNotFoundError:
        return False


needs_plans = pytest.mark.skipif(
    not _has_plans(), reason="plans of experts that exchange rows came with transformers 5.20"
)


def spread_graph(
    config: Mapping[str, Any], mesh: Mapping[str, int], phase: str, batch: int, seq: int, **how: Any
) -> Any:
    """The graph of one process of a mesh; {} is the plain model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    over = rt.tools.fake_mesh(huggingface.processes(mesh)) if mesh else nullcontext()
    with over, torch.device("meta"):
        settings = dict(config)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings)
        )
        trains = phase == "training"
        huggingface.distribute(model.train(trains), mesh, trains=trains)
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return rt.trace(model, ids, phase=phase, **how)
