"""Converts a request to `/v1/responses` to the equivalent chat request.

instructions                                  ──> a system message
message of a user, the system, a developer    ──> a message
reasoning, message of the assistant, calls    ──> one assistant message, if they are consecutive
function_call_output                          ──> a tool message
"""

from __future__ import annotations

from ..errors import bad_request
from .chat_messages import (
    MAX_TOOLS,
    AllowedToolChoice,
    CalledFunction,
    ChatMessage,
    NamedToolChoice,
    TextPart,
    ToolCall,
    ToolChoice,
)
from .protocol import ChatRequest, ResponseFormat, SamplingFields, StreamOptions
from .responses_request import (
    AllowedFunctionChoice,
    InputFunctionCall,
    InputFunctionOutput,
    InputMessage,
    InputOutputText,
    InputReasoning,
    InputText,
    Item,
    NamedFunctionChoice,
    ResponsesRequest,
    SchemaFormat,
    TextFormat,
)


class ResponseChat(ChatRequest):
    """A chat request made of a request to `/v1/responses`."""

    asked: ResponsesRequest


def as_chat(asked: ResponsesRequest) -> ResponseChat:
    """Convert a validated request. Raises `ApiError` (400) for an impossible sequence of items."""
    shared = {name: getattr(asked, name) for name in SamplingFields.model_fields}
    return ResponseChat.model_construct(
        **shared,
        asked=asked,
        messages=_messages(asked),
        tools=[tool.for_chat() for tool in asked.tools] or None,
        tool_choice=_tool_choice(asked),
        parallel_tool_calls=asked.parallel_tool_calls,
        max_completion_tokens=asked.max_output_tokens,
        logprobs=asked.shows_logprobs,
        top_logprobs=asked.top_logprobs if asked.shows_logprobs else None,
        stream_options=_stream_options(asked),
        response_format=_response_format(asked.text.format),
        reasoning_effort=asked.reasoning.effort,
        chat_template_kwargs=asked.chat_template_kwargs,
    )


def _stream_options(asked: ResponsesRequest) -> StreamOptions | None:
    options = asked.stream_options
    return None if options is None else StreamOptions(resumable=options.resumable)


def _tool_choice(asked: ResponsesRequest) -> ToolChoice:
    chosen = asked.tool_choice
    match chosen:
        case NamedFunctionChoice():
            return NamedToolChoice.model_validate({"type": "function", "function": {"name": chosen.name}})
        case AllowedFunctionChoice():
            return AllowedToolChoice.of(chosen.mode, [each.name for each in chosen.tools])
    return chosen


def _response_format(wanted: TextFormat | SchemaFormat) -> ResponseFormat:
    if isinstance(wanted, SchemaFormat):
        return ResponseFormat(type="json_schema", json_schema=wanted)
    return ResponseFormat(type=wanted.type)


def _messages(asked: ResponsesRequest) -> list[ChatMessage]:
    instructions = [] if asked.instructions is None else [ChatMessage(role="system", content=_text(asked.instructions))]
    messages: list[ChatMessage] = instructions
    called: set[str] = set()
    answer = _AssistantTurn()
    for index, item in enumerate(asked.input):
        if answer.ends_before(item):
            messages += answer.messages()
            answer = _AssistantTurn()
        match item:
            case InputReasoning() | InputFunctionCall() | InputMessage(role="assistant"):
                answer.add(item)
            case InputMessage():
                messages.append(ChatMessage(role=item.role, content=_texts(item.content)))
            case InputFunctionOutput():
                _check_called(index, item, called)
                message = ChatMessage(role="tool", tool_call_id=item.call_id, content=_texts(item.output))
                messages.append(message)
        if isinstance(item, InputFunctionCall):
            called.add(item.call_id)
    return messages + answer.messages()


def _check_called(index: int, item: InputFunctionOutput, called: set[str]) -> None:
    if item.call_id not in called:
        param = f"input[{index}].call_id"
        message = (
            f"{param!r} is {item.call_id!r}, and no 'function_call' before it in 'input' has that. "
            "This server keeps no answers: send the call, too."
        )
        raise bad_request(param, message)


class _AssistantTurn:
    """One earlier answer of the model, collected item by item."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._words: list[TextPart] = []
        self._calls: list[ToolCall] = []

    def ends_before(self, item: Item) -> bool:
        """Return whether an item begins a new turn. A turn consists of calls and the items around them, up to the first
        output of a call.
        """
        match item:
            case InputFunctionCall():
                return False
            case InputReasoning() | InputMessage(role="assistant"):
                return bool(self._words) and not self._calls
        return True

    def add(self, item: InputReasoning | InputMessage | InputFunctionCall) -> None:
        match item:
            case InputReasoning():
                self._thoughts += [part.text for part in item.content or item.summary]
            case InputMessage():
                self._words += _texts(item.content)
            case InputFunctionCall():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                self._calls.append(ToolCall(id=item.call_id, function=function))

    def messages(self) -> list[ChatMessage]:
        """Return the turn as one message, or nothing if it has no items; reasoning alone is an answer that was cut off.

        Raises `ApiError` (400) for more calls than a message may have.
        """
        if not (self._thoughts or self._words or self._calls):
            return []
        thoughts = "\n".join(self._thoughts) or None
        calls = self._calls or None
        if len(self._calls) > MAX_TOOLS:
            message = f"'input' has {len(self._calls)} calls in one turn of the assistant, more than {MAX_TOOLS}."
            raise bad_request("input", message, "too_many_values")
        return [ChatMessage(role="assistant", content=self._words, tool_calls=calls, reasoning_content=thoughts)]


def _text(text: str) -> list[TextPart]:
    return [TextPart(type="text", text=text)]


def _texts(parts: list[InputText | InputOutputText]) -> list[TextPart]:
    return [TextPart(type="text", text=part.text) for part in parts]
