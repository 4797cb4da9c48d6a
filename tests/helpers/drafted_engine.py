"""An engine, of one rank or several, whose requests get drafts by one that knows their answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine import EngineConfig
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.messages import EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.parallel import Member
from baton.engine.startup import build

from .parallel_engine import Served, serve

MOST = 4
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": MOST}  # another drafter takes the place of this one
ERRORS = 0.3


def serve_with_drafts(
    member: Member,
    config: EngineConfig,
    batches: Sequence[Sequence[EngineRequest]],
    answers: dict[str, list[int]],
    vocab_size: int,
) -> Served | None:
    """Serve requests as `serve` does, with drafts of these answers, by request, some of which are wrong."""

    def make(core: EngineCoreConfig, device: str) -> Drafting | None:
        drafter = InformedDrafter(lambda name, prompt: [*prompt, *answers[name]], 1 - ERRORS, vocab_size)
        return Drafting(drafter, MOST, adapts=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_drafting", make)
        return serve(member, config, batches)
