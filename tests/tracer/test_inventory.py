"""Inventories: every tensor of a module once, its bytes, and what its values are."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.weights.inventory import merged
from rooftrace.weights.taking import statistics_of

pytestmark = pytest.mark.quick


def seed_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def test_the_model_of_the_habit() -> None:
    made = rt.inventory(seed_model())
    weights = 2 * 256 * 512
    assert made.total_params == weights + 512 + 256 == 262_912
    assert (made.trainable_params, made.non_trainable_params) == (262_912, 0)
    assert f"{made.total_memory_mb:.2f}" == "1.00"  # 4 bytes each, in MiB
    assert made.bytes_parameters == 4 * 262_912
    assert (made.num_layers, made.modules) == (4, 3)  # tensors; and the ReLU is a module too
    rows = [(x.name, x.kind, x.shape, x.num_params, x.requires_grad) for x in made.layers]
    assert rows == [
        ("0.weight", "Linear", (512, 256), 131_072, True),
        ("0.bias", "Linear", (512,), 512, True),
        ("2.weight", "Linear", (256, 512), 131_072, True),
        ("2.bias", "Linear", (256,), 256, True),
    ]
    assert [f"{x.memory:.2f}" for x in made.layers] == ["0.50", "0.00", "0.50", "0.00"]
    assert {x.dtype for x in made.layers} == {"fp32"}


def test_a_norm_between_makes_the_sums_that_the_habit_is_known_by() -> None:
    """263,936 parameters, 1.01 MB and 6 tensors are of this model, not of the one without."""
    model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 256))
    made = rt.inventory(model)
    assert (made.total_params, f"{made.total_memory_mb:.2f}", made.num_layers) == (
        263_936,
        "1.01",
        6,
    )


@given(
    values=st.lists(
        st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0]),
        max_size=40,
    ),
    size=st.integers(1, 7),
)
@settings(max_examples=200)
def test_statistics_of_slices_are_those_of_the_whole(values: list[float], size: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    parts = [whole[i : i + size] for i in range(0, len(values), size)]
    ours = statistics_of(lambda: parts)
    finite = whole[whole.isfinite()]
    assert ours.count == len(finite)
    assert (ours.nans, ours.infs) == (int(whole.isnan().sum()), int(whole.isinf().sum()))
    assert ours.zeros == sum(value == 0 for value in values)
    if not len(finite):
        assert math.isnan(ours.mean) and math.isnan(ours.std) and not ours.histogram
        return
    assert (ours.min, ours.max) == (float(finite.min()), float(finite.max()))
    assert ours.mean == pytest.approx(float(finite.mean()), rel=1e-9, abs=1e-6)
    if len(finite) > 1:
        assert ours.std == pytest.approx(float(finite.std()), rel=1e-6, abs=1e-6)
    assert sum(ours.histogram) == len(finite)
    again = merged(statistics_of(lambda part=part: [part]) for part in parts)  # type: ignore[misc]
    assert again.mean == pytest.approx(ours.mean, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
     torch.float8_e5m2],
)  # fmt: skip
def test_statistics_are_torchs_own(dtype: torch.dtype) -> None:
    layer = nn.Linear(300, 1000).to(dtype)  # more than one slice
    (row, _) = rt.inventory(layer).layers
    plain = layer.weight.detach().double()
    assert row.mean == pytest.approx(float(plain.mean()), abs=1e-9)
    assert row.std == pytest.approx(float(plain.std()), rel=1e-9)
    assert (row.min, row.max) == (float(plain.min()), float(plain.max()))
    assert row.statistics is not None
    assert sum(row.statistics.histogram) == 300_000
    if dtype.itemsize > 1:  # many values of 8 bits lie on an edge
        theirs = torch.histogram(plain, 50).hist.tolist()
        moved = sum(abs(a - b) for a, b in zip(row.statistics.histogram, theirs, strict=True))
        assert moved <= 4


def test_tied_weights_count_once_under_all_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    made = rt.inventory(model)
    assert made.total_params == sum(p.numel() for p in model.parameters()) == 40
    (row,) = made.layers
    assert (row.name, row.shared) == ("embed.weight", ("head.weight",))
    assert made.shared_params == 40
    assert "embed.weight is also head.weight" in str(made)
    with torch.device("meta"):
        assert rt.inventory(Tied()).shared_params == 40


def test_parameters_of_one_storage_have_its_bytes_once() -> None:
    flat = torch.randn(24)
    model = nn.ParameterList([nn.Parameter(flat[:8]), nn.Parameter(flat[8:])])
    assert rt.inventory(model).bytes == 24 * 4  # of one storage, and of other bytes in it
    assert not rt.inventory(model).shared_params
    twice = nn.ParameterList([nn.Parameter(flat), nn.Parameter(flat.reshape(4, 6))])
    made = rt.inventory(twice)
    assert (made.total_params, made.bytes) == (48, 24 * 4)
    assert made.notes == ("24 elements are views of bytes that other parameters have",)


def test_frozen_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].requires_grad_(False)
    made = rt.inventory(model)
    assert (made.trainable_params, made.non_trainable_params) == (8, 16)
    assert [x.name for x in made.buffers] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert made.bytes_buffers == 4 * 4 * 2 + 8


def test_lazy_modules_have_no_shape_yet_and_their_sums_say_so() -> None:
    made = rt.inventory(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))
    assert [x.name for x in made.uninitialized] == ["0.weight", "0.bias"]
    assert made.total_params == 8
    assert "at least 8" in str(made) and "not known yet" in str(made)
    first = made.to_dict()["tensors"][0]
    assert first["shape"] is None and first["params"] is None
    assert max(made.layers, key=lambda layer: layer.num_params).name == "1.weight"


def test_on_meta_there_are_sizes_and_no_values() -> None:
    made = rt.inventory(seed_model().to("meta"))
    assert made.total_params == 262_912 and made.bytes_parameters == 4 * 262_912
    assert all(math.isnan(x.mean) and x.statistics is None for x in made.layers)
    assert "on meta: no weights" in str(made)


def test_a_module_without_parameters() -> None:
    made = rt.inventory(nn.ReLU())
    assert (made.total_params, made.layers, made.bytes) == (0, (), 0)
    assert "0 tensors of parameters" in str(made)


def test_tensors_without_elements_and_complex_ones() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.wave = nn.Parameter(torch.tensor([3 + 4j, 1 - 2j]))
            self.scalar = nn.Parameter(torch.tensor(2.0))

    empty, wave, scalar = rt.inventory(Odd()).layers
    assert (empty.num_params, empty.bytes) == (0, 0) and math.isnan(empty.mean)
    assert (wave.dtype, wave.num_params, wave.bytes) == ("complex64", 2, 16)
    assert (wave.mean, wave.min, wave.max) == (6 / 4, -2.0, 4.0)  # real and imaginary parts
    assert scalar.mean == 2.0 and math.isnan(scalar.std)


def test_nan_and_infinite_weights_are_counted() -> None:
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, math.nan, math.inf, 3.0]])
    (row,) = rt.inventory(layer).layers
    assert row.statistics is not None
    assert (row.statistics.nans, row.statistics.infs, row.mean) == (1, 1, 2.0)


def test_a_constant_is_one_bar() -> None:
    (row, _) = rt.inventory(nn.LayerNorm(8)).layers
    assert row.statistics is not None
    assert max(row.statistics.histogram) == sum(row.statistics.histogram) == 8


def test_parametrizations_and_scripted_modules() -> None:
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    made = rt.inventory(weighted)
    assert made.total_params == 4 + 4 + 12
    assert "parametrizations.weight.original1" in [x.name for x in made.layers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(3, 4))
    made = rt.inventory(scripted)
    assert made.kind == "Linear" and made.total_params == 16


def test_packed_weights_of_torch_ao_stand_beside_the_parameters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = torch.ao.nn.quantized.dynamic.Linear(4, 5)
    made = rt.inventory(layer)
    assert made.total_params == 0
    sizes = {x.name.rpartition(".")[2]: (x.shape, x.dtype, x.bytes) for x in made.buffers}
    assert sizes == {"weight": ((5, 4), "int8", 20), "bias": ((5,), "fp32", 20)}


def test_a_parameter_in_a_list_of_another_module_is_still_a_parameter() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    model[0].watched = [model[1].weight, torch.ones(3)]
    made = rt.inventory(model)
    assert [x.name for x in made.layers] == ["1.weight", "1.bias"]
    assert [(x.name, x.role, x.bytes) for x in made.buffers] == [("0.watched", "attribute", 12)]


def test_a_sparse_parameter_has_its_stored_bytes() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(torch.eye(4).to_sparse_csr())
    (row,) = rt.inventory(layer).layers
    assert row.bytes == 5 * 8 + 4 * 8 + 4 * 4  # rows, columns, values
    assert row.mean == 1.0 and "stored values alone" in row.note


def inside(tensor: Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return sum(inside(part) for part in parts if isinstance(part, Tensor))


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao_weights_are_what_they_store(config: str, on_meta: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16))
    plain = model[0].weight.detach().double()
    torchao.quantize_(model, getattr(torchao, config)())
    weight = model[0].weight
    row = rt.inventory(model.to("meta") if on_meta else model).layers[0]
    assert row.num_params == 128 * 64
    assert row.bytes == inside(weight) == sum(part.bytes for part in row.stored)
    assert row.dtype.startswith("bf16 in ")
    if not on_meta:
        assert row.std == pytest.approx(float(plain.std()), rel=0.05)
        assert "unpacks" in row.note


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_weights_are_what_they_store(bits: int) -> None:
    library = pytest.importorskip("bitsandbytes")
    kind = library.nn.Linear4bit if bits == 4 else library.nn.Linear8bitLt
    layer = kind(64, 32, bias=False, **({} if bits == 4 else {"has_fp16_weights": False}))
    layer.weight = layer.weight._quantize("cpu")
    made = rt.inventory(layer)
    assert made.total_params == 64 * 32
    assert 64 * 32 * bits // 8 < made.bytes < 64 * 32 * bits // 8 + 1500  # and its scales
    assert made.layers[0].note


class Fails(Tensor):
    """A class of tensors that has no bytes and cannot be unpacked."""

    @staticmethod
    def __new__(cls, size: int) -> Fails:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, (size,))
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "detach" in str(func):
            return args[0]
        raise NotImplementedError(f"Fails has no {func}")


def test_a_tensor_that_cannot_be_read_says_why() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(Fails(5), requires_grad=False)
    (row,) = rt.inventory(model).layers
    assert row.statistics is None and row.note.startswith("not unpacked: ")


def test_compiled_modules_have_the_names_of_what_was_compiled() -> None:
    made = rt.inventory(torch.compile(seed_model()))
    assert made.layers[0].name == "0.weight"


def test_parameters_of_two_models_side_by_side() -> None:
    def model(layers: int, width: int) -> nn.Module:
        whole = nn.Module()
        whole.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(layers)])
        whole.head = nn.Linear(4, width)
        return whole

    before, after = rt.inventory(model(2, 3)), rt.inventory(model(5, 3))
    result: Any = rt.diff(before, after)
    assert result.params == (2 * 20 + 15, 5 * 20 + 15)
    (row,) = result.modules
    assert (row.path, row.modules, row.params) == ("layers.*", (2, 5), (40, 100))
    assert result.unchanged == 1
    assert result.violations(["params>100%"]) and not result.violations(["params>200%"])
    assert rt.diff(before, before).modules == ()  # type: ignore[union-attr]
    with pytest.raises(rt.types.RequestError, match="time>1%"):
        result.violations(["time>1%"])


def test_what_has_no_inventory_is_refused() -> None:
    with pytest.raises(rt.types.RequestError, match="expected a torch"):
        rt.inventory(3)
    with pytest.raises(rt.types.RequestError, match="a config has no weights"):
        rt.inventory("gpt2", weights=True)
    with pytest.raises(rt.types.RequestError, match="is built already"):
        rt.inventory(nn.ReLU(), trust_remote_code=True)
    with pytest.raises(rt.types.TargetError):
        rt.inventory("no.such:thing")
    with pytest.raises(rt.types.RequestError, match="of two kinds"):
        rt.diff(rt.inventory(nn.ReLU()), nn.ReLU())


def test_a_config_is_counted_on_meta() -> None:
    pytest.importorskip("transformers")
    made = rt.inventory("gpt2")
    assert made.total_params == 124_439_808  # as published for the smallest GPT-2
    assert made.layers[0].shared == ("lm_head.weight",)
