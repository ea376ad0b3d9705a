"""Scripts of Lightning, accelerate and transformers on a GPU that is not there, and for real."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.conftest import forget_accelerate, mostly_heavy
from tests.tracer.script_oracle import (
    DENSE,
    all_flops,
    held,
    matrix_flops,
    ours,
    really,
    trained,
)

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

LIGHTNING = """
import sys
import torch
import pytorch_lightning as pl
from torch import nn

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

data = torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randint(0, 10, (48,)))
fit = pl.Trainer(
    max_epochs=2, accelerator="gpu" if sys.argv[1] == "cuda" else "cpu", devices=1,
    precision="bf16-mixed", logger=False, enable_checkpointing=False, gradient_clip_val=1.0,
    num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False)
fit.fit(Net(), torch.utils.data.DataLoader(data, batch_size=16),
        torch.utils.data.DataLoader(data, batch_size=32))
"""

ACCELERATE = """
import sys
import torch
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4,
                          cpu=sys.argv[1] == "cpu")
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                      nn.Linear(8, 10))
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(0, 10, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
model, opt, loader, plan = accelerator.prepare(model, opt, loader, plan)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            plan.step()
            opt.zero_grad()
    accelerator.print(epoch, loss.item())
"""

TRAINER = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 100, (24,))
        return {"input_ids": ids, "labels": ids}

config = GPT2Config(vocab_size=100, n_layer=1, n_embd=32, n_head=4, n_positions=32,
                    attn_implementation="eager", use_cache=False)
options = TrainingArguments(
    sys.argv[3], per_device_train_batch_size=4, max_steps=3, logging_steps=1, bf16=True,
    report_to=[], save_strategy="no", use_cpu=sys.argv[1] == "cpu", disable_tqdm=True,
    optim="adamw_torch", gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2,
    gradient_checkpointing=sys.argv[2] == "checkpointed")
evaluated = torch.utils.data.Subset(Texts(), range(16))
Trainer(GPT2LMHeadModel(config), options, train_dataset=Texts(), eval_dataset=evaluated).train()
"""

GENERATED = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config).bfloat16().to(sys.argv[1]).eval()
ids = torch.randint(0, 100, (2, 7)).to(sys.argv[1])
made = model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation=sys.argv[2],
                      attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0,
                      disable_compile=True)
print(made.shape, made[0, -1].item())
"""


@pytest.fixture(autouse=True)
def libraries_of_this_test_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What they replace in the process as they are imported, and keep for all of it."""
    monkeypatch.setattr(torch, "compile", torch.compile)
    with mock.patch.dict(os.environ):
        yield
    forget_accelerate()


TRAINING: dict[str, tuple[str, tuple[str, ...], int, str]] = {
    "lightning": (LIGHTNING, (), 6, "pytorch_lightning"),
    "accelerate": (ACCELERATE, (), 6, "accelerate"),
    "trainer": (TRAINER, ("plain",), 3, "accelerate"),
    "trainer-checkpointed": (TRAINER, ("checkpointed",), 3, "accelerate"),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", mostly_heavy(TRAINING, ("lightning", "accelerate", "trainer-checkpointed"))
)
def test_a_library_trains_as_it_does_for_real(case: str, tmp_path: Path) -> None:
    text, words, steps, library = TRAINING[case]
    pytest.importorskip(library)
    path = written(tmp_path, text)
    words = (*words, str(tmp_path / "out"))
    real, cost = really(path, *words), ours(path, *words)
    counts = (*DENSE, "recompute") if "checkpointed" in words else DENSE
    assert real.trained == trained(cost) == steps
    assert all_flops(cost, counts) == real.flops > 0
    assert cost.steady is not None
    assert matrix_flops(cost.steady, counts) == min(real.steps())
    assert held(cost.steady, "optimizer") == sum(real.states.values())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_makes_its_tokens_as_it_does_for_real(cache: str, tmp_path: Path) -> None:
    path = written(tmp_path, GENERATED)
    real, cost = really(path, cache), ours(path, cache)
    assert all_flops(cost) == real.flops > 0
    assert [row.kind for row in cost.rows] == ["inference"] * len(cost.rows)
    assert sum(row.turns for row in cost.rows) == 4
