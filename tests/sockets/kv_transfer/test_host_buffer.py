"""Hand-offs through host memory: between processes over NIXL, between engines, and without free slots."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.connector import (
    BlocksReleased,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
)
from baton.engine.core.messages import EngineRequest, FinishReason
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.core.sampling import SamplingParams
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.connector import TransferSettings
from baton.kv_transfer.errors import NotRegistrable, TransportError
from baton.kv_transfer.protocol.messages import DigestMode
from baton.kv_transfer.protocol.ticket import Ticket
from baton.kv_transfer.settings import LocalEngine
from baton.kv_transfer.staging import host_buffer
from baton.kv_transfer.staging.host_buffer import HostBufferConnector, open_connector
from baton.kv_transfer.staging.slots import StagingCopier

from ...helpers.checkpoints import write_checkpoint
from ...helpers.host_buffer_harness import BY_HOST, LAYOUT, ME, PATIENCE_S, SLOTS, Inner, Station, wait_until
from .engine_process import EngineProcess
from .group_engines import GroupEngine

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120)]

PROVEN = BY_HOST.model_copy(update={"digest": DigestMode.VERIFY})
DIRECT = TransferSettings(buffer="device")


@pytest.fixture(
    scope="module",
    params=[(PROVEN, PROVEN), (BY_HOST, DIRECT), (DIRECT, BY_HOST)],
    ids=["both by host, with digests", "holder by host", "reader by host"],
)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    key = ClusterKey.generate()
    prefill, decode = (
        EngineProcess(name, key, LAYOUT, settings=settings, num_blocks=64)
        for name, settings in zip(("prefill", "decode"), request.param, strict=True)
    )
    try:
        prefill.fill(1)
        decode.peers_changed([prefill.info])
        wait_until(lambda: decode.stats().peers_ready == 1)
        yield prefill, decode
    finally:
        prefill.kill()
        decode.kill()


class TestBetweenProcesses:
    def test_shuffled_blocks_arrive_intact(self, pair: tuple[EngineProcess, EngineProcess]) -> None:
        prefill, decode = pair
        rng = random.Random(0)
        for number in range(10):  # more blocks in all than there are slots
            source, target = rng.sample(range(64), 6), rng.sample(range(64), 6)
            offer = prefill.offer(f"request-{number}", source)
            transfer = decode.receive(offer.ticket, 0, target)
            assert decode.events(1, PATIENCE_S) == [Received(transfer)]
            assert decode.content(target) == prefill.content(source)
            assert prefill.events(1, PATIENCE_S) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]
        assert prefill.stats().buffer_blocks == decode.stats().buffer_blocks == 0

    @pytest.mark.slow
    def test_blocks_of_a_growing_offer_are_copied_as_they_are_written(
        self, pair: tuple[EngineProcess, EngineProcess]
    ) -> None:
        prefill, decode = pair
        offer = prefill.offer_growing("grows", [3, 4, 9])
        transfer = decode.receive(offer.ticket, 1, [7, 50])
        prefill.advance(offer.transfer_id, 2)
        assert decode.events(1, 0.3) == []
        prefill.advance(offer.transfer_id, 3)
        assert decode.events(1, PATIENCE_S) == [Received(transfer)]
        assert decode.content([7, 50]) == prefill.content([4, 9])
        assert prefill.events(1, PATIENCE_S) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]

    def test_a_receive_of_a_fully_cached_prompt_reads_no_block(self, pair: tuple[EngineProcess, EngineProcess]) -> None:
        prefill, decode = pair
        offer = prefill.offer("cached", [1, 2])
        transfer = decode.receive(offer.ticket, 2, [])
        assert decode.events(1, PATIENCE_S) == [Received(transfer)]
        assert prefill.events(1, PATIENCE_S) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]


@pytest.fixture
def station(monkeypatch: pytest.MonkeyPatch) -> Iterator[Station]:
    monkeypatch.setattr(host_buffer, "TransferConnector", Inner)
    station = Station()
    yield station
    station.buffer.close()


class TestPlaces:
    def test_peers_see_slots_of_host_memory_in_the_same_layout(self, station: Station) -> None:
        region = station.inner.region
        assert (region.num_blocks, region.device, region.only.layout) == (SLOTS, "cpu", LAYOUT)

    def test_a_block_is_ready_for_its_reader_only_when_it_is_copied(self, station: Station) -> None:
        offer = station.buffer.offer("r", 0, [5, 9], 32)
        (inner_id, slots), *_ = station.inner.offered.items()
        wait_until(lambda: station.inner.ready.get(inner_id) == 2)
        assert [int(station.slot(slot)[-1]) for slot in slots] == [5, 9]
        station.inner.events.append(OfferEnded(inner_id, OfferOutcome.FINISHED))
        assert station.events(1) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]
        assert station.slots_used == 0

    def test_an_offer_without_room_is_refused_by_name_and_counted(self, station: Station) -> None:
        station.buffer.offer("a", 0, range(6), 96)
        offer = station.buffer.offer("b", 0, range(3), 48)
        assert "has 2 of 8 slots free and the prompt needs 3: raise transfer.buffer_bytes" in (
            Ticket.decode(offer.ticket).refusal
        )
        assert station.events(1) == [OfferEnded(offer.transfer_id, OfferOutcome.WITHDRAWN)]
        assert station.buffer.stats().buffer_refusals == 1

    def test_a_receive_without_room_waits_for_others_to_end(self, station: Station) -> None:
        first = station.buffer.receive("a", 0, b"", 0, range(6))
        second = station.buffer.receive("b", 0, b"", 0, range(8, 12))
        (inner_id,) = station.inner.received
        station.inner.events += [ReceiveFailed(inner_id, "gone"), BlocksReleased(inner_id)]
        assert station.events(2) == [ReceiveFailed(first, "gone"), BlocksReleased(first)]
        _, inner_id = station.inner.received
        station.inner.events.append(Received(inner_id))
        assert station.events(1) == [Received(second)]
        assert station.slots_used == 0

    def test_a_receive_waits_for_room_no_longer_than_a_lease(
        self, station: Station, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After that time the holder has freed the blocks, and the prompt may be computed elsewhere."""
        station.now_s = 0.0
        station.buffer.receive("a", 0, b"", 0, range(6))
        waiting = [station.buffer.receive(name, 0, b"", 0, range(8, 12)) for name in "bc"]
        station.now_s += BY_HOST.lease_s - 1.0
        station.buffer.receive("d", 0, b"", 0, range(12, 16))
        assert station.buffer.poll() == []
        station.now_s += 1.0
        events = station.events(4)
        assert [event.transfer_id for event in events] == [waiting[0], waiting[0], waiting[1], waiting[1]]
        assert "within 30 s: raise transfer.buffer_bytes" in events[0].reason
        assert events[1] == BlocksReleased(waiting[0])
        assert station.buffer.stats().buffer_refusals == 2
        (inner_id,) = station.inner.received
        station.inner.events.append(Received(inner_id))
        station.events(1)
        assert len(station.inner.received) == 2, "the receive that has not waited too long must go on"

    def test_a_receive_that_is_larger_than_the_buffer_fails_by_name(self, station: Station) -> None:
        transfer = station.buffer.receive("a", 0, b"", 0, range(9))
        failed, released = station.events(2)
        assert isinstance(failed, ReceiveFailed)
        assert "needs 9 slots of this engine's host buffer, which has 8" in failed.reason
        assert released == BlocksReleased(transfer)

    def test_immediate_failures_wake_the_step_loop(self, station: Station) -> None:
        """Without a wake-up an idle loop polls only after a second."""
        station.buffer.receive("a", 0, b"", 0, range(9))
        assert station.woken.is_set()
        assert len(station.buffer.poll()) == 2
        station.buffer.receive("b", 0, b"", 0, range(8))
        waiting = station.buffer.receive("c", 0, b"", 0, [8])
        station.woken.clear()
        station.buffer.cancel(waiting)
        assert station.woken.is_set()
        assert len(station.buffer.poll()) == 2

    def test_blocks_are_written_only_after_the_receive_has_succeeded(self, station: Station) -> None:
        transfer = station.buffer.receive("a", 0, b"", 0, [3, 12])
        ((inner_id, slots),) = station.inner.received.items()
        for slot, value in zip(slots, (77, 88), strict=True):
            station.slot(slot)[:] = value
        assert station.buffer.poll() == []
        assert station.blocks[[3, 12], 0].tolist() == [3, 12]
        station.inner.events.append(Received(inner_id, claimed_s=1.0, pulled_s=2.0))
        assert station.events(1) == [Received(transfer, claimed_s=1.0, pulled_s=2.0)]
        assert station.blocks[[3, 12], -1].tolist() == [77, 88]

    def test_blocks_of_a_failed_receive_are_free_at_once_and_its_slots_when_nothing_writes(
        self, station: Station
    ) -> None:
        transfer = station.buffer.receive("a", 0, b"", 0, [3])
        (inner_id,) = station.inner.received
        station.inner.events.append(ReceiveFailed(inner_id, "lost"))
        assert station.events(2) == [ReceiveFailed(transfer, "lost"), BlocksReleased(transfer)]
        assert station.slots_used == 1
        station.inner.events.append(BlocksReleased(inner_id))
        assert station.buffer.poll() == []
        assert station.slots_used == 0

    def test_a_receive_may_be_cancelled_while_it_waits_for_room(self, station: Station) -> None:
        station.buffer.receive("a", 0, b"", 0, range(8))
        transfer = station.buffer.receive("b", 0, b"", 0, [8])
        station.buffer.cancel(transfer)
        assert station.events(2) == [ReceiveFailed(transfer, "cancelled"), BlocksReleased(transfer)]
        assert len(station.inner.received) == 1

    def test_a_receive_may_be_cancelled_while_it_is_read(self, station: Station) -> None:
        transfer = station.buffer.receive("a", 0, b"", 0, [3])
        (inner_id,) = station.inner.received
        station.buffer.cancel(transfer)
        assert station.inner.cancelled == [inner_id]
        station.inner.events.append(Received(inner_id))  # an event that was sent before the cancel arrived
        assert station.events(2) == [ReceiveFailed(transfer, "cancelled"), BlocksReleased(transfer)]
        assert station.blocks[3, 0] == 3
        assert station.slots_used == 0

    def test_a_receive_may_be_cancelled_while_it_is_copied(self, station: Station) -> None:
        transfer = station.buffer.receive("a", 0, b"", 0, [3])
        (inner_id,) = station.inner.received
        station.inner.events.append(Received(inner_id))
        assert station.buffer.poll() == []
        station.buffer.cancel(transfer)
        station.buffer.cancel(transfer)
        assert station.events(2) == [ReceiveFailed(transfer, "cancelled"), BlocksReleased(transfer)]
        assert station.slots_used == 0

    def test_slots_of_an_ended_offer_are_kept_while_a_copy_writes_them(
        self, station: Station, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_copy, down = threading.Event(), StagingCopier.down

        def copy_late(copier: StagingCopier, pairs: Any) -> None:
            may_copy.wait(PATIENCE_S)
            down(copier, pairs)

        monkeypatch.setattr(StagingCopier, "down", copy_late)
        offer = station.buffer.offer_growing("r", 0, [5, 9], 32)
        station.buffer.advance(offer.transfer_id, 1)
        station.buffer.withdraw(offer.transfer_id)
        station.buffer.withdraw(offer.transfer_id + 100)  # unknown: ignored
        assert station.events(1) == [OfferEnded(offer.transfer_id, OfferOutcome.WITHDRAWN)]
        station.buffer.advance(offer.transfer_id, 2)  # too late: ignored
        assert station.slots_used == 2
        may_copy.set()

        def all_back() -> bool:
            station.buffer.poll()
            return station.slots_used == 0

        wait_until(all_back)


class TestChoice:
    REGION = CacheRegion.of(ArenaRegion(4096, 16, "cpu", LAYOUT, 0, 2))

    def open(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> object:
        """Open a connector for device memory that cannot be registered."""

        class Picky(Inner):
            def __init__(self, region: CacheRegion, me: LocalEngine, **options: Any) -> None:
                super().__init__(region, me, **options)
                if region.address == 4096:
                    raise NotRegistrable("cannot register 65536 bytes of VRAM memory: unsupported")

        monkeypatch.setattr(host_buffer, "TransferConnector", Picky)
        return open_connector(self.REGION, ME, settings=TransferSettings(buffer_bytes=1 << 16, **settings))

    def test_auto_uses_host_memory_with_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened = self.open(monkeypatch, buffer="auto")
        assert isinstance(opened, HostBufferConnector)
        opened.close()
        assert "use a buffer in host memory, which is slower: cannot register 65536 bytes" in caplog.text

    def test_device_fails_with_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(NotRegistrable, match="cannot register"):
            self.open(monkeypatch, buffer="device")

    def test_a_buffer_that_holds_no_block_is_refused(self) -> None:
        with pytest.raises(TransportError, match="buffer_bytes is 9 and a block has 4096 bytes"):
            open_connector(self.REGION, ME, settings=TransferSettings(buffer="host", buffer_bytes=9))

    def test_memory_that_can_be_registered_is_used_directly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_buffer, "TransferConnector", Inner)
        opened = open_connector(self.REGION, ME, settings=TransferSettings())
        assert isinstance(opened, Inner)


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "family", "changes"),
    [
        ((1, 1), "qwen3", {}),
        ((1, 2), "qwen3", {}),
        ((2, 1), "qwen3", {}),
        ((2, 1), "qwen3_5_text", HYBRID),  # recurrent states, which have digests like blocks
    ],
    ids=lambda value: str(value),
)
def test_hand_offs_through_host_memory_give_the_tokens_of_one_engine(
    tmp_path: Path, sizes: tuple[int, int], family: str, changes: dict[str, Any]
) -> None:
    folder = write_checkpoint(tmp_path / "model", family, num_hidden_layers=2, **changes)
    arguments = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,  # long prompts run in chunks, and are offered early
        "num_gpu_blocks_override": 64,
    }
    key, settings = (
        ClusterKey.generate(),
        TransferSettings(buffer="host", buffer_bytes=4 << 20, digest=DigestMode.VERIFY if changes else DigestMode.OFF),
    )
    prefill, decode = (
        GroupEngine(name, key, size, arguments, settings)
        for name, size in zip(("prefill", "decode"), sizes, strict=True)
    )
    sampling = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
    rng = random.Random(3)
    requests = [
        EngineRequest(
            request_id=f"r{n}",
            prompt_token_ids=[rng.randrange(3, 256) for _ in range(20 + 17 * n)],
            sampling=sampling,
            seed=n,
            keep_kv=True,
        )
        for n in range(6)
    ]
    try:
        decode.meet([prefill.info])
        wait_until(lambda: decode.num_ready() == 1)
        alone = decode.run([_again(request, f"alone-{request.request_id}") for request in requests])
        handed_over = prefill.run(requests)
        continued = []
        for request in requests:
            last = handed_over[request.request_id][-1]
            assert last.finish_reason is FinishReason.HANDOFF
            continued.append(
                _again(
                    request,
                    request.request_id,
                    output_token_ids=last.token_ids,
                    kv_source=last.kv_source,
                    cache_salt="nothing cached",
                )
            )
        found = decode.run(continued)
        for request in requests:
            first = handed_over[request.request_id][-1].token_ids
            rest = [token for output in found[request.request_id] for token in output.token_ids]
            whole = [token for output in alone[f"alone-{request.request_id}"] for token in output.token_ids]
            assert [*first, *rest] == whole
            assert found[request.request_id][0].num_cached_tokens == len(request.prompt_token_ids), (
                "the whole prompt must have been received"
            )
    finally:
        prefill.kill()
        decode.kill()


def _again(request: EngineRequest, request_id: str, **changes: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        seed=request.seed,
        **changes,
    )
