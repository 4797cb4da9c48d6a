"""The configuration of the engine's core: the model's limits, the device's memory, the operator's settings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .layout import BLOCK_SIZE
from .speculation.config import SpeculativeConfig


class InvalidEngineCoreConfig(ValueError):
    """A field of `EngineCoreConfig` has a value that no engine can work with."""


class CacheGroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arena of one group of layers; see `core.layout.CacheLayout`."""

    num_blocks: int
    window: int | None = None  # tokens that a query sees, itself included; None: all
    checkpoint_tokens: int | None = None  # tokens from one kept state to the next; None: its blocks hold tokens


class EngineCoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and limits of one `EngineCore`. The constructor raises `InvalidEngineCoreConfig`."""

    num_blocks: int  # of all arenas together
    cache_groups: list[CacheGroupConfig] = []  # in the layout's order; empty: one group, whose layers read all tokens
    max_num_seqs: int  # requests in one step; also the number of rows the runner keeps
    max_num_batched_tokens: int  # tokens in one step
    max_model_len: int  # prompt and output together, in tokens
    vocab_size: int
    eos_token_ids: list[int] = []
    block_size: int = BLOCK_SIZE  # tokens
    enable_prefix_caching: bool = True
    depth: int = 2  # steps in flight: 1 waits for each result, 2 plans the next step before it arrives
    speculation: SpeculativeConfig | None = None  # None: a decoding request draws one token in a step

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_num_seqs", "vocab_size", "block_size", "depth"):
            if getattr(self, name) < 1:
                raise InvalidEngineCoreConfig(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.cache_groups and sum(group.num_blocks for group in self.cache_groups) != self.num_blocks:
            raise InvalidEngineCoreConfig(f"num_blocks is {self.num_blocks}, must be the sum over all cache_groups")
        if any(group.num_blocks < 1 or (group.window is not None and group.window < 1) for group in self.groups):
            raise InvalidEngineCoreConfig("cache_groups: blocks and windows must be at least 1")
        if self.groups[0].checkpoint_tokens is not None:
            raise InvalidEngineCoreConfig("cache_groups: the first must keep tokens, as prefixes are found by it")
        if any(group.checkpoint_tokens is not None and group.num_blocks < 2 for group in self.groups):
            raise InvalidEngineCoreConfig("cache_groups: states need 2 slots, to go on from one in the other")
        if any((group.checkpoint_tokens or 0) % self.block_size for group in self.groups):
            raise InvalidEngineCoreConfig(f"checkpoint_tokens must be whole blocks of {self.block_size}")
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
    def groups(self) -> Sequence[CacheGroupConfig]:
        """The cache groups: at least one."""
        return self.cache_groups or [CacheGroupConfig(num_blocks=self.num_blocks)]

    @property
    def max_length(self) -> int:
        """The most tokens, prompt and output together, that a request can have: the model's length or an arena's.

        An arena of windows, too, must hold a whole sequence, since blocks are given back only after they are computed.
        """
        holding = (group.num_blocks * self.block_size for group in self.groups if group.checkpoint_tokens is None)
        return min(self.max_model_len, *holding)
