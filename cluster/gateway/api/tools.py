"""Tool calling: the format of calls, the functions that may be called, and whether a call is required."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from baton.engine.text import (
    FunctionSignature,
    GrammarSpec,
    GrammarToolCallFormat,
    ParserConfig,
    ReasoningStart,
    Tokenizer,
    ToolCallFormat,
)

from ..errors import bad_request, excerpt
from .chat_messages import AllowedToolChoice, Function, NamedToolChoice, Tool, ToolChoice
from .protocol import ChatRequest

NO_ARGUMENTS = {"type": "object", "properties": {}}
ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class ToolCallRules:
    """Rules for the tool calls of one answer."""

    form: ToolCallFormat
    functions: tuple[Function, ...]  # those that may be called
    must_call: bool
    at_most_one: bool
    tells_of_others: bool = False  # the prompt also lists functions that may not be called

    def grammar(self, words: GrammarSpec | None) -> GrammarSpec | None:
        """Return the grammar of the answer, or None if the model is not constrained.

        * If a call is required: only calls.
        * If `words` constrains the content: calls, or such content.
        * If some function is strict or not allowed: any text, and calls of allowed functions.
        """
        form = self.form
        if not isinstance(form, GrammarToolCallFormat):
            return None  # `tool_call_rules` has refused constraints
        functions = [self._signature(function) for function in self.functions]
        if self.must_call:
            return form.calls_grammar(functions, at_most_one=self.at_most_one)
        if words is not None:
            calls = form.calls_grammar(functions, at_most_one=self.at_most_one)
            return {"type": "or", "elements": [calls, form.answer_grammar(words)]}
        if self.tells_of_others or any(function.strict for function in self.functions):
            return form.text_and_calls_grammar(functions, at_most_one=self.at_most_one)
        return None

    def _signature(self, function: Function) -> FunctionSignature:
        fits = self.must_call or function.strict
        return FunctionSignature(function.name, (function.parameters or NO_ARGUMENTS) if fits else ANY_ARGUMENTS)


def parser_config(form: ToolCallFormat | None, calls: ToolCallRules | None, reasoning: ReasoningStart) -> ParserConfig:
    """Return how the answers of one request are parsed; `form` is the model's tool-call format."""
    if calls is not None:
        functions = {function.name: function.parameters or NO_ARGUMENTS for function in calls.functions}
        return ParserConfig(calls.form, functions, calls.at_most_one, reasoning)
    return ParserConfig(form if form is not None and form.frames_answers else None, reasoning=reasoning)


def check_prompt_lists_tools(tools: Collection[Tool], tokenizer: Tokenizer) -> None:
    """Raise `ApiError` (400) for tools that the model's chat template would leave out of the prompt."""
    if tools and not tokenizer.lists_tools:
        message = (
            "'tools' is not supported with this model: its chat template does not list them. Put a chat_template.jinja "
            "that does into the model's folder, or leave 'tools' out."
        )
        raise bad_request("tools", message, "unsupported_parameter")


def tool_call_rules(request: ChatRequest, form: ToolCallFormat | None) -> ToolCallRules | None:
    """Return the rules, or None if the answer cannot contain calls. Raises `ApiError` (400).

    `form` is the model's tool-call format.
    """
    _check_choice(request)
    if not request.usable_tools:
        return None
    if form is None:
        message = (
            "'tools' is not supported with this model: its chat template teaches no form of calls that is known. "
            "Leave it out, or set 'tool_choice' to 'none'."
        )
        raise bad_request("tools", message, "unsupported_parameter")
    if not isinstance(form, GrammarToolCallFormat):
        _check_free(request, form)
    chosen = request.tool_choice
    names = _chosen_names(chosen)
    functions = tuple(tool.function for tool in request.usable_tools)
    callable_ones = tuple(function for function in functions if not names or function.name in names)
    is_one = isinstance(chosen, NamedToolChoice)
    return ToolCallRules(
        form,
        callable_ones,
        must_call=is_one or _mode(chosen) == "required",
        at_most_one=form.takes_one or is_one or request.parallel_tool_calls is False,
        tells_of_others=len(callable_ones) < len(functions),
    )


def _mode(chosen: ToolChoice | None) -> str | None:
    if isinstance(chosen, AllowedToolChoice):
        return chosen.allowed_tools.mode
    return chosen if isinstance(chosen, str) else None


def _chosen_names(chosen: ToolChoice | None) -> list[str]:
    """Return the functions that `tool_choice` names; empty if all may be called."""
    match chosen:
        case NamedToolChoice():
            return [chosen.function.name]
        case AllowedToolChoice():
            return [tool.function.name for tool in chosen.allowed_tools.tools]
    return []


def _check_choice(request: ChatRequest) -> None:
    chosen, names = request.tool_choice, [tool.function.name for tool in request.tools or ()]
    if chosen == "required" and not names:
        raise bad_request("tool_choice", "'tool_choice' is 'required', so 'tools' must name a function.")
    for name in _chosen_names(chosen):
        if name not in names:
            raise bad_request("tool_choice", f"'tool_choice' names {excerpt(name)}, which is none of 'tools'.")


def _check_free(request: ChatRequest, form: ToolCallFormat) -> None:
    """Raise `ApiError` for constraints on the answer if the model's tool-call format has no grammar."""
    wanted = request.response_format
    asked = {
        "tool_choice": request.tool_choice not in (None, "auto"),
        "response_format": wanted is not None and wanted.type != "text",
        "structured_outputs": request.structured_outputs is not None,
    }
    asked |= {
        f"tools[{at}].function.strict": bool(tool.function.strict) for at, tool in enumerate(request.usable_tools)
    }
    for field, is_asked in asked.items():
        if is_asked:
            message = (
                f"{field!r} is not supported beside 'tools' with this model: no grammar says how it writes calls "
                f"({form.name}). Leave it out, and check the arguments of calls."
            )
            raise bad_request(field, message, "unsupported_parameter")


def call_id(request_id: str, created: int, choice: int, index: int) -> str:
    """Return an id that every gateway would give the call, so that a stream can be resumed."""
    return f"call_{digest(request_id, created, choice, index)}"


def digest(*names: object) -> str:
    """Return a short id derived from these names."""
    return hashlib.blake2b(" ".join(map(str, names)).encode(), digest_size=12).hexdigest()
