"""Messages of a chat, the tool calls in them, and the tools that may be called."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, model_validator

from ..errors import excerpt
from .json_body import first_json_fault
from .validators import (
    TEXT_ALONE,
    FieldError,
    Integer,
    ReplayedModel,
    RequestModel,
    json_type_name,
    object_of_type,
    string_or_object,
    tag,
    tag_of,
)

MAX_TOOLS = 128  # OpenAI's limit

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(ReplayedModel):
    type: Literal["text"]
    text: str


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _json_object(value: str) -> str:
    try:
        read = json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ValueError("must be a JSON object, as a string")
    if (fault := first_json_fault(value.encode(), read)) is not None:
        raise ValueError(f"must be a JSON object that can be worked with: {fault.name or 'it'} {fault.message}")
    return value


class CalledFunction(ReplayedModel):
    name: FunctionName
    arguments: Annotated[str, AfterValidator(_json_object)]
    parsed_arguments: Any = None  # added by the official client, which parses them


class ToolCall(ReplayedModel):
    """A tool call in an earlier answer."""

    id: str = Field(min_length=1, max_length=128)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Integer | None = None  # index among the answer's calls, as in streams

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it, with its arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


def _text_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of text parts, not {json_type_name(value)}")
    return value


OnlyText = Annotated[TextPart, object_of_type(("text",), TEXT_ALONE)]
TextContent = Annotated[
    list[OnlyText], Field(fail_fast=True), BeforeValidator(_text_parts, json_schema_input_type=str | list[TextPart])
]


class ChatMessage(ReplayedModel):
    """A message. Messages of this server can be sent back unchanged, also as the official client stores them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent = []
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    function_call: None = None
    reasoning_content: str | None = None  # the chat template decides whether the prompt has it
    reasoning: str | None = None  # another name of `reasoning_content`; this server's messages have both
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    parsed: Any = None  # added by the official client, which parses `content`

    @model_validator(mode="after")
    def _has_what_its_role_has(self) -> Self:
        for field in ("tool_calls", "parsed"):
            if getattr(self, field) and self.role != "assistant":
                raise FieldError((field,), "is only for messages of the role 'assistant'")
        if self.role == "tool" and self.tool_call_id is None:
            raise FieldError(("tool_call_id",), "is required: the id of the call that this message answers")
        if self.reasoning_content not in (None, self.reasoning) and self.reasoning is not None:
            raise FieldError(("reasoning",), "must equal 'reasoning_content', if both are there")
        says_something = self.tool_calls or self.thoughts is not None
        if "content" not in self.model_fields_set and not (self.role == "assistant" and says_something):
            unless = ", unless it has 'tool_calls'" if self.role == "assistant" else ""
            raise FieldError(("content",), f"is required in a message of the role {self.role!r}{unless}")
        return self

    @property
    def thoughts(self) -> str | None:
        """The model's reasoning before this message, by either of its names."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it. `developer` is OpenAI's newer name for `system`."""
        calls = [call.for_template() for call in self.tool_calls or ()]
        content = [part.model_dump() for part in self.content]
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if content or not calls else None,
        }
        optional = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls or None}
        optional["reasoning_content"] = self.thoughts
        return message | {key: value for key, value in optional.items() if value is not None}


def check_tool_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Check that each tool message answers a call of an earlier message."""
    made: set[str] = set()
    for index, message in enumerate(messages):
        made |= {call.id for call in message.tool_calls or ()}
        asked = message.tool_call_id
        if message.role == "tool" and asked is not None and asked not in made:
            reason = f"is {excerpt(asked)}, which is the id of no call in 'tool_calls' of a message before this one"
            raise FieldError((index, "tool_call_id"), reason)
    return messages


class Function(RequestModel):
    """A function that may be called. `parameters` is a JSON schema; without it the function takes no arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments must match the schema; those of a required call always do


class Tool(RequestModel):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def check_unique_names(tools: list[Tool] | None) -> list[Tool] | None:
    names = Counter(tool.function.name for tool in tools or ())
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"must name each function once; given again: {', '.join(twice)}")
    return tools


Tools = Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS), AfterValidator(check_unique_names)]


class _FunctionsName(RequestModel):
    name: str


class NamedToolChoice(RequestModel):
    """A `tool_choice` of one function, which must be called."""

    type: Literal["function"]
    function: _FunctionsName


class _AllowedFunctions(RequestModel):
    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolChoice(RequestModel):
    """A `tool_choice` of several functions, which may or must be called. The prompt still lists all `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedFunctions

    @classmethod
    def of(cls, mode: str, names: Sequence[str]) -> AllowedToolChoice:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return cls.model_validate({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tag("word")]
    | Annotated[NamedToolChoice, tag("function")]
    | Annotated[AllowedToolChoice, tag("allowed_tools")],
    Discriminator(tag_of),
    string_or_object(("function", "allowed_tools")),
]
