"""The search with a compiler of our own, whose figures are a function of the plan."""

import types

import pytest

from l2d_jax.training.plans import plan_mesh, search_plans
from tests.support.programs import config


def devices(count, slices=1):
    return [types.SimpleNamespace(device_kind="TPU", slice_index=n * slices // count) for n in range(count)]


def search(room, count=4, **changes):
    """The rows on each device and the kinds of the plans that are tried; a saved product takes twice the memory."""
    tried = []

    def ask(planned):
        rows = 32 // planned.train.accumulation // 4
        tried.append((planned.train.remat, rows))
        needed = rows * {"none": 3, "products": 2, "full": 1}[planned.train.remat]
        return {"needed": needed, "usable": room} | ({"share of peak": 0.5} if needed <= room else {})

    found = search_plans(config(train__batch_size=32, **changes), devices(count), ask)
    assert [plan["remat"] for plan in found] == [remat for remat, _ in tried]
    assert all((plan["share_of_peak"] == 0.5) == (plan["spare"] >= 0) for plan in found)
    return tried


def test_saving_products_comes_first_and_memory_ends_it():
    assert search(100) == [("products", 1), ("products", 2), ("products", 4), ("products", 8)]
    assert search(4) == [("products", 1), ("products", 2)]  # the second leaves nothing free
    assert search(1.5) == [("products", 1), ("full", 1), ("full", 2)]
    assert search(0.5) == [("products", 1), ("full", 1)]


def test_what_the_config_sets_is_not_tried_otherwise():
    assert search(100, train__remat="none") == [("none", 1), ("none", 2), ("none", 4), ("none", 8)]
    assert search(100, train__accumulation=4) == [("products", 2)]
    assert search(100, train__accumulation=1) == [("products", 8)]
    assert search(100, train__accumulation=32) == []


@pytest.mark.parametrize(
    ("count", "slices", "changes", "mesh"),
    [
        (16, 1, {}, {"data": 1, "fsdp": 16, "tensor": 1, "context": 1}),
        (16, 2, {}, {"data": 2, "fsdp": 8, "tensor": 1, "context": 1}),
        (64, 1, {"data__max_length": 2048}, {"data": 1, "fsdp": 32, "tensor": 1, "context": 2}),
        (64, 1, {"data__max_length": 200}, {"data": 1, "fsdp": 32, "tensor": 2, "context": 1}),
        (12, 1, {}, {"data": 1, "fsdp": 4, "tensor": 3, "context": 1}),
        (16, 1, {"mesh__tensor": 4}, {"data": 1, "fsdp": 4, "tensor": 4, "context": 1, "stationary": 1}),
    ],
)
def test_rows_are_divided_where_there_are_too_few(count, slices, changes, mesh):
    assert plan_mesh(config(train__batch_size=32, **changes), devices(count, slices)) == mesh
