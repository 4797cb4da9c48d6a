"""One fleet, one policy, one list of requests: what clients and engines see."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.routing.load import Placement
from baton.engine.core.messages import EngineOutput, EngineRequest, FinishReason
from baton.engine.core.sampling import SamplingParams

from .engines import Speed, VirtualConnector, VirtualEngine, VirtualTime, make_config, make_record
from .policies import OF_TIERS, POLICIES, Policy
from .tiers import VirtualTiers
from .traffic import Arrival


@dataclass(frozen=True)
class Fleets:
    """Either unified engines, or prefill and decode engines."""

    num_unified: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    num_blocks: int = 8192  # of each engine
    num_gateways: int = 4
    num_host_blocks: int = 0  # of the tiers of each engine; 0: no such tier
    num_disk_blocks: int = 0

    @property
    def num_tier_blocks(self) -> int:
        return self.num_host_blocks + self.num_disk_blocks


class Report(msgspec.Struct, frozen=True):
    """Times in ms of virtual time."""

    policy: str
    num_requests: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float  # from the first token to the last, over the tokens behind the first
    tpot_p99_ms: float
    hit_rate: float  # prompt tokens found in the prefix cache, or restored, where the prompt was read
    restored_rate: float  # prompt tokens restored
    imbalance: float  # prompt tokens computed by the busiest engine over the mean of those that read prompts


@dataclass
class _Served:
    """A request on its way."""

    arrival: Arrival
    gateway: int
    request: EngineRequest
    placement: Placement
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached: int = 0


class _Gateway:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.outstanding: Counter[int] = Counter()  # by rank


class Replay:
    """`run` once."""

    def __init__(self, fleets: Fleets, policy: str, speed: Speed) -> None:
        self._time = VirtualTime()
        self._policy = policy
        make_policy = (POLICIES | OF_TIERS)[policy]
        self._gateways = [_Gateway(make_policy(number, self._time)) for number in range(fleets.num_gateways)]
        counts = {Role.UNIFIED: fleets.num_unified, Role.PREFILL: fleets.num_prefill, Role.DECODE: fleets.num_decode}
        config = make_config(fleets.num_blocks)
        offers: dict[bytes, VirtualConnector] = {}
        self._engines: list[VirtualEngine] = []
        for role in [role for role, count in counts.items() for _ in range(count)]:
            record = make_record(len(self._engines), role, fleets.num_blocks, fleets.num_tier_blocks)
            connector, tiers = VirtualConnector(self._time, speed, offers), self._tiers(fleets, speed)
            engine = VirtualEngine(record, config, self._time, speed, connector, self._on_output, tiers)
            if tiers is not None:
                tiers.on_event = engine.wake
            self._engines.append(engine)
        self._served: dict[str, _Served] = {}

    def _tiers(self, fleets: Fleets, speed: Speed) -> VirtualTiers | None:
        if not fleets.num_tier_blocks:
            return None
        return VirtualTiers(self._time, speed, fleets.num_host_blocks, fleets.num_disk_blocks)

    def run(self, arrivals: Sequence[Arrival]) -> Report:
        for index, arrival in enumerate(arrivals):
            self._time.after(arrival.at_s, functools.partial(self._arrive, index, arrival))
        self._time.run()
        return self._report()

    def _arrive(self, index: int, arrival: Arrival) -> None:
        number = index % len(self._gateways)
        sampling = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        request = EngineRequest(request_id=f"r{index}", prompt_token_ids=arrival.prompt, sampling=sampling)
        placement = self._gateways[number].policy.reader(self._views(number), request)
        hands_off = placement.engine.role is Role.PREFILL
        request = msgspec.structs.replace(request, keep_kv=hands_off)
        self._served[request.request_id] = _Served(arrival, number, request, placement)
        self._send(request, number, placement)

    def _views(self, number: int) -> list[EngineView]:
        outstanding = self._gateways[number].outstanding
        return [engine.view(outstanding[engine.record.rank], number) for engine in self._engines]

    def _send(self, request: EngineRequest, number: int, placement: Placement) -> None:
        gateway, rank = self._gateways[number], placement.engine.rank
        gateway.policy.sent(placement)
        gateway.outstanding[rank] += 1
        self._engines[rank].add(request)

    def _on_output(self, output: EngineOutput) -> None:
        served = self._served[output.request_id]
        gateway, now_s = self._gateways[served.gateway], self._time()
        assert output.error is None, output.error
        self._engines[served.placement.engine.rank].heard_by(served.gateway)
        if not served.first_s:
            served.first_s, served.num_cached = now_s, output.num_cached_tokens
            gateway.policy.read(served.placement)
        served.last_s = now_s
        if output.finish_reason is None:
            return
        gateway.policy.ended(served.placement)
        gateway.outstanding[served.placement.engine.rank] -= 1
        if output.finish_reason is FinishReason.HANDOFF:
            request = msgspec.structs.replace(
                served.request, keep_kv=False, kv_source=output.kv_source, output_token_ids=output.token_ids
            )
            source = served.placement.engine
            placement = gateway.policy.writer(self._views(served.gateway), request, source)
            served.placement = placement
            self._send(request, served.gateway, placement)

    def _report(self) -> Report:
        served = list(self._served.values())
        ttft_ms = [1e3 * (each.first_s - each.arrival.at_s) for each in served]
        tpot_ms = [
            1e3 * (each.last_s - each.first_s) / (each.arrival.output_tokens - 1)
            for each in served
            if each.arrival.output_tokens > 1
        ]
        num_prompt_tokens = sum(len(each.arrival.prompt) for each in served)
        work = [engine.prompt_tokens for engine in self._engines if engine.record.role is not Role.DECODE]
        return Report(
            policy=self._policy,
            num_requests=len(served),
            ttft_mean_ms=statistics.fmean(ttft_ms),
            ttft_p50_ms=statistics.median(ttft_ms),
            ttft_p99_ms=_p99(ttft_ms),
            tpot_mean_ms=statistics.fmean(tpot_ms) if tpot_ms else 0.0,
            tpot_p99_ms=_p99(tpot_ms),
            hit_rate=sum(each.num_cached for each in served) / num_prompt_tokens,
            restored_rate=sum(engine.restored_tokens for engine in self._engines) / num_prompt_tokens,
            imbalance=max(work) / statistics.fmean(work) if any(work) else 1.0,
        )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[round(0.99 * (len(values) - 1))] if values else 0.0
