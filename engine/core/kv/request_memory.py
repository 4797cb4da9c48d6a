"""The blocks of requests: reserved, grown, registered in the prefix cache when full, given back behind windows.

lookup ──> reserve ──> register, grow ... ──> give_back_behind ...        each for all cache groups at once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..prefix import BlockHash, extend_block_hashes
from ..requests.request import Request
from ..tiers import KVTiers
from .cache_groups import IN_TIERS, CacheGroup, DropCheckpoints, FullGroup, StateGroup
from .table_starts import Shortage, TableStart

MOST_KNOWN = 16  # lookups to remember: at least as many as there are requests examined near the queue's head


class GroupHit(NamedTuple):
    """The cached blocks of one group from which a request may continue."""

    first: int  # the table entry of the first block; entries before it are not read any more
    blocks: Sequence[int]  # in a `RestorePlan`: IN_TIERS for blocks to restore


class PrefixLookup(NamedTuple):
    """The cached prefix of one request: the longest whose next token finds all that it reads, in every group."""

    hashes: Sequence[BlockHash]  # of all full blocks that the request may skip if they are cached
    num_blocks: int  # how many of them are hits
    hits: Sequence[GroupHit]  # in each group
    num_seen: int  # blocks that the first group has: other requests have computed this much of the prompt


class MissingBlock(NamedTuple):
    """A block that a tier has and the pool has not."""

    group: int
    entry: int  # of the group's table
    block_hash: BlockHash


class RestorePlan(NamedTuple):
    """Blocks to restore from the tiers, to lengthen a request's prefix hit."""

    prefix: PrefixLookup  # the hit after the restore: the longest that pool and tiers allow in all groups
    missing: Sequence[MissingBlock]  # blocks to restore, group by group; only blocks that will be read
    num_tokens: int  # tokens that need not be computed then, beyond the hits in the pool


class _CachedLookup(NamedTuple):
    """A lookup that holds until one of `decisive` is cached or evicted: the blocks found, and the first one missing."""

    prefix: PrefixLookup
    decisive: frozenset[BlockHash]


class RequestMemory:
    """Reserves, grows and registers the blocks of requests. Knows nothing of the order in which they are served.

    As a `BlockWatcher` of all arenas, it looks up a waiting request only once, however many steps that waits.
    """

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, enable_prefix_caching: bool) -> None:
        self._groups = groups
        self._pools = [group.pool for group in groups]
        numbered = list(enumerate(groups))
        self._given_back = [(number, group) for number, group in numbered if not isinstance(group, FullGroup)]
        self._full = [number for number, group in numbered if isinstance(group, FullGroup)]  # a gap ends a hit there
        self._of_tokens = [number for number, group in numbered if not isinstance(group, StateGroup)]
        self._states = [(number, group) for number, group in numbered if isinstance(group, StateGroup)]
        self.gives_back = bool(self._given_back)  # requests may give back blocks while they run
        self.has_states = bool(self._states)
        self.keeps_all = len(groups) == 1 and not self._given_back  # a single group, whose layers read all tokens
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._known: dict[Request, _CachedLookup] = {}  # lookups of requests without blocks, oldest first
        for pool in self._pools:
            pool.watch(self)
        for number in self._full[:1] if self._states else ():
            self._pools[number].watch(DropCheckpoints([group.pool for _, group in self._states]))

    def lookup(self, request: Request) -> PrefixLookup:
        """Find the request's longest cached prefix.

        The scheduler asks several times a step about the head of the queue, in every step in which it does not fit. A
        lookup is repeated only when blocks of the prefix have come or gone, or the request's tokens have changed.
        """
        hashes = self.skippable_hashes(request)
        known = self._known.get(request)
        if known is not None and len(known.prefix.hashes) == len(hashes):
            return known.prefix
        found = [group.find(hashes) for group in self._groups]
        prefix = self._deepest(hashes, found)
        if request.awaits_transfer and not self.keeps_all:
            prefix = self._beside_transfer(request, prefix, found)
        reach = min((len(found[number]) for number in self._full), default=len(hashes))
        self._known[request] = _CachedLookup(prefix, frozenset(hashes[: reach + 1]))
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return prefix

    def _deepest(self, hashes: Sequence[BlockHash], found: Sequence[Sequence[int]]) -> PrefixLookup:
        """Return the longest hit that all groups allow, given the entries that each has `found`."""
        num_blocks, deeper = len(hashes), -1
        while num_blocks != deeper:
            deeper = num_blocks
            for group, blocks in zip(self._groups, found, strict=True):
                num_blocks = group.deepest(blocks, num_blocks)
        return self._prefix(hashes, found, num_blocks)

    def _prefix(self, hashes: Sequence[BlockHash], found: Sequence[Sequence[int]], num_blocks: int) -> PrefixLookup:
        firsts = [group.first_visible(num_blocks * self._block_size) for group in self._groups]
        hits = [
            GroupHit(first, blocks[first : group.num_entries(num_blocks)])
            for group, first, blocks in zip(self._groups, firsts, found, strict=True)
        ]
        return PrefixLookup(hashes, num_blocks, hits, len(found[0]))

    def _beside_transfer(self, request: Request, prefix: PrefixLookup, found: Sequence[Sequence[int]]) -> PrefixLookup:
        """Return the hit of a request whose KV another engine has: the leading blocks that need not be read from there.

        It may lack windows and states in front of it, since those that the next token reads are handed over.
        """
        source = request.message.kv_source
        if source is None or source.num_tokens <= prefix.num_blocks * self._block_size:
            return prefix
        num_blocks = len(prefix.hashes)
        for group, blocks in zip(self._groups, found, strict=True):
            num_blocks = group.num_present(blocks, num_blocks, source.num_tokens)
        return self._prefix(prefix.hashes, found, num_blocks)

    def find_restore(self, request: Request, tiers: KVTiers) -> RestorePlan:
        """Find the blocks of the request's prefix that the tiers have, beyond its hits in the pool."""
        known = self.lookup(request)
        hashes = known.hashes
        found = [known.hits[0].blocks] if self.keeps_all else [group.find(hashes) for group in self._groups]
        with_tiers = [
            group.find_in_tiers(blocks, hashes, tiers, number)
            for number, (group, blocks) in enumerate(zip(self._groups, found, strict=True))
        ]
        prefix = self._deepest(hashes, with_tiers)
        missing = [
            MissingBlock(number, entry, hashes[group.last_block(entry)])
            for number, (group, hit) in enumerate(self._with_groups(prefix.hits))
            for entry in _entries_in_tiers(hit)
        ]
        return RestorePlan(prefix, missing, (prefix.num_blocks - known.num_blocks) * self._block_size)

    def fits_restored(self, request: Request, plan: RestorePlan) -> bool:
        """Return whether the request's blocks can be allocated now, those to be restored included."""
        return self._fit(self._starts(request, plan.prefix))

    def stored(self, block_hash: BlockHash) -> None:
        self._forget_lookups(block_hash)

    def evicted(self, block_hash: BlockHash) -> None:
        self._forget_lookups(block_hash)

    def _forget_lookups(self, block_hash: BlockHash) -> None:
        if self._known:
            for request in [each for each, known in self._known.items() if block_hash in known.decisive]:
                del self._known[request]

    def num_blocks(self, request: Request) -> int:
        """Return how many blocks of a table the request needs to start, cached ones included."""
        return self._blocks_for(request.num_to_hold)

    def fits(self, request: Request) -> bool:
        """Return whether the request's blocks can be allocated now."""
        return self._fit(self._starts(request, self.lookup(request)))

    def _fit(self, starts: Sequence[TableStart]) -> bool:
        """Return whether these tables can be allocated now."""
        return all(start.fits(pool) for pool, start in zip(self._pools, starts, strict=True))

    def shortage(self, request: Request, without: Sequence[Request]) -> Shortage | None:
        """Return the blocks that the request lacks even once the requests `without` release theirs; None: none."""
        starts = self._starts(request, self.lookup(request))
        owned = [other.owned_blocks() for other in without]
        for number, (pool, start) in enumerate(zip(self._pools, starts, strict=True)):
            num_lacking = start.num_lacking(pool, [blocks[number] for blocks in owned])
            if num_lacking > 0:
                return Shortage(request.priority, starts, pool, pool.num_dropped + num_lacking)
        return None

    def shortage_persists(self, shortage: Shortage, request: Request) -> bool:
        """Return whether a request still has a shortage, whoever has released blocks or begun to share them since."""
        if shortage.pool.num_dropped >= shortage.most_dropped or shortage.priority != request.priority:
            return False
        return shortage.starts == self._starts(request, self.lookup(request))

    def _starts(self, request: Request, prefix: PrefixLookup) -> list[TableStart]:
        """Return the tables with which a request starts.

        For KV that another engine has, they hold only the entries that the token behind that KV reads.
        """
        source = request.message.kv_source if request.awaits_transfer else None
        num_blocks = self._blocks_for(request.num_to_hold)
        loaded = 0 if source is None else source.num_tokens
        if loaded <= prefix.num_blocks * self._block_size:
            num_there, firsts = prefix.num_blocks, [hit.first for hit in prefix.hits]
        else:
            num_there = loaded // self._block_size
            firsts = [max(hit.first, group.first_visible(loaded)) for group, hit in self._with_groups(prefix.hits)]
        return [
            TableStart(first, hit.blocks[first - hit.first :], group.entries_at_start(num_blocks, num_there))
            for first, (group, hit) in zip(firsts, self._with_groups(prefix.hits), strict=True)
        ]

    def _with_groups(self, hits: Sequence[GroupHit]) -> Iterator[tuple[CacheGroup, GroupHit]]:
        return zip(self._groups, hits, strict=True)

    def reserve(self, request: Request, plan: RestorePlan | None = None) -> bool:
        """Allocate blocks for all tokens of a request, leading ones from the prefix cache. Returns whether they fit.

        All at once, before the first chunk: so a prompt that has begun can finish, and its blocks lie side by side.
        With a `plan`, tables have new blocks in the places of those that it restores, and begin with the entries read
        at its end. Only the hits in the pool count as computed, until the restore is done.
        """
        prefix = self.lookup(request)
        in_reach = prefix if plan is None else plan.prefix
        starts = self._starts(request, in_reach)
        if not self._fit(starts):
            return False
        self._known.pop(request, None)
        tables = [[0] * start.first + start.take(pool) for pool, start in zip(self._pools, starts, strict=True)]
        request.take_blocks(
            tables,
            [start.first for start in starts],
            self._capacity(tables),
            num_computed=prefix.num_blocks * self._block_size,
        )
        request.num_seen_blocks = in_reach.num_seen
        if self._caching:
            self._set_registered(request, prefix.num_blocks)
            if not request.stages.has_started and request.may_skip_computed_prefix:
                self._pools[0].record_lookup(len(request.token_ids), request.num_computed)
        return True

    def grow(self, request: Request) -> list[list[int]]:
        """Return the new blocks of each group for the request's next token; empty if an arena has no free block."""
        full = self._full_tables(request)
        for number in full:
            if not self._pools[number].num_free:
                return []
        new = self.extend_states(request, request.num_computed + 1) if self._states else [[] for _ in self._pools]
        if not new:
            return []
        for number in full:
            table = request.block_tables[number]
            new[number] = self._pools[number].allocate(1, after=table[-1])
            table += new[number]
        request.capacity = self._capacity(request.block_tables)
        return new

    def dry_groups(self, request: Request) -> list[int]:
        """Return the groups that need a block for the request's next token, and whose arenas have none free."""
        return [number for number in self._full_tables(request) if not self._pools[number].num_free]

    def _full_tables(self, request: Request) -> Sequence[int]:
        """Return the groups of token blocks whose tables have no entry for the request's next token.

        Tables of token blocks are equally long. Without state groups, this is only called when they are full.
        """
        if self._states and len(request.block_tables[0]) * self._block_size > request.num_computed:
            return ()
        return self._of_tokens

    def _capacity(self, tables: Sequence[Sequence[int]]) -> int:
        """Return for how many tokens the tables of all groups have entries."""
        capacity = len(tables[0]) * self._block_size
        for number, group in self._states:
            capacity = min(capacity, len(tables[number]) * group.entry_tokens)
        return capacity

    def chunk_end(self, request: Request, end: int) -> int:
        """Return where the request's next chunk ends, at most at token `end`: where all its checkpoints can be kept."""
        for _, group in self._states if self._caching else ():
            end = group.chunk_end(request.num_computed, end, request.num_tokens)
        return end

    def may_extend_states(self, request: Request, end: int) -> bool:
        """Return whether `extend_states` can be called now."""
        return all(group.may_extend(request.block_tables[number], end) for number, group in self._states)

    def extend_states(self, request: Request, end: int) -> list[list[int]]:
        """Add to the request's tables the slots needed to compute its tokens up to `end` in one step.

        Returns the new slots of each group. An empty list if the step has to wait, because others read the slot that it
        would write.
        """
        if not self.may_extend_states(request, end):
            return []
        new: list[list[int]] = [[] for _ in self._groups]
        for number, group in self._states:
            table = request.block_tables[number]
            wanted = request.num_seen_blocks * self._block_size // group.entry_tokens
            slots = group.extend(table, request.num_computed, end, keeps=self._caching, wanted=wanted)
            new[number] += slots
            table += slots
        request.capacity = self._capacity(request.block_tables)
        return new

    def room_for_drafts(self, request: Request) -> int:
        """Return how many drafts a decode may have so that none is the last token of an entry of states.

        The state after that token is a checkpoint, but a decode with drafts stores only the state after its first,
        known token. `request` counts that token as computed. While drafts are unsettled, the decode may begin earlier.
        """
        room = request.limit
        for _, group in self._states:
            earliest = request.num_computed - request.num_unsettled_drafts  # the first token that may be a draft
            last = (earliest // group.entry_tokens + 1) * group.entry_tokens - 1
            room = min(room, last - request.num_computed)
        return max(0, room)

    def give_back_behind(self, request: Request) -> Sequence[tuple[int, list[int]]]:
        """Return, by group, blocks that no later token of the request reads. The caller owns them from now on.

        Steps in flight may still read them. A block stays while some of its tokens are unknown, since it is not
        registered yet; a state's slot stays while accepted drafts have not been applied to it.
        """
        given_back = []
        for number, group in self._given_back:
            num_read = request.num_computed - request.num_unsettled_drafts
            if isinstance(group, StateGroup):
                num_read -= request.num_accepted_drafts
            end = group.first_visible(num_read)
            if self._caching:
                end = min(end, group.num_entries(request.num_registered))
            if end > request.first_kept[number]:
                given_back.append((number, request.give_back(number, end)))
        return given_back

    def register(self, request: Request) -> Sequence[BlockHash]:
        """Register the blocks in the prefix cache that are full of known tokens.

        Returns the hashes of those that were not registered before. A planned step may still have to write them, but
        any reader runs in a later step, or in the same one with more than one token: there, every layer writes the KV
        of all chunks before it reads any.
        """
        if not self._caching:
            return ()
        num_full = min(request.num_computed, len(request.token_ids)) // self._block_size
        self._hash_blocks(request, num_full)
        new = range(request.num_registered, num_full)
        for group, table, first in zip(self._groups, request.block_tables, request.first_kept, strict=True):
            group.register(table, first, request.block_hashes, new)
        self._set_registered(request, num_full)
        return request.block_hashes[new.start : new.stop]

    def must_follow(self, filled: set[BlockHash], request: Request, budget: int) -> bool:
        """Return whether the request can start only in a step after the one that fills the blocks with these hashes.

        That is so if it would run a single token after a prefix that has some of the blocks, or if its prefix ends with
        one of them: then the same step may also write the states from which the request continues.
        """
        num_known = len(request.token_ids) - 1
        may_be_one = budget == 1 or num_known % self._block_size == 0
        if not filled or not (may_be_one or self.has_states):
            return False
        prefix = self.lookup(request)
        hits = prefix.hashes[: prefix.num_blocks]
        if self.has_states and hits and hits[-1] in filled:
            return True
        may_be_one &= budget == 1 or prefix.num_blocks * self._block_size == num_known
        return may_be_one and not filled.isdisjoint(hits)

    def skippable_hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of the full blocks that the request may skip if they are cached.

        These never cover all of its tokens: the last one has to be computed, so that the next can be drawn.
        """
        if not self._caching or not request.may_skip_computed_prefix:
            return ()
        num_blocks = (len(request.token_ids) - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        return request.block_hashes[:num_blocks]

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks:
            tokens = request.token_ids
            extend_block_hashes(request.block_hashes, request.root, tokens, num_blocks, self._block_size)

    def _set_registered(self, request: Request, num_blocks: int) -> None:
        request.num_registered = num_blocks
        request.next_registration = (num_blocks + 1) * self._block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _entries_in_tiers(hit: GroupHit) -> Iterator[int]:
    if IN_TIERS in hit.blocks:
        for index in range(hit.blocks.index(IN_TIERS), len(hit.blocks)):
            if hit.blocks[index] == IN_TIERS:
                yield hit.first + index
