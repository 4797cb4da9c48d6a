"""The request of `POST /v1/responses`, as far as a server without stored state can serve it.

    instructions, input: messages | reasoning | function_call | function_call_output ──> `responses_input.py` ──> a chat

Sampling fields are those of the other endpoints. Fields with a value that has no effect are dropped before validation
(`REFUSED`); fields of the API that Baton does not support are refused by name, with an alternative.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field

from .chat_messages import MAX_TOOLS, CalledFunction, Function, Tool, check_unique_names
from .job import ResponseEcho
from .parsing import ApiFields
from .protocol import JsonSchemaFormat, SamplingFields
from .reasoning import Effort
from .validators import (
    TEXT_ALONE,
    Integer,
    ReplayedModel,
    RequestModel,
    kind,
    object_of_type,
    string_or_object,
    tag,
    tag_of,
    without_nulls,
)

LOGPROBS = "message.output_text.logprobs"
KEEPS_NOTHING = "This server keeps no answers"

# Field -> values that have no effect and are accepted, and advice for other values.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((None, False), f"{KEEPS_NOTHING}: leave it out, or set it to false."),
    "previous_response_id": ((None,), f"{KEEPS_NOTHING}: send the earlier items in 'input'."),
    "conversation": ((None,), f"{KEEPS_NOTHING}: send the earlier items in 'input'."),
    "background": ((None, False), f"{KEEPS_NOTHING}: wait for this one, or set 'stream' to true."),
    "background_options": ((None,), "Nothing runs in the background: leave it out."),
    "prompt": ((None,), f"{KEEPS_NOTHING}, and no templates of prompts: send the text in 'instructions' and 'input'."),
    "truncation": ((None, "disabled"), "Nothing is cut from 'input': shorten it, or set 'truncation' to 'disabled'."),
    "context_management": ((None, []), "Nothing is cut from 'input': leave it out."),
    "access_programs": ((None,), "Leave it out."),
    "image": ((None,), "This server reads text only: leave it out."),
    "moderation": ((None,), "Nothing is moderated here: leave it out."),
    "prompt_cache_options": ((None,), "Prefixes are cached as long as there is room: leave it out."),
    "prompt_cache_retention": ((None,), "Prefixes are cached as long as there is room: leave it out."),
}

# Refused names of fields of a chat request -> this API's names.
RENAMED = {
    "functions": "tools",
    "logprobs": f"include: [{LOGPROBS!r}]",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}

# Names of fields of a chat request -> this API's names.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}

FIELDS = ApiFields(REFUSED, RENAMED, NAMES)

Status = Literal["in_progress", "completed", "incomplete"]  # of an item in an earlier response


def _item_kind(value: Any) -> Any:
    """Return an item's type; for messages it may be omitted."""
    return "message" if kind(value) is None and isinstance(value, dict) and "role" in value else kind(value)


def _text_part(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _user_message(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _not_ours(value: Any) -> Any:
    raise ValueError(
        "comes from another server: leave the item out. This server's thoughts are plain text, in 'content'"
    )


class InputText(RequestModel):
    type: Literal["input_text"]
    text: str


class InputOutputText(RequestModel):
    """A text part of an earlier answer, as the server sent it."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: list[Any] = []
    parsed: Any = None  # added by the official client, which parses `text`


class InputReasoningText(ReplayedModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


Part = Annotated[
    Annotated[InputText, tag("input_text")] | Annotated[InputOutputText, tag("output_text")],
    Discriminator(lambda value: f"<{kind(value)}>"),
    object_of_type(("input_text", "output_text"), TEXT_ALONE),
]
Parts = Annotated[list[Part], BeforeValidator(_text_part, json_schema_input_type=str | list[Part])]


class InputMessage(RequestModel):
    """A message of any role. Messages of this server can be sent back unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputReasoning(RequestModel):
    """The model's reasoning before an earlier answer or call."""

    type: Literal["reasoning"]
    content: list[InputReasoningText] = []
    summary: list[InputReasoningText] = []
    encrypted_content: Annotated[None, BeforeValidator(_not_ours)] = None
    id: str | None = None
    status: Status | None = None


class InputFunctionCall(CalledFunction):
    """An earlier function call of the model."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=128)
    id: str | None = None
    status: Status | None = None


class InputFunctionOutput(RequestModel):
    """The client's result of a function call."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=128)
    output: Parts
    name: str | None = None
    id: str | None = None
    status: Status | None = None


Item = Annotated[
    Annotated[InputMessage, tag("message")]
    | Annotated[InputReasoning, tag("reasoning")]
    | Annotated[InputFunctionCall, tag("function_call")]
    | Annotated[InputFunctionOutput, tag("function_call_output")],
    Discriminator(lambda value: f"<{_item_kind(value)}>"),
    object_of_type(
        ("message", "reasoning", "function_call", "function_call_output"),
        f". {KEEPS_NOTHING}: send each item whole",
        _item_kind,
    ),
]


class FunctionTool(Function):
    """A function that the client executes."""

    type: Literal["function"]
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] = []

    def echo(self) -> dict[str, Any]:
        """Return the tool as the response repeats it."""
        return {"type": "function", **self._function(), "strict": bool(self.strict)}

    def for_chat(self) -> Tool:
        return Tool(type="function", function=Function(**self._function()))

    def _function(self) -> dict[str, Any]:
        return self.model_dump(include=set(Function.model_fields))


def _named_once(tools: list[FunctionTool]) -> list[FunctionTool]:
    check_unique_names([tool.for_chat() for tool in tools])
    return tools


class NamedFunctionChoice(RequestModel):
    """A `tool_choice` of one function, which must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctionChoice(RequestModel):
    """A `tool_choice` of several functions, which may or must be called. The prompt still lists all `tools`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunctionChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class TextFormat(RequestModel):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchemaFormat):
    type: Literal["json_schema"]


class TextConfig(RequestModel):
    """The answer's format."""

    format: Annotated[
        Annotated[TextFormat, tag("text")] | Annotated[SchemaFormat, tag("json_schema")],
        Discriminator(lambda value: "<json_schema>" if kind(value) == "json_schema" else "<text>"),
        object_of_type(("text", "json_object", "json_schema")),
    ] = TextFormat(type="text")
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(RequestModel):
    """Reasoning options. Reasoning is returned in full: there are no summaries."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Literal[False] | None = None
    resumable: bool = False  # Baton's extension: see `resume.py`


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses`"""

    input: Annotated[
        list[Item], Field(min_length=1), BeforeValidator(_user_message, json_schema_input_type=str | list[Item])
    ]
    instructions: str | None = None
    tools: Annotated[
        list[
            Annotated[FunctionTool, object_of_type(("function",), ". This server runs no tools: clients run functions")]
        ],
        Field(max_length=MAX_TOOLS),
        AfterValidator(_named_once),
    ] = []
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], tag("word")]
        | Annotated[NamedFunctionChoice, tag("function")]
        | Annotated[AllowedFunctionChoice, tag("allowed_tools")],
        Discriminator(tag_of),
        string_or_object(("function", "allowed_tools")),
    ] = "auto"
    parallel_tool_calls: bool | None = None
    text: Annotated[TextConfig, BeforeValidator(without_nulls)] = TextConfig()
    reasoning: Annotated[ReasoningConfig, BeforeValidator(without_nulls)] = ReasoningConfig()
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    max_output_tokens: Integer | None = None
    max_tool_calls: Integer | None = Field(None, gt=0)  # no effect: it limits tools that a server runs; Baton has none
    top_logprobs: Integer | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in self.include

    def echo(self) -> ResponseEcho:
        """Return the fields that the response repeats."""
        chosen = self.tool_choice
        return ResponseEcho(
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            max_tool_calls=self.max_tool_calls,
            metadata=self.metadata or {},
            parallel_tool_calls=self.parallel_tool_calls is not False,
            prompt_cache_key=self.prompt_cache_key,
            reasoning={"effort": self.reasoning.effort, "summary": self.reasoning.summary},
            safety_identifier=self.safety_identifier,
            text={"format": self.text.format.model_dump(by_alias=True, exclude_none=True)},
            tool_choice=chosen if isinstance(chosen, str) else chosen.model_dump(),
            tools=[tool.echo() for tool in self.tools],
            top_logprobs=self.top_logprobs or 0,
            user=self.user,
        )


class InputTokensRequest(ResponsesRequest):
    """`POST /v1/responses/input_tokens`: the body of a response, in which `model` may be omitted."""

    model: str = ""
