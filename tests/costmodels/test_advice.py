"""What the structure of decode says: weights that are multiplied with the whole cache."""

import rooftrace as rt
from rooftrace.costmodels.fusion.execution_advice import cache_products
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Ref
from rooftrace.hardware.units import format_flops
from tests.costmodels.graph_support import Builder
from tests.releases import with_transformers_5

KV, LATENT, WIDTH = 32, 8, 16


def notes(graph: OpGraph) -> tuple[str, ...]:
    return cache_products(graph, price_ops(graph)[0])


def latent(rows: int = KV, role: str = "weights") -> OpGraph:
    """A cache of latents grows by a row; seen through a view and a cast, it is multiplied."""
    b = Builder()
    old, row = b.input(KV - 1, LATENT, role="kv"), b.input(1, LATENT)
    whole = b.value((KV, LATENT), "kv")
    b.op("aten.cat", {"tensors": (Ref(old), Ref(row))}, [whole])
    seen = b.view(whole, b.places[whole][KV - rows :])
    cast = b.unary("_to_copy", seen)
    b.mm(b.input(1, WIDTH), b.weight(WIDTH, WIDTH), module="layers.0.q")
    out = b.mm(cast, b.input(LATENT, WIDTH, role=role), module="layers.0.kv_up")
    return b.graph(whole, out, phase="decode")


def test_a_product_of_the_whole_cache_with_weights_is_reported():
    (note,) = notes(latent())
    again, total = 2 * KV * LATENT * WIDTH, 2 * KV * LATENT * WIDTH + 2 * WIDTH * WIDTH
    assert note == (
        "1 matrix product multiplies the whole cache with weights (layers.*.kv_up): "
        f"{format_flops(again)} of {format_flops(total)}; absorbing those weights into the "
        "query would avoid that"
    )


def test_products_of_one_row_or_with_activations_are_not():
    assert notes(latent(rows=1)) == ()
    assert notes(latent(role="activations")) == ()


def test_a_query_scaled_by_weights_is_no_weight():
    b = Builder()
    cache = b.input(WIDTH, KV, role="kv")
    query = b.binary("mul", b.input(4, WIDTH), b.weight(WIDTH))
    out = b.mm(query, cache)
    assert notes(b.graph(out)) == ()


def test_a_convolution_over_a_window_of_the_state_is_not():
    b = Builder()
    window, weight = b.input(2, WIDTH, 4, role="kv"), b.weight(WIDTH, 1, 4)
    out = b.value((2, WIDTH, 1))
    b.op("aten.convolution", {
        "input": Ref(window), "weight": Ref(weight), "bias": None, "stride": (1,),
        "padding": (0,), "dilation": (1,), "transposed": False, "output_padding": (0,),
        "groups": WIDTH,
    }, [out])  # fmt: skip
    assert notes(b.graph(out)) == ()


def test_without_a_cache_there_is_nothing_to_say(traced):
    assert notes(traced("llama", "training")) == ()


@with_transformers_5  # before, the cache of DeepSeek holds the expanded keys and values
def test_latent_attention_has_it_and_grouped_attention_has_not(traced):
    for execution in ("naive", "eager", "efficient"):
        deepseek = rt.plan(traced("deepseek", "decode"), execution)
        (note,) = (n for n in deepseek.notes if "whole cache" in n)
        # kv_b_proj of both layers makes 4 heads of 8 + 12 from 16, for 8 tokens of 2 sequences.
        assert note.startswith("2 matrix products") and "self_attn.kv_b_proj" in note
        assert f": {format_flops(2 * 2 * (2 * 8) * 16 * 4 * (8 + 12))} of" in note
        llama = rt.plan(traced("llama", "decode"), execution)
        assert not any("whole cache" in n for n in llama.notes)
    assert not any("whole cache" in n for n in rt.plan(traced("deepseek", "prefill")).notes)
