"""Reference of sampling, in plain torch.

    edit        allowed tokens, bad words, banned tokens, logit bias, penalties          (in this order)
    truncate    min-p, then top-k, then top-p over the remaining tokens; ties are kept or dropped together
    draw        argmax of logits / temperature + Gumbel noise; greedy rows: argmax of the edited logits

Every truncation keeps the tokens with at least some logit, so it is one threshold per row. A NaN logit counts as minus
infinity. If no token is left, the result is `NO_TOKEN`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import GREEDY_BELOW, NO_TOKEN, AllowedTokens, BadWords, Penalties, SamplingBatch, TokenHistory
from .noise import noise

NUCLEUS_WIDTHS = (128, 4096)  # top-p considers so many of the best tokens before it sorts the whole vocabulary


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw token ids [R] int64 from `logits` [R, V] float32, which are not changed."""
    logits = edit_logits(logits, batch).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best, greedy = logits.max(dim=-1)
    greedy = greedy.masked_fill(best == -torch.inf, NO_TOKEN)
    if batch.temperature is None:
        return greedy
    random = batch.temperature >= GREEDY_BELOW
    temperature = torch.where(random, batch.temperature, 1.0).double()[:, None]
    scores = logits.double() / temperature + noise(batch.seeds, batch.positions, logits.shape[1])
    kept = logits.double() >= truncation_threshold(logits, temperature, batch)
    drawn = scores.masked_fill(~kept, -torch.inf).argmax(dim=-1)
    return torch.where(random & (greedy != NO_TOKEN), drawn, greedy)


def edit_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the logits for temperature and truncation: an edited copy if any row needs edits, else `logits` itself."""
    if not batch.edits_logits:
        return logits
    logits = logits.clone()
    if batch.allowed is not None:
        _keep_allowed(logits, batch.allowed)
    if batch.bad_words is not None:
        _ban_bad_words(logits, batch.bad_words, batch)
    if batch.banned is not None:
        # A device tensor: a Python number would be copied to the device, and synchronize.
        logits.index_put_((batch.banned.rows, batch.banned.token_ids), logits.new_full((), -torch.inf))
    if batch.bias is not None:
        logits[batch.bias.rows, batch.bias.token_ids] += batch.bias.values
    if batch.penalties is not None:
        _penalize(logits, batch.penalties, batch)
    return logits


def truncation_threshold(logits: Tensor, temperature: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the least logit that may be drawn, `[R, 1]` float64; `temperature` is `[R, 1]` float64 and positive."""
    threshold = torch.full_like(temperature, -torch.inf)
    if batch.min_p is not None:
        best = logits.amax(dim=-1, keepdim=True).double()
        least = best + temperature * batch.min_p.double().log()[:, None]
        threshold = torch.where(batch.min_p[:, None] > 0, least, threshold)  # without min_p, inf - inf would be NaN
    if batch.top_k is not None:
        count = torch.where(batch.top_k > 0, batch.top_k, logits.shape[1]).clamp(max=logits.shape[1])[:, None]
        truncated = count < logits.shape[1]
        width = int((count * truncated).amax().clamp(min=1))
        kth = logits.topk(width, dim=-1).values.gather(1, (count - 1).clamp(max=width - 1)).double()
        threshold = torch.where(truncated, torch.maximum(threshold, kth), threshold)
    if batch.top_p is not None:
        kept = logits.double().masked_fill(logits.double() < threshold, -torch.inf)
        threshold = torch.maximum(threshold, _nucleus_threshold(kept, temperature, batch.top_p.double()[:, None]))
    return threshold


def _nucleus_threshold(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Return the greatest logit x [R, 1] for which the tokens with logits >= x have at least probability `top_p`."""
    vocab_size = logits.shape[1]
    best = logits.amax(dim=-1, keepdim=True)
    best = torch.where(best.isfinite(), best, 0.0)
    goal = top_p * ((logits - best) / temperature).exp().sum(dim=-1, keepdim=True)
    for width in (*(width for width in NUCLEUS_WIDTHS if width < vocab_size), vocab_size):
        top = logits.topk(width, dim=-1).values
        mass = ((top - best) / temperature).exp().cumsum(dim=-1)
        if bool(((mass[:, -1:] >= goal) | (top_p >= 1)).all()):
            break
    last = (mass < goal).sum(dim=-1, keepdim=True).clamp(max=width - 1)
    return torch.where(top_p >= 1, -torch.inf, top.gather(1, last))


def _keep_allowed(logits: Tensor, allowed: AllowedTokens) -> None:
    bit = torch.arange(32, device=logits.device, dtype=torch.int32)
    mask = (allowed.bits[:, :, None] >> bit & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[allowed.rows] = logits[allowed.rows].masked_fill(~mask, -torch.inf)


def _ban_bad_words(logits: Tensor, words: BadWords, batch: SamplingBatch) -> None:
    before, last = words.token_ids[:, :-1], words.token_ids[:, -1]
    completes = torch.ones_like(words.rows, dtype=torch.bool)
    if before.shape[1]:
        history = history_of(batch)
        lengths = batch.positions[words.rows, None]
        where = lengths - before.shape[1] + torch.arange(before.shape[1], device=logits.device)
        in_output = where >= history.prompt_lens[words.rows, None]
        tail = history.token_ids[history.rows[words.rows, None], where.clamp(min=0)]
        completes = ((before < 0) | (in_output & (tail == before))).all(dim=-1)
    # Only the device knows which words would be completed, so every word adds something: minus infinity, or 0.
    logits.index_put_((words.rows, last), torch.where(completes, -torch.inf, 0.0).to(logits.dtype), accumulate=True)


def _penalize(logits: Tensor, penalties: Penalties, batch: SamplingBatch) -> None:
    history = history_of(batch)
    rows = penalties.rows
    lengths = batch.positions[rows, None]
    tokens = history.token_ids[history.rows[rows], : int(lengths.max())].long()
    index = torch.arange(tokens.shape[1], device=logits.device)[None]
    valid = index < lengths
    counts = logits.new_zeros(2, len(rows), logits.shape[1])  # counts of tokens in the prompt, and in the output
    tokens = torch.where(valid, tokens, 0)
    in_output = index >= history.prompt_lens[rows, None]
    counts[0].scatter_add_(1, tokens, (valid & ~in_output).to(counts.dtype))
    counts[1].scatter_add_(1, tokens, (valid & in_output).to(counts.dtype))
    selected = logits[rows]
    repetition = penalties.repetition[:, None]
    repeated = torch.where(selected > 0, selected / repetition, selected * repetition)
    selected = torch.where(counts.sum(dim=0) > 0, repeated, selected)
    selected -= penalties.frequency[:, None] * counts[1]
    selected -= penalties.presence[:, None] * (counts[1] > 0)
    logits[rows] = selected


def history_of(batch: SamplingBatch) -> TokenHistory:
    if batch.history is None:
        raise ValueError("penalties and bad words of several tokens read the tokens drawn so far: give batch.history")
    return batch.history
