"""Steps of language models on two A100 that NeuSight's authors measured, predicted.

    python benchmarks/accuracy/neusight.py FOLDER [--points FILE.csv] [--details]

FOLDER/llm has neusight_a100.csv and the models' configs.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rooftrace as rt

CHIPS = {"NVIDIA_A100_80GB_PCIe": "a100-pcie-80", "NVIDIA_A100-PCIE-40GB": "a100-pcie-40"}


@dataclass(frozen=True)
class Row:
    """One measurement; seconds of forward and of backward."""

    chip: str
    model: str
    phase: str
    seq: int
    batch: int
    compiled: bool
    forward: float
    backward: float

    @property
    def name(self) -> str:
        ran = " compiled" if self.compiled else ""
        return f"{self.model} {self.phase} {self.batch}x{self.seq}{ran}"

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                CHIPS[line["gpu"]],
                line["model"],
                {"train": "training", "inf": "forward"}[line["mode"]],
                int(line["seq"]),
                int(line["batch"]),
                line["fused"] == "True",
                float(line["fw_latency"]) * 1e-3,
                float(line["bwall_latency"]) * 1e-3,
            )
            for line in csv.DictReader(file)
        ]


# -- attention as transformers 4.38 wrote it out, by family ----------------------------------------


def _scores(query: Any, key: Any) -> Any:
    return query @ key.transpose(-1, -2)


def _finished(module: Any, scores: Any, value: Any, dropout: float) -> tuple[Any, None]:
    import torch

    shares = torch.nn.functional.softmax(scores, dim=-1)
    shares = torch.nn.functional.dropout(shares, p=dropout, training=module.training)
    return (shares @ value).transpose(1, 2).contiguous(), None


def _gpt2(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any):
    """The mask is of booleans, and chooses."""
    import torch

    scores = _scores(query, key) / query.shape[-1] ** 0.5
    scores = torch.where(mask[:1], scores, torch.finfo(scores.dtype).min)
    return _finished(module, scores, value, dropout)


def _bert(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any):
    """The mask is added, even where it hides nothing."""
    scores = _scores(query, key) / query.shape[-1] ** 0.5
    scores = scores + query.new_zeros(query.shape[0], 1, 1, key.shape[-2])
    return _finished(module, scores, value, dropout)


def _opt(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any):
    """Heads are copied apart; the mask is added, and minus infinity taken away."""
    import torch

    query, key, value = (each.contiguous() for each in (query, key, value))
    scores = _scores(query, key) + mask
    lowest = torch.finfo(scores.dtype).min
    scores = torch.max(scores, torch.full((), lowest, device=scores.device))
    return _finished(module, scores, value, dropout)


def _switch(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float = 0.0,
    position_bias: Any = None,
    **_: Any,
):
    """One sum of positions and mask, made once, is added."""
    scores = _scores(query, key)
    scores += position_bias if position_bias is not None else mask
    return _finished(module, scores, value, dropout)


FORMS = {"gpt2": _gpt2, "bert": _bert, "opt": _opt, "switch_transformers": _switch}


def _written_out() -> None:
    """Register the forms with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    def choosing(*given: Any, **named: Any) -> Any:
        return sdpa_mask(*given, **{**named, "allow_is_causal_skip": False})

    for family, form in FORMS.items():
        AttentionInterface.register(f"written_out_{family}", form)
        mask = choosing if family == "gpt2" else eager_mask
        AttentionMaskInterface.register(f"written_out_{family}", mask)


def built(config: Path, training: bool) -> Any:
    """The model on meta."""
    import torch
    import transformers

    told = json.loads(config.read_text(encoding="utf-8"))
    family = told["model_type"]
    told = {k: v for k, v in told.items() if k not in ("torch_dtype", "transformers_version")}
    read = transformers.AutoConfig.for_model(**told)
    read.use_cache = False
    kinds = {
        "bert": transformers.BertForPreTraining
        if training
        else transformers.BertForSequenceClassification,
        "gpt2": transformers.GPT2LMHeadModel,
        "opt": transformers.OPTForCausalLM,
        "switch_transformers": transformers.SwitchTransformersForConditionalGeneration,
    }
    read._attn_implementation = f"written_out_{family}"
    with torch.device("meta"):
        model = kinds[family](read)
    return model.train() if training else model.eval()


def training_step(model: Any, ids: Any) -> None:
    """Forward, loss and backward; gradients are added to those of the step before."""
    import torch

    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    output = model(input_ids=ids, **more)
    logits = output["prediction_logits" if "prediction_logits" in output else "logits"]
    torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1)).backward()


def traced(row: Row, folder: Path) -> rt.OpGraph:
    import torch

    model = built(folder / "configs" / f"{row.model}.json", row.phase == "training")
    ids = torch.ones(row.batch, row.seq, dtype=torch.long, device="meta")
    if row.phase == "training":
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight)
        return rt.trace(training_step, model, ids)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return rt.trace(model, input_ids=ids, **more)
