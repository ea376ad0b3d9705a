"""Models of different kinds, small, with real weights; and what torch says that a step takes.

Dropout is off: on a CPU it runs other ops than on a GPU, which is what a trace shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, dict[str, Tensor]]
VOCABULARY = 512


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(5, VOCABULARY, (batch, length))


def hugging_face(kind: str, head: str, inputs: Mapping[str, Tensor], **settings: Any) -> Case:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}{head}")(config), dict(inputs)


def gpt2() -> Case:
    settings = dict(n_positions=256, n_embd=128, n_layer=4, n_head=4, bos_token_id=0,
                    eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    return hugging_face("GPT2", "LMHeadModel", {"input_ids": ids(4, 128)},
                        vocab_size=VOCABULARY, use_cache=False, **settings)  # fmt: skip


DECODER = dict(vocab_size=VOCABULARY, hidden_size=128, num_attention_heads=8,
               num_key_value_heads=2, use_cache=False)  # fmt: skip


def llama() -> Case:
    """Grouped-query attention, and one tensor for the embedding and the head."""
    return hugging_face("Llama", "ForCausalLM", {"input_ids": ids(4, 128)}, **DECODER,
                        num_hidden_layers=6, intermediate_size=344,
                        tie_word_embeddings=True)  # fmt: skip


def llama_checkpointed() -> Case:
    model, inputs = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, inputs


def mixtral() -> Case:
    return hugging_face("Mixtral", "ForCausalLM", {"input_ids": ids(4, 128)}, **DECODER,
                        num_hidden_layers=3, intermediate_size=256, num_local_experts=8,
                        num_experts_per_tok=2)  # fmt: skip


def bert() -> Case:
    return hugging_face("Bert", "ForMaskedLM", {"input_ids": ids(4, 128)},
                        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4,
                        num_attention_heads=4, intermediate_size=512, hidden_dropout_prob=0,
                        attention_probs_dropout_prob=0)  # fmt: skip


def t5() -> Case:
    """With attention written out: a CPU takes the fused one apart where its bias is trained."""
    return hugging_face("T5", "ForConditionalGeneration",
                        {"input_ids": ids(4, 128), "decoder_input_ids": ids(4, 64)},
                        vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=3,
                        num_heads=4, use_cache=False, decoder_start_token_id=0,
                        dropout_rate=0, attn_implementation="eager")  # fmt: skip


def vit() -> Case:
    return hugging_face("ViT", "ForImageClassification",
                        {"pixel_values": torch.randn(8, 3, 64, 64)}, hidden_size=128,
                        num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
                        image_size=64, patch_size=8, num_labels=10)  # fmt: skip


def resnet50() -> Case:
    return hugging_face("ResNet", "ForImageClassification",
                        {"pixel_values": torch.randn(4, 3, 64, 64)}, num_labels=10,
                        embedding_size=32, hidden_sizes=[64, 128, 256, 512],
                        depths=[2, 3, 3, 2])  # fmt: skip


def convnext() -> Case:
    return hugging_face("ConvNext", "ForImageClassification",
                        {"pixel_values": torch.randn(8, 3, 64, 64)}, num_labels=10,
                        hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 4, 2])  # fmt: skip


def mamba() -> Case:
    """A scan over time in plain torch, as transformers runs it without its kernels."""
    return hugging_face("Mamba", "ForCausalLM", {"input_ids": ids(2, 24)},
                        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2,
                        state_size=8, use_cache=False)  # fmt: skip


class Recurrent(nn.Module):
    """A cell that is called once for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, 128), nn.GRUCell(128, 192)
        self.head = nn.Linear(192, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        states, x = [torch.zeros(tokens.shape[0], 192, device=tokens.device)], self.embed(tokens)
        for t in range(tokens.shape[1]):
            states.append(self.cell(x[:, t], states[-1]))
        out: Tensor = self.head(torch.stack(states[1:], 1))
        return out


class UNet(nn.Module):
    """Convolutions down and up again, with connections across."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self.block(3, width), self.block(width, 2 * width), self.block(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([self.block(6 * width, 2 * width), self.block(3 * width, width)])
        self.last = nn.Conv2d(width, 3, 1)

    @staticmethod
    def block(inner: int, outer: int) -> nn.Module:
        first, second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        return nn.Sequential(
            first, nn.GroupNorm(8, outer), nn.SiLU(), second, nn.GroupNorm(8, outer), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        out: Tensor = self.last(x)
        return out


class Rms(nn.Module):
    """RMS norm op by op, as a CPU runs it: CUDA's one kernel keeps less for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Gated(nn.Module):
    """Attention by einsum and gates, the same weights in every layer; the head is the embedding."""

    def __init__(self, width: int = 128, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, width), nn.Linear(width, 3 * width)
        self.gate, self.norm = nn.Linear(width, width), Rms(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def layer(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = torch.einsum("bik,bjk->bij", q, k).softmax(-1)
        y, gate = torch.einsum("bij,bjk->bik", scores, v), torch.sigmoid(self.gate(x))
        return gate * y + (1 - gate) * x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(4):
            if self.checkpointed and self.training:
                x = checkpoint(self.layer, x, use_reentrant=False)
            else:
                x = self.layer(x)
        out: Tensor = self.head(x)
        return out


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama checkpointed": llama_checkpointed,
    "mixtral": mixtral,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet50": resnet50,
    "convnext": convnext,
    "mamba": mamba,
    "recurrent": lambda: (Recurrent(), {"tokens": ids(8, 48)}),
    "unet": lambda: (UNet(), {"x": torch.randn(4, 3, 64, 64)}),
    "gated": lambda: (Gated(), {"tokens": ids(4, 128)}),
    "gated checkpointed": lambda: (Gated(checkpointed=True), {"tokens": ids(4, 128)}),
}


def built(name: str, phase: str) -> Case:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.train(phase == "training"), inputs


def loss_of(output: Any) -> Tensor:
    """A loss with a gradient of its own for every element."""
    result = output if isinstance(output, Tensor) else output.logits
    return (result * result).mean()


# -- what torch says -------------------------------------------------------------------------------


def warm_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the states that it has after its first step."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def step_of(model: nn.Module, inputs: Mapping[str, Tensor], phase: str) -> Callable[[], Any]:
    """One forward, or one training step, as a user writes it."""

    def forward() -> Any:
        with torch.no_grad():
            return model(**inputs)

    optimizer = warm_optimizer(model) if phase == "training" else None

    def training() -> Any:
        assert optimizer is not None
        output = model(**inputs)
        loss_of(output).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return output

    training.optimizer = optimizer  # type: ignore[attr-defined]
    return training if phase == "training" else forward


def tracked_peak(model: nn.Module, inputs: Mapping[str, Tensor], phase: str) -> int:
    """Peak bytes as torch's memory tracker counts them, op by op."""
    step = step_of(model, inputs, phase)
    optimizer = getattr(step, "optimizer", None)
    tracker = MemTracker()
    tracker.track_external(model, *([optimizer] if optimizer else []), *inputs.values())
    with tracker:
        step()
    return max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


def allocated_peak(model: nn.Module, inputs: Mapping[str, Tensor], phase: str) -> int:
    """Peak bytes that the CPU's allocator gave out in a real step, and what was there before.

    On one thread: convolutions on the CPU take a workspace for each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _allocated_peak(model, inputs, phase)
    finally:
        torch.set_num_threads(threads)


def _allocated_peak(model: nn.Module, inputs: Mapping[str, Tensor], phase: str) -> int:
    step = step_of(model, inputs, phase)
    optimizer = getattr(step, "optimizer", None)
    states = [s for of in optimizer.state.values() for s in of.values()] if optimizer else []
    there = [*model.parameters(), *model.buffers(), *inputs.values(), *states]
    before = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}
    step()
    model.zero_grad(set_to_none=True)
    with profile(profile_memory=True) as profiler:
        kept = step()
    events: Any = profiler.kineto_results
    sizes = [(e.start_ns(), e.nbytes()) for e in events.events() if e.name() == "[memory]"]
    now = most = 0
    for _, size in sorted(sizes, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    del kept
    return sum(before.values()) + most
