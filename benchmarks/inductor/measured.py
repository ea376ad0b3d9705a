"""What Inductor really fused on this machine: `python benchmarks/inductor/measured.py [MODEL ...]`.

Each model runs through torch.compile on the CPU (or a GPU), forward and training.  A line has the
share of the step's time that belongs to ops of our graph; how far the kernels that we detect agree
with those that Inductor wrote (F1 of pairs of ops in one kernel, adjusted Rand index); bytes
through HBM by the measured kernels, by the detected ones, and with a kernel for each op; and the
two factors of the execution model that follow, of activations and of temporaries.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.measured.bench import models, models as suite

NAMES = ("resnet-50", "vit-l", "gpt2", "llama-1b", "mamba", "unet", "lstm", "recommender")
Case = tuple[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]]


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per model and phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--scale", default="small", choices=models.SCALES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--differences", type=int, default=0, help="print so many of each")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    print(
        f"{'model':12} {'phase':9} {'calls':>5} {'written':>7} {'ours':>6} {'F1':>5} {'ARI':>5} "
        f"{'MB measured':>11} {'detected':>9} {'unfused':>9} {'activations':>11} "
        f"{'temporaries':>11}"
    )
    for name in options.model or NAMES:
        for phase, build in cases(name, options.scale, options.device):
            torch._dynamo.reset()
            module, inputs = build()
            run = rt.measure(module, phase=phase, compiled=True, budget_s=1.0, name=name, **inputs)
            graph = rt.trace(module, phase=phase, **inputs)
            _print(name, phase, rt.tools.fused(run.models[0], graph), options.differences)


def _print(name: str, phase: str, step: rt.types.FusedStep, differences: int) -> None:
    score = step.agreement
    megabytes = [made.bytes.total / 1e6 for made in (step.measured, step.detected, step.unfused)]
    print(
        f"{name:12} {phase:9} {len(step.kernels):5} "
        f"{sum(kernel.generated for kernel in step.kernels):7} {step.coverage:6.1%} "
        f"{score.f1:5.2f} {score.rand:5.2f} {megabytes[0]:11.1f} {megabytes[1]:9.1f} "
        f"{megabytes[2]:9.1f} {step.activation_fusion:11.2f} {step.elementwise:11.2f}",
        flush=True,
    )
    for difference in step.differences[:differences]:
        print(f"    {difference}")


def cases(name: str, scale: str, device: str) -> Iterator[Case]:
    """Of each phase of a model: its name, and what makes the module and its inputs."""
    if name == "mamba":
        yield "forward", lambda: _mamba(scale, device)
        yield "training", lambda: _mamba(scale, device)
        return
    model = suite.named(name)
    phases: dict[str, Any] = {}
    for phase, sizes in model.steps[scale]:
        phases.setdefault(phase, sizes)
    for phase, sizes in phases.items():
        if phase != "decode":

            def build(sizes: Any = sizes) -> tuple[nn.Module, dict[str, Tensor]]:
                dtype = model.dtype(device)
                make = models.Make.on(device, dtype, model.channels_last)
                inputs = model.inputs(model.settings[scale], sizes, make)
                return model.made(scale, device, dtype), dict(inputs)

            yield phase, build


def _mamba(scale: str, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import MambaConfig, MambaForCausalLM

    width, layers, length = {"full": (768, 24, 256), "small": (256, 4, 32), "tiny": (64, 1, 8)}[
        scale
    ]
    config = MambaConfig(
        hidden_size=width, num_hidden_layers=layers, vocab_size=4096, use_cache=False
    )
    with torch.device(device):
        module = MambaForCausalLM(config).eval()
        return module, {"input_ids": torch.randint(0, 4096, (4, length))}


if __name__ == "__main__":
    main()
