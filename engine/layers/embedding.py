"""Token embedding, and the head that turns hidden states into logits. The vocabulary is divided over ranks in both."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.parallel.groups import ALONE, Group, ParallelGroups
from baton.kernels.embedding import embedding
from baton.kernels.linear import PackedWeight, linear, pack

from .base import Layer, Parameter, Share
from .linear import Linear

_ALIGNMENT = 16  # a rank's rows are a multiple of it: matrix products are faster at such widths


class Vocabulary:
    """This rank's rows of the vocabulary. All ranks reserve equally many; the last ranks may use fewer, or none."""

    def __init__(self, size: int, group: Group = ALONE) -> None:
        self.size = size
        self.group = group
        self._room = size if group.size == 1 else -(-size // (group.size * _ALIGNMENT)) * _ALIGNMENT
        self.share = self._share_of(group.rank)

    def _share_of(self, rank: int) -> Share:
        start = min(rank * self._room, self.size)
        return Share(start, min(self._room, self.size - start), self.size)

    def gather(self, logits: Tensor, out: Tensor | None) -> Tensor:
        """Concatenate all ranks' logits [R, rows of the rank's share] to [R, vocab], in `out` if given."""
        group, missing = self.group, self._room - logits.shape[1]
        if missing:
            logits = functional.pad(logits, (0, missing))
        parts = group.all_gather(logits).view(group.size, -1, self._room)
        kept = [part[:, : self._share_of(rank).size] for rank, part in enumerate(parts)]
        return torch.cat(kept, dim=1) if out is None else torch.cat(kept, dim=1, out=out)


class Embedding(Layer):
    """Look-up of token ids [T] in weight [vocab, hidden] -> [T, hidden], times `scale`.

    The scale is rounded to the weight's dtype, unless `rounds_scale` is false.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, rounds_scale: bool = True) -> None:
        self.weight = Parameter(vocab_size, hidden_size)
        self.vocabulary = Vocabulary(vocab_size)
        self._scale = scale
        self._rounds_scale = rounds_scale

    def divide(self, groups: ParallelGroups) -> None:
        self.vocabulary = Vocabulary(self.vocabulary.size, groups.tp)
        self.weight.keep(0, self.vocabulary.share)

    def finish(self) -> None:
        if self._rounds_scale:
            self._scale = torch.tensor(self._scale, dtype=self.weight.data.dtype).item()

    def __call__(self, token_ids: Tensor) -> Tensor:
        group, share = self.vocabulary.group, self.vocabulary.share
        if group.size == 1:
            return embedding(token_ids, self.weight.data, self._scale)
        if not share.size:
            return group.all_reduce(self.weight.data.new_zeros(len(token_ids), self.weight.shape[1]))
        elsewhere = (token_ids < share.start) | (token_ids >= share.end)
        rows = embedding((token_ids - share.start).masked_fill_(elsewhere, 0), self.weight.data, self._scale)
        return group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


class Head(Linear):
    """Logits [R, vocab] of hidden states [R, hidden], with a weight of its own."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size)
        self._vocabulary = Vocabulary(vocab_size)

    def divide(self, groups: ParallelGroups) -> None:
        self._vocabulary = Vocabulary(self._vocabulary.size, groups.tp)
        self.keep_rows(self._vocabulary.share)

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        if self._vocabulary.group.size == 1:
            return self(hidden, out=out)
        return self._vocabulary.gather(self(hidden), out)


class TiedHead(Layer):
    """Logits with the embedding's weight: the head has no parameter, and no tensor in the checkpoint."""

    def __init__(self, embedding: Embedding) -> None:
        self._shared = (embedding,)  # in a tuple, so that `Layer.children` does not find it
        self._packed: PackedWeight | None = None

    def finish(self) -> None:
        self._packed = pack(self._shared[0].weight.data)

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        assert self._packed is not None, "finish() comes before the first call"
        vocabulary = self._shared[0].vocabulary
        if vocabulary.group.size == 1:
            return linear(hidden, self._packed, out=out)
        return vocabulary.gather(linear(hidden, self._packed), out)
