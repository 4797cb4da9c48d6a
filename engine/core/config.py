"""The configuration of the engine's core: the model's limits, the device's memory, the operator's settings."""

from __future__ import annotations

import msgspec

from .layout import BLOCK_SIZE


class InvalidEngineCoreConfig(ValueError):
    """A field of `EngineCoreConfig` has a value that no engine can work with."""


class EngineCoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and limits of one `EngineCore`. Raises `InvalidEngineCoreConfig` from the constructor."""

    num_blocks: int  # of the KV pool
    max_num_seqs: int  # requests in one step; also the number of rows the runner keeps
    max_num_batched_tokens: int  # tokens in one step
    max_model_len: int  # prompt and output together, in tokens
    vocab_size: int
    eos_token_ids: list[int] = []
    block_size: int = BLOCK_SIZE  # tokens
    enable_prefix_caching: bool = True
    depth: int = 2  # steps in flight: 1 waits for each result, 2 plans the next step before it arrives

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_num_seqs", "vocab_size", "block_size", "depth"):
            if getattr(self, name) < 1:
                raise InvalidEngineCoreConfig(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_model_len < 2:
            raise InvalidEngineCoreConfig(
                f"max_model_len is {self.max_model_len}, it must be at least 2: one token of prompt and one of output"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidEngineCoreConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must not be less than max_num_seqs "
                f"({self.max_num_seqs}): every running request is given at least one token in each step"
            )

    @property
    def max_length(self) -> int:
        """The most tokens, prompt and output together, that a request can reach: the model's length or the pool's."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
