"""Chat templates: Jinja programs in a model's folder that turn messages into the text format the model was trained on.

Templates come with downloaded weights and are not trusted: they run in Jinja's immutable sandbox. They may use the
extensions of `transformers`: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.visitor
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..absent import FETCH_AGAIN, absent_file
from .client_text import concatenated
from .control_tokens import ControlTokens
from .errors import ChatTemplateError, InvalidMessages
from .parsers import reasoning, tool_call_format
from .parsers.tool_call_format import with_readable_arguments

DEFAULT = "default"
TOOL_USE = "tool_use"  # name of the template that some models have for chats with tools
# Names that a chat's `variables` cannot set: `self` is Jinja's, the others are arguments of their own.
RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
# Marks the end of the message to continue. The space at its end reveals whether the template trims messages.
_CUT = "\N{INFORMATION SEPARATOR ONE}the answer goes on here\N{INFORMATION SEPARATOR ONE} "
_BEYOND_ASCII = re.compile("[^\x00-\x7e\ud800-\udfff]")  # surrogates are tags: see client_text.py

# Filters and methods that change, drop or reorder characters of a text.
_REWRITING = {"lower", "upper", "title", "capitalize", "swapcase", "casefold", "replace", "translate", "reverse"}


# Templates fail in any of these ways on values of unexpected types.
_UNREADABLE = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Chat:
    """A conversation, and everything else that its prompt depends on."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True  # opens the answer
    continue_final_message: bool = False  # leaves the last message open instead, so that the model continues it
    # Further names that the template may read, like `enable_thinking`; they override special tokens, like `bos_token`.
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """One model's template, or its templates by name, compiled once."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """Compile the templates. Raises `ChatTemplateError` for one that does not parse."""
        self._templates: dict[str, jinja2.Template] = {}
        self._tell_none: set[str] = set()  # names of templates that test content for none
        self.sources = dict(sources)
        self.source = sources.get(DEFAULT)
        self.tool_call_format = tool_call_format(sources.get(TOOL_USE) or sources.get(DEFAULT, ""))
        self.has_reasoning = any(reasoning.BEGIN in source for source in sources.values())
        self.variables: frozenset[str] = frozenset()  # names that it reads in addition to the standard ones
        self.literals: frozenset[str] = frozenset()  # texts that it writes or compares with
        self.rewrites_texts = False  # True if it may change a client's text
        environment = _environment()
        for name, source in sources.items():
            try:
                tree = environment.parse(source)
                self.variables |= jinja2.meta.find_undeclared_variables(tree)
                self.literals |= frozenset(_literals(tree))
                self.rewrites_texts |= _rewrites_texts(tree)
                self._templates[name] = environment.from_string(_Concatenations().visit(tree))
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
            if _asks_for_content(tree):
                self._tell_none.add(name)

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Return the templates of a model folder, or None. Its `*.jinja` files take precedence over `config`."""
        sources = _sources_in_config(config.get("chat_template"))
        named_files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        for name, file in [(DEFAULT, folder / "chat_template.jinja"), *((file.stem, file) for file in named_files)]:
            if file.is_symlink() and not file.exists():
                raise ChatTemplateError(f"{folder} has no {absent_file(file)}: {FETCH_AGAIN}")
            if file.is_file():
                sources[name] = file.read_text(encoding="utf-8")
        return cls(sources) if sources else None

    def render(
        self, chat: Chat, *, special_tokens: Mapping[str, str] | None = None, control: ControlTokens | None = None
    ) -> str:
        """Return the prompt's text.

        `special_tokens` are those that the template may read by name. `control` tags messages, tools and variables.

        Raises `InvalidMessages` for messages that the template refuses or cannot read.
        """
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidMessages(
                "continue_final_message and add_generation_prompt exclude each other: set one of them"
            )
        for name in sorted(RESERVED_VARIABLES & chat.variables.keys()):
            raise InvalidMessages(f"{name!r} is not a template variable that can be set: it is an argument of its own")
        tools = chat.tools
        name = self._name(tools)
        messages = [_plain_message(index, message) for index, message in enumerate(chat.messages)]
        names = {**(special_tokens or {}), **_tagged(chat.variables, control)}
        if control is not None:
            messages, tools = [control.tag_message(message) for message in messages], control.tag(tools)
        turns = [self._turn(message, name) for message in messages]
        if not turns:
            raise InvalidMessages("a chat needs at least one message")
        if tools and "tools" not in self.variables:
            turns = self._introduced(turns, tools)
        if chat.continue_final_message:
            _mark_end(turns[-1])
        text = self._render(
            self._templates[name],
            {**names, "messages": turns, "tools": tools, "add_generation_prompt": chat.add_generation_prompt},
        )
        return _cut_at_mark(text) if chat.continue_final_message else text

    @property
    def lists_tools(self) -> bool:
        """True if prompts list the `tools`."""
        return "tools" in self.variables or bool(
            self.tool_call_format is not None and self.tool_call_format.introduction
        )

    def _introduced(self, turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the turns. If the template does not list tools, describe them in the system message."""
        if self.tool_call_format is None or not self.tool_call_format.introduction:
            return turns
        has_system = turns[0]["role"] == "system"
        words = [turns[0]["content"] if has_system else None, self.tool_call_format.describe_tools(tools)]
        return [{"role": "system", "content": "\n\n".join(filter(None, words))}, *turns[has_system:]]

    def _turn(self, message: Mapping[str, Any], name: str) -> dict[str, Any]:
        turn = with_readable_arguments(message)
        if turn["content"] is None and name not in self._tell_none:
            turn["content"] = ""  # for None, Jinja would write "None"
        return turn if self.tool_call_format is None else self.tool_call_format.adapt_message(turn)

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the name of the template for a chat with these tools."""
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise ChatTemplateError(
                f"this model names its chat templates {sorted(self._templates)}, and none {DEFAULT!r}"
            )
        return name

    @staticmethod
    def _render(template: jinja2.Template, context: dict[str, Any]) -> str:
        try:
            return template.render(context)
        except _RefusedByTemplate as error:
            raise InvalidMessages(f"the model's chat template refuses these messages: {error}") from error
        except (jinja2.TemplateError, *_UNREADABLE) as error:
            detail = f"{type(error).__name__}: {error}"
            raise InvalidMessages("the model's chat template cannot read these messages", detail) from error


def _tagged(variables: Mapping[str, Any], control: ControlTokens | None) -> Mapping[str, Any]:
    return variables if control is None else {name: control.tag(value) for name, value in variables.items()}


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy whose content is one string, or None for a message of the assistant that has none, only calls."""
    if not isinstance(message, Mapping):
        raise InvalidMessages(f"messages[{index}] must be an object with a role, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise InvalidMessages(f"messages[{index}].role must be a string, not {message.get('role')!r}")
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise InvalidMessages(f"messages[{index}] has no content, which the role {message['role']!r} needs")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_text_of_part(f"messages[{index}].content[{i}]", part) for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise InvalidMessages(f"messages[{index}].content must be a string or a list of text parts, not {content!r}")
    return {**message, "content": content}


def _asks_for_content(template: jinja2.nodes.Template) -> bool:
    """Return whether a template tests content for none, as DeepSeek's do, which then write another text."""
    tests = template.find_all(jinja2.nodes.Test)
    comparisons = template.find_all(jinja2.nodes.Compare)
    asked = [test.node for test in tests if test.name == "none"]
    asked += [compared.expr for compared in comparisons if any(_is_none(other.expr) for other in compared.ops)]
    return any(_is_content(node) for node in asked)


def _is_none(node: jinja2.nodes.Expr) -> bool:
    return isinstance(node, jinja2.nodes.Const) and node.value is None


def _is_content(node: jinja2.nodes.Node) -> bool:
    match node:
        case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Name(name="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Call(args=[jinja2.nodes.Const(value="content"), *_]):  # a call of `get`
            return True
    return False


def _literals(template: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the literal texts of a template."""
    for node in template.find_all((jinja2.nodes.TemplateData, jinja2.nodes.Const)):
        text = node.data if isinstance(node, jinja2.nodes.TemplateData) else node.value  # type: ignore[attr-defined]
        if isinstance(text, str):
            yield text


def _rewrites_texts(template: jinja2.nodes.Template) -> bool:
    names = {node.name for node in template.find_all(jinja2.nodes.Filter)}
    names |= {node.attr for node in template.find_all(jinja2.nodes.Getattr)}
    steps = any(node.step is not None for node in template.find_all(jinja2.nodes.Slice))
    return steps or not names.isdisjoint(_REWRITING)


def _text_of_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidMessages(f"{where} is of type {kind!r}; this model reads only parts of type 'text'")


def _mark_end(message: dict[str, Any]) -> None:
    if not message["content"]:
        raise InvalidMessages("continue_final_message needs a last message whose content can be continued")
    message["content"] += _CUT


def _cut_at_mark(text: str) -> str:
    mark = _CUT.rstrip()
    end = text.rfind(mark)
    if end < 0:
        raise InvalidMessages("continue_final_message: the model's chat template leaves the last message out")
    trimmed = not text.startswith(_CUT, end)
    return text[:end].rstrip() if trimmed else text[:end]


def _sources_in_config(value: Any) -> dict[str, str]:
    """Return `chat_template` of `tokenizer_config.json`, which is one template or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        allowed = "a string or a list of objects with name and template"
        raise ChatTemplateError(f"tokenizer_config.json: chat_template must be {allowed}") from error


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, which marks text for training, as a no-op."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Concatenations(jinja2.visitor.NodeTransformer):
    """Replaces `a ~ b` by a filter that keeps track of a client's text."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        items = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(items, "concatenated", [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(concatenated)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.filters["concatenated"] = _concatenated
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escaping characters for HTML, as Jinja's own filter does."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _BEYOND_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(character: re.Match[str]) -> str:
    return json.dumps(character[0])[1:-1]


def _concatenated(values: Iterable[Any]) -> str:
    return concatenated(map(str, values))


class _RefusedByTemplate(jinja2.TemplateError):
    """The template itself refuses the messages, with an explanation that its author wrote for users."""


def _refuse(message: str) -> NoReturn:
    raise _RefusedByTemplate(message)
