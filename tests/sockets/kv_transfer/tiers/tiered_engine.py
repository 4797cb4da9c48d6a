"""Whole engines with tiers, driven step by step."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.engine.config import EngineConfig
from baton.engine.core.messages import EngineRequest
from baton.engine.core.regions import CacheRegion
from baton.engine.core.tiers import TierStats
from baton.engine.startup.build import Engine, build_engine
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.store import TierStore

from .tier_requests import ENGINE_ARGS, FEW_BLOCKS, MANY_BLOCKS, Tokens

_names = itertools.count(1)


class TieredEngine:
    """An engine with tiers that `make_store` opens. Its `run` waits for copies when the engine has no other work."""

    def __init__(
        self,
        model: Path,
        settings: TierSettings | None,
        make_store: Callable[..., TierStore] = TierStore,
        **arguments: Any,
    ) -> None:
        config = EngineConfig.from_args({"model": str(model), **ENGINE_ARGS, **arguments})
        self.store: TierStore | None = None
        self.num_cached_tokens: dict[str, int] = {}  # of each prompt that ran: on the device, or restored
        self._news = threading.Event()

        def open_tiers(region: CacheRegion) -> TierStore:
            assert settings is not None
            self.block_bytes = region.block_bytes
            self.store = make_store(
                region, settings, name=f"engine-{next(_names)}", cpu_affinity="any", wake=self._news.set
            )
            return self.store

        self.engine: Engine = build_engine(config, open_tiers=open_tiers if settings else None)

    def run(self, requests: Sequence[EngineRequest]) -> Tokens:
        core = self.engine.core
        tokens: Tokens = {request.request_id: [] for request in requests}
        for request in requests:
            core.add(request)
        unfinished = len(requests)
        while unfinished:
            for output in core.step():
                assert output.error is None
                if not tokens[output.request_id]:
                    self.num_cached_tokens[output.request_id] = output.num_cached_tokens
                tokens[output.request_id] += output.token_ids
                unfinished -= output.finish_reason is not None
            if not core.has_work() and unfinished:
                assert self._news.wait(30), "no copy has ended, and requests are unfinished"
                self._news.clear()
        return tokens

    def quiet(self) -> TierStats:
        """Step until all blocks that can be stored in tiers are. Return the statistics of tiers."""
        while self.engine.core.scheduler.tier_copies.has_stores or self.engine.core.has_work():
            self.engine.core.step()
        stats = self.engine.core.stats()
        assert stats.num_blocks_free == stats.num_blocks
        assert stats.tiers is not None
        return stats.tiers

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        self.engine.close()


@contextlib.contextmanager
def engine(model: Path, settings: TierSettings | None, **arguments: Any) -> Iterator[TieredEngine]:
    """Run an engine, with few blocks if it has tiers, otherwise with enough for everything."""
    num_blocks = FEW_BLOCKS if settings else MANY_BLOCKS
    it = TieredEngine(model, settings, **{"num_gpu_blocks_override": num_blocks, **arguments})
    try:
        yield it
    finally:
        it.close()
