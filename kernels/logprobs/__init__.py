"""Log-probabilities from raw logits, i.e. before penalties and temperature."""

from torch import Tensor

from . import cpu, reference

__all__ = ["token_logprobs"]


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return natural-log probabilities of `token_ids` [R], and of the `k` best tokens, from `logits` [R, V].

    The result is `(chosen [R] float32, rank [R] int64, top_ids [R, k] int64, top_logprobs [R, k] float32)`. The rank is
    one plus the number of strictly greater logits. The best token comes first; equal ones are in any order.
    """
    num_rows, vocab_size = logits.shape
    if token_ids.shape != (num_rows,):
        raise ValueError(f"token_ids {list(token_ids.shape)} for logits {list(logits.shape)}: give one id a row")
    if not 0 <= k <= vocab_size:
        raise ValueError(f"k is {k}: give a number of tokens from 0 to the vocabulary's {vocab_size}")
    if logits.is_cuda:
        from . import gpu

        return gpu.token_logprobs(logits, token_ids, k)
    if logits.device.type == "cpu":
        return cpu.token_logprobs(logits, token_ids, k)
    return reference.token_logprobs(logits, token_ids, k)
