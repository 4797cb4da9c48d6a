"""Run requests through engine cores: all on one, or the prompts on one and the decodes on another."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.engine.core.engine import EngineCore
from baton.engine.core.messages import EngineOutput, EngineRequest, FinishReason


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[EngineOutput]]:
    """Return all outputs of each request, in order."""
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while any(not steps or steps[-1].finish_reason is None for steps in outputs.values()):
        for step in core.step():
            outputs[step.request_id].append(step)
    return outputs


def hand_off(prefill: EngineCore, decode: EngineCore, requests: Sequence[EngineRequest]) -> list[list[int]]:
    """Run the prompts on one engine and the decodes on the other; return the tokens of both."""
    first = run(prefill, [msgspec.structs.replace(request, keep_kv=True) for request in requests])
    tokens = {request_id: [token for step in steps for token in step.token_ids] for request_id, steps in first.items()}
    moved = [
        msgspec.structs.replace(
            request, output_token_ids=tokens[request.request_id], kv_source=first[request.request_id][-1].kv_source
        )
        for request in requests
        if first[request.request_id][-1].finish_reason is FinishReason.HANDOFF
    ]
    for request_id, steps in run(decode, moved).items():
        assert steps[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        tokens[request_id] = tokens[request_id] + [token for step in steps for token in step.token_ids]
    return [tokens[request.request_id] for request in requests]
