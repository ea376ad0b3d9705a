"""docs/accuracy.md: what rooftrace's times were compared with, and how far off they are.

    python benchmarks/accuracy/page.py FOLDER [--every N] [--refit] > docs/accuracy.md
    make accuracy DATA=FOLDER [REFIT=1]

FOLDER holds measurements of others (gemm-*.csv.gz, attention-*.csv.gz, timm-*.csv, kernels/, llm/,
traces/); our own stand in benchmarks/measurements/.  What is not there is left out, and said.
--refit also makes the table of intervals anew (see coverage.py), from the points of all scripts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage
from points import Point, read_points

HERE = Path(__file__).parent
MEASUREMENTS = HERE.parent / "measurements"
DOCS = HERE.parents[1] / "docs"
DRAWN = 800
"""Points in a figure."""

HEAD = """# How accurate are the times?

FLOPs, bytes and memory are counts, and are held to other counters in the tests: see
[the counter graveyard](counter-graveyard.md), `make flops` and `make inductor`. Times are
predictions. This page compares them with measurements; `make accuracy DATA=folder` writes it.

Errors are (predicted - measured) / measured; mean, median and p90 are of their size, bias is with
the sign. *No fit* takes the constants that come along, and each section says which of its rows made
some of them; a fit never sees the rows that it is tested on. Without knobs a time is a ceiling from
the datasheet, and real steps take 1.3 to 2.5 times as long on a GPU."""


@dataclass(frozen=True)
class Part:
    """A section made by a script beside this one, from files in the folder."""

    title: str
    script: str
    pattern: str
    figure: str
    text: str


PARTS = (
    Part(
        "Matrix products",
        "gemm.py",
        "gemm-*.csv.gz",
        "products.png",
        """\
Latencies of linear layers of vLLM, TensorRT-LLM and SGLang, from the aiconfigurator performance
database (Apache-2.0). *No fit* takes what comes along for the chip and the library, for a product
alone. The numbers of A100, of H100 and H200 together, of B200 and of L40S were made from files of
these GPUs, a number of them for both engines where there are two; those of narrow formats, four to
ten a format and library, from the rows of that library. So these rows test the form of the
formulas, and less the constants. Files of other engines, releases and GPUs test both. One factor,
and two numbers (sustained arithmetic and bandwidth), are fitted to 200 rows and predict the others,
five seeds. Rows in fp8 and fp4 hold the kernels that round the activations before. vLLM's rows of
block scales were launched without a CUDA graph since 0.24: small ones take what its host needs.
They stand apart (*host*), predicted as the least latency of their kernel; no interval has them.""",
    ),
    Part(
        "Attention kernels",
        "attention.py",
        "attention-*.csv.gz",
        "attention.png",
        """\
Latencies of attention in vLLM, from the same database, by library: prompts, and one query on a
cache. Steps take attention from the same formula wherever a library's kernel was called for. Seven
numbers come along for each library and generation, and are from these files: of FlashAttention 3
from H100 and H200 together (from H100 alone H200 is as close), of FlashAttention 2 from A100 and
from L40S, of flashinfer from L40S; a launch of GPUs with HBM and one of others, the kernel that
stores entries, and the cache of L40S, too. One factor, and two numbers (compute and memory), are
fitted to one half of the rows of a library and judged on the other, both ways. FlashAttention 4,
which serves heads of 512 on Hopper, is not modelled.""",
    ),
    Part(
        "Latent attention",
        "mla.py",
        "kernels/mla*.csv.gz",
        "mla.png",
        """\
MLA of DeepSeek's sizes, from the same database: prompts and decode of SGLang (FlashAttention 3, on
H100) and TensorRT-LLM (FlashMLA and its kernel of prompts on H200, trtllm-gen on B200). Numbers are
from these files, one set for each kernel and both formats of the cache.""",
    ),
    Part(
        "Layers of routed experts",
        "moe.py",
        "kernels/moe*.csv.gz",
        "experts.png",
        """\
Layers of experts on one process under CUDA graphs, by engine, kernel and format, from the same
database: one to 16,384 tokens, 8 to 512 experts, tokens spread evenly or by a power law, some of
the experts or parts of each. *No fit* takes the numbers of the kernel by format and generation
(`EXPERT_KERNELS`), which are from these rows: those of vLLM from H100 and H200 together, those of
SGLang from H200 and B200 apart, as those of TensorRT-LLM. Fitted to H100 alone they miss H200 by 10
to 13 % where both together miss it by 9 to 13 %; those of CUTLASS from H200 miss B200 by 12 %;
those of Triton do not carry over between engines (20 %) or generations (30 %). For one factor, and
for two numbers, models are left out. What a row holds, and how tokens were drawn, is from the
source of its collector; versions whose draws or kernels changed are told apart by their number.
Rows where TensorRT-LLM took three to eight times as long as its neighbours (1 % of them), for want
of a tuned kernel, are not explained.""",
    ),
    Part(
        "Steps of image models",
        "timm_steps.py",
        "timm-infer-*.csv",
        "images.png",
        """\
Published inference steps of about 1,000 models of timm (Apache-2.0), AMP fp16. Two numbers a file
are fitted to forty models of families that are kept apart: what the GPU sustains of its arithmetic
and of its bandwidth; `as they come` is without that fit. Shares between classes of kernels are
those of `typical-eager` and `typical-compiled`, which come from a study of such files, these GPUs
among them, RTX 5090 and PRO 6000 too; what RTX 3090, RTX 4090 and PRO 6000 Max-Q sustain (their
chip files) was fitted to such files. The host is `desktop`. Attention is that of the section above;
what its kernel for masks of numbers takes was chosen with the rows of tiny_vit in sight, a family
that is kept apart. To how many columns cuDNN pads groups of other widths than 4 to 32 and multiples
of 64 (128) was read off regnets, which are judged. Everything else is a fact of how PyTorch, cuDNN
and its compiler run an op, and was studied on the families that are kept apart; of the others a
sample (every sixth to tenth row) was looked at after changes, and told where to look: what
upsampling takes for a value was read off efficientformerv2, how much faster than the memory the
last cache is (2) was chosen with the compiled sample in sight, and what a layer norm takes for each
row (edgenext tells most) and convolutions of 1 with permuted images (coatnet, convnext, rdnet) with
the eager samples in sight.

Names say too little about what ran, so parameters are compared: a row with those of the
re-parameterised model is traced so, and a row with those of neither form is left out and listed
below the table. What timm has changed since is undone for norms of vision transformers and for the
attention of VOLO.""",
    ),
    Part(
        "Training steps of image models",
        "timm_steps.py",
        "timm-train-*.csv",
        "training.png",
        """\
The same for forward, loss, backward and SGD of torch 1.12, whose attention was written out. The
shares of the backward of depthwise and grouped convolutions were chosen with these rows in sight,
as was that gradients of the others copy every operand where channels come first; that batch norm
passes twice over long rows, and that each gradient of a convolution reads the incoming one, was
found on the families that are kept apart. Two numbers are fitted as above.""",
    ),
    Part(
        "Steps of language models",
        "neusight.py",
        "llm/neusight_a100.csv",
        "language.png",
        """\
BERT, GPT-2, GPT-3, OPT and Switch in fp32 on two A100, by NeuSight's authors (MIT): inference,
eager and compiled, and training without an optimizer. The models are of today's transformers, with
the attention of 4.38.1, which they ran, written out. One model is left out of each fit, which sees
the eager rows of the same GPU, and is predicted. Before each step they emptied the cache of the
allocator, so the forward of training waits for the driver at every block that it saves: it took up
to twice as long as its kernels, and no fit here knows of that. The backward, timed apart, stands
below. Which attention ran, and that the cache was emptied, is from their program. How fast products
in fp32 are on these chips (0.78 of the vector peak) was chosen with such rows in sight, and their
tiles (at least 128 x 64) with those of ViT and BEiT below, so the rows without a fit test less than
the others do.""",
    ),
    Part(
        "Training of language models",
        "foundry.py",
        "llm/llm_foundry_*.csv",
        "training-language.png",
        """\
Throughput of MPT with 125 M to 70 B parameters and sequences of 512 to 65,536 in llm-foundry
(Apache-2.0), with FSDP on 8 to 512 A100 and H100. One model is left out of each fit, which sees the
rows on 8 GPUs, and is predicted. The clock that an A100 holds with its matrix engines at full rate
(80 %) was chosen with the rows of A100 80 GB in sight; those of A100 40 GB test it little. That of
H100 (77 %) is between what products alone hold (81 %; 80 % on H200), what steps of Llama 3.1 at
500 W say (torchtitan; 78 %), and what suits the rows here best (69 %), which were in sight.
Attention was a Triton kernel there; how much slower than FlashAttention 2 it is was taken from the
paper of the latter, and on H100 it has the matrix instructions of sm_80 alone. Composer's defaults
are added: two metrics of each microbatch (cross entropies in fp32), and gathering and reducing in
backward, which its prefetching leaves exposed; their times are those of the DGX system. That this
exchange is not hidden was found on the 8-GPU rows, and then read in Composer. Rows of 128 and more
H100 ran otherwise, as their script says: FlashAttention 2 for four models, around which each layer
takes out rows of padding, gradients reduced in fp32, gathering ahead. That should hide all of the
exchange; the rows say that it costs what it takes (7 B to 70 B: 0.7 to 1.1 times), so it counts in
full. Rows that fill the memory (30 B and 13 B on 8 GPUs) take longer.""",
    ),
    Part(
        "Published steps",
        "public.py",
        "steps/*.csv",
        "public.png",
        """\
Steps that others published with their recipe, without a fit: image models of transformers on an
A100, eager and compiled (transformers docs, Apache-2.0), the encoder of BERT under TorchScript
(FasterTransformer, Apache-2.0), training of ResNet-50 on six GPUs (lambdal deeplearning-benchmark).
Rows that the host bounds stand apart. Python per module call (8 us, of the typical host) and a
launch of PyTorch 2.0's compiled code (15 us, host `torch-2.0`) were read off ResNet-50 at batch 1
and 4 of the first source; what ops through cuDNN and cuBLAS take of the host is from traces
(TraceLens, MIT). BERT was not looked at for either. The least tiles of products in fp32 suit ViT
and BEiT best, and that Inductor before 2.1 keeps channels first was found on DeepLab. That linear
layers of older releases add their bias in a kernel of its own was read in pull requests after BERT
was found too fast; it makes ConvNeXt and VOLO in training (RTX 3090, torch 1.12) better too. That
Inductor 2.0 leaves hand-written attention as it is was read in its wheel after ViT, and that
gradients of convolutions copy every operand on GeForce on AMP rows and timm's training. Segformer
takes about 10 ms more at any batch than is predicted, as if each of the 4,096 channels of its
depthwise convolutions, channels last, were a kernel of 2 to 3 us: no source says so, and nothing
here stands for it.""",
    ),
    Part(
        "Kernels of other people's traces",
        "traces.py",
        "traces/*.json.gz",
        "traces.png",
        """\
Sums of the kernels of a step in traces of torch.profiler that come with TraceLens (MIT), H100 and
MI300X: ViT, BERT and Qwen, on torch, cuBLAS and hipBLASLt of their time, and steps of inference
engines, priced from the published config of their model and the requests that the engine names. The
third column says what was fitted to the kernels of which other trace. The duration of a kernel in a
trace of an NVIDIA GPU does not hold the pause before the next one, of about 1 us; the predicted one
does. Products of few rows take 1.4 to 2 times as long on H100 here as in a loop over one product
(the first section). The numbers of products on MI300X are from these traces; they meet 26 batched
products of another library there (AITER's tuned tables, MIT) within 8 %. A convolution on MI300X
(MIOpen) takes five kernels, of which one is predicted. All traces were looked at.""",
    ),
)


def printed(script: str, arguments: Sequence[str]) -> str:
    """What a script prints."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed with {done.returncode}")
    return done.stdout.strip()


@dataclass(frozen=True)
class Made:
    """The table that a script prints, its predictions, and a figure of them."""

    text: str
    points: list[Point]
    figure: str


def made(script: str, arguments: Sequence[str], title: str, figure: Path, kept: Path) -> Made:
    """Run a script; kept: a folder for its points."""
    path = kept / f"{figure.stem}.csv"
    text = printed(script, [*arguments, "--points", str(path)])
    points = read_points(path)
    draw(points, title, figure)
    name = f"{figure.parent.name}/{figure.name}"
    return Made(text, points, f"![{title}: predicted against measured]({name})")


def draw(points: Sequence[Point], title: str, figure: Path) -> None:
    """A parity plot of at most `DRAWN` of the points, evenly taken."""
    from rooftrace.reporting.figures import style
    from rooftrace.reporting.figures.parity import ParityPoint, parity_figure

    step = -(-len(points) // DRAWN)
    shown = [
        ParityPoint(one.label, one.predicted, one.measured, one.group, one.measured)
        for one in points[::step]
    ]
    some = f"every {step}th of {len(points):,} predictions" if step > 1 else "every prediction"
    style.save(lambda: parity_figure(shown, title, f"{some}, without a fit to these rows"), figure)


def part_made(part: Part, given: Asked) -> Made | str:
    """The part of what the folder has for a script, or that there is nothing for it."""
    if given.folder is None or not any(given.folder.glob(part.pattern)):
        return f"Not measured for this page: the folder has no `{part.pattern}`."
    arguments = [str(given.folder)]
    if part.script == "timm_steps.py":
        arguments += ["--every", str(given.every), "--files", part.pattern]
    if given.cache and "--cache" in (HERE / part.script).read_text(encoding="utf-8"):
        arguments += ["--cache", str(given.cache)]
    return made(part.script, arguments, part.title, given.figures / part.figure, given.points)


def told(one: Made | str, by: coverage.LeftOut) -> str:
    """A part as text: its table, that of its intervals, its figure."""
    if isinstance(one, str):
        return one
    sourced = [point for point in one.points if point.source]
    intervals = [by.table(sourced, lambda point: point.group)] if sourced else []
    return "\n\n".join([one.text, *intervals, one.figure])


@dataclass(frozen=True)
class Asked:
    """What a page is made of: measurements, every n-th of the steps, folders for what it makes."""

    folder: Path | None
    every: int
    figures: Path
    points: Path
    cache: Path | None
    refit: bool


OWN = """\
## This project's own runs

Files of `rooftrace measure` in [measurements](../benchmarks/measurements/README.md), each with the
chip that `rooftrace measure --chip-only` made on the same machine just before. The models of a run,
sorted by name, are dealt into two halves; a fit sees the steps of one half, the other is predicted,
both ways: without a fit (the measured chip alone), with two numbers fitted (what it sustains of its
arithmetic and of its bandwidth), and with as many as `rooftrace calibrate` chose."""


COVERAGE = """\
## Do intervals hold what they say?

Nominal 90 % intervals of predictions without a fit, by what was measured. They depend on where a
step is: its phase, the generation of the chip, the kind of its kernels, their precision, how it is
run, and what limits it. A cell of these takes its mean and its width from the sources that measured
it, drawn towards the cells around it; steps of a source are alike, so n of them count as n / (n +
5) of a source. Cells that nobody measured take both from there, and are wider by how far cells are
apart. Which field is dropped first is where sources are least apart: the generation. What the host
takes has errors of its own: as far as hosts lie apart, and at least as far as steps of one run do
that wait for theirs. These make no cell, and where the kernels of a step were timed alone, their
time makes it. An interval takes of each as much as the step may wait for it.
*Inside*: of the steps, with nothing of their source (one file, or one publication) in the interval.
*Effective*: how many sources of equal size would say as much of a group. Rows of a source err
together, so with one or two of them *inside* is nearly all or nothing, and only the mean over many
groups tells whether 90 % are 90 %. *Source seen*: with it, as for more rows of the same file.
high/low: the upper end over the lower one, the median of the steps. The tables of the sections
above have the same columns. How strongly a cell is drawn is from these sources (coverage.py prints
it), and many constants behind the predictions were read off the same rows: expect a few percent
fewer inside on rows of new sources."""


MEMORY = """\
## Memory

Published peaks beside `estimate.reserved` ([what is in it](memory.md)). Operators: what
`torch.cuda.max_memory_allocated` said in Liger-Kernel's benchmarks (BSD-2, benchmark/data), its
baselines of PyTorch and transformers, in eager mode, on six GPUs. `tensors alone` is the mean
error of the peak of the tensors, without blocks and workspaces. All rows were
in sight, and four facts were found with them: the temporary of the backward of softmax and the
buffers of long sorts, then read in PyTorch's sources; copies of gradients that are not dense, and
buffers of group norms, which the numbers bear out. One number was fitted: the convolutions of
`multi_token_attention` are tiny, and cuDNN takes 0.97 MiB for them beside copies, which is the
difference in its two largest rows; other rows show what it is worth. Workspaces that earlier calls
had left in the measured process are added (rotary embeddings, forward alone of gated MLPs).
Left out are operators of which the published numbers contain other tensors (embedding), that are
0.1 MiB (softmax, relu_squared), or whose peak depends on routing (fused_moe).

Fine-tuning: `active` of torchtune's table of optimisations (BSD-3), Llama 3.2 of 3 B on an A100;
the decoder is rebuilt. A compiled step is taken as compiled as a whole, where the recipe compiles
each layer, and chunks of the loss: that compiler makes the softmax again in backward instead of
keeping it, which is not modelled. The tables of PEFT are left out: their maximum is what was
reserved over a whole run, with rows of different lengths and generation in between."""


def sections(given: Asked, tell: Callable[[str], None]) -> Iterator[str]:
    """The parts of docs/accuracy.md; figures go into their folder."""
    parts: list[tuple[Part, Made | str]] = []
    for part in PARTS if given.folder else ():
        tell(part.title)
        parts.append((part, part_made(part, given)))
    tell("own runs")
    own = made("own.py", [str(MEASUREMENTS)], "Own runs", given.figures / "own.png", given.points)
    points = coverage.sourced(given.points)
    by = coverage.LeftOut(points)
    if given.refit:
        coverage.write(points, coverage.SHIPPED)
    yield HEAD
    if given.folder and given.every > 1:
        yield f"Of the steps of image models this page has every {given.every}th row."
    for part, one in parts:
        yield f"## {part.title}\n\n{part.text}\n\n{told(one, by)}"
    yield f"{OWN}\n\n{told(own, by)}"
    yield f"{COVERAGE}\n\n{by.table(points, coverage.group_of)}"
    tell("memory")
    yield f"{MEMORY}\n\n{printed('memory.py', [])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="measurements of others")
    parser.add_argument("--every", type=int, default=1, help="of the steps every n-th row only")
    parser.add_argument("--figures", type=Path, default=DOCS / "accuracy", help="where they go")
    parser.add_argument("--points", type=Path, help="a folder where all predictions are kept")
    parser.add_argument("--cache", type=Path, help="a folder of traces")
    parser.add_argument("--refit", action="store_true", help="write the table of intervals")
    given = parser.parse_args()
    if given.folder is not None and not given.folder.is_dir():
        raise SystemExit(f"{given.folder}: there is no such folder")
    given.figures.mkdir(parents=True, exist_ok=True)
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    with tempfile.TemporaryDirectory() as scratch:
        points = given.points or Path(scratch)
        points.mkdir(parents=True, exist_ok=True)
        asked = Asked(given.folder, given.every, given.figures, points, given.cache, given.refit)
        for number, text in enumerate(sections(asked, tell)):
            print(f"\n{text}" if number else text, flush=True)


if __name__ == "__main__":
    main()
