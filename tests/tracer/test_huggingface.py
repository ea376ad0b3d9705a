"""Hugging Face configs: which model, which inputs, which phases, and what each mistake is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftrace.tracer.api import trace_target
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.request import Request, RequestError, TargetError
from rooftrace.tracer.target import load_target

pytest.importorskip("transformers")

WIDTHS = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2)
WHISPER = dict(
    vocab_size=64,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    max_source_positions=30,
    max_target_positions=20,
    pad_token_id=1,
    bos_token_id=1,
    eos_token_id=1,
    decoder_start_token_id=1,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(WIDTHS, vocab_size=64),
    "gpt2": dict(
        vocab_size=64,
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "bert": dict(WIDTHS, vocab_size=64),
    "t5": dict(num_layers=2, d_model=32, d_ff=48, num_heads=4, d_kv=8, vocab_size=64),
    "vit": dict(WIDTHS, image_size=32, patch_size=8),
    "resnet": dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], image_size=32),
    "whisper": WHISPER,
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """`config("bert", architectures=[...])`: the path of a small config of this type."""

    def written(kind: str, **changes: Any) -> str:
        path = tmp_path / f"small-{kind}.json"
        path.write_text(json.dumps({"model_type": kind, **CONFIGS.get(kind, {}), **changes}))
        return str(path)

    return written


def shapes(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    return {graph.values[i].name: graph.values[i].shape for i in graph.inputs}


@pytest.mark.parametrize(
    ("kind", "name", "phases", "inputs"),
    [
        ("llama", "LlamaForCausalLM", ["prefill", "decode", "training"], {"input_ids": (2, 6)}),
        ("bert", "BertForMaskedLM", ["forward", "training"], {"input_ids": (2, 6)}),
        (
            "t5",
            "T5ForConditionalGeneration",
            ["prefill", "decode", "training"],
            {"input_ids": (2, 6), "decoder_input_ids": (2, 6)},
        ),
        (
            "vit",
            "ViTForImageClassification",
            ["forward", "training"],
            {"pixel_values": (2, 3, 32, 32)},
        ),
        (
            "resnet",
            "ResNetForImageClassification",
            ["forward", "training"],
            {"pixel_values": (2, 3, 32, 32)},
        ),
    ],
)
def test_a_config_gives_the_model_its_inputs_and_its_phases(
    kind: str,
    name: str,
    phases: list[str],
    inputs: dict[str, tuple[int, ...]],
    config: Callable[..., str],
) -> None:
    seq = 6 if "input_ids" in inputs else None
    graphs = trace_target(config(kind), request=Request(batch=2, seq=seq))
    assert list(graphs) == phases
    first = next(iter(graphs.values()))
    assert first.model["class"] == name
    assert first.model["name"] == f"small-{kind}"
    assert shapes(first) == inputs


def test_the_architecture_that_a_config_names_is_built(config: Callable[..., str]) -> None:
    path = config("bert", architectures=["BertForSequenceClassification"])
    assert type(load_target(path).module).__name__ == "BertForSequenceClassification"


def test_weights_have_the_precision_of_the_config(config: Callable[..., str]) -> None:
    loaded = load_target(config("llama", dtype="bfloat16"), Request(seq=4))
    assert {str(p.dtype) for p in loaded.module.parameters()} == {"torch.bfloat16"}
    assert {p.device.type for p in loaded.module.parameters()} == {"meta"}


def test_a_models_own_loss_is_trained(config: Callable[..., str]) -> None:
    training = trace_target(config("llama"), ["training"], Request(seq=4))["training"]
    assert "loss" in {op.family for op in training.ops}
    assert "loss" not in {a.kind for a in training.assumptions}
    assert training.values[training.outputs[0]].shape == ()


def test_a_cache_may_be_longer_than_the_prompt(config: Callable[..., str]) -> None:
    graphs = trace_target(config("llama"), ["prefill", "decode"], Request(batch=2, seq=4, kv=9))
    decode = graphs["decode"]
    assert {decode.values[i].shape for i in decode.external if decode.values[i].role == "kv"} == {
        (2, 4, 9, 8)
    }
    assert shapes(decode) == {"input_ids": (2, 1)}
    assert graphs["prefill"].workload["items"] == 2 * 4
    assert decode.workload["items"] == 2


# -- inputs that are given -------------------------------------------------------------------------


def test_features_that_cannot_be_guessed_are_asked_for(config: Callable[..., str]) -> None:
    with pytest.raises(
        RequestError,
        match=(
            "WhisperForConditionalGeneration: its main input is 'input_features', which cannot be "
            "guessed; pass --input input_features=SHAPE:DTYPE, for example --input "
            "input_features=1,80,3000:fp32"
        ),
    ):
        load_target(config("whisper"))


def test_features_that_are_given_are_used(config: Callable[..., str]) -> None:
    request = Request(seq=5, inputs={"input_features": "2,80,60:fp32"})
    graphs = trace_target(config("whisper"), request=request)
    assert list(graphs) == ["prefill", "decode", "training"]
    assert shapes(graphs["prefill"]) == {"input_features": (2, 80, 60), "decoder_input_ids": (2, 5)}
    assert shapes(graphs["decode"]) == {"decoder_input_ids": (2, 1), "encoder_outputs": (2, 30, 32)}


def test_further_inputs_stand_beside_the_guessed_ones(config: Callable[..., str]) -> None:
    request = Request(batch=2, seq=8, inputs={"attention_mask": "2,8:int64"})
    forward = trace_target(config("bert"), ["forward"], request)["forward"]
    assert shapes(forward) == {"input_ids": (2, 8), "attention_mask": (2, 8)}


def test_given_token_ids_can_be_decoded(config: Callable[..., str]) -> None:
    request = Request(inputs={"input_ids": "3,7:int64"})
    decode = trace_target(config("gpt2"), ["decode"], request)["decode"]
    assert shapes(decode) == {"input_ids": (3, 1)}
    assert decode.workload["kv"] == 7


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        (
            "vit",
            {"seq": 8},
            "--seq 8: ViTForImageClassification takes pixel_values, which has no "
            "such length; leave it out",
        ),
        ("resnet", {"kv": 8}, "--kv 8: ResNetForImageClassification takes pixel_values"),
        ("bert", {"kv": 8}, "--kv 8: BertForMaskedLM keeps no cache; leave it out"),
        ("gpt2", {"seq": 64}, "--seq 64: GPT2LMHeadModel has a position table of 32 entries"),
        ("gpt2", {"kv": 33, "seq": 8}, "--kv 33: GPT2LMHeadModel has a position table of 32"),
        (
            "bert",
            {"batch": 4, "inputs": {"input_ids": "2,8:int64"}},
            "--batch 4: the inputs that were given have 2",
        ),
        (
            "bert",
            {"seq": 4, "inputs": {"input_ids": "2,8:int64"}},
            "--seq 4: --input input_ids has 8; leave one of them out",
        ),
    ],
)
def test_sizes_that_a_model_has_not_are_refused(
    kind: str, request_: dict[str, Any], message: str, config: Callable[..., str]
) -> None:
    with pytest.raises(RequestError, match=message):
        load_target(config(kind), Request(**request_))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_models_without_a_cache_have_no_decode(
    kind: str, phase: str, config: Callable[..., str]
) -> None:
    with pytest.raises(RequestError, match=f"{phase} of .*: its forward takes and returns no"):
        trace_target(config(kind), [phase])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON file: Expecting property name"),
        ("[]", "a Hugging Face config has a model_type; this one has none"),
        ('{"hidden_size": 8}', "a Hugging Face config has a model_type; this one has none"),
        ('{"model_type": "llamma"}', r"model_type 'llamma' is unknown to transformers \d+\.\d+"),
        (
            '{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}',
            r"transformers refuses it: .*hidden size \(30\) is not a multiple",
        ),
        (
            '{"model_type": "llama", "vocab_size": "many"}',
            "transformers refuses it: .*'vocab_size' expected int",
        ),
    ],
)
def test_a_file_that_is_no_config_is_told_why(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(TargetError, match=message) as caught:
        load_target(str(path))
    assert str(caught.value).startswith(f"target {str(path)!r}: ")


def test_a_config_that_is_not_there() -> None:
    with pytest.raises(TargetError, match=r"target 'nowhere.json': there is no such file"):
        load_target("nowhere.json")


def test_a_folder_with_a_config_is_a_target(config: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    Path(config("llama")).rename(folder / "config.json")
    assert load_target(str(folder), Request(seq=4)).name == "my-llama"
