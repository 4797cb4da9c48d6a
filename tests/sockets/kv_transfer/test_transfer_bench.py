"""The benchmark runs, and its figures are consistent. Tests do not judge their size."""

from __future__ import annotations

import threading

import pytest

from baton.engine.core.layout import KVLayout, UnevenHeads
from baton.kv_transfer.bench import TransferCase, measure, table
from baton.kv_transfer.bench.stages import HandoffStage, StampedChannel, Stamps
from baton.kv_transfer.channel import Route
from baton.kv_transfer.protocol.messages import Claim, EngineKey, LeaseKey, ReaderKey, encode

LAYOUT = KVLayout(model="tiny", num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_bench_measures_the_connector_and_raw_nixl_and_times_each_stage(capfd: pytest.CaptureFixture[str]) -> None:
    case = TransferCase(num_tokens=(32, 100), in_flight=(1, 2), repeats=3, run_blocks=2, stages=True)
    result = measure(LAYOUT, case)
    alone, short, _, long = result["rows"]
    assert (short["num_bytes"], long["num_bytes"]) == (4 * LAYOUT.block_bytes, 14 * LAYOUT.block_bytes)
    assert short["descriptors"] == 2  # two prompts, each one run of two blocks
    assert all(row["gb_per_s"] > 0 and row["raw_gb_per_s"] > 0 and row["ratio"] > 0 for row in result["rows"])
    check_stages(alone["stages_us"])
    assert len(table(result).splitlines()) == 1 + 4 + 2 + len(HandoffStage) + 1
    assert "is lost" not in capfd.readouterr().err, "one side outlived the other, and took it for lost"


def check_stages(at: dict[HandoffStage, float]) -> None:
    for chain in (
        (
            HandoffStage.ASKED,
            HandoffStage.AWAKE,
            HandoffStage.READ_POSTED,
            HandoffStage.READ_DONE,
            HandoffStage.ENGINE_NOTIFIED,
            HandoffStage.ANSWERED,
        ),
        (HandoffStage.AWAKE, HandoffStage.CLAIM_HERE, HandoffStage.GRANT_HERE, HandoffStage.ENGINE_NOTIFIED),
        (HandoffStage.AWAKE, HandoffStage.CLAIM_SENT, HandoffStage.READ_POSTED),
        (HandoffStage.CLAIM_HERE, HandoffStage.GRANT_SENT),
    ):
        moments = [at[stage] for stage in chain]
        assert moments == sorted(moments), chain
    assert at[HandoffStage.ASKED] == 0
    assert set(at) == set(HandoffStage)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_bench_measures_groups_whose_ranks_each_move_their_heads() -> None:
    result = measure(
        LAYOUT, TransferCase(num_tokens=(64,), in_flight=(1,), repeats=2, run_blocks=4, prefill_tp=1, decode_tp=2)
    )
    (row,) = result["rows"]
    assert row["num_bytes"] == 4 * LAYOUT.block_bytes
    assert row["descriptors"] == 2 * 4  # each rank of the reader reads half of each block
    assert row["gb_per_s"] > 0
    assert row["stages_us"] == {}
    assert len(table(result).splitlines()) == 2


def test_sizes_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(UnevenHeads, match="2 KV heads cannot be shared out over 3 ranks"):
        measure(LAYOUT, TransferCase(prefill_tp=3))


def test_a_message_that_was_sent_is_stamped_before_stamps_are_taken() -> None:
    """The receiver may finish before the sender's thread continues."""
    stamps, may_return, has_arrived = Stamps(), threading.Event(), threading.Event()

    class SlowToReturn:
        address = "tcp://127.0.0.1:1"

        def send(self, route: Route, data: bytes) -> bool:
            has_arrived.set()
            return may_return.wait(30)

    channel = StampedChannel(SlowToReturn(), stamps)  # type: ignore[arg-type]
    engine = EngineKey("e", 1)
    claim = Claim(LeaseKey(engine, "r", 0, 1), ReaderKey(engine, 1), 1)
    sender = threading.Thread(target=channel.send, args=(b"route", encode(claim)))
    sender.start()
    assert has_arrived.wait(30)
    threading.Timer(0.05, may_return.set).start()
    assert HandoffStage.CLAIM_SENT in stamps.take()
    sender.join()
