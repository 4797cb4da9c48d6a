"""Converts a request of Anthropic's Messages API to the equivalent chat request.

system                                       ──> a system message
text of the user                             ──> a message of the user
tool_result                                  ──> a tool message
thinking, text, tool_use of the assistant    ──> one assistant message; if it is the last, the answer continues it

Consecutive messages of the same role become one message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from ..errors import bad_request, excerpt
from .anthropic_answer import TokenCount
from .anthropic_request import (
    FIELDS,
    CountTokensRequest,
    Message,
    MessagesInput,
    MessagesRequest,
    TextBlockParam,
    ThinkingBlockParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from .chat_messages import CalledFunction, ChatMessage, NamedToolChoice, TextPart, ToolCall
from .chat_messages import ToolChoice as ChatToolChoice
from .job import PreparedRequest
from .prepare import Preparer
from .protocol import ChatRequest, EngineFields, JsonSchemaFormat, ResponseFormat, StreamOptions
from .reasoning import THINKS

_CHOICES: dict[str, ChatToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
_ERROR = "Error: "  # put before the text of a result with `is_error`


class MessagesChat(ChatRequest):
    """A chat request made of a request to `/v1/messages`."""

    asked: MessagesInput


def parse_messages(data: dict[str, Any]) -> MessagesChat:
    """Validate a body. Raises `ApiError` (400) that names the invalid field."""
    asked = FIELDS.parse(MessagesRequest, data)
    shared = {name: getattr(asked, name) for name in EngineFields.model_fields}
    wanted = asked.output_config.format
    return MessagesChat.model_construct(
        **shared,
        asked=asked,
        **_chat_input(asked),
        max_tokens=asked.max_tokens,
        stop=asked.stop_sequences,
        stream_options=None
        if asked.stream_options is None
        else StreamOptions(resumable=asked.stream_options.resumable),
        response_format=None
        if wanted is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="answer", schema=wanted.schema_)),
    )


async def prepare_messages(preparer: Preparer, request: MessagesChat, key_salt: str) -> PreparedRequest:
    """Prepare the generation. Raises `ApiError` (400) that names the invalid field."""
    _check_choice(request.asked)
    prepared = await preparer.converted_chat(request, FIELDS, key_salt)
    thinking = request.asked.thinking
    prepared.omits_thoughts = thinking is not None and thinking.display == "omitted"
    return prepared


async def count_tokens(preparer: Preparer, data: dict[str, Any]) -> TokenCount:
    """Answer `/v1/messages/count_tokens`. Raises `ApiError` (400) that names the invalid field."""
    asked = FIELDS.parse(CountTokensRequest, data)
    _check_choice(asked)
    chat = ChatRequest.model_construct(model=asked.model, **_chat_input(asked))
    with FIELDS.in_errors():
        return TokenCount(len(await preparer.chat_tokens(chat)))


def _chat_input(asked: MessagesInput) -> dict[str, Any]:
    """Return the fields that determine the chat's prompt and the tools that may be called."""
    continues = asked.messages[-1].role == "assistant"
    chosen, thinking = asked.tool_choice, asked.thinking
    variables = asked.chat_template_kwargs or {}
    if thinking is not None and thinking.type != "disabled":
        variables = dict.fromkeys(THINKS, True) | variables
    is_off = thinking is not None and thinking.type == "disabled"
    return {
        "messages": _messages(asked),
        "tools": [tool.for_chat() for tool in asked.tools] or None,
        "tool_choice": None if chosen is None else _tool_choice(chosen.type, chosen.name),
        "parallel_tool_calls": None if chosen is None else not chosen.disable_parallel_tool_use,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "reasoning_effort": "none" if is_off else asked.output_config.effort,
        "chat_template_kwargs": variables or None,
    }


def _check_choice(asked: MessagesInput) -> None:
    """Raise `ApiError` if the chosen tool does not exist, in this API's terms: the chat's check would use its own."""
    chosen = asked.tool_choice
    if chosen is None:
        return
    if chosen.type == "any" and not asked.tools:
        raise bad_request("tool_choice", "'tool_choice' is 'any', so 'tools' must name a tool.")
    if chosen.name is not None and chosen.name not in [tool.name for tool in asked.tools]:
        raise bad_request(
            "tool_choice.name", f"'tool_choice.name' is {excerpt(chosen.name)}, which is none of 'tools'."
        )


def _tool_choice(kind: str, name: str | None) -> ChatToolChoice:
    if name is None:
        return _CHOICES[kind]
    return NamedToolChoice.model_validate({"type": "function", "function": {"name": name}})


def _messages(asked: MessagesInput) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if any(block.text for block in asked.system):
        messages.append(_message("system", asked.system))
    turns = (turn for message in asked.messages for turn in _turns(message))
    for role, group in groupby(turns, key=lambda turn: turn.role):
        same = list(group)
        messages += [_joined(same)] if role in ("user", "assistant") else same
    return messages


def _turns(message: Message) -> Iterator[ChatMessage]:
    """Yield the messages of a chat that stand for one message: each tool result becomes a message of its own."""
    if message.role == "assistant":
        yield _assistant_message(message)
        return
    for is_result, group in groupby(message.content, key=lambda block: isinstance(block, ToolResultBlockParam)):
        blocks = list(group)
        if is_result:
            yield from (_tool_message(block) for block in blocks if isinstance(block, ToolResultBlockParam))
        else:
            yield _message(message.role, [block for block in blocks if isinstance(block, TextBlockParam)])


def _assistant_message(message: Message) -> ChatMessage:
    texts = [block for block in message.content if isinstance(block, TextBlockParam)]
    thoughts = [block.text for block in message.content if isinstance(block, ThinkingBlockParam)]
    calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlockParam)]
    return _message("assistant", texts, tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None)


def _tool_message(result: ToolResultBlockParam) -> ChatMessage:
    message = _message("tool", result.content, tool_call_id=result.tool_use_id)
    if not result.is_error:
        return message
    first, *rest = message.content or [_part("")]
    return message.model_copy(update={"content": [_part(_ERROR + first.text), *rest]})


def _call(block: ToolUseBlockParam) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = CalledFunction.model_construct(name=block.name, arguments=arguments)
    return ToolCall.model_construct(id=block.id, function=function)


def _joined(turns: list[ChatMessage]) -> ChatMessage:
    """Join messages of one role into one."""
    if len(turns) == 1:
        return turns[0]
    return ChatMessage.model_construct(
        role=turns[0].role,
        content=[part for turn in turns for part in turn.content],
        tool_calls=[call for turn in turns for call in turn.tool_calls or ()] or None,
        reasoning_content="\n".join(filter(None, (turn.reasoning_content for turn in turns))) or None,
    )


def _message(
    role: Literal["system", "user", "assistant", "tool"], texts: list[TextBlockParam], **fields: Any
) -> ChatMessage:
    """Return a message without validation: its parts are valid, and this API does not limit the number of calls."""
    return ChatMessage.model_construct(role=role, content=[_part(block.text) for block in texts], **fields)


def _part(text: str) -> TextPart:
    return TextPart.model_construct(type="text", text=text)
