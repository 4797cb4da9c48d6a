from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_as_accurate
from moe_cases import mixture

from baton.kernels.moe import RoutingRule, fused_experts, reference, route, router_logits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_router_logits_are_not_rounded(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(7, 64).to(dtype)
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


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


def test_padding_goes_to_no_expert() -> None:
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "padding"), [(0, 4, 2, 0), (1, 4, 2, 0), (30, 4, 3, 7), (3, 16, 1, 3)]
)
def test_experts_equal_their_definition(
    num_tokens: int, num_experts: int, top_k: int, padding: int, dtype: torch.dtype
) -> None:
    case = mixture(num_tokens, num_experts, top_k, 32, 24, padding=padding)
    tensors = tuple(t.to(dtype) if t.is_floating_point() and t is not case.weights else t for t in case.tensors)
    exact = reference.fused_experts(*(t.double() if t.is_floating_point() else t for t in tensors))
    *inputs, add_to = tensors
    # Torch's products in a short type round what each expert gives; the reference rounds only the sum.
    result, expected = fused_experts(*inputs, add_to=add_to.clone()), reference.fused_experts(*tensors)
    assert_as_accurate(result, exact, expected, slack=2.0 if dtype == torch.float32 else 4.0)


def test_the_definition_is_the_formula() -> None:
    case = mixture(1, 3, 1, 8, 4).to(torch.float64)
    expert = int(case.expert_ids[0, 0])
    hidden = case.gate_up[expert] @ case.x[0]
    activation = torch.nn.functional.silu(hidden[0::2]) * hidden[1::2]
    expected = case.add_to[0] + case.weights[0, 0] * (case.down[expert] @ activation)
    torch.testing.assert_close(fused_experts(*case.tensors[:-1], add_to=case.add_to.clone())[0], expected)


def test_what_the_experts_give_is_added_in_place() -> None:
    case = mixture(5, 3, 2, 16, 8)
    *inputs, add_to = case.tensors
    assert fused_experts(*inputs, add_to=add_to) is add_to
    torch.testing.assert_close(add_to, case.add_to + fused_experts(*inputs))


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = mixture(5, 3, 2, 16, 8)
    with pytest.raises(ValueError, match=r"give \[T, H\], \[E, 2 F, H\] and \[E, H, F\]"):
        fused_experts(case.x[:, :15], case.gate_up, case.down, case.expert_ids, case.weights)
    with pytest.raises(ValueError, match=r"give \[T, H\]"):
        fused_experts(case.x, case.gate_up[:, :15], case.down, case.expert_ids, case.weights)
    with pytest.raises(ValueError, match=r"give \[5, K\] each"):
        fused_experts(case.x, case.gate_up, case.down, case.expert_ids[:4], case.weights)
