"""Token embedding and the head that turns hidden states into logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from baton.kernels.linear import PackedWeight, linear, pack

from .base import Layer, Parameter


class Embedding(Layer):
    """Rows of weight [vocab, hidden] by token id [T] -> [T, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self.weight = Parameter(vocab_size, hidden_size)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight.data)


class TiedHead(Layer):
    """Logits by the embedding's own weight: no parameter, and no tensor in the checkpoint."""

    def __init__(self, embedding: Embedding) -> None:
        self._shared = (embedding,)  # in a tuple, so that it is no layer below this one
        self._packed: PackedWeight | None = None

    def finish(self) -> None:
        self._packed = pack(self._shared[0].weight.data)

    def __call__(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        assert self._packed is not None, "finish() comes before the first call"
        return linear(hidden, self._packed, out=out)
