"""Checks of a scheduler's internal state between any two steps."""

from __future__ import annotations

from collections import Counter

from baton.engine.core.requests.request import NO_ROW, RequestStatus
from baton.engine.core.scheduling.scheduler import Scheduler

from .core_runner import FakeRunner

BLOCK_SIZE = 4
VOCAB_SIZE = 50


def check_in_flight(scheduler: Scheduler, runner: FakeRunner) -> None:
    """Check that nothing is free that a step in flight may read or write."""
    for step, touched in runner.in_flight.items():
        free = [(group, block) for group, block in touched if not scheduler.groups[group].pool.references(block)]
        assert not free, f"step {step} is in flight and may touch {free}"


def check_checkpoints(scheduler: Scheduler, runner: FakeRunner) -> None:
    """Check that each registered and computed state is the one after its entry's last token."""
    for request in scheduler.requests.values():
        row = runner.rows.get(request.row) if request.status is RequestStatus.RUNNING else None
        if row is None or runner.lazy or row.request_id != request.request_id:
            continue  # its first step may not have run
        for number, states in runner.states.items():
            size, table = states.checkpoint_tokens, request.block_tables[number]
            num_full = request.num_registered * scheduler.config.block_size // size
            for entry in range(request.first_kept[number], num_full):
                if table[entry] >= 0 and (entry + 1) * size <= row.applied.get(number, 0):
                    assert states.slots[table[entry]] == row.kv[(entry + 1) * size - 1], "a checkpoint of other tokens"


def check_references(scheduler: Scheduler, number: int) -> None:
    """Check that every block reference in a group has an owner, and that only one table may write to a block."""
    pool, fence = scheduler.groups[number].pool, scheduler.fence
    owned = {each: each.owned_blocks()[number] for each in scheduler.requests.values() if each.has_blocks}
    tables = list(owned.values())
    tables += fence.owned_blocks(number)
    tables += blocks_being_stored(scheduler, number)
    owners = Counter(block for table in tables for block in table)
    for block in range(pool.num_blocks):
        assert pool.references(block) == owners[block], f"block {block} of group {number}"
    for request, blocks in owned.items():
        assert len(set(blocks)) == len(blocks)
        is_restored = scheduler.tier_copies.restores(request)
        first = max(request.num_computed // scheduler.groups[number].entry_tokens, request.first_kept[number])
        for block in request.block_tables[number][first:]:
            if is_restored and pool.is_cached(block):
                continue  # a hit in this group after the end of another group's hits: nobody writes to it
            own = 1 + scheduler.transfers.grows(request)  # its growing offer holds the blocks that it will write
            assert owners[block] <= own, f"{request.request_id} may write to block {block}, which others have, too"


def blocks_being_stored(scheduler: Scheduler, number: int) -> list[list[int]]:
    """Return the blocks of a group that transfers and tiers hold."""
    transfers = scheduler.transfers
    held, quarantined = transfers.held.owned_blocks(), transfers.quarantine.owned_blocks()
    assert transfers.held.num_blocks == len({block for blocks in held for block in blocks})
    assert transfers.quarantine.num_blocks == sum(map(len, quarantined))
    first = sum(group.pool.num_blocks for group in scheduler.groups[:number])
    last = first + scheduler.groups[number].pool.num_blocks
    of_all = held + quarantined + scheduler.tier_copies.quarantine.owned_blocks()
    tables = [[block - first for block in blocks if first <= block < last] for blocks in of_all]
    return tables + scheduler.tier_copies.blocks_being_stored(number)


def check_rows(scheduler: Scheduler) -> None:
    owned = [request.row for request in scheduler.requests.values() if request.row != NO_ROW]
    owned += scheduler.fence.owned_rows()
    assert len(set(owned)) == len(owned), "a row of two requests"
    assert set(owned) <= set(range(scheduler.config.max_num_seqs))
    assert scheduler.rows.num_free == scheduler.config.max_num_seqs - len(owned)


def check_places(scheduler: Scheduler) -> None:
    """Check that each live request is in exactly the one queue or table that fits its status, with valid counts."""
    transfers, copies = scheduler.transfers, scheduler.tier_copies
    assert list(scheduler.running) == sorted(scheduler.running, key=lambda each: each.queue_key)
    for request in scheduler.requests.values():
        places = {
            RequestStatus.RUNNING: request in scheduler.running,
            RequestStatus.WAITING_FOR_KV: transfers.pulls(request) or copies.restores(request),
            RequestStatus.PREEMPTED: request in scheduler.waiting,
            RequestStatus.WAITING_FOR_GRAMMAR: scheduler.constraints.awaits_mask(request),
            RequestStatus.WAITING: request in scheduler.waiting or request in scheduler.loading.ready,
        }
        assert places[request.status], f"{request.request_id} is {request.status}"
        assert 0 <= request.num_computed < request.num_tokens + request.awaits_token
        assert request.num_tokens <= request.limit
        assert len(request.token_ids) <= request.num_tokens
        assert request.num_computed <= request.capacity
    filled = len(scheduler.loading.ready)
    queued = len(scheduler.waiting) + filled + scheduler.constraints.num_opening
    count = len(scheduler.running) + transfers.num_pulling + copies.num_restoring + queued
    assert count == len(scheduler.requests), "somebody is in two places, or over and still somewhere"


def check_unread(scheduler: Scheduler) -> None:
    """Check the incremental count of unread tokens in the queue against a count from scratch."""
    size, backlog = scheduler.config.block_size, scheduler.backlog
    counted = {each: backlog.num_full_blocks(each) for each in scheduler.waiting if not each.awaits_transfer}
    num_drafts = 0 if scheduler.drafting is None else scheduler.drafting.most
    most_coming = scheduler.config.depth * (1 + num_drafts)
    for each, num_full in counted.items():  # the results of steps in flight may have filled some since
        found = len(scheduler.memory.skippable_hashes(each))
        assert num_full <= found <= num_full + 1 + most_coming // size or each.prompt_logprobs is not None
    hashes = {block_hash for each, num_full in counted.items() for block_hash in each.block_hashes[:num_full]}
    missing = sum(not scheduler.groups[0].pool.has(block_hash) for block_hash in hashes)
    behind = sum(each.num_tokens - num_full * size for each, num_full in counted.items())
    preempted = sum(each.status is RequestStatus.PREEMPTED for each in counted)
    most_rejected = preempted * scheduler.config.depth * num_drafts
    assert 0 <= backlog.num_tokens - missing * size - behind <= most_rejected
