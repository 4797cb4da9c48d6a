"""The GPU's MoE routing, and its tiles of rows by expert: interpreted in CI, compiled on machines with a GPU."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.moe import RoutingRule, reference, router_logits

from .moe_cases import mixture

pytest.importorskip("triton")
from baton.kernels.moe import gpu
from baton.kernels.moe.gpu import alignment

pytestmark = pytest.mark.exhaustive

RULES = {
    "softmax": (RoutingRule(3), 12),
    "renormalized": (RoutingRule(4, renormalize=True, scale=2.5), 8),
    "one expert": (RoutingRule(1), 2),
    "all experts": (RoutingRule(5), 5),
    "best groups": (RoutingRule(3, num_groups=4, top_groups=2, scale=16.0), 20),
    "sigmoid": (RoutingRule(3, scoring="sigmoid", renormalize=True), 10),
    "sigmoid, groups": (RoutingRule(4, "sigmoid", True, 2.5, 8, 4, "top2"), 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_routing_equals_its_definition(
    name: str, num_tokens: int, dtype: torch.dtype, triton_device: torch.device
) -> None:
    rule, num_experts = RULES[name]
    wide = torch.randn(num_tokens, num_experts + 3, dtype=torch.float64).to(triton_device, dtype)
    logits = wide[:, :num_experts]
    bias = torch.randn(num_experts, device=triton_device) if rule.scoring == "sigmoid" else None
    slots = torch.tensor([3, -1, 0, 7, -1], device=triton_device)[:num_tokens]
    scale = torch.randn(num_experts, device=triton_device) if name == "renormalized" else None
    expert_ids, weights = gpu.route(logits, rule, bias=bias, expert_scale=scale, slots=slots)
    expected_ids, expected_weights = reference.route(logits, rule, bias=bias, expert_scale=scale, slots=slots)
    assert (expert_ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(expert_ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_of_equal_scores_the_first_expert_wins(triton_device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]], device=triton_device)
    assert gpu.route(logits, RoutingRule(3), bias=None, expert_scale=None, slots=None)[0].tolist() == [[1, 2, 4]]
    assert reference.route(logits, RoutingRule(3))[0].tolist() == [[1, 2, 4]]


def test_many_tokens_are_routed_several_to_a_program(triton_device: torch.device) -> None:
    logits = torch.randn(515, 6, device=triton_device)
    ids, weights = gpu.route(logits, RoutingRule(2, renormalize=True), bias=None, expert_scale=None, slots=None)
    expected_ids, expected_weights = reference.route(logits, RoutingRule(2, renormalize=True))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("block_rows", [1, 4, 16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "padding"),
    [(1, 4, 1, 0), (40, 6, 3, 0), (40, 6, 3, 11), (3, 6, 2, 3), (70, 3, 1, 0)],
)
def test_tiles_hold_every_pair_once_by_expert_in_order(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    padding: int,
    block_rows: int,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alignment, "CHUNK_TOKENS", 16)
    expert_ids = mixture(num_tokens, num_experts, top_k, 4, 4, padding=padding).expert_ids.to(triton_device)
    check_tiles(expert_ids, num_experts, block_rows)


@pytest.mark.parametrize("num_tokens", [40, 70, 129])
def test_many_experts_are_counted_chunk_by_chunk(
    num_tokens: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {40: 16, 70: 16, 129: 32}[num_tokens]
    monkeypatch.setattr(alignment, "COUNTED_BY_ALL", 16 * 4 * 8)
    assert alignment.chunk_tokens(num_tokens, places=4, experts=8) == expected
    check_tiles(mixture(num_tokens, 6, 3, 4, 4, padding=3).expert_ids.to(triton_device), 6, 4)


@pytest.mark.parametrize(
    ("num_tokens", "experts", "places", "chunk"),
    [
        *((64, 512, 16, 64), (256, 512, 16, 64), (1000, 512, 16, 128), (5000, 512, 16, 1024)),
        *((1, 128, 8, 16), (512, 128, 8, 512), (16384, 64, 8, 1024)),
    ],
)
def test_tokens_of_a_chunk(num_tokens: int, experts: int, places: int, chunk: int) -> None:
    assert alignment.chunk_tokens(num_tokens, places, experts) == chunk


def test_a_token_may_have_an_expert_twice(triton_device: torch.device) -> None:
    check_tiles(torch.tensor([[2, 2, 0], [0, 2, 0]], dtype=torch.int32, device=triton_device), 4, 2)


def check_tiles(expert_ids: torch.Tensor, num_experts: int, block_rows: int) -> None:
    made = alignment.align(expert_ids, num_experts, block_rows)
    flat = expert_ids.flatten().tolist()
    expected_order = sorted((p for p in range(len(flat)) if flat[p] >= 0), key=lambda p: (flat[p], p))
    expected_table = []
    for expert in range(num_experts):
        rows = [row for row, pair in enumerate(expected_order) if flat[pair] == expert]
        expected_table += [[expert, row, rows[-1] + 1] for row in rows[::block_rows]]
    assert made.order[: len(expected_order)].tolist() == expected_order
    assert made.count.item() == len(expected_table) <= made.most
    assert made.table[: len(expected_table)].tolist() == expected_table


@pytest.mark.parametrize("counts", [[9, 0, 0], [3, 3, 3], [1, 4, 4], [2, 7, 0], [8, 1, 0]])
@pytest.mark.parametrize("block_rows", [1, 2, 4, 16])
def test_no_routing_has_more_tiles_than_are_allocated(counts: list[int], block_rows: int) -> None:
    made = sum(-(-count // block_rows) for count in counts)
    assert made <= alignment.most_tiles(sum(counts), len(counts), block_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 3000])
def test_router_logits_keep_float32_on_a_device(num_tokens: int, with_bias: bool) -> None:
    x, weight = (torch.randn(rows, 2048, device="cuda").bfloat16() for rows in (num_tokens, 128))
    bias = torch.randn(128, device="cuda").bfloat16() if with_bias else None
    logits = router_logits(x, weight, bias)
    assert logits.dtype == torch.float32
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-3)
