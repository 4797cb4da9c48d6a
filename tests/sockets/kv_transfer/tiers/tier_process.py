"""A process with a disk tier, which tests may kill: `python -m ...tiers.tier_process FOLDER SLOTS WHAT`.

write      stores blocks without end, and prints how many are stored
full       has a limit of file sizes of half the tier from the start, and prints its statistics
fills_up   gets the same limit once the tier exists, and prints its statistics

`python -m ...tiers.tier_process FOLDER SLOTS WHAT ADDRESS` is rank 1 of a group of two whose rank 0 is at ADDRESS:

full       has a limit of file sizes of half its share of the tier from the start
fills_up   gets the same limit once it reads a line
lives      has no limit
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec

from baton.kv_transfer.group.rpc import GroupRank
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.group import follow_tiers

from ....helpers.tier_memory import BLOCK, Pool, event_of, load, names, save, tiers

SAID = "said: "  # marks our lines, as NIXL writes to the same output


def say(text: str) -> None:
    print(SAID + text, flush=True)


def limit_files(num_bytes: int) -> None:
    """Make longer writes fail, as on a full disk. Python ignores the signal SIGXFSZ."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def write(folder: Path, num_slots: int) -> None:
    pool = Pool()
    with tiers(pool, disk=num_slots, folder=folder) as store:
        for first in range(0, 1_000_000, 4):
            numbers = range(first, first + 4)
            pool.fill(numbers)
            store.store(names(numbers), range(4))
            event_of(store)
            say(str(first + 4))


def full(folder: Path, num_slots: int) -> None:
    limit_files(BLOCK * num_slots // 2)
    pool = Pool()
    with tiers(pool, host=2, disk=num_slots, folder=folder) as store:
        for number in range(6):
            save(store, pool, [number])
        found = load(store, pool, [5])
        say(msgspec.json.encode([store.stats(), found]).decode())


def fills_up(folder: Path, num_slots: int) -> None:
    pool = Pool()
    with tiers(pool, disk=num_slots, folder=folder) as store:
        save(store, pool, [1])
        limit_files(BLOCK * num_slots // 2)
        for first in range(2, num_slots):
            save(store, pool, [first])
        found = load(store, pool, [1])
        say(msgspec.json.encode([store.stats(), found]).decode())


def follow(folder: Path, num_slots: int, what: str, address: str) -> None:
    pool = Pool(rank=1, size=2)
    limit = pool.region.block_bytes * num_slots // 2
    if what == "full":
        limit_files(limit)
    member = follow_tiers(
        pool.region,
        GroupRank(1, 2, None),
        TierSettings(disk_path=str(folder), disk_bytes=num_slots * pool.region.block_bytes),
        leader=address,
        name="rank 1",
        cpu_affinity="any",
    )
    sys.stdin.readline()
    if what == "fills_up":
        limit_files(limit)
        say("limited")
    sys.stdin.readline()
    member.close()


if __name__ == "__main__" and len(sys.argv) > 4:
    follow(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
elif __name__ == "__main__":
    {"write": write, "full": full, "fills_up": fills_up}[sys.argv[3]](Path(sys.argv[1]), int(sys.argv[2]))
