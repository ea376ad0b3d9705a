"""Hugging Face configs: which model, which inputs, which phases, and what each mistake is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftrace as rt
from rooftrace.errors import RequestError, TargetError
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.api import trace_target
from rooftrace.tracer.inputs.huggingface import model_inputs
from rooftrace.tracer.phases.running import trace_phases
from rooftrace.tracer.request import Request
from rooftrace.tracer.targets.target import load_target
from rooftrace.tracer.values.masks import REAL_VALUE
from tests.releases import TRANSFORMERS, with_transformers_5

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
    assert "loss" in {op.family for op in rt.plan(training, "eager").graph.ops}
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


def test_a_cache_leaves_room_for_the_token_behind_it(config: Callable[..., str]) -> None:
    graphs = trace_target(config("gpt2"), ["prefill", "decode"])
    assert graphs["prefill"].workload["seq"] == 32  # all that the table of positions has
    assert graphs["decode"].workload["kv"] == 32 - 1


def test_whole_numbers_of_a_built_model_are_known(config: Callable[..., str]) -> None:
    module = load_target(config("bert"), Request(seq=4)).module
    known = {n: t.__dict__.get(REAL_VALUE) for n, t in module.named_buffers()}
    positions = known["bert.embeddings.position_ids"]
    assert positions is not None and positions.tolist() == [list(range(512))]


# -- inputs that are given -------------------------------------------------------------------------


def test_features_that_cannot_be_guessed_are_asked_for(config: Callable[..., str]) -> None:
    loaded = load_target(config("vit"))

    def forward(smells: Any, strengths: Any = None) -> Any:
        raise AssertionError("never called")

    loaded.module.forward = forward
    with pytest.raises(
        RequestError,
        match=(
            "ViTForImageClassification: its input 'smells' cannot be guessed; pass --input "
            "smells=SHAPE:DTYPE, for example --input smells=1,80,3000:fp32"
        ),
    ):
        model_inputs(loaded.module, Request())


def test_a_guess_that_is_refused_is_told_with_the_reason(config: Callable[..., str]) -> None:
    loaded = load_target(config("vit"))

    def forward(pixel_values: Any) -> Any:
        raise ValueError("not\nlike this")

    loaded.module.forward = forward
    with pytest.raises(
        RequestError,
        match=r"'pixel_values' cannot be guessed \(to a guess it says ValueError: not like this\)",
    ):
        model_inputs(loaded.module, Request())


def test_features_that_are_given_are_used(config: Callable[..., str]) -> None:
    request = Request(seq=5, inputs={"input_features": "2,80,60:bf16"})
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


# -- inputs of other kinds -------------------------------------------------------------------------

CONV = dict(conv_dim=[8, 8], conv_kernel=[10, 8], conv_stride=[8, 8], num_feat_extract_layers=2)
SIDE = dict(image_size=32, patch_size=8)
OTHERS: dict[str, dict[str, Any]] = {
    "wav2vec2": dict(WIDTHS, vocab_size=32, num_conv_pos_embedding_groups=4, **CONV),
    "vivit": dict(WIDTHS, image_size=32, num_frames=4, tubelet_size=[2, 8, 8]),
    "clip": dict(
        architectures=["CLIPModel"],
        projection_dim=16,
        text_config=dict(WIDTHS, vocab_size=64, max_position_embeddings=12),
        vision_config=dict(WIDTHS, **SIDE),
    ),
    "audio-spectrogram-transformer": dict(WIDTHS, max_length=64, num_mel_bins=16),
    "patchtst": dict(d_model=16, num_hidden_layers=1, context_length=32, num_input_channels=3),
}


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("wav2vec2", {"input_values": (2, 160 * 1000 - 160 * 1000 % 1920)}),
        ("vivit", {"pixel_values": (2, 4, 3, 32, 32)}),
        ("clip", {"input_ids": (2, 12), "pixel_values": (2, 3, 32, 32)}),
        ("audio-spectrogram-transformer", {"input_values": (2, 64, 16)}),
        ("patchtst", {"past_values": (2, 32, 3), "past_observed_mask": (2, 32, 3)}),
        ("whisper", {"input_features": (2, 80, 60), "decoder_input_ids": (2, 20)}),
    ],
)
def test_inputs_are_of_the_layout_that_the_model_accepts(
    kind: str, inputs: dict[str, tuple[int, ...]], config: Callable[..., str]
) -> None:
    loaded = load_target(config(kind, **OTHERS.get(kind, {})), Request(batch=2))
    given = loaded.inputs.kwargs
    assert {name: tuple(tensor.shape) for name, tensor in given.items()} == inputs


LLAVA = dict(
    image_token_index=60,
    image_token_id=60,
    text_config=dict(WIDTHS, model_type="llama", vocab_size=64),
    vision_config=dict(WIDTHS, **SIDE, model_type="clip_vision_model"),
)


def test_a_model_of_text_and_images_is_given_text(config: Callable[..., str]) -> None:
    loaded = load_target(config("llava", **LLAVA), Request(seq=30))
    assert list(loaded.inputs.kwargs) == ["input_ids"]


@pytest.mark.slow
def test_an_image_has_its_places_in_the_prompt(config: Callable[..., str]) -> None:
    image = {"pixel_values": "1,3,32,32:fp32"}
    path = config("llava", **LLAVA)
    graphs = trace_target(path, ["prefill", "decode"], Request(seq=30, inputs=image))
    assert shapes(graphs["prefill"]) == {"pixel_values": (1, 3, 32, 32), "input_ids": (1, 30)}
    convolutions = [op for op in graphs["prefill"].ops if op.name == "aten.convolution"]
    assert len(convolutions) == 1
    assert not any(op.name == "aten.convolution" for op in graphs["decode"].ops)
    patches = (32 // 8) ** 2
    with pytest.raises(RequestError, match=f"{patches} tokens of the prompt, which has 9; pass a"):
        load_target(path, Request(seq=9, inputs=image))


def test_an_image_that_a_model_cannot_read_is_told_why(config: Callable[..., str]) -> None:
    request = Request(seq=30, inputs={"pixel_values": "1,4,32,32:fp32"})
    with pytest.raises(
        RequestError,
        match=r"LlavaForConditionalGeneration: it makes no image features of the inputs that were "
        "given .*; its get_image_features takes pixel_values, ",
    ):
        load_target(config("llava", **LLAVA), request)


def test_a_model_that_writes_about_a_given_image_has_a_prompt(config: Callable[..., str]) -> None:
    text = dict(WIDTHS, vocab_size=64, max_position_embeddings=16, encoder_hidden_size=32)
    vision = dict(WIDTHS, **SIDE)
    path = config(
        "blip",
        architectures=["BlipForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
    )
    given = load_target(path, Request(inputs={"pixel_values": "2,3,32,32:fp32"})).inputs.kwargs
    assert set(given) == {"pixel_values", "input_ids"}


QWEN = dict(
    image_token_id=60,
    text_config=dict(
        WIDTHS,
        vocab_size=64,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
        # The same in transformers 4.
        **(
            {}
            if TRANSFORMERS >= (5, 0)
            else {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
        ),
    ),
    vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4),
)


def test_patches_come_from_a_grid(config: Callable[..., str]) -> None:
    rows, width = 4 * 6, 3 * 2 * 4 * 4  # of two frames
    request = Request(seq=20, inputs={"pixel_values": f"{rows},{width}:fp32"})
    loaded = load_target(config("qwen2_vl", **QWEN), request)
    given = {n: t.__dict__.get(REAL_VALUE) for n, t in loaded.inputs.kwargs.items()}
    assert given["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert int((given["input_ids"] == 60).sum()) == rows // 4  # four patches make a token
    assert trace_phases(loaded.module, loaded.inputs, ["prefill"])


def test_a_class_for_a_part_of_a_config_is_given_that_part(config: Callable[..., str]) -> None:
    path = config("llava", **LLAVA, architectures=["LlamaForCausalLM"])
    loaded = load_target(path, Request(seq=4))
    assert type(loaded.module).__name__ == "LlamaForCausalLM"
    assert loaded.module.config.vocab_size == 64


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
        ("gpt2", {"kv": 32, "seq": 8}, "--kv 32: GPT2LMHeadModel has a position table of 32"),
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
        ('{"model_type": "llama", "num_hidden_layers": 2000000000}', "expected 20,000 at most"),
        ('{"model_type": ["llama"]}', r"model_type=\['llama'\]: expected a text"),
        ('{"model_type": "llama", "architectures": [2]}', r"architectures\[0\]=2: expected a text"),
        ("[" * 5000 + "]" * 5000, "more than 64 deep"),
        (f'{{"model_type": "llama", "hidden_size": {"9" * 400}}}', "more than 64 bits"),
        (f'{{"model_type": "llama", "hidden_size": {"9" * 5000}}}', "not a readable JSON file"),
        ("{", r"not a readable JSON file \(Expecting property name"),
        ("[]", "a Hugging Face config has a model_type; this one has none"),
        ('{"hidden_size": 8}', "a Hugging Face config has a model_type; this one has none"),
        ('{"model_type": "llamma"}', r"model_type 'llamma' is unknown to transformers \d+\.\d+"),
        pytest.param(
            '{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}',
            r"transformers refuses it: .*hidden size \(30\) is not a multiple",
            marks=with_transformers_5,
        ),
        pytest.param(
            '{"model_type": "llama", "vocab_size": "many"}',
            "transformers refuses it: .*'vocab_size' expected int",
            marks=with_transformers_5,
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


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"do_sample": True},
        {"num_beams": 4},
        {"num_beams": 4, "do_sample": True},
        {"num_beams": 2, "early_stopping": True},
    ],
)
def test_generating_runs_to_its_last_token(how: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(shape).eval()
    ids = torch.randint(2, 64, (2, 5))
    calls = []

    def step(model: Any, ids: Tensor, **settings: Any) -> None:
        count = 0

        def counted(*_: Any) -> None:
            nonlocal count
            count += 1

        handle = model.transformer.register_forward_pre_hook(counted)
        with torch.no_grad():
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, pad_token_id=0, max_new_tokens=6, **settings)
        handle.remove()
        calls.append(count)

    step(model, ids, **how, min_new_tokens=6)
    rt.trace(lambda model, ids: step(model, ids, **how), model, ids)
    assert calls == [6, 6]
