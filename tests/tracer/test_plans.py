"""Plans of engines: the results of real processes, and what each process has and sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from rooftrace.tracer.sharding import huggingface
from tests.tracer.expert_models import DEEPSEEK, MIXTRAL, needs_plans

pytestmark = needs_plans
QWEN: dict[str, Any] = {**MIXTRAL, "model_type": "qwen3_moe", "num_key_value_heads": 2,
                        "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16}  # fmt: skip
SHARED: dict[str, Any] = {**MIXTRAL, "model_type": "qwen2_moe", "num_key_value_heads": 4,
                          "moe_intermediate_size": 32, "num_experts": 8,
                          "shared_expert_intermediate_size": 64}  # fmt: skip
OSS: dict[str, Any] = {**MIXTRAL, "model_type": "gpt_oss", "head_dim": 16, "intermediate_size": 64,
                       "layer_types": ["full_attention"] * 2}  # fmt: skip
PROCESSES = 4


def model_of(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    kind = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForCausalLM.from_config(kind).eval()


def one_process(rank: int, config: dict[str, Any], mesh: dict[str, int], folder: str) -> None:
    """Compare the logits of a spread model with those of the whole one; the error is kept."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    model = model_of(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.2 if weight.dim() > 1 else 1.0)
        assert name
    ids = torch.randint(128, (2, 5))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        huggingface.distribute(model, mesh, trains=False)
        spread = model(ids, use_cache=False).logits
    error = (whole - spread).abs().max() / whole.abs().max()
    Path(folder, f"error-{rank}").write_text(f"{error:.3e}")
    dist.destroy_process_group()


CASES = [
    (DEEPSEEK, {"tp": 4}),
    (DEEPSEEK, {"tp": 4, "ep": 2}),
    (DEEPSEEK, {"tp": 4, "ep": 4}),
    (DEEPSEEK, {"dp": 2, "tp": 2}),
    (DEEPSEEK, {"dp": 2, "tp": 2, "ep": 4}),
    (QWEN, {"tp": 4}),
    (SHARED, {"tp": 4, "ep": 2}),
    (OSS, {"tp": 4}),
    (OSS, {"tp": 4, "ep": 2}),
]


@pytest.mark.parametrize(("config", "mesh"), CASES, ids=str)
def test_real_processes_compute_what_the_whole_model_does(
    config: dict[str, Any], mesh: dict[str, int], tmp_path: Path
) -> None:
    model_of(config)  # imports, before processes are forked
    multiprocessing.start_processes(
        one_process, (config, mesh, str(tmp_path)), PROCESSES, start_method="fork"
    )
    errors = [float((tmp_path / f"error-{rank}").read_text()) for rank in range(PROCESSES)]
    assert max(errors) < 1e-5
