"""`DecoderLayer` and `LayerStep`: the contract between model files and the decoder.

Importing this module does not import torch, because model files import it where only configs are read.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .base import Layer
from .step_context import TokenRows, rows_at

if TYPE_CHECKING:
    from torch import Tensor

    from .mlp import FeedForward
    from .norm import ResidualStream, RMSNorm
    from .step_context import LayerContext
    from .token_mixer import TokenMixer


@dataclass(frozen=True)
class Branch:
    """after(mlp(before(x))): one of several feed-forward layers side by side."""

    mlp: FeedForward
    before: RMSNorm
    after: RMSNorm


class LayerStep:
    """A step as decoder layers see it: the residual stream, and the other inputs of attention and MLPs.

    step.attend(self.self_attn, before=norm)         x = x + attention(norm(x))
    step.attend(self.mamba, self.self_attn, ...)     x = x + mamba(norm(x)) + attention(norm(x))
    step.feed_forward(self.mlp, after=norm)          x = x + norm(mlp(x))
    step.feed_forward_side_by_side(b1, b2, after=norm)    x = x + norm(b1(x) + b2(x)), each a `Branch`
    """

    def __init__(self, stream: ResidualStream, context: LayerContext, wanted: Tensor | None = None) -> None:
        """Begin a step. Tokens other than `wanted` [R] are dropped after attention, or without it before the MLP."""
        self._stream = stream
        self._context = context
        self._wanted = wanted
        self._rows = TokenRows(context.slots, context.rows_of_ranks, context.layer_inputs)

    def attend(self, *mixers: TokenMixer, before: RMSNorm | None = None, after: RMSNorm | None = None) -> None:
        """Add `after(mixer(before(x)))` to the stream. Several mixers read the same x; their outputs are summed."""
        assert before is not None or len(mixers) == 1, "several mixers do not read what they add to"
        stream, wanted = self._stream, self._wanted
        x, norm = stream.read(before)
        if len(mixers) > 1 and norm is not None:  # norm once for all mixers, into a tensor that none of them adds to
            x, norm = norm(x), None
        self._keep_wanted()
        result = stream.target if after is None else None
        for mixer in mixers:
            result = mixer(x, self._context, wanted, norm=norm, add_to=result)
        assert result is not None, "a layer attends by a mixer"
        stream.take(result, after)

    def feed_forward(self, mlp: FeedForward, *, before: RMSNorm | None = None, after: RMSNorm | None = None) -> None:
        """Add `after(mlp(before(x)))` to the stream."""
        stream, wanted = self._stream, self._wanted
        x, norm = stream.read(before)
        if wanted is not None:  # the layer has no attention
            x = rows_at(x, wanted)
            self._keep_wanted()
        add_to = stream.target if after is None else None
        stream.take(mlp(x, self._rows, norm=norm, add_to=add_to), after)

    def feed_forward_side_by_side(self, *branches: Branch, after: RMSNorm) -> None:
        """Add the norm of the sum of the branches' outputs to the stream. Called after the layer's attention."""
        assert self._wanted is None, "attention comes first, and drops the tokens that are not wanted"
        x, _ = self._stream.read(None)
        total: Tensor | None = None
        for branch in branches:
            result = branch.after(branch.mlp(x, self._rows, norm=branch.before.of_rows))
            total = result if total is None else total.add_(result)
        assert total is not None, "there are branches"
        self._stream.take(total, after)

    def multiply(self, factor: Tensor) -> None:
        """Multiply the stream by a factor [1]."""
        self._stream.multiply(factor)

    def _keep_wanted(self) -> None:
        """Drop all tokens but the wanted ones from the stream, once, in the layer's first block after it was read."""
        if self._wanted is not None:
            self._stream.keep(self._wanted)
            inputs = self._rows.layer_inputs
            self._rows = replace(
                self._rows,
                slots=rows_at(self._rows.slots, self._wanted),
                layer_inputs=None if inputs is None else rows_at(inputs, self._wanted),
            )
            self._wanted = None


class DecoderLayer(Layer, abc.ABC):
    """One layer of a decoder: its blocks, as attributes with their names in checkpoints, and the order they run in."""

    @abc.abstractmethod
    def __call__(self, step: LayerStep) -> None:
        """Add the output of each block to the residual stream of `step`."""
