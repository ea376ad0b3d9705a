"""Sparse products count what is stored: against loops over the stored elements."""

import pytest
import torch

import rooftrace as rt
from tests.costmodels.rules_support import cost, meta

pytestmark = pytest.mark.quick


class Product(torch.nn.Module):
    """A[32, 64] with the elements that `places` names, times x."""

    def __init__(self, multiply):
        super().__init__()
        self.multiply = multiply

    def forward(self, places, x):
        values = torch.ones(places.shape[1], device=x.device)
        return self.multiply(torch.sparse_coo_tensor(places, values, (32, 64)), x)


def products_of_a_loop(places, columns):
    """Multiplications and additions over the stored elements, one by one."""
    done = 0
    for _place in places.t():
        for _column in range(columns):
            done += 2
    return done


def traced_flops(multiply, places, x):
    graph = rt.trace(Product(multiply), places, x)
    planned = rt.plan(graph, "eager")
    assert not planned.coverage.unsupported
    assert planned.coverage.bytes_with_rule_share == 1
    return planned.total.flops()


@pytest.mark.parametrize("stored", [1, 40, 300])
def test_a_sparse_product_counts_its_stored_elements(stored):
    places = torch.stack([torch.randint(0, 32, (stored,)), torch.randint(0, 64, (stored,))])
    done = products_of_a_loop(places, columns=16)
    assert traced_flops(torch.sparse.mm, places, torch.ones(64, 16)) == done
    more = traced_flops(lambda a, x: torch.sparse.addmm(x[:32], a, x), places, torch.ones(64, 16))
    assert more == done + 32 * 16
    assert traced_flops(torch.matmul, places, torch.ones(64, 16)) == done
    assert traced_flops(torch.mv, places, torch.ones(64)) == products_of_a_loop(places, 1)


def test_a_sparse_product_moves_its_elements_with_their_indices():
    places = torch.zeros(2, 40, dtype=torch.long)
    graph = rt.trace(Product(torch.matmul), places, torch.ones(64, 16))
    planned = rt.plan(graph, "eager")
    (product,) = (c for op, c in zip(graph.ops, planned.op_costs, strict=True) if "mm" in op.target)
    assert product.bytes() == 40 * (4 + 2 * 8) + 4 * (64 * 16 + 32 * 16)


def test_where_the_stored_elements_are_not_known_all_count():
    """A meta tensor in CSR layout does not know: an upper bound, and it is said."""
    dense, x = torch.eye(64), meta(64, 16)
    csr, ones = dense.to_sparse_csr(), torch.ones(64, 16)
    unknown = cost(lambda: torch.sparse.mm(csr, ones), "_sparse_addmm")
    assert unknown.flops() == 2 * 64 * 64 * 16

    class Csr(torch.nn.Module):
        def forward(self, a, x):
            return a.to_sparse_csr() @ x

    graph = rt.trace(Csr(), dense.to("meta"), x)
    assert rt.plan(graph, "eager").total.flops() == 64 * 64 + 2 * 64 * 64 * 16  # compare, multiply
    assert any("sparse" in a.text for a in graph.assumptions)


def test_a_sampled_product_is_made_where_the_mask_stores():
    mask = torch.eye(64).to_sparse_csr()
    a, b = torch.ones(64, 4), torch.ones(4, 64)
    found = cost(lambda: torch.sparse.sampled_addmm(mask, a, b), "sparse_sampled_addmm", stored=64)
    done = sum(2 * 4 + 2 for _ in range(64))  # a product of 4, scaled, added
    assert found.flops() == done


@pytest.mark.parametrize("call", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_making_a_tensor_sparse_looks_at_every_element(call):
    assert cost(lambda: getattr(torch.eye(8), call)(), f"_{call}").flops() == 8 * 8


def test_sparse_sums_add_what_is_stored():
    places = torch.tensor([[0, 0, 1], [2, 2, 3]])
    x = torch.sparse_coo_tensor(places, torch.ones(3), (4, 4))
    assert cost(lambda: x.coalesce(), "_coalesce", stored=3).flops() == 3
    assert cost(lambda: x.to_dense(), "_to_dense", stored=3).flops() == 0
    assert cost(lambda: x.to_dense(), "_to_dense", stored=3).bytes() == 3 * (4 + 16) + 4 * 16
