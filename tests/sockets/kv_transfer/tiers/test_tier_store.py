"""Blocks are stored to memory and to files and restored, across restarts, kills, other models and damaged files."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from baton.engine.core.tiers import Restored, Tier, TierStats
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers import store as tier_store
from baton.kv_transfer.tiers.disk_files import HEADER_BYTES, RECORD_BYTES, DiskFiles, TierRefused
from baton.kv_transfer.tiers.store import TierStore

from .... import ROOT
from ....helpers.tier_memory import BLOCK, LAYOUT, Pool, event_of, load, name, names, save, tiers
from . import tier_process
from .tier_process import SAID

pytestmark = pytest.mark.timeout(60)

COMMAND = [sys.executable, "-m", tier_process.__name__]


def run(folder: Path, num_slots: int, what: str) -> tuple[TierStats, int]:
    """Run `tier_process` and return its last message."""
    done = subprocess.run(
        [*COMMAND, folder, str(num_slots), what], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    (text,) = said_in(done.stdout)
    return msgspec.json.decode(text, type=tuple[TierStats, int])


def said_in(output: str) -> list[str]:
    return [line.removeprefix(SAID) for line in output.splitlines() if line.startswith(SAID)]


class TestMemory:
    def test_blocks_are_restored_as_they_were_stored(self) -> None:
        pool = Pool()
        with tiers(pool, host=8) as store:
            save(store, pool, range(8))
            assert load(store, pool, range(8)) == 8
            assert store.stats().blocks == {"host": 8}
            assert store.stats().written_bytes == 8 * BLOCK

    def test_without_a_disk_the_oldest_are_gone(self) -> None:
        pool = Pool()
        with tiers(pool, host=4) as store:
            save(store, pool, range(4))
            save(store, pool, [4, 5])
            assert [store.find([name(number)]) for number in range(6)] == [0, 0, 1, 1, 1, 1]
            assert store.stats().evictions == 2

    def test_many_blocks_go_through_a_small_tier(self) -> None:
        pool = Pool()
        with tiers(pool, host=3) as store:
            for first in range(0, 60, 2):
                save(store, pool, [first, first + 1])
                assert load(store, pool, [first, first + 1]) == 2

    def test_a_tier_that_holds_no_block_is_refused(self, tmp_path: Path) -> None:
        pool = Pool(layout=msgspec.structs.replace(LAYOUT, num_layers=1000))
        with pytest.raises(TierRefused, match="host_bytes is 1, and a block of this engine has"):
            TierStore(pool.region, TierSettings(host_bytes=1), name="none", cpu_affinity="any")


class TestDisk:
    def test_blocks_are_restored_as_they_were_stored(self, tmp_path: Path) -> None:
        pool = Pool(256)
        with tiers(pool, disk=200, folder=tmp_path) as store:
            save(store, pool, range(150))  # more than fits the staging memory at a time
            assert load(store, pool, range(150)) == 150
            assert store.stats().blocks == {"disk": 150}

    def test_the_tier_threads_sleeps_have_no_timer_slack(self, tmp_path: Path) -> None:
        with tiers(Pool(), disk=8, folder=tmp_path):
            (thread,) = (each for each in threading.enumerate() if each.name == "baton-tiers")
            assert Path(f"/proc/{thread.native_id}/timerslack_ns").read_text() == "1\n"

    def test_blocks_that_do_not_fit_memory_are_on_the_disk(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, host=4, disk=16, folder=tmp_path) as store:
            for first in range(0, 16, 4):
                save(store, pool, range(first, first + 4))
            assert store.stats().blocks == {"host": 4, "disk": 12}
            assert load(store, pool, range(16)) == 16

    def test_a_restore_reports_its_blocks_of_each_tier(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, host=4, disk=16, folder=tmp_path) as store:
            save(store, pool, range(4))
            save(store, pool, range(4, 8))
            store.restore(names(range(8)), range(8))
            event = event_of(store)
            assert isinstance(event, Restored)
            assert [(read.tier, read.num_blocks) for read in event.reads] == [(Tier.DISK, 4), (Tier.HOST, 4)]

    def test_the_next_process_finds_the_blocks_of_the_last_one(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, disk=8, folder=tmp_path) as store:
            save(store, pool, range(8))
        with tiers(pool, disk=8, folder=tmp_path) as store:
            assert set(store.kept_in(Tier.DISK)) == set(names(range(8)))
            assert load(store, pool, range(8)) == 8
            save(store, pool, [8, 9])
        with tiers(pool, disk=8, folder=tmp_path) as store:
            kept = [number for number in range(10) if store.find([name(number)])]
            assert kept == [0, 1, 2, 3, 4, 5, 8, 9], "the last blocks of the used prefix must be evicted first"

    @pytest.mark.parametrize("num_slots", [4, 20])
    def test_another_size_keeps_what_fits(self, tmp_path: Path, num_slots: int) -> None:
        pool = Pool()
        with tiers(pool, disk=8, folder=tmp_path) as store:
            save(store, pool, range(8))
        with tiers(pool, disk=num_slots, folder=tmp_path) as store:
            assert store.stats().blocks == {"disk": min(8, num_slots)}
            kept = [number for number in range(8) if store.find([name(number)])]
            assert load(store, pool, kept) == len(kept) == min(8, num_slots)
        assert (tmp_path / "blocks-0.kv").stat().st_size == num_slots * BLOCK

    def test_two_engines_in_one_folder_have_files_of_their_own(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, disk=4, folder=tmp_path) as first, tiers(pool, disk=4, folder=tmp_path) as second:
            save(first, pool, [1])
            save(second, pool, [2])
            assert (first.find([name(2)]), second.find([name(1)])) == (0, 0)
        assert sorted(path.name for path in tmp_path.glob("*.kv")) == ["blocks-0.kv", "blocks-1.kv"]

    @pytest.mark.parametrize(
        "difference", [{"model": "other"}, {"dtype": "float16"}, {"version": 99}, {"num_kv_heads": 1}]
    )
    def test_files_of_another_layout_are_not_read_and_a_warning_is_logged(
        self, tmp_path: Path, difference: dict[str, object], caplog: pytest.LogCaptureFixture
    ) -> None:
        with tiers(Pool(), disk=4, folder=tmp_path) as store:
            save(store, Pool(), [1, 2])
        before = (tmp_path / "blocks-0.kv").read_bytes()
        other = Pool(layout=msgspec.structs.replace(LAYOUT, **difference))
        with caplog.at_level(logging.WARNING), tiers(other, disk=4, folder=tmp_path) as store:
            assert store.find(names([1])) == 0
            save(store, other, [1])
        assert "written for other blocks (fingerprint is" in caplog.text
        assert (tmp_path / "blocks-0.kv").read_bytes() == before

    def test_a_folder_may_be_in_the_home_of_the_engines_user(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        with tiers(Pool(), disk=4, folder=Path("~/kv")) as store:
            save(store, Pool(), [1])
        assert (tmp_path / "kv/blocks-0.kv").exists()

    def test_a_folder_that_cannot_be_used_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with (
            pytest.raises(TierRefused, match=r"kv_tiers\.disk_path: .*file"),
            tiers(Pool(), disk=4, folder=tmp_path / "file"),
        ):
            pass


class TestOrderlyEnd:
    def test_blocks_in_memory_are_saved_to_the_disk(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, host=8, disk=16, folder=tmp_path) as store:
            save(store, pool, range(6))
            assert store.stats().blocks == {"host": 6, "disk": 0}
        with tiers(pool, host=8, disk=16, folder=tmp_path) as store:
            assert store.stats().blocks == {"host": 0, "disk": 6}
            assert load(store, pool, range(6)) == 6

    def test_the_last_used_blocks_are_saved_if_the_disk_is_smaller_than_memory(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, host=6, disk=3, folder=tmp_path) as store:
            for number in range(6):
                save(store, pool, [number])
            store.touch(names([1]))
        with tiers(pool, disk=3, folder=tmp_path) as store:
            assert [number for number in range(6) if store.find([name(number)])] == [1, 4, 5]
            save(store, pool, [7])
            assert [number for number in range(8) if store.find([name(number)])] == [1, 5, 7], (
                "the oldest block must be evicted first"
            )

    def test_saving_stops_after_its_time_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tier_store, "SAVE_S", 0.0)
        pool = Pool()
        with tiers(pool, host=8, disk=16, folder=tmp_path) as store:
            save(store, pool, range(6))
        with tiers(pool, host=8, disk=16, folder=tmp_path) as store:
            assert store.stats().blocks == {"host": 0, "disk": 0}


class TestOrderOfUse:
    def test_the_order_of_use_survives_a_restart(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, disk=4, folder=tmp_path) as store:
            save(store, pool, range(4))
            store.touch(names([0]))
        with tiers(pool, disk=4, folder=tmp_path) as store:
            save(store, pool, [7, 8])
            assert [number for number in range(9) if store.find([name(number)])] == [0, 3, 7, 8]

    def test_of_several_records_of_a_block_the_newest_counts(self, tmp_path: Path) -> None:
        """The block was evicted, and stored again in another slot."""
        region, data = Pool().region.only, memoryview(Pool().content(1))
        files = DiskFiles(tmp_path, region, 3)
        for slot in (0, 2, 1):
            files.note(slot, name(1), data)
        files.close()
        files = DiskFiles(tmp_path, region, 3)
        assert [(record.slot, record.number) for record in files.records] == [(1, 3)]
        assert [files.fits(slot, data) for slot in range(3)] == [False, True, False]
        files.close()

    def test_the_order_of_use_is_recorded_while_the_process_lives(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tier_store, "RECORD_USES_EVERY_S", 0.0)
        pool = Pool()
        with tiers(pool, disk=4, folder=tmp_path / "used") as store:
            save(store, pool, range(4))
            index = tmp_path / "used/blocks-0.index"
            before = index.read_bytes()
            store.touch(names([0]))
            deadline = time.monotonic() + 20
            while index.read_bytes() == before:
                assert time.monotonic() < deadline, "the use was not recorded"
                store.poll()
                time.sleep(0.01)
            shutil.copytree(tmp_path / "used", tmp_path / "killed")
        with tiers(pool, disk=4, folder=tmp_path / "killed") as store:
            save(store, pool, [7])
            assert [number for number in range(8) if store.find([name(number)])] == [0, 2, 3, 7]


class TestBadBytes:
    def test_a_damaged_slot_is_not_restored_and_is_counted(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, disk=4, folder=tmp_path) as store:
            save(store, pool, range(4))
        with (tmp_path / "blocks-0.kv").open("r+b") as file:
            place = file.read().index(pool.content(2).tobytes())
            file.seek(place + BLOCK // 2)
            file.write(b"\xff\x00\xff")
        with tiers(pool, disk=4, folder=tmp_path) as store:
            assert load(store, pool, range(4)) == 2
            assert store.stats().failures == {"corrupt": 1}
            assert store.find(names([2])) == 0, "the damaged block must be forgotten"
            assert load(store, pool, [3]) == 1
            save(store, pool, [2])
            assert load(store, pool, range(4)) == 4

    def test_a_damaged_record_is_ignored(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, disk=4, folder=tmp_path) as store:
            save(store, pool, range(4))
        index = tmp_path / "blocks-0.index"
        data = bytearray(index.read_bytes())
        data[HEADER_BYTES + RECORD_BYTES + 20] ^= 1
        index.write_bytes(data)
        with tiers(pool, disk=4, folder=tmp_path) as store:
            assert store.stats().blocks == {"disk": 3}

    def test_a_file_that_became_shorter_turns_the_tier_off(self, tmp_path: Path) -> None:
        pool = Pool()
        with tiers(pool, host=1, disk=4, folder=tmp_path) as store:
            for number in range(5):
                save(store, pool, [number])
            (tmp_path / "blocks-0.kv").open("r+b").truncate(BLOCK)
            assert load(store, pool, [0, 1, 2, 3]) < 4
            assert store.stats().blocks == {"host": 1, "disk": 0}
            assert store.stats().failures.keys() == {"disk_read"}
            save(store, pool, [9])
            assert load(store, pool, [9]) == 1, "the memory tier must go on"

    @pytest.mark.slow
    def test_a_process_killed_while_it_writes_leaves_only_blocks_with_right_content(self, tmp_path: Path) -> None:
        process = subprocess.Popen([*COMMAND, tmp_path, "64", "write"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            stored = 0
            while stored < 200:  # until every slot was written several times
                stored = int((said_in(process.stdout.readline()) or [stored])[0])
        finally:
            process.kill()
            process.wait()
        stored = max([stored, *map(int, said_in(process.stdout.read()))])
        pool = Pool()
        with tiers(pool, disk=64, folder=tmp_path) as store:
            numbers = [number for number in range(stored + 8) if store.find([name(number)])]
            good = sum(load(store, pool, [number]) for number in numbers)  # checks every byte
            assert good >= 56, "all blocks but those being written must be right"
            assert good + store.stats().failures.get("corrupt", 0) == len(numbers)


class TestFullDisk:
    @pytest.mark.slow
    def test_a_disk_without_room_means_no_disk_tier_and_is_counted(self, tmp_path: Path) -> None:
        stats, found = run(tmp_path, 16, "full")
        assert found == 1, "the memory tier must work"
        assert stats.blocks == {"host": 2}
        assert stats.failures == {"disk_full": 1}

    @pytest.mark.slow
    def test_writes_that_fail_later_lose_only_their_blocks(self, tmp_path: Path) -> None:
        stats, found = run(tmp_path, 16, "fills_up")
        assert found == 1, "the block that was stored before must be there"
        assert stats.failures["disk_write"] > 0
        assert stats.blocks["disk"] + stats.failures["disk_write"] == 15
