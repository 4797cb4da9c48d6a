"""Tiers of a group of two ranks: a block counts only if both ranks have it."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.engine.core.tiers import Restored, Tier
from baton.kv_transfer.channel import Channel, Route
from baton.kv_transfer.codec import encode
from baton.kv_transfer.errors import MalformedMessage, TransportError
from baton.kv_transfer.group.rpc import GroupMember, GroupRank, GroupSocket, Join, MemberThread, TpCopyGroup
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.group import MAX_MOVES, TIERS, MoveBlocks, OpenTiers, TierHandler, follow_tiers
from baton.kv_transfer.tiers.store import TierStore, TierThreadDied
from baton.kv_transfer.tiers.tier_index import Move

from .... import ROOT
from ....helpers.tier_memory import LAYOUT, Pool, event_of, name, names
from . import tier_process

pytestmark = pytest.mark.timeout(60)

SHARE = LAYOUT.head_bytes  # bytes of a block on each rank
_names = itertools.count(1)


class Group:
    """The store of a group, and the pools of its ranks."""

    def __init__(self, store: TierStore, pools: Sequence[Pool], member: MemberThread | None) -> None:
        self.store, self.pools, self.member = store, pools, member

    def save(self, numbers: Sequence[int]) -> None:
        for pool in self.pools:
            pool.fill(numbers)
        self.store.store(names(numbers), range(len(numbers)))
        event_of(self.store)

    def load(self, numbers: Sequence[int]) -> int:
        """Restore blocks, check their content on both ranks, and return their number."""
        for pool in self.pools:
            pool.blocks[:] = 0
        found = self.store.find(names(numbers))
        self.store.restore(names(numbers)[:found], range(found))
        event = event_of(self.store)
        assert isinstance(event, Restored)
        for pool in self.pools:
            assert pool.holds(numbers[: event.num_blocks]) == [True] * event.num_blocks
        return event.num_blocks

    def known(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self.store.find([name(number)])]


class WatchLog:
    """A watcher that records the locations of blocks that a store reports."""

    def __init__(self) -> None:
        self.news: list[tuple[str, bytes, Tier]] = []

    def kept(self, block_hash: bytes, tier: Tier) -> None:
        self.news.append(("kept", block_hash, tier))

    def lost(self, block_hash: bytes, tier: Tier) -> None:
        self.news.append(("lost", block_hash, tier))


def settings_of(host: int, disk: int, folder: Path | None) -> TierSettings:
    on_disk = {"disk_path": str(folder), "disk_bytes": disk * SHARE} if disk else {}
    return TierSettings(host_bytes=host * SHARE, **on_disk)


def a_store(pool: Pool, settings: TierSettings, socket: GroupSocket) -> TierStore:
    return TierStore(pool.region, settings, name=f"leader-{next(_names)}", cpu_affinity="any", group_socket=socket)


def a_member(pool: Pool, settings: TierSettings, socket: GroupSocket) -> MemberThread:
    return follow_tiers(
        pool.region,
        GroupRank(1, 2, None),
        settings,
        leader=socket.address,
        name=f"member-{next(_names)}",
        cpu_affinity="any",
    )


@contextlib.contextmanager
def a_group(*, host: int = 0, disk: int = 0, folder: Path | None = None, others: Path | None = None) -> Iterator[Group]:
    """Run two ranks with `host` and `disk` slots each. `others` is the folder of rank 1, by default `folder`."""
    socket = GroupSocket(2, "127.0.0.1", None)
    pools = [Pool(2100, rank=rank, size=2) for rank in range(2)]
    member = a_member(pools[1], settings_of(host, disk, others or folder), socket)
    try:
        store = a_store(pools[0], settings_of(host, disk, folder), socket)
        try:
            yield Group(store, pools, member)
        finally:
            store.close()
    finally:
        member.close()
        socket.close()  # the store closes it, unless it could not start


class TestBothRanks:
    @pytest.mark.parametrize(("host", "disk"), [(8, 0), (0, 8), (4, 8)])
    def test_shares_are_restored_as_they_were_stored(self, tmp_path: Path, host: int, disk: int) -> None:
        with a_group(host=host, disk=disk, folder=tmp_path) as group:
            group.save(range(4))
            group.save(range(4, 8))
            assert group.load(range(8)) == 8
            assert sum(group.store.stats().blocks.values()) == 8

    def test_more_blocks_than_one_order_holds_go_in_several(self) -> None:
        numbers = range(2 * MAX_MOVES + 10)
        with a_group(host=len(numbers)) as group:
            group.save(numbers)
            assert group.load(numbers) == len(numbers)

    def test_the_next_group_finds_the_blocks_of_the_last_one_in_the_folders_of_its_ranks(self, tmp_path: Path) -> None:
        with a_group(disk=8, folder=tmp_path / "a", others=tmp_path / "b") as group:
            group.save(range(8))
        with a_group(disk=8, folder=tmp_path / "a", others=tmp_path / "b") as group:
            assert group.load(range(8)) == 8
        assert [len(list((tmp_path / part).glob("*.kv"))) for part in "ab"] == [1, 1]

    def test_two_engines_in_one_folder_have_four_pairs_of_files_and_find_their_own(self, tmp_path: Path) -> None:
        for _ in range(2):
            with a_group(disk=4, folder=tmp_path) as one, a_group(disk=4, folder=tmp_path) as other:
                one.save([1, 2])
                other.save([3, 4, 5])
        assert len(list(tmp_path.glob("*.kv"))) == 4
        with a_group(disk=4, folder=tmp_path) as one, a_group(disk=4, folder=tmp_path) as other:
            assert sorted([one.known(range(6)), other.known(range(6))]) == [[1, 2], [3, 4, 5]]
            assert one.load([1, 2]) == 2

    def test_a_single_engine_does_not_use_the_files_of_a_group_and_logs_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with a_group(disk=4, folder=tmp_path) as group:
            group.save([1])
        pool = Pool()
        alone = TierSettings(disk_path=str(tmp_path), disk_bytes=4 * LAYOUT.block_bytes)
        store = TierStore(pool.region, alone, name="alone", cpu_affinity="any")
        assert store.find([name(1)]) == 0
        store.close()
        assert "num_ranks is 2, not 1" in caplog.text


def file_of(folder: Path, rank: int) -> Path:
    """Return the file with the blocks of one rank."""
    (index,) = [path for path in folder.glob("*.index") if f'"rank": {rank},'.encode() in path.read_bytes()]
    return index.with_suffix(".kv")


class TestOneRank:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_damaged_block_of_one_rank_is_lost_for_both(self, tmp_path: Path, rank: int) -> None:
        with a_group(disk=8, folder=tmp_path) as group:
            group.save(range(4))
            content = group.pools[rank].content(2).tobytes()
        with file_of(tmp_path, rank).open("r+b") as file:
            file.seek(file.read().index(content) + 7)
            file.write(b"\x01\x02\x03")
        with a_group(disk=8, folder=tmp_path) as group:
            told = WatchLog()
            group.store.watch(told)
            assert set(group.store.kept_in(Tier.DISK)) == set(names(range(4))), "all blocks count until they are read"
            assert group.load(range(4)) == 2
            assert group.store.stats().failures == {"corrupt": 1}
            assert group.known(range(4)) == [0, 1, 3]
            assert told.news == [("lost", name(2), Tier.DISK)]
            group.save([2])
            assert told.news[1:] == [("kept", name(2), Tier.DISK)]
            assert group.load(range(4)) == 4

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_lost_file_of_one_rank_means_that_no_block_is_known(self, tmp_path: Path, rank: int) -> None:
        with a_group(disk=8, folder=tmp_path) as group:
            group.save(range(4))
        lost = file_of(tmp_path, rank)
        lost.with_suffix(".index").unlink()
        lost.unlink()
        with a_group(disk=8, folder=tmp_path) as group:
            assert group.known(range(4)) == []
            assert list(group.store.kept_in(Tier.DISK)) == []
            group.save(range(4))
            assert group.load(range(4)) == 4
        with a_group(disk=8, folder=tmp_path) as group:
            assert group.load(range(4)) == 4

    def test_a_slot_with_different_blocks_on_the_ranks_is_empty(self, tmp_path: Path) -> None:
        """This is the state after a kill between the two ranks' writes."""
        with a_group(disk=4, folder=tmp_path) as group:
            group.save(range(4))
            before = file_of(tmp_path, 1).with_suffix(".index").read_bytes()
            group.save([7])
        file_of(tmp_path, 1).with_suffix(".index").write_bytes(before)
        with a_group(disk=4, folder=tmp_path) as group:
            assert len(group.known(range(8))) == 3
            assert 7 not in group.known(range(8))
            kept = group.known(range(8))
            assert group.load(kept) == 3

    def test_a_disk_that_cannot_be_read_turns_the_disk_tier_off_and_memory_goes_on(self, tmp_path: Path) -> None:
        with a_group(host=1, disk=4, folder=tmp_path) as group:
            for number in range(5):
                group.save([number])
            file_of(tmp_path, 1).open("r+b").truncate(SHARE)
            assert group.load([0, 1, 2, 3]) < 4
            assert group.store.stats().blocks == {"host": 1, "disk": 0}
            assert group.store.stats().failures.keys() == {"disk_read"}
            group.save([9])
            assert group.load([9]) == 1

    def test_a_rank_whose_folder_cannot_be_used_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        refusal = pytest.raises(TransportError, match=r"rank 1 cannot go on: TierRefused: kv_tiers\.disk_path: .*file")
        with refusal, a_group(disk=4, folder=tmp_path / "good", others=tmp_path / "file"):
            pass


@contextlib.contextmanager
def a_group_with(what: str, folder: Path, *, host: int, disk: int) -> Iterator[tuple[Group, subprocess.Popen[str]]]:
    """Run a group whose rank 1 is a process: see `tier_process.py`."""
    socket, pool = GroupSocket(2, "127.0.0.1", None), Pool(rank=0, size=2)
    arguments = [sys.executable, "-m", tier_process.__name__, folder, str(disk), what, socket.address]
    process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        store = a_store(pool, settings_of(host, disk, folder), socket)
        try:
            yield Group(store, [pool], None), process
        finally:
            store.close()
    finally:
        process.kill()
        process.communicate()
        socket.close()


class TestOneRanksFullDisk:
    @pytest.mark.slow
    def test_a_full_disk_at_the_start_means_no_disk_tier_on_any_rank_and_is_counted(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with a_group_with("full", tmp_path, host=0, disk=16) as (group, _):
            assert group.store.stats().failures == {"disk_full": 1}
            group.save([1])
            assert group.known([1]) == []
        assert "no disk tier until the next start: rank 1: " in caplog.text

    @pytest.mark.slow
    def test_a_disk_that_fills_up_loses_only_the_blocks_that_were_not_written(self, tmp_path: Path) -> None:
        with a_group_with("fills_up", tmp_path, host=0, disk=16) as (group, process):
            group.save([1])
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
            while "limited" not in process.stdout.readline():
                pass
            for number in range(2, 16):
                group.save([number])
            stats = group.store.stats()
            assert stats.failures["disk_write"] > 0
            assert stats.blocks["disk"] + stats.failures["disk_write"] == 15
            assert group.load([1]) == 1, "blocks that were stored before must be there"


class TestGone:
    @pytest.mark.slow
    def test_a_rank_that_dies_ends_the_store_at_once(self, tmp_path: Path) -> None:
        with a_group_with("lives", tmp_path, host=0, disk=4) as (group, process):
            group.save([1])
            process.kill()
            process.wait()
            group.store.restore([name(1)], [0])
            with pytest.raises(TierThreadDied, match="rank 1"):
                event_of(group.store)

    def test_a_rank_that_does_not_come_is_named(self) -> None:
        socket = GroupSocket(3, "127.0.0.1", None)
        member = another_rank(socket, rank=2, num_ranks=3, fingerprint="f")
        with pytest.raises(TransportError, match=r"of 3 ranks these did not join within 1 s: \[1\]"):
            TpCopyGroup(socket, "f", TIERS, timeout_s=1.0)
        member.close()
        socket.close()

    def test_a_rank_of_another_layout_does_not_fit(self) -> None:
        socket = GroupSocket(2, "127.0.0.1", None)
        member = another_rank(socket, rank=1, num_ranks=2, fingerprint="other")
        with pytest.raises(TransportError, match="rank 1 keeps blocks of layout other, rank 0 of f"):
            TpCopyGroup(socket, "f", TIERS, timeout_s=10.0)
        member.close()
        socket.close()


def another_rank(socket: GroupSocket, *, rank: int, num_ranks: int, fingerprint: str) -> MemberThread:
    handler = TierHandler(Pool(rank=1, size=2).region, settings_of(1, 0, None), "s", rank, num_ranks)

    def begin(channel: Channel, leader: Route) -> GroupMember:
        return GroupMember(handler, TIERS, rank=rank, fingerprint=fingerprint, channel=channel, leader=leader)

    return MemberThread(begin, GroupRank(rank, num_ranks, None), leader=socket.address, name=f"rank {rank}").start()


class TestOrders:
    def test_a_move_out_of_range_is_refused_before_a_byte_moves(self) -> None:
        pool = Pool(4, rank=1, size=2)
        handler = TierHandler(pool.region, settings_of(2, 0, None), "s", 1, 2)
        with pytest.raises(MalformedMessage, match="before anything is open"):
            list(handler.handle(MoveBlocks([])))
        list(handler.handle(OpenTiers("")))
        for move in (
            Move(name(1), Tier.POOL, 4, Tier.HOST, 0),
            Move(name(1), Tier.POOL, 0, Tier.HOST, 2),
            Move(name(1), Tier.POOL, 0, Tier.DISK, 0),
            Move(name(1), Tier.HOST, -1, Tier.POOL, 0),
        ):
            with pytest.raises(MalformedMessage, match="is outside of"):
                list(handler.handle(MoveBlocks([move])))
        handler.close()

    def test_orders_and_reports_are_decoded_as_encoded_and_nonsense_is_refused(self) -> None:
        order = MoveBlocks([Move(name(1), Tier.DISK, 3, Tier.POOL, 9)])
        assert TIERS.decode_order(encode(order)) == order
        join = Join(1, "f")
        assert TIERS.decode_report(encode(join)) == join
        for decode in (TIERS.decode_order, TIERS.decode_report):
            with pytest.raises(MalformedMessage):
                decode(b"\x00nonsense")
