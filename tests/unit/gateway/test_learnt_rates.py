"""The router uses the rates that engines measured, and makes no hand-off that would be slow."""

from __future__ import annotations

import pytest

from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.routing.rates import ALIKE, NEWEST, RENEWED_S, CostRates, LearntRates
from baton.cluster.gateway.routing.router import LINK_TRIAL_SHARE, Path, Route, Router
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest
from baton.engine.core.pace import STALE_S, Line, StepTimes
from baton.engine.core.sampling import SamplingParams
from baton.kv_transfer.protocol.stats import PeerLane

from ...helpers.gateway_service import Clock
from .engine_views import view

GUESSES = CostRates()
PROMPT = [7] * 2000
COMPUTE_S = len(PROMPT) / GUESSES.prefill_tokens_per_s
FAST, SLOW = 1e-6, 1e-3  # seconds to read a token's KV


def lane(peer: str, token_s: float, num_reads: int = 1) -> PeerLane:
    line = Line(0.0, token_s * BLOCK_SIZE)
    return PeerLane(engine_id=peer, transport="t", bytes_per_s=None, is_slow=False, num_reads=num_reads, read_s=line)


def divided(token_s: float, num_reads: int = 1, **decode: int) -> list[EngineView]:
    return [view(0, Role.PREFILL), view(1, Role.DECODE, lanes=[lane("e0", token_s, num_reads)], **decode)]


class Gateway:
    """The router of a gateway."""

    def __init__(self, local: int = 32768, **settings: float) -> None:
        self.clock = Clock()
        self.rates = LearntRates(CostRates(**settings), self.clock)
        self.router = Router(
            "g", rates=self.rates, session_patience_s=0.0, local_prefill_max_tokens=local, clock=self.clock
        )

    def route(self, engines: list[EngineView], tokens: list[int] = PROMPT, pinned_rank: int | None = None) -> Route:
        request = EngineRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams())
        route = self.router.route(engines, self.router.query(request, pinned_rank=pinned_rank))
        assert route is not None
        return route


def test_a_hand_off_that_costs_more_than_computing_is_not_made() -> None:
    assert Gateway().route(divided(FAST)).path is Path.DISAGGREGATED
    route = Gateway().route(divided(SLOW))
    assert (route.hands_off, route.reason) == (False, "slow-handoff")
    assert route.path in (Path.LOCAL_PREFILL, Path.LOCAL_DECODE)


def test_a_cheap_hand_off_is_not_made_if_no_request_gains_by_it() -> None:
    token_s = 0.5 * COMPUTE_S / len(PROMPT)
    assert not Gateway().route(divided(token_s)).hands_off
    prefill, decode = divided(token_s, num_requests_running=60)
    assert not Gateway().route([prefill, decode]).hands_off, "the idle prefill engine should decode, too"
    busy = view(0, Role.PREFILL, num_requests_running=60)
    assert Gateway(decode_request_s=0).route([busy, decode]).hands_off, (
        "computing the prompt anywhere else would delay running answers"
    )


@pytest.mark.parametrize(("busy", "path"), [(0, Path.LOCAL_PREFILL), (1, Path.LOCAL_DECODE)])
def test_without_a_hand_off_the_less_loaded_engine_serves(busy: int, path: Path) -> None:
    engines = divided(SLOW)
    engines[busy] = view(busy, engines[busy].record.role, lanes=engines[1].transfers.lanes, num_requests_running=9)
    assert Gateway().route(engines).path is path


def test_a_decode_engine_that_may_compute_nothing_does_not() -> None:
    assert Gateway(local=0).route(divided(SLOW)).path is Path.LOCAL_DECODE
    prefill, decode = divided(SLOW)
    assert Gateway(local=0).route([prefill, decode], pinned_rank=1).hands_off, "the pinned engine must take part"


def test_a_short_hand_off_is_made_without_comparing() -> None:
    tokens = [7] * 16
    assert Gateway().route(divided(SLOW), tokens).hands_off
    assert not Gateway(slow_handoff_s=0.001).route(divided(SLOW), tokens).hands_off


def test_reads_that_wait_for_a_link_count() -> None:
    token_s = 0.1 * COMPUTE_S / len(PROMPT)
    assert Gateway().route(divided(token_s)).hands_off
    assert not Gateway().route(divided(token_s, num_requests_waiting_for_kv=20)).hands_off


def test_a_link_that_was_judged_slow_is_tried_again_at_little_cost() -> None:
    gateway = Gateway()
    loss_s = SLOW * len(PROMPT)
    gateway.clock.now_s += 0.5 * loss_s / LINK_TRIAL_SHARE
    assert not gateway.route(divided(SLOW)).hands_off
    gateway.clock.now_s += 1.1 * loss_s / LINK_TRIAL_SHARE
    route = gateway.route(divided(SLOW))
    assert (route.path, route.reason) == (Path.DISAGGREGATED, "measuring")
    assert not gateway.route(divided(SLOW)).hands_off, "one trial at a time"
    assert gateway.route(divided(FAST, num_reads=2)).hands_off


def test_a_link_is_not_tried_again_from_an_engine_without_room() -> None:
    gateway = Gateway()
    prefill, decode = divided(SLOW)
    gateway.route([prefill, decode])
    gateway.clock.now_s += 1.1 * SLOW * len(PROMPT) / LINK_TRIAL_SHARE
    assert not gateway.route([view(0, Role.PREFILL, num_blocks_free=0), decode]).hands_off
    assert gateway.route([prefill, decode]).hands_off


def two_readers(first: PeerLane, second: PeerLane) -> list[EngineView]:
    """A prefill engine and two decode engines on different nodes, so that no other pair tells about a link."""
    readers = [view(rank, Role.DECODE, node=f"n{rank}", lanes=[each]) for rank, each in ((1, first), (2, second))]
    return [view(0, Role.PREFILL, node="n0"), *readers]


def test_a_reader_whose_link_was_slow_is_tried_again_although_another_can_read() -> None:
    """Otherwise it would stay idle until the load of the other costs more than the slow link did."""
    gateway = Gateway()
    query = gateway.router.query(EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams()))

    def reader(engines: list[EngineView]) -> int:
        gateway.rates.renew(engines)
        placement = gateway.router.decode_placement(engines, query, engines[0].record)
        assert placement is not None
        return placement.engine.rank

    def at_present(num_reads: int, second: PeerLane) -> list[EngineView]:
        return two_readers(lane("e0", FAST, num_reads), second)

    slow = lane("e0", SLOW)
    loss_s = (SLOW - FAST) * len(PROMPT)
    assert reader(at_present(1, slow)) == 1
    gateway.clock.now_s += 0.9 * loss_s / LINK_TRIAL_SHARE
    assert reader(at_present(2, slow)) == 1, "the trial would cost too much"
    gateway.clock.now_s += 0.2 * loss_s / LINK_TRIAL_SHARE
    assert reader(at_present(3, slow)) == 2
    assert reader(at_present(3, slow)) == 1, "one trial at a time"
    gateway.clock.now_s += 1
    loaded = view(1, Role.DECODE, node="n1", lanes=[lane("e0", FAST, 4)], num_requests_running=9)
    assert reader([*at_present(4, slow)[:1], loaded, at_present(4, lane("e0", FAST, 2))[2]]) == 2


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2)], [(0, 1), (2, 1)], [(0, 3), (0, 1), (0, 2)]])
def test_every_slow_link_is_tried_although_trials_of_another_cost_less(pairs: list[tuple[int, int]]) -> None:
    """The last pair is the slowest: with another one that is always slow, and in the last case with a fast one."""
    gateway = Gateway()
    token_s = dict(zip(reversed(pairs), (2.5e-4, 1e-4, FAST), strict=False))
    num_reads = dict.fromkeys(pairs, 1)
    num_trials = 0
    for number in range(2000):
        gateway.clock.now_s += 5
        sources = [view(rank, Role.PREFILL, node=f"n{rank}") for rank in {source for source, _ in pairs}]
        readers = [
            view(
                rank,
                Role.DECODE,
                node=f"n{rank}",
                lanes=[lane(f"e{pair[0]}", token_s[pair], num_reads[pair]) for pair in pairs if pair[1] == rank],
            )
            for rank in {reader for _, reader in pairs}
        ]
        request = EngineRequest(request_id=str(number), prompt_token_ids=PROMPT, sampling=SamplingParams())
        query = gateway.router.query(request)
        route = gateway.router.route([*sources, *readers], query)
        assert route is not None
        if route.hands_off:
            source = route.placement.engine
            placement = gateway.router.decode_placement([*sources, *readers], query, source)
            assert placement is not None
            num_reads[source.rank, placement.engine.rank] += 1
            num_trials += (source.rank, placement.engine.rank) != (0, 3)
    assert num_reads[pairs[-1]] > 10
    assert num_trials <= 2 * LINK_TRIAL_SHARE * gateway.clock.now_s / (1e-4 * len(PROMPT)), "at little cost"


def test_a_reader_with_more_work_is_no_slow_link() -> None:
    gateway = Gateway()
    query = gateway.router.query(EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams()))
    engines = two_readers(lane("e0", FAST), lane("e0", FAST))
    engines[2] = view(2, Role.DECODE, node="n2", lanes=[lane("e0", FAST)], num_requests_running=1)
    gateway.rates.renew(engines)
    for _ in range(3):
        gateway.clock.now_s += 100 * STALE_S
        placement = gateway.router.decode_placement(engines, query, engines[0].record)
        assert placement is not None
        assert placement.engine.rank == 1


def test_a_prefill_engine_whose_links_were_slow_is_tried_again_although_another_hands_over() -> None:
    gateway = Gateway(slow_handoff_s=10.0)  # no engine decodes what it has read

    def engines(num_reads: int, slow: PeerLane) -> list[EngineView]:
        sources = [view(rank, Role.PREFILL, node=f"n{rank}") for rank in (0, 2)]
        return [*sources, view(1, Role.DECODE, node="n1", lanes=[lane("e0", FAST, num_reads), slow])]

    slow = lane("e2", COMPUTE_S / len(PROMPT))
    assert gateway.route(engines(1, slow)).placement.engine.rank == 0
    gateway.clock.now_s += 0.9 * COMPUTE_S / LINK_TRIAL_SHARE
    assert gateway.route(engines(2, slow)).placement.engine.rank == 0
    gateway.clock.now_s += max(STALE_S, 0.2 * COMPUTE_S / LINK_TRIAL_SHARE)
    tried = gateway.route(engines(3, slow))
    assert (tried.placement.engine.rank, tried.hands_off, tried.reason) == (2, True, "measuring")
    assert gateway.route(engines(3, slow)).placement.engine.rank == 0, "one trial at a time"


def test_a_pair_is_like_others_of_its_nodes_once_its_own_measurement_is_old() -> None:
    gateway = Gateway()

    def reads(first: float, second: float, num_reads: int) -> list[EngineView]:
        lanes = [lane("e0", first), lane("e2", second, num_reads)]
        return [view(0, Role.PREFILL), view(2, Role.PREFILL), view(1, Role.DECODE, lanes=lanes)]

    def seconds(engines: list[EngineView]) -> float:
        gateway.rates.renew(engines)
        return gateway.rates.read_s(engines[2], engines[0].record).at(1000)

    assert seconds(reads(SLOW, SLOW, 1)) == pytest.approx(1.0)
    gateway.clock.now_s += 1
    assert seconds(reads(SLOW, FAST, 2)) == pytest.approx(1.0)
    gateway.clock.now_s += STALE_S
    assert seconds(reads(SLOW, FAST, 3)) == pytest.approx(0.001)


@pytest.mark.parametrize("num_reads", [0, 2])
def test_a_peer_that_was_restarted_under_its_name_has_the_rate_of_its_new_pairing(num_reads: int) -> None:
    """No report in between may have come to this gateway, and the new process may have been read as often."""
    gateway = Gateway()
    assert not gateway.route(divided(SLOW, num_reads)).hands_off
    assert gateway.route(divided(FAST, num_reads)).hands_off


def test_a_slow_link_between_nodes_counts_for_pairs_without_a_new_measurement() -> None:
    gateway, prefill = Gateway(), [view(0, Role.PREFILL), view(2, Role.PREFILL)]
    for number in range(NEWEST + 1):
        lanes = [lane("e0", FAST), lane("e2", FAST if number == 0 else SLOW, number + 1)]
        engines = [*prefill, view(1, Role.DECODE, lanes=lanes)]
        gateway.rates.renew(engines)
        known_s = gateway.rates.read_s(engines[2], prefill[0].record).at(1000)
        gateway.clock.now_s += RENEWED_S
    assert known_s == pytest.approx(1.0)


def test_what_was_measured_at_pairing_counts_for_the_pair_itself_and_against_older_reads() -> None:
    gateway, prefill = Gateway(), [view(0, Role.PREFILL), view(2, Role.PREFILL)]

    def seconds(*lanes: PeerLane) -> list[float]:
        gateway.clock.now_s += RENEWED_S
        reader = view(1, Role.DECODE, lanes=lanes)
        gateway.rates.renew([*prefill, reader])
        return [gateway.rates.read_s(reader, source.record).at(1000) for source in prefill]

    guessed = 1000 / GUESSES.node_tokens_per_s
    assert seconds(lane("e0", SLOW, 0)) == pytest.approx([1.0, guessed]), "another pair may be faster"
    for number in range(NEWEST):
        seconds(lane("e2", SLOW, number + 1))
    assert seconds(lane("e0", FAST, 0), lane("e2", SLOW, NEWEST)) == pytest.approx([0.001, 1.0])


def test_a_pair_that_was_parted_has_no_figure_any_more() -> None:
    gateway, source = Gateway(), view(0, Role.PREFILL)
    for lanes, seconds in ([lane("e0", SLOW, 0)], 1.0), ([lane("e9", SLOW, 0)], 1000 / GUESSES.node_tokens_per_s):
        reader = view(1, Role.DECODE, lanes=lanes)
        gateway.rates.renew([source, reader])
        assert gateway.rates.read_s(reader, source.record).at(1000) == pytest.approx(seconds)


def test_figures_of_links_are_kept_only_of_engines_seen_lately() -> None:
    gateway = Gateway()
    gateway.route(divided(FAST))
    gateway.clock.now_s += STALE_S + RENEWED_S
    gateway.rates.renew([view(5)])
    assert gateway.rates.known == {"e5"}


def steps(prefill_s: float, step_s: float = 0.01, request_s: float = 1e-5) -> StepTimes:
    return StepTimes(Line(0.0, prefill_s), Line(step_s, request_s))


def test_engines_without_a_measurement_are_rated_by_what_others_measured() -> None:
    gateway, slow = Gateway(), 10 / GUESSES.prefill_tokens_per_s
    engines = [view(0), view(1)]
    gateway.rates.renew(engines)
    assert gateway.rates.prefill_s(engines[0], 1000) == pytest.approx(1000 / GUESSES.prefill_tokens_per_s)
    engines = [view(0), view(1, step_times=steps(slow))]
    gateway.clock.now_s += RENEWED_S
    gateway.rates.renew(engines)
    assert [gateway.rates.prefill_s(each, 1000) for each in engines] == pytest.approx([1000 * slow] * 2)


def test_of_two_engines_the_faster_one_stands_for_those_without_a_measurement() -> None:
    gateway, new = Gateway(), view(2)
    gateway.rates.renew([view(0, step_times=steps(1e-3)), view(1, step_times=steps(1e-5)), new])
    assert gateway.rates.prefill_s(new, 1000) == pytest.approx(0.01)


def test_measurements_take_precedence_over_new_settings_at_once() -> None:
    gateway, engines = Gateway(), [view(0, step_times=steps(1e-4, request_s=1e-3)), view(1)]
    gateway.rates.renew(engines)
    guesses = CostRates(prefill_tokens_per_s=1.0, decode_request_s=99.0)
    gateway.rates.reconfigure(guesses)
    gateway.rates.renew(engines)
    assert gateway.rates.prefill_s(engines[1], 1000) == pytest.approx(0.1)
    assert gateway.rates.request_s(engines[1]) == pytest.approx(1e-3 * guesses.answer_tokens)


@pytest.mark.parametrize(("factor", "counts"), [(0.9 * ALIKE, False), (1.5 * ALIKE, True)])
def test_engines_that_measured_nearly_the_same_are_equal(factor: float, counts: bool) -> None:
    gateway, own = Gateway(), steps(1e-4, 0.01, 1e-4)
    other = steps(1e-4 * factor, 0.01 * factor, 1e-4 * factor)
    engines = [view(0, step_times=own), view(1, step_times=own), view(2, step_times=other)]
    gateway.rates.renew(engines)
    for figure in (
        lambda each: gateway.rates.prefill_s(each, 1000),
        gateway.rates.request_s,
        gateway.rates.slowness_s,
    ):
        assert (figure(engines[0]) != figure(engines[2])) is counts


def test_an_engine_that_has_become_the_fastest_has_no_negative_cost() -> None:
    gateway = Gateway()
    gateway.route([view(0, step_times=steps(1e-4, 0.05))], [1])
    faster = view(0, step_times=steps(1e-6, 0.001))
    assert gateway.rates.slowness_s(faster) == 0
    assert gateway.route([faster], [1]).placement.engine.rank == 0


def test_requests_avoid_an_engine_whose_steps_are_slow() -> None:
    engines = [view(0, step_times=steps(1e-4, 0.05)), view(1, step_times=steps(1e-4), num_requests_running=9)]
    assert Gateway().route(engines, [1]).placement.engine.rank == 1


@pytest.mark.parametrize("running", [0, 3])
def test_an_engine_that_has_become_the_fastest_is_chosen(running: int) -> None:
    gateway = Gateway()
    gateway.route([view(0, step_times=steps(1e-4, 0.05))])
    faster = view(0, step_times=steps(1e-4, 0.001), num_requests_running=running)
    assert gateway.rates.slowness_s(faster) == 0
    assert gateway.route([faster], [1]).placement.engine.rank == 0
