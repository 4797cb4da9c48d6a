"""Run a model as an engine would: sequences in chunks, several in one step, KV in blocks with shuffled ids."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from baton.engine.core.layout import StateLayout
from baton.engine.layers.decoder import CausalLM
from baton.engine.layers.step_context import GroupCache, StateCache
from baton.kernels.attention import AttentionBatch
from baton.kernels.state_batch import StateBatch

BLOCK_SIZE = 16

# The first release of `transformers` that computes what the authors' own code does, where an older one is admitted.
RIGHT_SINCE = {
    "bamba": "5.23",  # a gated norm for each group of Mamba-2
    "granitemoehybrid": "5.23",  # likewise
    "minimax_m2": "5.18",  # `rotary_dim`
}


class PagedRun:
    """Sequences that grow by what `step` is given. Blocks that nobody has written hold NaN: reading one shows."""

    def __init__(
        self, model: CausalLM, num_seqs: int, max_len: int, seed: int = 0, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Allocate caches for `num_seqs` sequences. `rank` of `num_ranks`: the model's tensor-parallel part."""
        self.model = model
        self.device = model.model.norm.weight.data.device
        self.lens = [0] * num_seqs
        blocks_per_seq = -(-max_len // BLOCK_SIZE)
        num_blocks = num_seqs * blocks_per_seq + 3
        generator = torch.Generator().manual_seed(seed)
        self.block_tables, self.arenas = [], []  # for each cache group
        self.slots: dict[int, Tensor] = {}  # for each group with states: one slot for each sequence
        for number, group in enumerate(model.config.caches.of_rank(rank, num_ranks).groups):
            if isinstance(group.blocks, StateLayout):
                shape = (num_seqs + 2, group.blocks.block_bytes)
                self.arenas.append(torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device))  # NaN in any type
                self.slots[number] = torch.randperm(num_seqs + 2, generator=generator)[:num_seqs]
                self.block_tables.append(torch.empty(0))
                continue
            shuffled = torch.randperm(num_blocks, generator=generator)[: num_seqs * blocks_per_seq].int()
            self.block_tables.append(shuffled.view(num_seqs, blocks_per_seq).to(self.device))
            dtype = getattr(torch, group.kv.dtype)
            self.arenas.append(torch.full(group.kv.shape(num_blocks), float("nan"), dtype=dtype, device=self.device))

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Run (sequence, its next tokens) pairs in one step; return log-probabilities [tokens, vocab] of each."""
        chunks = sorted(chunks, key=lambda chunk: len(chunk[1]) > 1)  # decodes come first
        for sequence, tokens in chunks:
            self.lens[sequence] += len(tokens)
        rows = [sequence for sequence, _ in chunks]
        query_lens = [len(tokens) for _, tokens in chunks]
        seq_lens = [self.lens[sequence] for sequence, _ in chunks]
        token_ids = torch.tensor([token for _, tokens in chunks for token in tokens], device=self.device)
        logits = self.model.logits(self.model(token_ids, self.caches(rows, query_lens, seq_lens)))
        parts = logits.float().log_softmax(-1).split(query_lens)
        by_sequence = {sequence: part for (sequence, _), part in zip(chunks, parts, strict=True)}
        return [by_sequence[sequence] for sequence in sorted(by_sequence)]

    def caches(
        self, rows: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> list[GroupCache | StateCache]:
        """Return the model's cache arguments for a step that runs the last `query_lens` tokens of these sequences."""
        index = torch.tensor(rows, device=self.device)
        caches: list[GroupCache | StateCache] = []
        for number, (tables, arena) in enumerate(zip(self.block_tables, self.arenas, strict=True)):
            if number in self.slots:
                slots = self.slots[number][rows].tolist()
                begins = [length == total for length, total in zip(query_lens, seq_lens, strict=True)]
                sources = [-1 if begin else slot for slot, begin in zip(slots, begins, strict=True)]
                caches.append(StateCache(StateBatch.plan(query_lens, sources, slots, device=self.device), arena))
            else:
                batch = AttentionBatch.plan(query_lens, seq_lens, tables[index].contiguous(), BLOCK_SIZE)
                caches.append(GroupCache(batch, arena))
        return caches


def chunked_logprobs(model: CausalLM, tokens: Sequence[int], chunk: int, **rank: int) -> Tensor:
    """Return log-probabilities [tokens, vocab] of one sequence, run `chunk` tokens a step. `rank`: see `PagedRun`."""
    run = PagedRun(model, 1, len(tokens), **rank)
    return torch.cat([run.step([(0, tokens[i : i + chunk])])[0] for i in range(0, len(tokens), chunk)])


def greedy(model: CausalLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Continue all prompts together, always with the most likely token."""
    run = PagedRun(model, len(prompts), max(map(len, prompts)) + num_tokens)
    outputs: list[list[int]] = [[] for _ in prompts]
    pending: list[Sequence[int]] = list(prompts)
    for _ in range(num_tokens):
        for sequence, logprobs in enumerate(run.step(list(enumerate(pending)))):
            outputs[sequence].append(int(logprobs[-1].argmax()))
            pending[sequence] = outputs[sequence][-1:]
    return outputs


@torch.inference_mode()
def reference_logprobs(reference: Any, tokens: Sequence[int]) -> Tensor:
    """Return a `transformers` model's log-probabilities [tokens, vocab] in float32, computed without a cache.

    Skips the test if the installed release of `transformers` is known to compute this model wrongly.
    """
    model_type, installed = reference.config.model_type, version("transformers")
    if model_type in RIGHT_SINCE and Version(installed) < Version(RIGHT_SINCE[model_type]):
        pytest.skip(f"transformers {installed} computes {model_type} wrongly")
    logits: Tensor = reference(torch.tensor([list(tokens)], device=reference.device), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def reference_greedy(reference: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logprobs(reference, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def random_tokens(count: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
