"""A request to every endpoint with every field, and helpers that walk through the bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

JsonPath = tuple[str | int, ...]
SCHEMA = {"type": "object", "title": "t", "properties": {"size": {"enum": [1, "two"]}}, "required": ["size"]}
FORMAT = {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}
FUNCTION = {"name": "cut", "description": "d", "parameters": SCHEMA, "strict": True}
ENGINES: dict[str, Any] = {
    "model": "tiny",
    **{"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "min_tokens": 0, "priority": 1},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1.0}},
    **{"stop_token_ids": [5], "allowed_token_ids": [6, 7], "bad_words": ["fox"], "cache_salt": "s"},
}
SHARED: dict[str, Any] = {
    **ENGINES,
    **{"stop": ["zz"], "user": "u", "metadata": {"k": "v"}, "safety_identifier": "x", "prompt_cache_key": "y"},
}
CALL = {"id": "a", "index": 0, "type": "function", "function": {"name": "cut", "arguments": '{"size": 1}'}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"},
    {"role": "assistant", "content": "w", "tool_calls": [CALL], "reasoning_content": "t", "parsed": {"a": "b"}},
    {"role": "tool", "tool_call_id": "a", "content": "1"},
]
ITEMS = [
    {"role": "user", "content": "hello"},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "w", "logprobs": ["q"]}]},
    {"type": "function_call", "id": "f", "call_id": "a", "name": "cut", "arguments": '{"size": 1}'},
    {"type": "function_call_output", "call_id": "a", "output": "1"},
]
BLOCKS = [
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "w", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "a", "name": "cut", "input": {"size": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": True}]},
]
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}})
STRUCTURED = {"json": SCHEMA, "regex": "a+", "choice": ["a", "b"], "grammar": 'root ::= "a"', "structural_tag": TAG}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **fields}


def response(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": "tiny", "input": ITEMS, "max_output_tokens": 2, **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "tiny", "messages": BLOCKS, "max_tokens": 2, **fields}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": completion(**SHARED, n=1, logprobs=1, echo=True),
    "completions of tokens": completion(prompt=[[5, 6]], stream=True, stream_options={"include_usage": True}),
    "completions of a format": completion(response_format={"type": "json_schema", "json_schema": FORMAT}),
    **{f"completions of a {kind}": completion(structured_outputs={kind: what}) for kind, what in STRUCTURED.items()},
    "chat": chat(**SHARED, logprobs=True, top_logprobs=1, chat_template_kwargs={"k": "v"}),
    "chat with tools": chat(
        messages=MESSAGES[:2],
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice={"type": "function", "function": {"name": "cut"}},
    ),
    "responses": response(**SHARED, instructions="i", chat_template_kwargs={"k": "v"}),
    "responses with tools": response(
        input="x",
        tools=[{"type": "function", **FUNCTION}],
        tool_choice={"type": "function", "name": "cut"},
        text={"format": {"type": "json_schema", **FORMAT}},
    ),
    "messages": message(**ENGINES, system="s", stop_sequences=["zz"], metadata={"user_id": "u"}, service_tier="auto"),
    "messages with tools": message(
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        system=[{"type": "text", "text": "s"}],
        tools=[{"name": "cut", "description": "d", "input_schema": SCHEMA, "strict": True}],
        tool_choice={"type": "tool", "name": "cut", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    ),
    "count tokens": ("/v1/messages/count_tokens", {"model": "tiny", "messages": BLOCKS, "system": "s"}),
    "input tokens": ("/v1/responses/input_tokens", {"model": "tiny", "input": "x", "instructions": "s"}),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": "x"}),
    "tokenize a chat": ("/tokenize", {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"k": "v"}}),
    "detokenize": ("/detokenize", {"model": "tiny", "tokens": [5, 6]}),
}


def places(value: Any, place: JsonPath = ()) -> Iterator[JsonPath]:
    """Yield the path of every value inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*place, key)
        yield from places(part, (*place, key))


def within(body: Any, place: JsonPath) -> Any:
    for key in place:
        body = body[key]
    return body


def name_of(place: JsonPath) -> str | None:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".") or None
