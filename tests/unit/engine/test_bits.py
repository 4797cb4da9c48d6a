"""On a CPU, an answer and its logprobs have the same bits with drafts and without, in every family.

Drafts share steps with other requests, and take tokens from their prompts: no product or function of one token may
depend on how many others are computed with it, or on where a prompt is cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine import LLM
from baton.engine.core.requests.drafting import Drafting
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.startup import build
from baton.kernels.linear.cpu import PANEL_ROWS, pack

from ...helpers.checkpoints import ARCHITECTURES, write_checkpoint
from ...helpers.tiny_shapes import DIFFERENCES, SHAPE
from .controls import EVERYTHING, own_seeds, prompts_of
from .guessing import HOT

PROMPTS = prompts_of(1, 15, 17, 48, 90, 130)
PARAMS = [EVERYTHING, msgspec.structs.replace(HOT, prompt_logprobs=1)] * 3
MOST = 4
ERRORS = 0.4
IN_PANELS = pack(torch.zeros(PANEL_ROWS, 2, dtype=torch.bfloat16)) is not None


def widths(architecture: str) -> dict[str, Any]:
    """Return widths of experts whose matrices fit into panels, as those of published models do."""
    keys = {**SHAPE, **DIFFERENCES[architecture]}
    return {name: 64 for name, value in keys.items() if name.endswith("intermediate_size") and value % PANEL_ROWS}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not IN_PANELS, reason="needs the C++ kernels: torch's products depend on the number of rows")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_change_no_bit(architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, architecture, dtype=dtype, **widths(architecture))
    args = {"skip_tokenizer_init": True, "dtype": dtype, "max_num_seqs": 8, "enable_prefix_caching": False}
    params = [own_seeds(each, len(PROMPTS))[number] for number, each in enumerate(PARAMS)]
    expected = LLM(str(folder), **args).generate(PROMPTS, params, use_tqdm=False)
    whole = {tuple(each.prompt_token_ids): each.prompt_token_ids + each.outputs[0].token_ids for each in expected}
    drafter = InformedDrafter(lambda _, prompt: whole[tuple(prompt)], 1 - ERRORS, 256)
    monkeypatch.setattr(build, "make_drafting", lambda *_: Drafting(drafter, MOST, adapts=False))
    speculative = {"method": "ngram", "num_speculative_tokens": MOST}
    llm = LLM(str(folder), **args, speculative_config=speculative, max_num_batched_tokens=40, async_scheduling=True)
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    for drafted, plain in zip(found, expected, strict=True):
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
        assert drafted.outputs[0].logprobs == plain.outputs[0].logprobs
        assert drafted.prompt_logprobs == plain.prompt_logprobs
    stats = llm.engine.core.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 20
