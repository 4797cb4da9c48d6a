from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.kernels.activation import Activation
from baton.kernels.linear import cpu
from baton.kernels.moe import (
    ExpertWeights,
    GatedActivation,
    RoutingRule,
    fused_experts,
    pack,
    pack_router,
    reference,
    route,
    router_logits,
)

from .kernel_checks import assert_as_accurate
from .moe_cases import KINDS, in_8_bits, mixture

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_logits_are_not_rounded(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(7, 64).to(dtype)
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)
    bias = torch.randn(7).to(dtype)
    torch.testing.assert_close(router_logits(x, weight, bias).double(), expected + bias, rtol=1e-5, atol=1e-4)


def test_softmax_weights_are_those_of_the_chosen_experts_over_all() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    expert_ids, weights = route(logits, RoutingRule(2))
    assert expert_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    renormalized = route(logits, RoutingRule(2, renormalize=True, scale=3.0))[1]
    torch.testing.assert_close(renormalized, 3.0 * logits[:, [1, 2]].softmax(-1))


def test_a_bias_moves_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 5.0])
    expert_ids, weights = route(logits, RoutingRule(2, scoring="sigmoid"), bias=bias)
    assert expert_ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [2, 1]])


@pytest.mark.parametrize(("group_score", "expected"), [("max", [4, 5]), ("top2", [0, 1])])
def test_experts_come_from_the_best_groups_only(group_score: str, expected: list[int]) -> None:
    logits = torch.tensor([[3.0, 2.9, -9.0, -9.0, 4.0, -5.0]])  # groups (0, 1), (2, 3), (4, 5)
    rule = RoutingRule(2, scoring="sigmoid", num_groups=3, top_groups=1, group_score=group_score)
    assert route(logits, rule)[0].tolist() == [expected]


def test_padding_has_no_experts() -> None:
    expert_ids, weights = route(torch.randn(3, 4), RoutingRule(2), slots=torch.tensor([5, -1, 0]))
    assert (expert_ids >= 0).tolist() == [[True, True], [False, False], [True, True]]
    assert weights[1].tolist() == [0.0, 0.0]
    assert (expert_ids.dtype, weights.dtype) == (torch.int32, torch.float32)


@pytest.mark.parametrize(
    ("rule", "num_experts"),
    [(RoutingRule(3), 2), (RoutingRule(1, num_groups=3), 4), (RoutingRule(3, num_groups=2), 4)],
)
def test_a_rule_that_does_not_fit_the_experts_is_refused(rule: RoutingRule, num_experts: int) -> None:
    with pytest.raises(ValueError, match=f"{num_experts} experts do not fit"):
        route(torch.zeros(1, num_experts), rule)


@pytest.mark.parametrize(
    "keys", [{"top_k": 0}, {"scoring": "tanh"}, {"num_groups": 2, "top_groups": 3}, {"group_score": "mean"}], ids=str
)
def test_a_rule_that_contradicts_itself_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"unknown|must be"):
        RoutingRule(**{"top_k": 1, **keys})  # type: ignore[arg-type]


@pytest.mark.usefixtures("poisoned_outputs")
@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "padding"), [(0, 4, 2, 0), (1, 4, 2, 0), (30, 4, 3, 7), (3, 16, 1, 3)]
)
def test_experts_equal_their_definition(
    num_tokens: int, num_experts: int, top_k: int, padding: int, dtype: torch.dtype, kind: dict[str, bool]
) -> None:
    case = mixture(num_tokens, num_experts, top_k, 32, 24, padding=padding, **kind)
    case = replace(case.to(dtype), weights=case.weights)
    exact = reference.fused_experts(*case.to(torch.float64).inputs)
    *inputs, add_to = case.inputs
    # In 16 bits torch rounds the output of each expert; the reference rounds the sum only.
    result, expected = fused_experts(*inputs, add_to=add_to), reference.fused_experts(*case.inputs)
    assert_as_accurate(result, exact, expected, slack=2.0 if dtype == torch.float32 else 4.0)


def test_the_definition_is_the_formula() -> None:
    case = mixture(1, 3, 1, 8, 4).to(torch.float64)
    expert = int(case.expert_ids[0, 0])
    hidden = case.experts.gate_up[expert] @ case.x[0]
    activation = torch.nn.functional.silu(hidden[0::2]) * hidden[1::2]
    expected = case.add_to[0] + case.weights[0, 0] * (case.experts.down[expert] @ activation)
    *inputs, add_to = case.inputs
    torch.testing.assert_close(fused_experts(*inputs, add_to=add_to)[0], expected)


def test_gates_may_go_through_gelu() -> None:
    case = mixture(1, 3, 1, 8, 4, gelu=True).to(torch.float64)
    expert = int(case.expert_ids[0, 0])
    hidden = case.experts.gate_up[expert] @ case.x[0]
    activation = torch.nn.functional.gelu(hidden[0::2], approximate="tanh") * hidden[1::2]
    expected = case.add_to[0] + case.weights[0, 0] * (case.experts.down[expert] @ activation)
    *inputs, add_to = case.inputs
    torch.testing.assert_close(fused_experts(*inputs, add_to=add_to)[0], expected)
    with pytest.raises(ValueError, match="only silu has a slope"):
        GatedActivation(slope=2.0, gate=Activation.GELU_TANH)


def test_experts_without_gates_are_the_formula() -> None:
    case = mixture(1, 3, 1, 8, 4, gated=False).to(torch.float64)
    expert = int(case.expert_ids[0, 0])
    activation = torch.relu(case.experts.gate_up[expert] @ case.x[0]).square()
    expected = case.add_to[0] + case.weights[0, 0] * (case.experts.down[expert] @ activation)
    *inputs, add_to = case.inputs
    torch.testing.assert_close(fused_experts(*inputs, add_to=add_to)[0], expected)
    with pytest.raises(ValueError, match=r"give \[E, F, H\]"):
        replace(case.experts, gate_up=case.experts.gate_up[:, :3])


def test_an_activation_with_limits_is_the_formula() -> None:
    gates, ups = torch.tensor([9.0, -9.0, 2.0]), torch.tensor([-8.0, 8.0, 3.0])
    given = torch.stack([gates, ups], dim=1).flatten()
    experts = ExpertWeights(
        torch.zeros(1, 6, 4),
        torch.eye(4, 3)[None],
        gate_up_bias=given[None],
        down_bias=torch.tensor([[0.5, 0.0, 0.0, 7.0]]),
        activation=GatedActivation(slope=1.702, limit=7.0, shift=1.0),
    )
    gates, ups = torch.tensor([7.0, -9.0, 2.0]), torch.tensor([-7.0, 7.0, 3.0])
    expected = torch.cat([gates * torch.sigmoid(1.702 * gates) * (ups + 1), torch.zeros(1)])
    expected = 2.0 * (expected + torch.tensor([0.5, 0.0, 0.0, 7.0]))
    result = fused_experts(torch.ones(1, 4), experts, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[2.0]]))
    torch.testing.assert_close(result[0], expected)


@pytest.mark.parametrize(("hidden_size", "width", "gated"), [(256, 128, True), (144, 200, True), (144, 200, False)])
def test_fp8_experts_equal_their_dequantized_weights(hidden_size: int, width: int, gated: bool) -> None:
    case = mixture(9, 3, 2, hidden_size, width, gated=gated)
    parts = case.experts.parts
    narrow = in_8_bits(case.experts)
    assert narrow.gate_up_scale is not None
    assert narrow.down_scale is not None
    for expert in range(3):
        gate_up, down = narrow.matrices(expert, torch.float32)
        for row in (0, 1, parts * width - 2, parts * width - 1):
            for column in (0, hidden_size - 1):
                scale = narrow.gate_up_scale[expert, row // parts // 128 * parts + row % parts, column // 128]
                assert gate_up[row, column] == narrow.gate_up[expert, row, column].float() * scale
        last = narrow.down_scale[expert, -1, -1]
        assert down[-1, -1] == narrow.down[expert, -1, -1].float() * last
    wide = [narrow.matrices(expert, torch.float32) for expert in range(3)]
    matrices = (torch.stack(of_each) for of_each in zip(*wide, strict=True))
    plain = ExpertWeights(*matrices, activation=case.experts.activation)
    inputs = case.expert_ids, case.weights
    torch.testing.assert_close(fused_experts(case.x, narrow, *inputs), fused_experts(case.x, plain, *inputs))
    with pytest.raises(ValueError, match="give scales for float8_e4m3fn"):
        ExpertWeights(narrow.gate_up, narrow.down, activation=narrow.activation)
    with pytest.raises(ValueError, match="scales are"):
        replace(narrow, down_scale=narrow.down_scale[:, :, :-1])


@pytest.mark.parametrize("kind", [{}, {"like_gpt_oss": True}, {"gated": False}], ids=["plain", "biases", "no gates"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_experts_are_as_accurate_and_a_token_has_the_same_bits_alone(
    dtype: torch.dtype, kind: dict[str, bool]
) -> None:
    case = mixture(40, 3, 2, 64, 96, **kind)
    case = replace(case.to(dtype), weights=case.weights)
    exact, expected = (reference.fused_experts(*each.inputs) for each in (case.to(torch.float64), case))
    packed = pack(case.experts)
    if cpu.pack(torch.zeros(32, 2, dtype=dtype)) is not None:
        assert packed.gate_up_in_panels
        assert packed.down_in_panels
    result = fused_experts(case.x, packed, case.expert_ids, case.weights, add_to=case.add_to.clone())
    assert_as_accurate(result, exact, expected, slack=2.0 if dtype == torch.float32 else 4.0)
    if packed.gate_up_in_panels:
        for token in (slice(0, 1), slice(7, 9)):
            alone = case.x[token], packed, case.expert_ids[token], case.weights[token]
            assert torch.equal(fused_experts(*alone, add_to=case.add_to[token].clone()), result[token])


def test_experts_that_fill_no_panels_stay_as_they_are() -> None:
    experts = mixture(1, 3, 1, 32, 24).experts
    before = experts.gate_up.clone()
    assert not pack(experts).gate_up_in_panels
    assert torch.equal(experts.gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_router_has_the_same_logits(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(7, 64).to(dtype)
    bias = torch.randn(7).to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    logits = router_logits(x, pack_router(weight), bias)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


def test_the_output_of_experts_is_added_in_place() -> None:
    case = mixture(5, 3, 2, 16, 8)
    *inputs, add_to = case.inputs
    assert fused_experts(*inputs, add_to=add_to) is add_to
    torch.testing.assert_close(add_to, case.add_to + fused_experts(*inputs))


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = mixture(5, 3, 2, 16, 8)
    experts = case.experts
    with pytest.raises(ValueError, match=r"give \[T, 16\]"):
        fused_experts(case.x[:, :15], experts, case.expert_ids, case.weights)
    with pytest.raises(ValueError, match=r"give \[5, K\] each"):
        fused_experts(case.x, experts, case.expert_ids[:4], case.weights)
    with pytest.raises(ValueError, match=r"give \[E, 2 F, H\] and \[E, H, F\]"):
        ExpertWeights(experts.gate_up[:, :15], experts.down)
    with pytest.raises(ValueError, match=r"down_bias is \[3, 8\]: give \[3, 16\]"):
        ExpertWeights(experts.gate_up, experts.down, down_bias=torch.zeros(3, 8))
