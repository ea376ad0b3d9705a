"""Steps of models that nothing here was fitted to, on a GPU, and what is expected of them.

    python benchmarks/steps.py measure steps.jsonl [--only WORD] [--until SECONDS]   # on the GPU
    python benchmarks/steps.py compare steps.jsonl h100-sxm [--only WORD] [--ops]

Models come from torchvision, timm, torchaudio and transformers, with random weights, and run as
their users run them: forward, or forward, backward and AdamW, eagerly, in bf16, under autocast, or
in fp32 with TF32.  The first line of the file is the machine; each other has the milliseconds of a
step on the wall (the median), of its kernels under the profiler, and microseconds and calls of each
operator: `ops` of its kernels, `host` of the thread that launches them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent / "kernels")]
Given = dict[str, torch.Tensor]
Made = tuple[nn.Module, Given]
BF16 = torch.bfloat16
ASKED = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
"""Watts and MHz, asked in the middle of the steps."""


@dataclass(frozen=True)
class Step:
    """A model with its inputs, made on a device; `precision` is bf16, autocast or tf32."""

    name: str
    phase: str
    precision: str
    made: Callable[[], Made]


def image(batch: int, side: int, name: str = "x") -> Given:
    """Random images, channels first."""
    return {name: torch.randn(batch, 3, side, side)}


def vision(name: str, batch: int, side: int = 224, **more: Any) -> Callable[[], Made]:
    """A classifier of torchvision."""

    def made() -> Made:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **more), image(batch, side)

    return made


def timm_model(name: str, batch: int, side: int = 224) -> Callable[[], Made]:
    """A classifier of timm."""

    def made() -> Made:
        import timm

        return timm.create_model(name), image(batch, side)

    return made


def hugging(kind: str, auto: str, inputs: Callable[[], Given], **sizes: Any) -> Callable[[], Made]:
    """A model of transformers, from its configuration's defaults and `sizes`."""

    def made() -> Made:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        kind_of = getattr(transformers, auto)
        return getattr(kind_of, "from_config", kind_of)(config), inputs()

    return made


def tokens(batch: int, length: int, below: int = 20000, **more: int) -> Callable[[], Given]:
    """Token ids [batch, length]; `more` names further inputs by their lengths."""
    return lambda: {
        name: torch.randint(below, (batch, many))
        for name, many in {"input_ids": length, **more}.items()
    }


def conformer() -> Made:
    """Sixteen conformer layers of torchaudio over 16 x 800 frames."""
    import torchaudio

    model = torchaudio.models.Conformer(512, 8, 2048, 16, 31)
    return model, {"input": torch.randn(16, 800, 512), "lengths": torch.full((16,), 800)}


def whisper() -> Given:
    """Thirty seconds of sound, and 128 tokens."""
    sound = torch.randn(8, 80, 3000)
    return {"input_features": sound, "decoder_input_ids": torch.randint(20000, (8, 128))}


QWEN = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
OLMOE = {"num_hidden_layers": 8}
LM, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
STEPS = [
    Step("bert-base", "training", "bf16", hugging("bert", MASKED, tokens(32, 512))),
    Step("bert-base", "training", "autocast", hugging("bert", MASKED, tokens(32, 128))),
    Step("bert-base", "forward", "tf32", hugging("bert", MASKED, tokens(64, 256))),
    Step("gpt2-medium", "training", "autocast",
         hugging("gpt2", LM, tokens(8, 1024), n_embd=1024, n_layer=24, n_head=16)),
    Step("qwen3-0.6b", "training", "bf16", hugging("qwen3", LM, tokens(4, 2048), **QWEN)),
    Step("qwen3-0.6b", "forward", "bf16", hugging("qwen3", LM, tokens(16, 1024), **QWEN)),
    Step("t5-base", "training", "bf16",
         hugging("t5", "AutoModelForSeq2SeqLM", tokens(16, 512, decoder_input_ids=128),
                 d_model=768, d_ff=3072, num_layers=12, num_heads=12, pad_token_id=0,
                 decoder_start_token_id=0)),
    Step("whisper-small", "training", "bf16",
         hugging("whisper", "WhisperForConditionalGeneration", whisper, d_model=768,
                 encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
                 decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)),
    Step("wav2vec2-base", "training", "bf16",
         hugging("wav2vec2", "AutoModel", lambda: {"input_values": torch.randn(8, 160000)})),
    Step("clip-vision", "training", "bf16",
         hugging("clip_vision_model", "CLIPVisionModel", lambda: image(64, 224, "pixel_values"))),
    Step("segformer-b0", "forward", "bf16",
         hugging("segformer", "SegformerForSemanticSegmentation",
                 lambda: image(16, 512, "pixel_values"))),
    Step("olmoe-8-layers", "training", "bf16", hugging("olmoe", LM, tokens(4, 1024), **OLMOE)),
    Step("olmoe-8-layers", "forward", "bf16", hugging("olmoe", LM, tokens(8, 1024), **OLMOE)),
    Step("gemma2-2b-10-layers", "forward", "bf16",
         hugging("gemma2", LM, tokens(4, 2048), num_hidden_layers=10)),
    Step("efficientnet-v2-s", "training", "autocast", vision("efficientnet_v2_s", 64)),
    Step("mobilenet-v3-large", "training", "autocast", vision("mobilenet_v3_large", 256)),
    Step("densenet121", "training", "autocast", vision("densenet121", 64)),
    Step("vgg16", "training", "autocast", vision("vgg16", 64)),
    Step("regnet-y-8gf", "forward", "bf16", vision("regnet_y_8gf", 64)),
    Step("convnext-base", "training", "bf16", vision("convnext_base", 64)),
    Step("swin-t", "training", "autocast", vision("swin_t", 64)),
    Step("maxvit-t", "forward", "bf16", vision("maxvit_t", 64)),
    Step("inception-v3", "forward", "tf32", vision("inception_v3", 64, 299)),
    Step("r3d-18", "training", "autocast",
         lambda: (__import__("torchvision").models.get_model("r3d_18", weights=None),
                  {"x": torch.randn(16, 3, 16, 112, 112)})),
    Step("deeplabv3-resnet50", "training", "autocast", 
         vision("deeplabv3_resnet50", 8, 512, weights_backbone=None)),
    Step("raft-large", "forward", "tf32",
         lambda: (__import__("torchvision").models.get_model("raft_large", weights=None),
                  {n: torch.randn(2, 3, 360, 512) for n in ("image1", "image2")})),
    Step("eva02-base", "training", "bf16", timm_model("eva02_base_patch14_224", 64)),
    Step("mixer-b16", "training", "bf16", timm_model("mixer_b16_224", 64)),
    Step("nfnet-f0", "forward", "bf16", timm_model("nfnet_f0", 64, 192)),
    Step("coatnet-0", "training", "autocast", timm_model("coatnet_0_rw_224", 32)),
    Step("resnext50", "training", "autocast", timm_model("resnext50_32x4d", 64)),
    Step("conformer", "training", "bf16", conformer),
    Step("mobilenet-v3-large", "forward", "bf16", vision("mobilenet_v3_large", 1)),
    Step("bert-base", "forward", "bf16", hugging("bert", MASKED, tokens(1, 128))),
]  # fmt: skip


def sums(found: Any) -> torch.Tensor:
    """The sum of every float tensor in an output."""
    if isinstance(found, torch.Tensor):
        return found.float().sum() if found.is_floating_point() else torch.zeros(())
    if hasattr(found, "values"):
        found = list(found.values())
    parts = [sums(one) for one in found if isinstance(one, (torch.Tensor, list, tuple, dict))]
    return sum(parts[1:], parts[0])


class Whole(nn.Module):
    """A model that takes its inputs by name, and in training gives a loss.

    A language model's loss is its own, with its ids for labels; of all others the output's first
    tensor is summed.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], step: Step) -> None:
        super().__init__()
        self.model, self.names, self.step = model, names, step

    def forward(self, *given: torch.Tensor) -> Any:
        named = dict(zip(self.names, given, strict=True))
        ids = named.get("decoder_input_ids", named.get("input_ids"))
        if ids is not None and self.step.phase == "training":
            named["labels"] = ids
            named.pop("decoder_input_ids", None)
        mixed = torch.autocast("cuda", BF16) if self.step.precision == "autocast" else nullcontext()
        with mixed:
            found = self.model(**named) if "x" not in named else self.model(*given)
        if self.step.phase != "training":
            return found
        if "labels" in named:
            return found.loss
        while not isinstance(found, torch.Tensor):
            found = next(iter(found.values() if hasattr(found, "values") else found))
        return found.float().mean()


def whole(step: Step, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model of a step and what it takes, on a device."""
    torch.manual_seed(0)
    with torch.device(device):
        model, given = step.made()
    kind = BF16 if step.precision == "bf16" else torch.float32
    model = model.to(kind).train(step.phase == "training")
    if hasattr(model, "config"):
        model.config.use_cache = False
    tensors = tuple(t.to(kind) if t.is_floating_point() else t for t in given.values())
    return Whole(model, tuple(given), step), tensors


def runs(step: Step, device: str) -> tuple[Callable[..., None], tuple[torch.Tensor, ...]]:
    """What runs a step once, as its user writes it, and what that takes."""
    model, given = whole(step, device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights)

    def train(*given: torch.Tensor) -> None:
        model(*given).backward()
        optimizer.step()
        optimizer.zero_grad()

    def infer(*given: torch.Tensor) -> None:
        with torch.inference_mode():
            model(*given)

    return train if step.phase == "training" else infer, given


def measured(step: Step) -> dict[str, Any]:
    """Milliseconds of a step: on the wall, of its kernels, and of each operator's kernels."""
    torch.set_float32_matmul_precision("high")
    step_once, given = runs(step, "cuda")

    def run() -> None:
        step_once(*given)

    for _ in range(4):
        run()
    torch.cuda.synchronize()
    walls: list[float] = []
    began = time.perf_counter()
    told: subprocess.Popen[str] | None = None
    while len(walls) < 5 or time.perf_counter() - began < 1.5:
        if told is None and time.perf_counter() - began > 0.7:
            told = subprocess.Popen(ASKED, stdout=subprocess.PIPE, text=True)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) * 1e3)
    power = None if told is None else told.communicate()[0].strip()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        run()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    host: Counter[str] = Counter()
    often: Counter[str] = Counter()
    kernels = 0
    for one in profiled.events():
        if one.device_type == torch.autograd.DeviceType.CPU:
            host[one.name] += one.self_cpu_time_total
            often[one.name] += 1
            own = one.self_device_time_total
            if own and one.name.startswith(("aten::", "torchvision::", "cudnn", "_")):
                spent[one.name] += own
                calls[one.name] += 1
        elif one.device_type == torch.autograd.DeviceType.CUDA and not one.is_user_annotation:
            kernels += one.time_range.elapsed_us()
    ops = {name: [round(us, 1), calls[name]] for name, us in spent.most_common(40)}
    return {
        "ms": round(statistics.median(walls), 4),
        "device_ms": round(kernels / 1e3, 4),
        "repeats": len(walls),
        "power": power,
        "ops": ops,
        "host": {name: [round(us, 1), often[name]] for name, us in host.most_common(50)},
    }


def measure(path: Path, only: str, until: float) -> None:
    """Write a line for each step."""
    from measure import machine

    began = time.perf_counter()
    with path.open("a") as file:
        file.write(f"{json.dumps(machine())}\n")
    for step in STEPS:
        if only not in step.name or time.perf_counter() - began > until:
            continue
        row = {"name": step.name, "phase": step.phase, "precision": step.precision}
        start = time.perf_counter()
        try:
            row |= measured(step)
        except Exception as error:  # a step that fails costs no other
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        torch.cuda.empty_cache()
        with path.open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        print(f"{time.perf_counter() - start:5.1f} s {row}"[:200], flush=True)


def expected(step: Step, chip: str) -> Any:
    """The estimate of a step, as rooftrace gives it to its user."""
    import rooftrace as rt

    try:
        once, given = runs(step, "meta")
    except (NotImplementedError, RuntimeError):  # a constructor that reads its weights
        once, given = runs(step, "cpu")
    graph = rt.trace(once, *given)
    return rt.estimate(graph, chip=chip, execution="eager", tf32=True)


def of_operators(estimate: Any) -> Counter[str]:
    """Microseconds of kernels by the operator that launches them."""
    found: Counter[str] = Counter()
    for row in estimate.rows:
        seconds = row.timing.t_device
        found[row.name.partition(" ")[0].replace("aten.", "")] += seconds * 1e6
    return found


def compare(path: Path, chip: str, only: str, ops: bool) -> None:
    """Print measured and expected milliseconds; with `ops` where they differ most."""
    rows = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if "ms" in row:
            rows[row["name"], row["phase"], row["precision"]] = row
    print("| step | measured ms | expected | error | kernels ms | expected | error |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    errors = []
    for step in STEPS:
        row = rows.get((step.name, step.phase, step.precision))
        if row is None or only not in step.name:
            continue
        label = f"{step.name}, {step.phase}, {step.precision}"
        try:
            estimate = expected(step, chip)
        except Exception as error:  # the page shows each
            print(f"| {label} | {row['ms']:.2f} | {type(error).__name__}: {str(error)[:100]} |")
            continue
        told = of_operators(estimate)
        kernels = sum(told.values()) / 1e3
        off = [estimate.t_est * 1e3 / row["ms"] - 1, kernels / row["device_ms"] - 1]
        errors.append(off)
        print(
            f"| {label} | {row['ms']:.2f} | {estimate.t_est * 1e3:.2f} | {off[0]:+.0%} "
            f"| {row['device_ms']:.2f} | {kernels:.2f} | {off[1]:+.0%} |",
            flush=True,
        )
        if ops:
            of_row = {name.removeprefix("aten::"): us for name, (us, _) in row["ops"].items()}
            names = sorted(set(told) | set(of_row), key=lambda n: -abs(told[n] - of_row.get(n, 0)))
            for name in names[:8]:
                print(f"    {name:40} {told[name]:10.0f} us, measured {of_row.get(name, 0):10.0f}")
    for what, numbers in zip(("step", "kernels"), zip(*errors, strict=True), strict=False):
        mean = statistics.mean(abs(number) for number in numbers)
        print(
            f"{what}: {len(numbers)}, mean error {mean:.1%}, bias {statistics.mean(numbers):+.1%}"
        )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("measure", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("chip", nargs="?", default="h100-sxm")
    parser.add_argument("--only", default="")
    parser.add_argument("--until", type=float, default=1e9)
    parser.add_argument("--ops", action="store_true")
    options = parser.parse_args()
    if options.verb == "measure":
        measure(options.file, options.only, options.until)
    else:
        compare(options.file, options.chip, options.only, options.ops)
