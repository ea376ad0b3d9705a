"""Steps that others published with their recipe, predicted without a fit.

    python benchmarks/accuracy/public.py FOLDER [--host NAME|FILE] [--cache DIR] [--points FILE.csv]

FOLDER/steps has files of rows: what,source,chip,execution,measured_ms.  `what` names a model, its
precision and its sizes in words ("HF ViT fp32 b4 A100 eager", "BERT-base encoder fp16 8x384"); the
model is built from its published configuration, on meta.  Rows of models, chips or executions that
are not in the tables here are listed as left out.

What the sources say of how they ran:
- transformers docs, perf_torch_compile.md: torch 2.0.1, default mode of torch.compile, fp32 without
  gradients, the mean of 300 calls on an image of the checkpoint's size; attention was written out.
- FasterTransformer, bert_guide.md: the encoder of transformers 2.5.1 alone, with a mask, through
  torch.jit.trace; "FP32" of A100 is TF32.  It was verified on torch 1.8, and names the script of
  its release of 2021, sample/pytorch/scripts/profile_encoder.sh.
- lambdal, deeplearning-benchmark: NVIDIA's ResNet-50 v1.5 recipe with autocast or TF32, SGD.
"""

from __future__ import annotations

import csv
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kept import kept
from points import Point, parser_of, write_points

import rooftrace as rt
from rooftrace.measured.fit.cases import errors

EXECUTIONS = {"eager": "eager", "compiled": "compiled", "graph": "efficient", "graphs": "efficient"}
_BATCH = re.compile(r"(?:b|bs|batch)=?(\d+)")
_SIZES = re.compile(r"(\d+)x(\d+)")
_LENGTH = re.compile(r"(?:s|seq|len)=?(\d+)")


@dataclass(frozen=True)
class Recipe:
    """How a source ran its models.  attention: None: as the installed transformers chooses; torch:
    the release; host: None: the typical one."""

    attention: str | None = None
    torch: str | None = None
    host: str | None = None


RECIPES = {
    "perf_torch_compile": Recipe("eager", "2.0", "torch-2.0"),
    "bert_guide": Recipe("eager", "1.8", "torchscript"),
}
"""By a part of the source's name."""


@dataclass(frozen=True)
class Row:
    """One measurement.  model: a key of MODELS, "" for none; sizes: of "8x384", or of a length."""

    what: str
    source: str
    chip: str
    execution: str
    seconds: float
    model: str
    precision: str
    batch: int
    sizes: tuple[int, ...]
    training: bool
    channels_last: bool

    @property
    def trace(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        how = "-training" * self.training + "-nhwc" * self.channels_last
        recipe = recipe_of(self.source)
        told = f"{recipe.attention or ''}{recipe.torch or ''}"
        return f"public-{self.model}-{self.precision}-b{self.batch}-{sizes}{how}-{told}"


def recipe_of(source: str) -> Recipe:
    """The recipe of a source; the plain one for others."""
    return next((recipe for part, recipe in RECIPES.items() if part in source), Recipe())


def parsed(line: Mapping[str, str]) -> Row:
    """A row of a file, by the words of `what`."""
    words = re.split(r"[\s,;()]+", line["what"].lower())
    numbers = [int(m[1]) for word in words if (m := _BATCH.fullmatch(word))]
    pairs = [(int(m[1]), int(m[2])) for word in words if (m := _SIZES.fullmatch(word))]
    lengths = [int(m[1]) for word in words if (m := _LENGTH.fullmatch(word))]
    if not numbers and pairs:  # batch x length
        numbers, pairs = [pairs[0][0]], [pairs[0][1:], *pairs[1:]]
    precision = next((word for word in words if word in PRECISIONS), "fp32")
    return Row(
        what=line["what"],
        source=line["source"],
        chip=line["chip"],
        execution=line["execution"],
        seconds=float(line["measured_ms"]) * 1e-3,
        model=next(
            (name for name, m in MODELS.items() if re.search(m.words, line["what"], re.I)), ""
        ),
        precision=precision,
        batch=numbers[0] if numbers else 1,
        sizes=pairs[0] if pairs else tuple(lengths[:1]),
        training=any(word.startswith("train") for word in words),
        channels_last=any(word in ("nhwc", "channels_last") for word in words),
    )


def read(folder: Path) -> list[Row]:
    """The rows of every file with these columns."""
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += [parsed(line) for line in csv.DictReader(file) if "measured_ms" in line]
    return rows


# -- models ----------------------------------------------------------------------------------------

PRECISIONS = {
    "fp32": ("float32", False),
    "tf32": ("float32", True),
    "fp16": ("float16", False),
    "half": ("float16", False),
    "bf16": ("bfloat16", False),
    "amp": ("float32", True),
}
"""The dtype of weights, and whether products of fp32 are in TF32."""


@dataclass(frozen=True)
class Model:
    """How a model is called in `what`, and how it is built.

    kind: the class of transformers.  config: what its configuration has, beside the defaults.
    size: of images (0: it takes tokens).  part: the module that ran, of the model.
    """

    words: str
    kind: str
    config: Mapping[str, Any]
    size: int = 224
    part: str = ""


def _vit(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * hidden, **more}


_BASE, _LARGE = _vit(768, 12, 12), _vit(1024, 24, 16)
_BEIT = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}
_SEGFORMER = {"num_labels": 150, "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768}
_SWIN_B = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}
_SWIN_S = {"embed_dim": 96, "depths": [2, 2, 18, 2], "num_heads": [3, 6, 12, 24]}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _backbone(kind: str, config: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """A backbone of transformers in place of one of timm."""

    def made() -> dict[str, Any]:
        import transformers

        return {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": getattr(transformers, f"{kind}Config")(**config),
        }

    return made


def _resnet(depths: Sequence[int], basic: bool = False) -> dict[str, Any]:
    if basic:
        return {"depths": depths, "layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}
    return {"depths": depths}


def _detr(depths: Sequence[int]) -> dict[str, Any]:
    return {"lazy": _backbone("ResNet", {"depths": depths, "out_features": _STAGES})}


_IMAGES = "ForImageClassification"
MODELS: dict[str, Model] = {
    # Detectors and segmenters first: their names hold those of backbones.
    "conditional-detr": Model(
        r"conditional.?detr", "ConditionalDetrForObjectDetection", _detr([3, 4, 6, 3]), 800
    ),
    "detr-101": Model(r"detr.*101", "DetrForObjectDetection", _detr([3, 4, 23, 3]), 800),
    "detr-50": Model(r"\bdetr", "DetrForObjectDetection", _detr([3, 4, 6, 3]), 800),
    "segformer-b0": Model(
        r"segformer.?b0", "SegformerForSemanticSegmentation", {"num_labels": 150}, 512
    ),
    "segformer-b1": Model(
        r"segformer.?b1",
        "SegformerForSemanticSegmentation",
        {**_SEGFORMER, "depths": [2, 2, 2, 2], "decoder_hidden_size": 256},
        512,
    ),
    "segformer-b5": Model(
        r"segformer.?b5",
        "SegformerForSemanticSegmentation",
        {**_SEGFORMER, "depths": [3, 6, 40, 3]},
        512,
    ),
    "deeplab-mobilenetv2": Model(
        r"deeplab.*mobilenet|mobilenet.*deeplab",
        "MobileNetV2ForSemanticSegmentation",
        {"image_size": 513, "output_stride": 8, "finegrained_output": True, "num_labels": 21},
        513,
    ),
    "vit-large": Model(r"\bvit.?l", f"ViT{_IMAGES}", {**_LARGE, "num_labels": 1000}),
    "deit-base": Model(r"\bdeit", f"DeiT{_IMAGES}", {**_BASE, "num_labels": 1000}),
    "dinov2-base": Model(r"dinov2", f"Dinov2{_IMAGES}", {**_BASE, "image_size": 518}, 224),
    "vit-base": Model(r"\bvit\b", f"ViT{_IMAGES}", {**_BASE, "num_labels": 1000}),
    "beit-base": Model(r"\bbeit", f"Beit{_IMAGES}", {**_BASE, **_BEIT, "num_labels": 21841}),
    "convnext-large": Model(
        r"convnext.?l",
        f"ConvNext{_IMAGES}",
        {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536], "num_labels": 1000},
    ),
    "convnext-base": Model(
        r"convnext.?b",
        f"ConvNext{_IMAGES}",
        {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024], "num_labels": 1000},
    ),
    "convnext-tiny": Model(r"convnext", f"ConvNext{_IMAGES}", {"num_labels": 1000}),
    "swin-base": Model(r"swin.?b", f"Swin{_IMAGES}", {**_SWIN_B, "num_labels": 1000}),
    "swin-small": Model(r"swin.?s", f"Swin{_IMAGES}", {**_SWIN_S, "num_labels": 1000}),
    "swin-tiny": Model(r"swin", f"Swin{_IMAGES}", {"num_labels": 1000}),
    "mobilenetv2": Model(r"mobilenet.?v2", f"MobileNetV2{_IMAGES}", {"num_labels": 1000}),
    **{
        f"resnet-{number}": Model(
            rf"resnet.?{number}\b",
            f"ResNet{_IMAGES}",
            {**_resnet(depths, number < 50), "num_labels": 1000},
        )
        for number, depths in {
            18: [2, 2, 2, 2],
            34: [3, 4, 6, 3],
            50: [3, 4, 6, 3],
            101: [3, 4, 23, 3],
            152: [3, 8, 36, 3],
        }.items()
    },
    "bert-large-encoder": Model(r"bert.large.*encoder", "BertModel", _LARGE, 0, "encoder"),
    "bert-encoder": Model(r"bert.*encoder", "BertModel", {}, 0, "encoder"),
    "bert-large": Model(r"bert.large", "BertForQuestionAnswering", _LARGE, 0),
    "distilbert": Model(r"distilbert", "DistilBertModel", {}, 0),
    "roberta-base": Model(r"roberta", "RobertaModel", {}, 0),
    "bert-base": Model(r"\bbert", "BertModel", {}, 0),
    "gpt2-xl": Model(
        r"gpt.?2.?xl", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 0
    ),
    "gpt2-medium": Model(
        r"gpt.?2.?m", "GPT2LMHeadModel", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, 0
    ),
    "gpt2": Model(r"gpt.?2", "GPT2LMHeadModel", {}, 0),
}
"""Published checkpoints; the first whose words are in `what` is taken."""


class _Amp:
    """Calls a model under autocast to fp16."""

    def __new__(cls, inner: Any) -> Any:
        import torch

        class Amp(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, *args: Any, **named: Any) -> Any:
                with torch.autocast("cuda", torch.float16):
                    return self.inner(*args, **named)

        return Amp()


def built(row: Row) -> tuple[Any, dict[str, Any]]:
    """The model of a row on meta, and its inputs by name."""
    import torch
    import transformers

    model = MODELS[row.model]
    config = {k: v for k, v in model.config.items() if k != "lazy"}
    config |= model.config["lazy"]() if "lazy" in model.config else {}
    made = getattr(transformers, model.kind).config_class(**config)
    attention = recipe_of(row.source).attention
    if attention:
        made._attn_implementation = attention
    with torch.device("meta"):
        whole = getattr(transformers, model.kind)(made)
    dtype = getattr(torch, PRECISIONS[row.precision][0])
    whole = whole.to(dtype).train(row.training)
    if model.size:
        sizes = row.sizes if len(row.sizes) == 2 else (model.size, model.size)
        pixels = torch.empty(row.batch, 3, *sizes, dtype=dtype, device="meta")
        if row.channels_last:
            whole = whole.to(memory_format=torch.channels_last)
            pixels = pixels.to(memory_format=torch.channels_last)
        inputs = {"pixel_values": pixels}
    elif model.part:
        length = row.sizes[0] if row.sizes else 128
        hidden = torch.empty(row.batch, length, made.hidden_size, dtype=dtype, device="meta")
        mask = torch.empty(row.batch, 1, length, length, dtype=dtype, device="meta")
        return getattr(whole, model.part), {"hidden_states": hidden, "attention_mask": mask}
    else:
        length = row.sizes[0] if row.sizes else 128
        inputs = {"input_ids": torch.ones(row.batch, length, dtype=torch.long, device="meta")}
    return (_Amp(whole) if row.precision == "amp" else whole), inputs


def _cross_entropy(output: Any) -> Any:
    import torch

    logits = output["logits"]
    target = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    flat = logits.reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, target.reshape(-1))


def traced(row: Row) -> rt.types.OpGraph:
    """The graph of a row."""
    model, inputs = built(row)
    how: dict[str, Any] = {"torch": recipe_of(row.source).torch}
    if row.training:
        how |= {"phase": "training", "loss": _cross_entropy, "optimizer": "sgd"}
    return rt.trace(model, **inputs, **{k: v for k, v in how.items() if v is not None})


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """A row with its estimate."""

    row: Row
    estimate: Any

    @property
    def host_bound(self) -> bool:
        """Whether most of the step waits for the host."""
        return bool(self.estimate.times.regime == "launch")


def predicted(
    rows: Sequence[Row], cache: Path, tell: Callable[[str], None], host: str | None = None
) -> tuple[list[Predicted], list[str]]:
    """Each row by the typical shares, and what is left out with its reason."""
    made, left = [], []
    for row in rows:
        if not row.model or row.execution not in EXECUTIONS:
            reason = "no such model here" if not row.model else f"execution {row.execution}"
            left.append(f"{row.what}: {reason}")
            continue
        try:
            chip = rt.load_chip(row.chip)
            graph = kept(cache / f"{row.trace}.json.gz", partial(traced, row))
        except Exception as error:  # whatever a library's model may raise
            left.append(f"{row.what}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        tell(row.what)
        tf32 = PRECISIONS[row.precision][1]
        execution = EXECUTIONS[row.execution]
        how = {"tf32": tf32 or None, "host": host or recipe_of(row.source).host}
        found = rt.estimate(graph, chip=chip, execution=execution, **how)
        made.append(Predicted(row, found))
    return made, left


HEAD = "| rows | n | mean | median | p90 | bias | worst |\n|---|---:|---:|---:|---:|---:|---|"


def line(name: str, chosen: Iterable[Predicted]) -> str:
    """One line of the table."""
    rows = list(chosen)
    names = [each.row.what for each in rows]
    e = errors(names, [r.estimate.t_est for r in rows], [r.row.seconds for r in rows])
    return (
        f"| {name} | {e.count} | {e.mean:.1%} | {e.median:.1%} | {e.p90:.1%} "
        f"| {e.bias:+.1%} | {e.worst_case} {e.worst:+.0%} |"
    )


def table(made: Sequence[Predicted]) -> str:
    """A line a source, and of the steps that a GPU or the host bounds."""
    lines = [HEAD]
    kinds: dict[str, list[Predicted]] = {}
    for each in made:
        kinds.setdefault(each.row.source, []).append(each)
    kinds["a GPU is the limit"] = [each for each in made if not each.host_bound]
    kinds["the host is the limit"] = [each for each in made if each.host_bound]
    kinds["all"] = list(made)
    return "\n".join([*lines, *(line(name, rows) for name, rows in kinds.items() if rows)])


def main() -> None:
    parser = parser_of(__doc__, cached=True)
    parser.add_argument("--host", help="of all rows, in place of what their sources say")
    parser.add_argument("--rows", action="store_true", help="print each row")
    given = parser.parse_args()
    rows = read(given.folder / "steps")
    if not rows:
        raise SystemExit(f"{given.folder}: no steps/*.csv in it")
    warnings.filterwarnings("ignore")
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    made, left = predicted(rows, given.cache, tell, given.host)
    print(table(made))
    if given.rows:
        for each in made:
            off = each.estimate.t_est / each.row.seconds - 1
            print(
                f"{each.row.what}: {each.estimate.t_est * 1e3:.3f} ms, measured "
                f"{each.row.seconds * 1e3:.3f}, {off:+.0%}, {each.estimate.times.regime}"
            )
    if left:
        print("\nLeft out:\n" + "\n".join(f"- {text}" for text in left))
    if given.points:
        points = [
            Point(each.row.what, each.estimate.t_est, each.row.seconds, each.row.source).of(
                each.row.source, each.estimate
            )
            for each in made
        ]
        write_points(given.points, points)


if __name__ == "__main__":
    main()
