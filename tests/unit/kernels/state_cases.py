"""State arenas for tests of layers with recurrent states: shuffled slots, with NaN in slots that must not be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.kernels.state_batch import Cuts, StateBatch, StateCheckpoint

NO_SLOT = -1


@dataclass(frozen=True)
class StateCase:
    """The sequences of a step. Those in `fresh` begin with a zero state; `checkpoints` are (sequence, tokens) pairs."""

    query_lens: Sequence[int]
    fresh: Sequence[int] = ()
    in_place: bool = True
    checkpoints: Sequence[tuple[int, int]] = ()
    decode_tokens: int = 1
    first_slot: int = 0
    keeps_in_source: bool = False  # the first checkpoint of a sequence is written to its source slot
    padding: int = 0  # as many empty sequences and chunks at the end, as in a captured step of any mix

    def draw(
        self, shape: Sequence[int], generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, StateBatch]:
        """Return the arena [slots, *shape] and the batch."""
        num_seqs = len(self.query_lens)
        num_slots = 2 * num_seqs + len(self.checkpoints) + 2
        free = (torch.randperm(num_slots, generator=generator) + self.first_slot).tolist()
        sources = [NO_SLOT if seq in self.fresh else free.pop() for seq in range(num_seqs)]
        targets = [source if self.in_place and source != NO_SLOT else free.pop() for source in sources]
        state = torch.full((self.first_slot + num_slots, *shape), float("nan"), device=device, dtype=dtype)
        for source in sources:
            if source != NO_SLOT:
                state[source] = torch.randn(*shape, generator=generator).to(device, dtype)
        kept, seen = [], set[int]()
        for seq, tokens in self.checkpoints:
            in_source = self.keeps_in_source and seq not in seen and sources[seq] != NO_SLOT
            kept.append(StateCheckpoint(seq, tokens, sources[seq] if in_source else free.pop()))
            seen.add(seq)
        cuts = Cuts.of(self.query_lens, sources, checkpoints=kept, decode_tokens=self.decode_tokens)
        if not self.padding:
            return state, StateBatch.of_cuts(cuts, sources, targets, device)
        more = [NO_SLOT] * self.padding
        cuts = cuts.padded(num_seqs + self.padding, len(cuts.chunk_seqs) + self.padding)
        batch = StateBatch.of_cuts(cuts, sources + more, targets + more, device)
        return state, replace(batch, least_decodes=0, most_decodes=num_seqs + self.padding)


def written_slots(batch: StateBatch) -> list[int]:
    """Return the slots that a step writes."""
    lengths = batch.query_start.diff().tolist()
    targets = [slot for slot, length in zip(batch.targets.tolist(), lengths, strict=True) if length]
    return [slot for slot in (*targets, *batch.checkpoints.tolist()) if slot != NO_SLOT]


def assert_same_states(state: Tensor, expected: Tensor) -> None:
    """Check that two arenas have equal bits; a slot that is NaN must be NaN in both."""
    assert torch.equal(state.nan_to_num(7.0), expected.nan_to_num(7.0))


def assert_others_untouched(state: Tensor, before: Tensor, batch: StateBatch) -> None:
    written = set(written_slots(batch))
    others = [slot for slot in range(len(state)) if slot not in written]
    assert_same_states(state[others], before[others])


def assert_graph_serves_other_slots(run: Callable[[], Tensor], state: Tensor, batch: StateBatch) -> None:
    """Capture `run`, a step on a GPU whose states have no NaN, and compare replays with other slots to plain runs."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for turn in range(3):
        generator = torch.Generator().manual_seed(turn)
        slots = torch.randperm(len(state), generator=generator)[: batch.num_seqs].int().to(state.device)
        batch.sources.copy_(slots)
        batch.targets.copy_(slots)
        before = state.clone()
        graph.replay()
        after, state[:] = state.clone(), before
        assert torch.equal(result, run())
        assert torch.equal(state, after)
