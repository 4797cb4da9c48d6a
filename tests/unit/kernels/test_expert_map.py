"""The expert map: the reference against hand-written results, and the kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.kernels.expert_map import ExpertMap, map_experts, reference

from ...helpers.aot import compile_for_h200


def table_of(places: list[list[int]], device: torch.device | str = "cpu") -> ExpertMap:
    table = ExpertMap.empty(len(places), max(map(len, places)), device)
    table.write(places)
    return table


def test_replicas_take_turns_by_token_and_places_elsewhere_are_none() -> None:
    table = table_of([[0], [1, 4], [2], [3, 5]])
    ids = torch.tensor([[1, 0], [1, 3], [3, 2], [-1, -1]], dtype=torch.int32)
    assert map_experts(ids, table, places=range(6), counted=range(4)).tolist() == [[1, 0], [4, 5], [3, 2], [-1, -1]]
    assert map_experts(ids, table, places=range(3, 6), counted=range(0)).tolist() == [
        [-1, -1],
        [1, 2],
        [0, -1],
        [-1, -1],
    ]


def test_only_counted_tokens_add_to_the_loads() -> None:
    table = table_of([[0], [1], [2]])
    ids = torch.tensor([[0, 1], [1, 2], [-1, -1], [2, 1]], dtype=torch.int32)
    map_experts(ids, table, places=range(3), counted=range(1, 4))
    map_experts(ids, table, places=range(3), counted=range(0, 1))
    assert table.loads.tolist() == [1, 3, 2]


def test_ids_that_are_no_experts_become_minus_one() -> None:
    table = table_of([[1], [0]])
    ids = torch.tensor([[2, 1], [-(2**31), 2**31 - 1]], dtype=torch.int32)
    assert map_experts(ids, table, places=range(2), counted=range(2)).tolist() == [[-1, 0], [-1, -1]]
    assert table.loads.tolist() == [0, 1]


def test_a_table_is_rewritten_in_place() -> None:
    table = table_of([[0, 2], [1, 3]])
    address = table.places.data_ptr()
    table.write([[3], [0, 1]])
    assert table.places.data_ptr() == address
    ids = torch.tensor([[0], [1], [1]], dtype=torch.int32)
    assert map_experts(ids, table, places=range(4), counted=range(0)).tolist() == [[3], [1], [0]]


@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (1, 8), (37, 6), (300, 8)])
def test_the_kernel_agrees_with_the_definition(num_tokens: int, top_k: int, triton_device: torch.device) -> None:
    gpu: Any = pytest.importorskip("baton.kernels.expert_map.gpu")
    generator = torch.Generator().manual_seed(num_tokens)
    places = [[e] if e % 3 else [e, 16 + e, 32 + e] for e in range(16)]
    ids = torch.randint(-2, 20, (num_tokens, top_k), generator=generator, dtype=torch.int32)
    expected_table, table = table_of(places), table_of(places, triton_device)
    for span, counted in ((range(48), range(num_tokens)), (range(16, 32), range(3, 20))):
        wide = torch.full((num_tokens, 2 * top_k), 7, dtype=torch.int32, device=triton_device)
        wide[:, :top_k] = ids.to(triton_device)
        result = gpu.map_experts(wide[:, :top_k], table, span, counted)
        assert torch.equal(result.cpu(), reference.map_experts(ids, expected_table, span, counted))
        assert table.loads.tolist() == expected_table.loads.tolist()


def test_the_kernel_compiles_for_the_device_without_spills() -> None:
    gpu: Any = pytest.importorskip("baton.kernels.expert_map.gpu")
    pointers = {"expert_ids": "*i32", "places": "*i32", "counts": "*i32", "loads": "*i64", "out": "*i32"}
    numbers = ("num_experts", "num_tokens", "ids_stride", "first", "num_places", "counted_from", "counted_to")
    compiled = compile_for_h200(
        gpu.map_experts_kernel,
        {**pointers, **dict.fromkeys(numbers, "i32")},
        {"TOP_K": 8, "REPLICAS": 4, "BLOCK": gpu.BLOCK},
    )
    assert compiled.spill_bytes == 0
