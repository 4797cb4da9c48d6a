"""The router: its logits in float32, and in one kernel the scores, groups and best experts of each token.

[tokens, groups, members of a group]   both filled up to powers of two with experts that do not exist
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.launch import cdiv, next_power_of_2
from baton.kernels.linear.gpu import Method, fitting_method, linear, options_for
from baton.kernels.moe.experts import RoutingRule
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous

LOWEST = tl.constexpr(float("-inf"))


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `baton.kernels.moe.router_logits`. The result keeps float32: rounded logits would choose other experts."""
    num_tokens, depth = x.shape
    num_experts = weight.shape[0]
    options = options_for(num_tokens, num_experts, depth, x.device, gated=False)
    if fitting_method(options, x, weight) is Method.LIBRARY:
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)
    out = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
    return linear(x, weight, bias, norm=None, add_to=None, out=out, activation=None, options=options)


def route(
    logits: Tensor, rule: RoutingRule, *, bias: Tensor | None, expert_scale: Tensor | None, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `baton.kernels.moe.route`."""
    num_tokens, num_experts = logits.shape
    expert_ids = torch.empty((num_tokens, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return expert_ids, weights
    group_size = num_experts // rule.num_groups
    padded = next_power_of_2(rule.num_groups) * next_power_of_2(group_size)
    block_tokens = max(1, 512 // padded) if num_tokens > 512 else 1
    route_kernel[(cdiv(num_tokens, block_tokens),)](
        logits,
        bias,
        expert_scale,
        slots,
        expert_ids,
        weights,
        num_tokens,
        logits.stride(0),
        rule.scale,
        GROUPS=rule.num_groups,
        GROUP_SIZE=group_size,
        TOP_GROUPS=rule.top_groups,
        TOP_TWO=rule.group_score == "top2",
        TOP_K=rule.top_k,
        SIGMOID=rule.scoring == "sigmoid",
        RENORMALIZE=rule.renormalize,
        GROUPS_PADDED=next_power_of_2(rule.num_groups),
        MEMBERS=next_power_of_2(group_size),
        PLACES=next_power_of_2(rule.top_k),
        BLOCK_TOKENS=block_tokens,
        num_warps=1,
        **launch_options(),
    )
    return expert_ids, weights


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits,  # [T, E]
    bias,  # [E] float32 or None
    expert_scale,  # [E] float32 or None
    slots,  # [T] int64 or None
    expert_ids,  # [T, TOP_K] int32
    weights,  # [T, TOP_K] float32
    num_tokens,
    logits_stride,
    scale,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    MEMBERS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    let_next_start()
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    here = token < num_tokens
    group, member = tl.arange(0, GROUPS_PADDED), tl.arange(0, MEMBERS)
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    exists = ((group[:, None] < GROUPS) & (member[None, :] < GROUP_SIZE))[None]
    if bias is not None:
        shift = tl.load(bias + expert[None], mask=exists, other=0.0)

    wait_for_previous()
    rows = logits + token.to(tl.int64)[:, None, None] * logits_stride
    logit = tl.load(rows + expert[None], mask=here[:, None, None] & exists, other=0.0).to(tl.float32)
    logit = tl.where(exists, logit, LOWEST)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(tl.max(logit, 2), 1)[:, None, None])
        score = powers / tl.sum(tl.sum(powers, 2), 1)[:, None, None]
    choice = score
    if bias is not None:
        choice += shift
    choice = tl.where(exists, choice, LOWEST)
    if GROUPS > 1:
        choice = _of_best_groups(choice, group, member, GROUPS, TOP_GROUPS, TOP_TWO)

    EXPERTS: tl.constexpr = GROUPS_PADDED * MEMBERS
    score, choice = tl.reshape(score, [BLOCK_TOKENS, EXPERTS]), tl.reshape(choice, [BLOCK_TOKENS, EXPERTS])
    column, expert = tl.arange(0, EXPERTS)[None, :], tl.reshape(expert, [1, EXPERTS])
    place = tl.arange(0, PLACES)[None, :]
    best_ids = tl.zeros([BLOCK_TOKENS, PLACES], tl.int32)
    best_scores = tl.zeros([BLOCK_TOKENS, PLACES], tl.float32)
    for k in tl.static_range(TOP_K):
        best = column == tl.argmax(choice, 1)[:, None]
        best_ids = tl.where(place == k, tl.sum(tl.where(best, expert, 0), 1)[:, None], best_ids)
        best_scores = tl.where(place == k, tl.sum(tl.where(best, score, 0.0), 1)[:, None], best_scores)
        choice = tl.where(best, LOWEST, choice)
    if RENORMALIZE:
        best_scores /= tl.sum(best_scores, 1)[:, None]
    best_scores *= scale
    if expert_scale is not None:
        best_scores *= tl.load(expert_scale + best_ids)
    if slots is not None:
        padding = tl.load(slots + token, mask=here, other=-1)[:, None] < 0
        best_ids, best_scores = tl.where(padding, -1, best_ids), tl.where(padding, 0.0, best_scores)
    to = token[:, None] * TOP_K + place
    kept = here[:, None] & (place < TOP_K)
    tl.store(expert_ids + to, best_ids, mask=kept)
    tl.store(weights + to, best_scores, mask=kept)


@triton.jit
def _of_best_groups(choice, group, member, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_TWO: tl.constexpr):
    """Return `choice` [tokens, groups, members] with the lowest value wherever the group is not among the best."""
    best = tl.max(choice, 2)
    if TOP_TWO:
        rest = tl.where(member[None, None, :] == tl.argmax(choice, 2)[:, :, None], LOWEST, choice)
        best += tl.max(rest, 2)
    best = tl.where((group < GROUPS)[None, :], best, LOWEST)
    kept = tl.zeros_like(best) > 0
    for _ in tl.static_range(TOP_GROUPS):
        first = group[None, :] == tl.argmax(best, 1)[:, None]
        kept = kept | first
        best = tl.where(first, LOWEST, best)
    return tl.where(kept[:, :, None], choice, LOWEST)
