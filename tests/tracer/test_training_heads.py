"""A head of a Hugging Face model trains on the labels that its class takes, by its config alone.

The right values come from one real step of the same small model with random weights, on labels made
by hand as the documentation of transformers says: which losses ran, and the FLOPs of its matrix
products and convolutions, counted by torch.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.tracer.api import trace_target
from rooftrace.tracer.inputs.labels import labels_of
from rooftrace.tracer.request import Request
from rooftrace.tracer.targets.target import load_target

transformers = pytest.importorskip("transformers")

BATCH, SEQ = 3, 8
WIDTHS = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2)
STILL = dict(hidden_dropout=0.0, attention_dropout=0.0, hidden_dropout_prob=0.0, layerdrop=0.0)
TEXT = dict(WIDTHS, vocab_size=64)
BERT = dict(TEXT, model_type="bert", max_position_embeddings=32)
LLAMA = dict(TEXT, model_type="llama", pad_token_id=0)
VIT = dict(WIDTHS, model_type="vit", image_size=32, patch_size=8)
SOUND = dict(
    **WIDTHS,
    **STILL,
    model_type="wav2vec2",
    vocab_size=40,
    num_conv_pos_embedding_groups=4,
    num_conv_pos_embeddings=8,
    conv_dim=[8, 8],
    conv_kernel=[10, 8],
    conv_stride=[40, 32],
    num_feat_extract_layers=2,
    mask_time_prob=0.0,
    classifier_proj_size=16,
    tdnn_dim=[16, 16, 24],
    tdnn_kernel=[5, 3, 1],
    tdnn_dilation=[1, 2, 1],
    xvector_output_dim=12,
    ctc_zero_infinity=True,
)
SEGMENTER = dict(
    model_type="segformer",
    image_size=64,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
    decoder_hidden_size=16,
    drop_path_rate=0.0,
)
DETECTOR = dict(
    WIDTHS, model_type="yolos", image_size=[32, 32], patch_size=8, num_detection_tokens=12
)
SERIES = dict(
    model_type="patchtst",
    d_model=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    ffn_dim=24,
    context_length=32,
    prediction_length=6,
    num_input_channels=3,
)
BEIT = dict(WIDTHS, model_type="beit", image_size=32, patch_size=8, vocab_size=24)
BART = dict(
    model_type="bart",
    vocab_size=64,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_position_embeddings=32,
)
WAVE = 160_000 - 160_000 % 1920  # samples of ten seconds
FRAMES = ((WAVE - 10) // 40 + 1 - 8) // 32 + 1


def classes(count: int) -> dict[str, Any]:
    """The classes of a config file, as transformers writes them."""
    return {
        "id2label": {str(i): f"LABEL_{i}" for i in range(count)},
        "label2id": {f"LABEL_{i}": i for i in range(count)},
    }


def ids(*shape: int, below: int = 64) -> Tensor:
    return torch.randint(below, shape)


class Head(NamedTuple):
    """A class with a config, the arguments of a real step, and the losses that run in it."""

    config: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]]
    labels: Callable[[], dict[str, Any]]
    losses: Mapping[str, int]


def text() -> dict[str, Any]:
    return {"input_ids": ids(BATCH, SEQ)}


def image(side: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(BATCH, 3, side, side)}


def sound() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, WAVE)}


def series() -> dict[str, Any]:
    return {
        "past_values": torch.randn(BATCH, 32, 3),
        "past_observed_mask": torch.ones(BATCH, 32, 3),
    }


def several(count: int, fields: int) -> list[dict[str, Tensor]]:
    """What is to be found in each image: so many boxes, of so many classes."""
    return [
        {"class_labels": ids(count, below=fields), "boxes": 0.2 + 0.5 * torch.rand(count, 4)}
        for _ in range(BATCH)
    ]


NLL = "nll_loss_forward"
BCE = "binary_cross_entropy_with_logits"
HEADS: dict[str, Head] = {
    "BertForSequenceClassification": Head(
        BERT, text, lambda: {"labels": ids(BATCH, below=2)}, {NLL: 1}
    ),
    "BertForSequenceClassification, several classes at once": Head(
        {**BERT, **classes(5), "problem_type": "multi_label_classification"},
        text,
        lambda: {"labels": torch.rand(BATCH, 5)},
        {BCE: 1},
    ),
    "BertForSequenceClassification, one number": Head(
        {**BERT, **classes(1)}, text, lambda: {"labels": torch.rand(BATCH)}, {"mse_loss": 1}
    ),
    "BertForSequenceClassification, three numbers": Head(
        {**BERT, **classes(3), "problem_type": "regression"},
        text,
        lambda: {"labels": torch.rand(BATCH, 3)},
        {"mse_loss": 1},
    ),
    "LlamaForSequenceClassification": Head(
        LLAMA, text, lambda: {"labels": ids(BATCH, below=2)}, {NLL: 1}
    ),
    "BertForTokenClassification": Head(
        {**BERT, **classes(5)}, text, lambda: {"labels": ids(BATCH, SEQ, below=5)}, {NLL: 1}
    ),
    "BertForMultipleChoice": Head(
        BERT,
        lambda: {"input_ids": ids(BATCH, 4, SEQ)},
        lambda: {"labels": ids(BATCH, below=4)},
        {NLL: 1},
    ),
    "BertForNextSentencePrediction": Head(
        BERT, text, lambda: {"labels": ids(BATCH, below=2)}, {NLL: 1}
    ),
    "BertForPreTraining": Head(
        BERT,
        text,
        lambda: {"labels": ids(BATCH, SEQ), "next_sentence_label": ids(BATCH, below=2)},
        {NLL: 2},
    ),
    "BertForQuestionAnswering": Head(
        BERT,
        text,
        lambda: {
            "start_positions": ids(BATCH, below=SEQ),
            "end_positions": ids(BATCH, below=SEQ),
        },
        {NLL: 2},
    ),
    "BartForSequenceClassification": Head(
        BART,
        lambda: {"input_ids": torch.tensor([[5, 6, 2, 2, 7, 8, 9, 2]] * BATCH)},
        lambda: {"labels": ids(BATCH, below=3)},
        {NLL: 1},
    ),
    "BrosForTokenClassification": Head(
        dict(TEXT, model_type="bros", hidden_size=64),
        lambda: {**text(), "bbox": torch.rand(BATCH, SEQ, 4)},
        lambda: {"labels": ids(BATCH, SEQ, below=2)},
        {NLL: 1},
    ),
    "LukeForEntityPairClassification": Head(
        dict(TEXT, model_type="luke", entity_vocab_size=20, entity_emb_size=16),
        lambda: {
            **text(),
            "entity_ids": ids(BATCH, 2, below=20),
            "entity_position_ids": ids(BATCH, 2, 30, below=8),
        },
        lambda: {"labels": ids(BATCH, below=2)},
        {NLL: 1},
    ),
    "AlbertForPreTraining": Head(
        dict(TEXT, model_type="albert", embedding_size=16),
        text,
        lambda: {"labels": ids(BATCH, SEQ), "sentence_order_label": ids(BATCH, below=2)},
        {NLL: 2},
    ),
    "ViTForImageClassification": Head(
        {**VIT, **classes(7)}, image, lambda: {"labels": ids(BATCH, below=7)}, {NLL: 1}
    ),
    "ViTForImageClassification, several classes at once": Head(
        {**VIT, **classes(7), "problem_type": "multi_label_classification"},
        image,
        lambda: {"labels": torch.rand(BATCH, 7)},
        {BCE: 1},
    ),
    "ViTForMaskedImageModeling": Head(
        {**VIT, "encoder_stride": 8},
        image,
        lambda: {"bool_masked_pos": torch.rand(BATCH, 16) > 0.5},
        {},  # a mean of absolute differences, weighed by the mask
    ),
    "BeitForMaskedImageModeling": Head(
        {**BEIT, "use_mask_token": True},
        image,
        lambda: {
            "bool_masked_pos": torch.ones(BATCH, 16, dtype=torch.bool),
            "labels": ids(BATCH * 16, below=24),
        },
        {NLL: 1},
    ),
    "Wav2Vec2ForCTC": Head(
        SOUND, sound, lambda: {"labels": 1 + ids(BATCH, 30, below=39)}, {"ctc": 1}
    ),
    "Wav2Vec2ForSequenceClassification": Head(
        SOUND, sound, lambda: {"labels": ids(BATCH, below=2)}, {NLL: 1}
    ),
    "Wav2Vec2ForAudioFrameClassification": Head(
        {**SOUND, **classes(3)},
        sound,
        lambda: {"labels": torch.nn.functional.one_hot(ids(BATCH, FRAMES, below=3))},
        {NLL: 1},
    ),
    "Wav2Vec2ForPreTraining": Head(
        {
            **SOUND,
            "mask_time_prob": 0.05,
            "codevector_dim": 16,
            "proj_codevector_dim": 16,
            "num_negatives": 5,
        },
        sound,
        lambda: {
            "mask_time_indices": torch.ones(BATCH, FRAMES, dtype=torch.bool),
            "sampled_negative_indices": ids(BATCH, FRAMES, 5, below=FRAMES),
        },
        {NLL: 1},
    ),
    "Wav2Vec2ForXVector": Head(SOUND, sound, lambda: {"labels": ids(BATCH, below=2)}, {NLL: 1}),
    "SegformerForSemanticSegmentation": Head(
        {**SEGMENTER, **classes(6)},
        lambda: image(64),
        lambda: {"labels": ids(BATCH, 64, 64, below=6)},
        {"nll_loss2d_forward": 1},
    ),
    "YolosForObjectDetection": Head(
        {**DETECTOR, **classes(5)},
        image,
        lambda: {"labels": several(7, 5)},
        {"nll_loss2d_forward": 1},
    ),
    "PatchTSTForPrediction": Head(
        SERIES, series, lambda: {"future_values": torch.randn(BATCH, 6, 3)}, {"mse_loss": 1}
    ),
    "PatchTSTForClassification": Head(
        {**SERIES, "num_targets": 4, "use_cls_token": True},
        series,
        lambda: {"target_values": ids(BATCH, below=4)},
        {NLL: 1},
    ),
}
LOSSES = {
    "nll_loss_forward",
    "nll_loss2d_forward",
    "mse_loss",
    "_ctc_loss",
    "binary_cross_entropy_with_logits",
}


PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}


class Counts(TorchDispatchMode):
    """Counts losses and FLOPs of matrix products and convolutions on real tensors, by shapes.

    Each multiply-add of a convolution is counted once forward and once for each gradient, which
    FlopCounterMode does not do where channels are in groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in LOSSES:
            self.losses[name] += 1
        if name in PRODUCTS:
            left, right = (args[i] for i in PRODUCTS[name])
            self.flops += 2 * left.numel() * right.shape[-1]
        elif name == "convolution":
            self.flops += self._convolution(result, args[1], args[0], args[6])
        elif name == "convolution_backward":
            grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
            self.flops += sum(mask[:2]) * self._convolution(grad, weight, x, transposed)
        return result

    def _convolution(self, y: Tensor, weight: Tensor, x: Tensor, transposed: bool) -> int:
        return 2 * (x if transposed else y).numel() * weight[0].numel()


def class_of(name: str) -> str:
    return name.partition(",")[0]


def written(name: str, folder: Path) -> str:
    """The path of the config of a head."""
    path = folder / "config.json"
    # Attention as its products, whose FLOPs no two counters see differently.
    how = {"architectures": [class_of(name)], "attn_implementation": "eager"}
    fields = {**HEADS[name].config, **how}
    path.write_text(json.dumps(fields))
    return str(path)


def real_step(name: str, path: str) -> tuple[int, Counter[str]]:
    """FLOPs of matrix products and convolutions of a step on the CPU, and the losses that ran."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(path)
    module = getattr(transformers, class_of(name))._from_config(config)
    module.train()
    head = HEADS[name]
    arguments = {**head.inputs(), **head.labels()}
    counts = Counts()
    with counts:
        output = module(**arguments)
        output.loss.backward()
    return counts.flops, counts.losses


@pytest.mark.parametrize("name", HEADS)
def test_a_head_trains_on_the_labels_that_its_class_takes(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    flops, losses = real_step(name, path)
    sizes = {"seq": SEQ} if "input_ids" in HEADS[name].inputs() else {}
    graph = trace_target(path, ["training"], Request(batch=BATCH, **sizes))["training"]
    assert [a.text for a in graph.assumptions if a.kind == "loss"] == []
    found: Counter[str] = Counter()
    for op in graph.ops:
        if op.name.partition(".")[2] in LOSSES:
            found[op.name.partition(".")[2]] += graph.times(op)
    assert found == losses
    assert 2 * rt.estimate(graph, execution="eager").macs == flops


# -- what is assumed, and what is said where nothing fits ------------------------------------------


def inputs_assumed(path: str, **sizes: int) -> list[str]:
    graph = trace_target(path, ["training"], Request(**sizes))["training"]
    return [a.text for a in graph.assumptions if a.kind == "inputs"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("BertForMultipleChoice", "input_ids: 4 choices for each sample, as SWAG and RACE have"),
        ("YolosForObjectDetection", "labels: 7 objects in each image, as COCO has on average"),
        ("ViTForMaskedImageModeling", "bool_masked_pos: every second of 16 patches is masked"),
        (
            "Wav2Vec2ForCTC",
            f"labels: a transcript of {FRAMES // 4} tokens, one for 4 of {FRAMES} frames",
        ),
    ],
)
def test_sizes_of_labels_that_no_config_has_are_assumed(
    name: str, said: str, tmp_path: Path
) -> None:
    assert said in inputs_assumed(written(name, tmp_path), batch=2)


def test_labels_are_looked_for_in_training_only(tmp_path: Path) -> None:
    path = written("BertForSequenceClassification", tmp_path)
    loaded = load_target(path, Request(batch=2, seq=8))
    assert "labels" not in loaded.inputs.labels
    trained = loaded.inputs.trained(loaded.module)
    assert trained.labels["labels"].shape == (2,)
    forward = trace_target(path, ["forward"], Request(batch=2, seq=8))["forward"]
    assert [forward.values[i].name for i in forward.inputs] == ["input_ids"]


def test_labels_that_are_given_are_used(tmp_path: Path) -> None:
    path = written("BertForSequenceClassification", tmp_path)
    given = Request(seq=8, inputs={"labels": "2:int64"})
    graph = trace_target(path, ["training"], given)["training"]
    shapes = {graph.values[i].name: graph.values[i].shape for i in graph.inputs}
    assert shapes == {"input_ids": (2, 8), "labels": (2,)}
    assert not any(a.kind == "loss" for a in graph.assumptions)


def test_what_a_config_misses_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "pad_token_id": None}
    path.write_text(json.dumps(config))
    said = (
        r"training of LlamaForSequenceClassification: it refuses input_ids \[2, 8\]: ValueError: "
        "Cannot handle batch sizes > 1 if no padding token is defined.; set what it misses in its "
        "config, or pass it with --input NAME=SHAPE:DTYPE: its forward takes input_ids, "
    )
    with pytest.raises(RequestError, match=said):
        trace_target(str(path), ["training"], Request(batch=2, seq=8))
    assert trace_target(str(path), ["training"], Request(batch=1, seq=8))


def classifier(tmp_path: Path, forward: Callable[..., Any]) -> Any:
    """A head of images with another forward."""
    module = load_target(written("ViTForImageClassification", tmp_path)).module
    module.forward = forward
    return module


def test_a_head_that_has_no_loss_is_told(tmp_path: Path) -> None:
    def forward(pixel_values: Tensor, labels: Any = None) -> Any:
        if labels is not None:
            raise NotImplementedError("Training is not implemented yet")
        return {"logits": pixel_values.mean((1, 2))}

    module, image = classifier(tmp_path, forward), torch.empty(2, 3, 32, 32, device="meta")
    kind = "ViTForImageClassification has no loss for labels"
    assert labels_of(module, {"pixel_values": image}, 2) == (
        {},
        (("loss", f"{kind}: it says NotImplementedError: Training is not implemented yet"),),
    )


def test_labels_that_cannot_be_guessed_are_asked_for(tmp_path: Path) -> None:
    def forward(pixel_values: Tensor, labels: Any = None) -> Any:
        if labels is not None:
            raise KeyError(tuple(labels.shape) if isinstance(labels, Tensor) else "no tensor")
        return {"logits": pixel_values.mean((1, 2))}

    module, image = classifier(tmp_path, forward), torch.empty(2, 3, 32, 32, device="meta")
    said = (
        r"training of ViTForImageClassification: its labels cannot be guessed \(to labels \[2\] it "
        r"says KeyError: \(2,\)\); pass --input labels=SHAPE:DTYPE, for example --input "
        r"labels=2:int64, or what else its forward takes \(pixel_values, labels\)"
    )
    with pytest.raises(RequestError, match=said):
        labels_of(module, {"pixel_values": image}, 2)
