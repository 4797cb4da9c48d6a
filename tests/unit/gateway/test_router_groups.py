"""The router counts prefixes of models whose layers keep different parts of a sequence as their engines do."""

from __future__ import annotations

import struct
from collections.abc import Collection

from hypothesis import example, given
from hypothesis import strategies as st

from baton.cluster.cached_blocks import CachedBlocks, FoundPrefix
from baton.cluster.contracts import Role
from baton.cluster.gateway.routing.router import Path
from baton.engine.core.block_log import BlocksCached, GroupBlocks, HitRule
from baton.engine.core.layout import BLOCK_SIZE, CHECKPOINT_TOKENS

from .engine_views import view
from .router_requests import PROMPT, rank_of, route, router, wanted

NEXT_TURN = [*PROMPT, 1]


def test_an_engine_that_has_lost_its_checkpoints_is_not_preferred_for_its_blocks() -> None:
    lost, kept = view(0, cached=PROMPT, checkpoints=[]), view(1, cached=PROMPT, checkpoints=PROMPT)
    for number in range(20):
        assert rank_of(router(), [lost, kept], NEXT_TURN, f"{number}") == 1
    chosen = route(router(), [lost, kept], NEXT_TURN)
    assert chosen.placement.uncached == len(NEXT_TURN) - CHECKPOINT_TOKENS
    alone = route(router(), [lost], NEXT_TURN)
    assert (alone.placement.uncached, alone.reason) == (len(NEXT_TURN), "least-loaded")


def test_a_request_on_its_way_leaves_checkpoints_until_the_engine_says_which() -> None:
    chooser, nothing = router(), view(0, checkpoints=[])
    chooser.loads.sent(route(chooser, [nothing], PROMPT).placement)
    assert route(chooser, [nothing], NEXT_TURN).placement.uncached == len(NEXT_TURN) - CHECKPOINT_TOKENS
    reported = view(0, cached=PROMPT, checkpoints=[])
    assert route(chooser, [reported], NEXT_TURN).placement.uncached == len(NEXT_TURN)


def test_a_decode_engine_that_has_the_blocks_needs_only_the_state_of_a_hand_off() -> None:
    prefill = view(0, Role.PREFILL, checkpoints=[])
    decode = [view(1, Role.DECODE, checkpoints=[]), view(2, Role.DECODE, cached=PROMPT, checkpoints=[])]
    chosen = route(router(), [prefill, *decode], NEXT_TURN)
    assert chosen.path is Path.DISAGGREGATED, "without a checkpoint, a decode engine has to compute all of the prompt"
    placements = [
        router(network_tokens_per_s=BLOCK_SIZE, node_tokens_per_s=BLOCK_SIZE).decode_placement(
            decode, wanted(NEXT_TURN, f"{number}"), prefill.record
        )
        for number in range(10)
    ]
    assert {placement.engine.rank for placement in placements if placement} == {2}


NUM_BLOCKS = 10  # of a prompt, named 0, 1, ...
RULES = st.one_of(
    st.just(HitRule()),
    st.builds(lambda count: HitRule(window_blocks=count), st.integers(0, 4)),
    st.builds(lambda count: HitRule(checkpoint_blocks=count), st.integers(1, 4)),
)
SETS = st.frozensets(st.integers(0, NUM_BLOCKS - 1))


def allows(rule: HitRule, has: Collection[int], depth: int) -> bool:
    """Return whether a group with these blocks allows a hit of `depth` blocks, by the definition of its rule."""
    if rule.checkpoint_blocks is not None:
        return depth % rule.checkpoint_blocks == 0 and (not depth or depth - 1 in has)
    first = 0 if rule.window_blocks is None else max(0, depth - rule.window_blocks)
    return all(block in has for block in range(first, depth))


@given(SETS, st.lists(st.tuples(RULES, SETS), min_size=1, max_size=3))
@example(  # each group in turn rules out what the others leave
    frozenset(range(NUM_BLOCKS)),
    [(HitRule(window_blocks=1), frozenset({7, 4, 0})), (HitRule(checkpoint_blocks=2), frozenset({5, 1}))],
)
def test_a_hit_is_the_longest_that_every_group_allows(
    first: frozenset[int], others: list[tuple[HitRule, frozenset[int]]]
) -> None:
    def packed(blocks: frozenset[int]) -> bytes:
        return struct.pack(f"<{len(blocks)}Q", *blocks)

    mirror = CachedBlocks(NUM_BLOCKS * (1 + len(others)))
    rules = [HitRule(), *(rule for rule, _ in others)]
    mirror.apply(BlocksCached(1, packed(first), rules=rules, groups=[GroupBlocks(packed(has)) for _, has in others]))
    groups = [(HitRule(), first), *others]
    depths = [depth for depth in range(NUM_BLOCKS + 1) if all(allows(rule, has, depth) for rule, has in groups)]
    assert mirror.find(range(NUM_BLOCKS)) == FoundPrefix(max(depths))
