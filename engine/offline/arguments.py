"""Arguments of `LLM.generate` and `LLM.chat` beside prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.sampling import InvalidSamplingParams, SamplingParams, as_decoded
from ..vllm_compat import UnsupportedArgument, refusals
from .prompts import InvalidPrompt

_TAKEN = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}  # by `render_chat`


class InvalidArgument(TypeError):
    """Argument `name` has an unsupported type or value."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name


def refuse_unsupported(call: str, given: Mapping[str, Any], known: Mapping[str, UnsupportedArgument]) -> None:
    """Check the arguments that `call` has no parameter for: each must be one of vLLM's that changes nothing.

    Raises `InvalidArgument`.
    """
    for name in given:
        if name not in known:
            raise InvalidArgument(name, f"is no argument of {call}")
    for name, message in refusals(given, known).items():
        raise InvalidArgument(name, message)


def require_flag(name: str, value: Any, hint: str = "") -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, f"is {value!r}: give True or False{hint}")


def require_tools(tools: Any) -> None:
    listed = isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)
    if tools is not None and not listed:
        raise InvalidArgument("tools", f"are {tools!r}: give a list of dicts, each of which describes a function")


def template_variables(given: Any) -> Mapping[str, Any]:
    """Return the template variables in `chat_template_kwargs`."""
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidArgument(name, f"is {given!r}: give a dict of names and values")
    if taken := sorted(_TAKEN & given.keys()):
        raise InvalidArgument(name, f"holds {taken[0]!r}, which cannot be set there")
    return given


def one_for_each(given: Any, num_prompts: int) -> list[SamplingParams]:
    """Return a `SamplingParams` for each prompt, validated as a message's would be.

    Raises `InvalidSamplingParams`, and `InvalidPrompt` if there are not as many as prompts.
    """
    if isinstance(given, SamplingParams):
        return [as_decoded(given)] * num_prompts
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    for at, params in enumerate(given) if listed else [(None, given)]:
        if not isinstance(params, SamplingParams):
            where = "sampling_params" if at is None else f"sampling_params[{at}]"
            kind = type(params).__name__
            raise InvalidSamplingParams(where, f"give SamplingParams, or a list with one for each prompt, not {kind}")
    if len(given) != num_prompts:
        raise InvalidPrompt(f"{num_prompts} prompts but {len(given)} sampling_params: give one for each")
    return [as_decoded(params) for params in given]
