"""Validates a body as a request, or refuses the first wrong field with a 400.

Fields that OpenAI or vLLM have and this server lacks are in `NOT_SUPPORTED` and refused as such; all others are refused
as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import bad_request
from .validation_errors import first_error
from .validators import RequestModel

# Field -> values without effect, which are accepted from clients that send defaults.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None,),
    "media_io_kwargs": (None,),
    "mm_processor_kwargs": (None,),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "prompt_embeds": (None,),
    "reasoning_effort": (None, "none"),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "return_token_offsets": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "vllm_xargs": (None,),
    "watermarking": (None, False),
    "web_search_options": (None,),
}

# Names in older versions of vLLM.
RENAMED = {
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "structural_tag": "structured_outputs.structural_tag",
}

RequestT = TypeVar("RequestT", bound=RequestModel)


def parse_request(kind: type[RequestT], data: dict[str, Any]) -> RequestT:
    """Validate a body as a request. Raises `ApiError` (400) that names the first wrong field."""
    asked = {key: value for key, value in data.items() if not _asks_for_nothing(kind, key, value, data)}
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise first_error(kind, error, asked) from None


def _asks_for_nothing(kind: type[BaseModel], key: str, value: Any, data: dict[str, Any]) -> bool:
    if key in RENAMED:
        if value is None:
            return True
        raise bad_request(key, f"{key!r} is now called {RENAMED[key]!r}.", "unsupported_parameter")
    if key in kind.model_fields or key not in NOT_SUPPORTED:
        return False
    same_as_n = key == "best_of" and type(value) is int and value == (data.get("n") or 1)
    if same_as_n or equals_any(value, NOT_SUPPORTED[key]):
        return True
    raise bad_request(key, f"{key!r} is not supported by this server. Leave it out.", "unsupported_parameter")


def equals_any(value: Any, others: Sequence[Any]) -> bool:
    """Compare as JSON does: `true` is not 1."""
    return any(value == other and type(value) is type(other) for other in others)
