"""`Gate`: how much of a state each token keeps, and how strongly it writes. `DeltaDrafts`: stored inputs of drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class DeltaDrafts(NamedTuple):
    """Stored inputs of draft tokens (`state_batch.Replay`): keys, values, and inputs of gates.

    The stride between places is the same in all four tensors.
    """

    k: Tensor  # [P, KH, K]
    v: Tensor  # [P, H, V]
    decay: Tensor  # [P, H], or [P, H, K]
    beta: Tensor  # [P, H]


@dataclass(frozen=True)
class Gate:
    """The gates of T tokens and H heads: one decay per head (GDN), or one for each of K key dimensions (KDA).

    With `log_rate`, `decay` and `beta` are outputs of projections, and the op computes the gates in float32:

        g = -exp(log_rate) * softplus(decay + bias)         beta = beta_scale * sigmoid(beta)

    Without it, `decay` is g itself (natural logarithms, at most 0), and `beta` is beta. With beta up to 2, a token can
    flip the sign of the state's value for its key (Grazzi et al., arXiv:2411.12537).
    """

    decay: Tensor  # [T, H], or [T, H, K]
    beta: Tensor  # [T, H]
    log_rate: Tensor | None = None  # [H] float32, `A_log` in checkpoints
    bias: Tensor | None = None  # [H] or [H, K] float32, `dt_bias` in checkpoints
    beta_scale: float = 1.0  # 1 or 2

    @property
    def per_dim(self) -> bool:
        return self.decay.dim() == 3

    def check(self, num_tokens: int, num_heads: int, key_dim: int) -> None:
        """Raise `ValueError` for tensors that do not match these numbers of tokens, heads and key dimensions."""
        heads = (num_heads, key_dim) if self.per_dim else (num_heads,)
        wrong = self.decay.shape != (num_tokens, *heads) or self.beta.shape != (num_tokens, num_heads)
        if self.log_rate is not None:
            wrong |= self.bias is None or self.bias.shape != heads or self.log_rate.shape != (num_heads,)
        if wrong:
            raise ValueError(
                f"decay {list(self.decay.shape)}, beta {list(self.beta.shape)}, log_rate {_shape(self.log_rate)} and "
                f"bias {_shape(self.bias)} for {num_tokens} tokens, {num_heads} heads and {key_dim} key dimensions: "
                "give decay [T, H] or [T, H, K], beta [T, H], and either neither of the others or log_rate [H] and "
                "bias as one token's decay"
            )

    def sliced(self, tokens: slice) -> Gate:
        """Return the gates of some of the tokens."""
        return replace(self, decay=self.decay[tokens], beta=self.beta[tokens])

    def at(self, drafts: DeltaDrafts, place: int) -> Gate:
        """Return the gates of the draft stored at `place`, as those of one token."""
        return replace(self, decay=drafts.decay[place : place + 1], beta=drafts.beta[place : place + 1])

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return g, in the shape of `decay`, and beta [T, H]."""
        decay, beta = self.decay.to(dtype), self.beta.to(dtype)
        if self.log_rate is None or self.bias is None:
            return decay, beta
        rate = self.log_rate.to(dtype).exp()
        softplus = functional.softplus(decay + self.bias.to(dtype))
        return -(rate[:, None] if self.per_dim else rate) * softplus, self.beta_scale * beta.sigmoid()


def _shape(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else list(tensor.shape)
