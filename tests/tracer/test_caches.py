"""A cache is what a call returns under the name of an argument: whatever it is called and is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.tracer.inputs.calls import call_inputs
from rooftrace.tracer.phases.running import trace_phases

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


def usual(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, rt.OpGraph]:
    return trace_phases(module, call_inputs(module, args, kwargs))


def cached(graph: rt.OpGraph) -> list[tuple[int, ...]]:
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


def test_a_plain_tuple_names_nothing() -> None:
    graphs = usual(Recurrent(lambda logits, memory: (logits, memory)), IDS)
    assert list(graphs) == ["forward", "training"]
    assert "kv" not in graphs["forward"].workload


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
