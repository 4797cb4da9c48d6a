"""The router counts prefixes of models whose layers keep different parts of a sequence as their engines do."""

from __future__ import annotations

from baton.cluster.contracts import Role
from baton.cluster.gateway.routing.router import Path
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
