"""A cache is what a call returns by the name of an argument, or what grows in a tuple."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.tracer.inputs.calls import call_inputs
from rooftrace.tracer.phases.running import trace_phases
from rooftrace.tracer.values import tensors_in

IDS = torch.randint(0, 16, (2, 5))


@dataclass
class Record:
    logits: Tensor
    memory: Any


class Named(NamedTuple):
    logits: Tensor
    memory: Any


def as_dict(logits: Tensor, memory: Any) -> dict[str, Any]:
    return {"logits": logits, "memory": memory}


class Recurrent(nn.Module):
    """A state of one row per sequence, whatever the length of the prompt."""

    def __init__(self, output: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.output = output

    def forward(self, ids: Tensor, memory: Any = None) -> Any:
        x = self.table(ids)
        state = x.new_zeros(len(ids), 8) if memory is None else memory[0]
        for token in x.unbind(1):
            state = torch.tanh(self.mix(state) + token)
        return self.output(state @ self.table.weight.mT, [state])


def usual(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, rt.types.OpGraph]:
    return trace_phases(module, call_inputs(module, args, kwargs))


def cached(graph: rt.types.OpGraph) -> list[tuple[int, ...]]:
    return [graph.values[i].shape for i in graph.external if graph.values[i].role == "kv"]


@pytest.mark.parametrize("output", [as_dict, Record, Named])
def test_what_is_named_like_an_argument_goes_into_the_next_call(output: Any) -> None:
    graphs = usual(Recurrent(output), IDS)
    assert list(graphs) == ["prefill", "decode", "training"]
    assert cached(graphs["decode"]) == [(2, 8)]
    products = [op.name for op in graphs["decode"].ops].count("aten.addmm")
    assert products == 1  # one token, where the prompt had five
    assert graphs["decode"].workload["kv"] == IDS.shape[1]
    assert "kv" not in graphs["training"].workload


class Towers(nn.Module):
    """A table that reads ids and, of a pair, something else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        other = other if other.dtype.is_floating_point else self.table(other)
        return self.table(ids).sum(1) * other.flatten(1).mean()


@pytest.mark.parametrize(
    ("other", "item"),
    [
        (torch.zeros(2, 9, dtype=torch.long), "sample"),  # the text of a second tower
        (torch.zeros(2, 3, 8, 8), "sample"),  # images
        (torch.zeros(2, 5, dtype=torch.long), "token"),  # targets, types
        (torch.zeros(2, 1, 5, 5), "token"),  # a mask that is added
        (torch.zeros(2, 1), "token"),  # a time for each sample
        (torch.zeros(9, 8), "token"),  # a table
    ],
)
def test_tokens_are_counted_where_they_are_all_that_a_call_reads(other: Tensor, item: str) -> None:
    workload = usual(Towers(), IDS, other)["forward"].workload
    assert (workload["item"], workload["items"]) == (item, 2 if item == "sample" else 2 * 5)
    turned = Towers().to("meta")
    turned.forward = lambda other, ids: Towers.forward(turned, ids, other)  # type: ignore[method-assign]
    if item == "sample":  # whichever comes first
        assert usual(turned, other, IDS)["forward"].workload["item"] == "sample"


def test_what_a_plain_tuple_holds_is_no_cache_unless_it_grows_with_the_prompt() -> None:
    graphs = usual(Recurrent(lambda logits, memory: (logits, memory)), IDS)
    assert list(graphs) == ["forward", "training"]
    assert "kv" not in graphs["forward"].workload


HEADS, WIDTH = 2, 4


class Attends(nn.Module):
    """One layer of attention, with keys and values [batch, HEADS, length, WIDTH]."""

    def __init__(self, output: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(16, HEADS * WIDTH)
        self.mix = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.output = output

    def forward(self, ids: Tensor, mask: Any = None, past: Any = None) -> Any:
        parts = self.mix(self.table(ids)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in parts)
        if past is not None:
            old = tensors_in(past)
            k, v = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)
            if isinstance(past, list):
                past.clear()  # a module may change what it is passed
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.output(y.transpose(1, 2).flatten(2) @ self.table.weight.mT, (k, v))


UNNAMED = {
    "a tuple": lambda logits, kv: (logits, kv),
    "a list": lambda logits, kv: [logits, list(kv)],
    "layers": lambda logits, kv: (logits, None, (kv,)),
    "by name inside": lambda logits, kv: (logits, {"k": kv[0], "v": kv[1]}),
}


@pytest.mark.parametrize("form", UNNAMED)
def test_a_cache_in_a_plain_tuple_is_what_comes_back_longer(form: str) -> None:
    named = usual(Attends(lambda logits, kv: {"logits": logits, "past": kv}), IDS)
    graphs = usual(Attends(UNNAMED[form]), IDS)
    assert list(graphs) == list(named) == ["prefill", "decode", "training"]
    assert cached(graphs["decode"]) == [(2, HEADS, 5, WIDTH)] * 2
    for phase in ("prefill", "decode"):
        assert graphs[phase].replace(model={}) == named[phase].replace(model={})


def test_a_decode_alone_is_that_of_all_phases() -> None:
    alone = rt.trace(Attends(UNNAMED["a tuple"]), IDS, phase="decode")
    assert alone == usual(Attends(UNNAMED["a tuple"]), IDS)["decode"]


def test_hidden_states_in_a_tuple_are_no_cache() -> None:
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8)

        def forward(self, ids: Tensor, cache: Any = None) -> Any:
            x = self.table(ids)
            return x.sum(-1), (x, x.relu())

    assert list(usual(States(), IDS)) == ["forward", "training"]
    returned = r"\(float32\[2, 5\], \(float32\[2, 5, 8\], float32\[2, 5, 8\]\)\)"
    again = r"\(float32\[2, 1\], \(float32\[2, 1, 8\], float32\[2, 1, 8\]\)\)"
    with pytest.raises(
        rt.types.RequestError,
        match=rf"decode of States: its forward returned {returned}, in which no cache is recognised"
        rf"; item 1 passed back as cache returns {again}\.  A cache is an output with the name",
    ):
        rt.trace(States(), IDS, phase="decode")


@pytest.mark.parametrize(
    "output, said",
    [
        (
            lambda logits, kv: (logits, *kv),
            "item 1 passed back as past raises IndexError: list index out of range",
        ),
        (
            lambda logits, kv: logits,
            r"returned float32\[2, 5, 16\], in which no cache is recognised\.  A cache is",
        ),
        (
            lambda logits, kv: {"logits": logits, "kv": kv},
            r"returned \{'logits': float32\[2, 5, 16\], 'kv': \(float32",
        ),
    ],
)
def test_without_a_cache_the_error_says_what_was_returned_and_tried(output: Any, said: str) -> None:
    for phase in ("prefill", "decode"):
        with pytest.raises(rt.types.RequestError, match=said):
            rt.trace(Attends(output), IDS, phase=phase)


def test_which_of_several_arguments_takes_a_cache_is_not_guessed() -> None:
    class Unclear(Attends):
        def forward(self, ids: Tensor, a: Any = None, b: Any = None) -> Any:
            return super().forward(ids, a, b)

    with pytest.raises(rt.types.RequestError, match="which of a, b takes it, no name says"):
        rt.trace(Unclear(UNNAMED["a tuple"]), IDS, phase="decode")


def test_a_module_without_a_cache_runs_once_for_its_forward(
    module: Callable[..., nn.Module],
) -> None:
    runs = []

    def forward(self: Any, ids: Tensor, mask: Any = None) -> dict[str, Tensor]:
        runs.append(ids.shape)
        return {"logits": self.lin(ids.float())}

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(5, 5)

        def forward(self, ids: Tensor, mask: Any = None) -> dict[str, Tensor]:
            return forward(self, ids, mask)

    graphs = usual(Tokens(), IDS)
    assert list(graphs) == ["forward", "training"]
    assert len(runs) == 2
    assert {g.phase for g in graphs.values()} == set(graphs)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
    )
    return transformers, transformers.LlamaForCausalLM(config)


def test_a_static_cache_of_the_user_is_read_whole() -> None:
    transformers, model = llama()
    cache = transformers.StaticCache(model.config, max_cache_len=12)
    graphs = usual(model, input_ids=IDS, past_key_values=cache)
    assert list(graphs) == ["prefill", "decode", "training"]
    assert (
        sorted(shape for shape in cached(graphs["decode"]) if len(shape) == 4)
        == [(2, 2, 12, 8)] * 2
    )  # keys and values, with room for twelve
    attention = [op for op in graphs["decode"].ops if op.name == "rooftrace.attention"]
    assert [graphs["decode"].values[op.inputs[1]].shape[-2] for op in attention] == [12]
    alone = rt.trace(model, input_ids=IDS, past_key_values=cache, phase="decode")
    assert len(alone.ops) == len(graphs["decode"].ops)


def test_a_filled_cache_of_the_user_is_continued() -> None:
    transformers, model = llama()
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=cache)
    decode = usual(model, input_ids=IDS[:, :3], past_key_values=cache)["decode"]
    assert cached(decode) == [(2, 2, 5 + 3, 8)] * 2
    assert cache.get_seq_length() == 5


class Notes:
    """A cache of its own kind, which the module writes into and does not return."""

    rows: Any = None


def test_a_cache_that_is_only_written_into_is_continued() -> None:
    class Scribe(Recurrent):
        def forward(self, ids: Tensor, notes: Any = None) -> Any:
            new = self.table(ids)
            old = [] if notes.rows is None else [notes.rows]
            notes.rows = torch.cat([*old, new], 1)
            return self.mix(notes.rows)

    decode = usual(Scribe(as_dict), IDS, notes=Notes())["decode"]
    assert cached(decode) == [(2, 5, 8)]
    assert decode.values[decode.outputs[0]].shape == (2, 6, 8)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_decoder_finds_what_the_encoder_returned(by_name: bool) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8)
            self.encoder = nn.Linear(8, 8)

        def forward(
            self,
            input_ids: Any = None,
            decoder_input_ids: Any = None,
            encoder_outputs: Any = None,
            past: Any = None,
        ) -> dict[str, Any]:
            if encoder_outputs is None:
                hidden = self.encoder(self.table(input_ids))
            else:
                hidden = encoder_outputs.last_hidden_state if by_name else encoder_outputs[0]
            new = self.table(decoder_input_ids)
            rows = new if past is None else torch.cat([past, new], 1)
            logits = rows @ hidden.mT
            return {"logits": logits, "past": rows, "encoder_last_hidden_state": hidden}

    decode = usual(Pair(), input_ids=IDS, decoder_input_ids=IDS[:, :3])["decode"]
    assert "encoder" not in {op.module for op in decode.ops}
    assert cached(decode) == [(2, 3, 8)]
