"""Answers in the format of each model family, built here from what the models' makers document."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.text import ContentPart, OutputPart, ReasoningPart, ToolCallArguments, ToolCallStart

Call = tuple[str, dict[str, Any]]
TYPES = ("null", "boolean", "integer", "string", "array", "object")
ARGUMENTS = {"properties": {f"{kind}_{at}": {"type": kind} for kind in TYPES for at in range(3)}}
FUNCTIONS = dict.fromkeys(("look", "cut-2", "größe"), ARGUMENTS)


def dumped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def hermes(words: str, calls: Sequence[Call]) -> str:
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(given)}}}\n</tool_call>' for name, given in calls
    ]
    return "\n".join(filter(None, [words, *written]))


def llama3(words: str, calls: Sequence[Call]) -> str:
    return "".join(f'{{"name": "{name}", "parameters": {dumped(given)}}}' for name, given in calls) or words


def llama3_with_types(words: str, calls: Sequence[Call]) -> str:
    """Write calls as in Meta's examples."""
    return llama3(words, calls).replace('{"name"', '{"type": "function", "name"', 1) if calls else words


def mistral_list(words: str, calls: Sequence[Call]) -> str:
    objects = [f'{{"name": "{name}", "arguments": {dumped(given)}}}' for name, given in calls]
    return f"{words}[TOOL_CALLS] [{', '.join(objects)}]" if calls else words


def mistral_list_with_ids(words: str, calls: Sequence[Call]) -> str:
    objects = [f'{{"name":"{name}","arguments":{dumped(given)}, "id": "abcdef123"}}' for name, given in calls]
    return f"{words}[TOOL_CALLS][{','.join(objects)}]" if calls else words


def mistral_named(words: str, calls: Sequence[Call]) -> str:
    return words + "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(given)}" for name, given in calls)


def mistral_named_with_ids(words: str, calls: Sequence[Call]) -> str:
    return words + "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdef123[ARGS]{dumped(given)}" for name, given in calls)


def deepseek3(words: str, calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return words + (f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>" if calls else "")


def deepseek31(words: str, calls: Sequence[Call]) -> str:
    written = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return words + (f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>" if calls else "")


def harmony(words: str, calls: Sequence[Call], thought: str = "") -> str:
    """Return an answer as OpenAI's harmony library writes it, less the last end marker, which is a stop token."""
    messages = [f"<|channel|>analysis<|message|>{thought}"] if thought else []
    if words:
        messages.append(f"<|channel|>{'commentary' if calls else 'final'}<|message|>{words}")
    for name, given in calls:
        messages.append(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(given)}")
    return "<|end|><|start|>assistant".join(messages)


def harmony_of_120b(words: str, calls: Sequence[Call], thought: str = "") -> str:
    """Return an answer as gpt-oss-120b writes it: a call names its recipient before the channel, and type `code`."""
    messages = [f"<|channel|>analysis<|message|>{thought}"] if thought else []
    if words:
        messages.append(f"<|channel|>final<|message|>{words}")
    for name, given in calls:
        messages.append(f" to=functions.{name}<|channel|>analysis code<|message|>{dumped(given)}<|call|>")
    return "<|end|><|start|>assistant".join(messages)


def pythonic(words: str, calls: Sequence[Call]) -> str:
    def written(name: str, given: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    return f"[{', '.join(written(name, given) for name, given in calls)}]" if calls else words


def text(value: Any) -> str:
    """Return the value as text, as it stands between tags."""
    return value if isinstance(value, str) else dumped(value)


def qwen3_coder(words: str, calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        parameters = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in given.items())
        written.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(filter(None, [words, *written]))


def qwen3_coder_in_one_line(words: str, calls: Sequence[Call]) -> str:
    """Return the answer in one line, except for the values, and without the tag that should open the outer element."""
    written = []
    for name, given in calls:
        parameters = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>" for key, value in given.items())
        written.append(f"<function={name}>{parameters}</function></tool_call>")
    return words + "".join(written)


def glm45(words: str, calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        lines = [f"<arg_key>{key}</arg_key>\n<arg_value>{text(value)}</arg_value>\n" for key, value in given.items()]
        written.append(f"<tool_call>{name}\n{''.join(lines)}</tool_call>")
    return "\n".join(filter(None, [words, *written]))


def glm47(words: str, calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        pairs = [f"<arg_key>{key}</arg_key><arg_value>{text(value)}</arg_value>" for key, value in given.items()]
        written.append(f"<tool_call>{name}{''.join(pairs)}</tool_call>")
    return words + "".join(written)


def minimax_m2(words: str, calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        lines = [f'<parameter name="{key}">{text(value)}</parameter>\n' for key, value in given.items()]
        written.append(f'<invoke name="{name}">\n{"".join(lines)}</invoke>\n')
    section = f"<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>" if calls else ""
    return "\n".join(filter(None, [words, section]))


def deepseek32(words: str, calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        lines = []
        for key, value in given.items():
            is_text = json.dumps(isinstance(value, str))
            lines.append(f'<｜DSML｜parameter name="{key}" string="{is_text}">{text(value)}</｜DSML｜parameter>')
        written.append("\n".join([f'<｜DSML｜invoke name="{name}">', *lines, "</｜DSML｜invoke>"]))
    section = "\n".join(["<｜DSML｜function_calls>", *written, "</｜DSML｜function_calls>"]) if calls else ""
    return "\n\n".join(filter(None, [words, section]))


@dataclass(frozen=True)
class Writer:
    form: str
    write: Callable[..., str]
    takes_one: bool = False  # at most one call per answer
    takes_both: bool = True  # words and calls in one answer
    thinks: bool = False  # the format itself has a place for thoughts
    streams: bool = True  # arguments arrive as JSON before their call is complete
    takes_names: bool = False  # argument names only as keys, and only of a type that the schema names


WRITERS = {
    "hermes": Writer("hermes", hermes),
    "llama3": Writer("llama3", llama3, takes_one=True, takes_both=False),
    "llama3 with types": Writer("llama3", llama3_with_types, takes_one=True, takes_both=False),
    "mistral-list": Writer("mistral-list", mistral_list),
    "mistral-list with ids": Writer("mistral-list", mistral_list_with_ids),
    "mistral-named": Writer("mistral-named", mistral_named),
    "mistral-named with ids": Writer("mistral-named", mistral_named_with_ids),
    "deepseek3": Writer("deepseek3", deepseek3),
    "deepseek3.1": Writer("deepseek3.1", deepseek31),
    "pythonic": Writer("pythonic", pythonic, takes_both=False, streams=False, takes_names=True),
    "qwen3-coder": Writer("qwen3-coder", qwen3_coder, streams=False, takes_names=True),
    "qwen3-coder in one line": Writer("qwen3-coder", qwen3_coder_in_one_line, streams=False, takes_names=True),
    "glm4.5": Writer("glm4.5", glm45, streams=False, takes_names=True),
    "glm4.5 in one line": Writer("glm4.5", glm47, streams=False, takes_names=True),
    "minimax-m2": Writer("minimax-m2", minimax_m2, streams=False, takes_names=True),
    "deepseek3.2": Writer("deepseek3.2", deepseek32, streams=False, takes_names=True),
    "harmony": Writer("harmony", harmony, takes_one=True, thinks=True),
    "harmony of 120b": Writer("harmony", harmony_of_120b, takes_one=True, thinks=True),
}


def told(words: str, calls: Sequence[Call], thought: str = "") -> list[OutputPart]:
    """Return the parts that a parser must report of such an answer."""
    parts: list[OutputPart] = [ReasoningPart(thought)] if thought else []
    parts += [ContentPart(words)] if words else []
    for index, (name, arguments) in enumerate(calls):
        parts += [ToolCallStart(index, name), ToolCallArguments(index, dumped(arguments))]
    return parts


def joined(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """Join consecutive pieces of one kind."""
    whole: list[OutputPart] = []
    for part in parts:
        last = whole[-1] if whole else None
        match part, last:
            case (ReasoningPart(text), ReasoningPart(before)):
                whole[-1] = ReasoningPart(before + text)
            case (ContentPart(text), ContentPart(before)):
                whole[-1] = ContentPart(before + text)
            case (ToolCallArguments(index, text), ToolCallArguments(_, before)):
                whole[-1] = ToolCallArguments(index, before + text)
            case _:
                whole.append(part)
    return whole
