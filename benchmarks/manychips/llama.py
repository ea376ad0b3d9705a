"""Llama 3.1 by its dimensions on meta, over a mesh as training libraries shard it."""

from __future__ import annotations

from typing import Any

import torch
from float8 import in_float8
from torch import nn

SIZES = {
    "8b": (4096, 14336, 32, 32),
    "70b": (8192, 28672, 64, 80),
    "405b": (16384, 53248, 128, 126),
}
"""Width, width inside of the MLP, heads, layers."""


def llama(size: str, fp8: bool = False, layers: int | None = None) -> nn.Module:
    """The model with fp32 weights, which steps cast to bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inside, heads, depth = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inside,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        num_hidden_layers=layers or depth,
        max_position_embeddings=131072,
        rope_theta=5e5,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config).float().train()
    if fp8:
        in_float8(model)
    return model


def over_mesh(model: Any, mesh: Any, compiled: bool) -> None:
    """Tensor parallelism with sharded sequences on "tp", each layer compiled, FSDP2 on "dp"."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if "tp" in mesh.mesh_dim_names:
        split_rows(model, mesh["tp"])
    if compiled:
        model.model.layers = nn.ModuleList(map(torch.compile, model.model.layers))
    how: dict[str, Any] = {
        "mesh": mesh["dp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)


def split_rows(model: Any, mesh: Any) -> None:
    """Tensor parallelism; between layers each process has a part of the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows, whole = Shard(1), Replicate()
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=rows, use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    plan = {
        **{name: ColwiseParallel() for name in columns},
        "self_attn.o_proj": RowwiseParallel(output_layouts=rows),
        "mlp.down_proj": RowwiseParallel(output_layouts=rows),
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": rows},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
