"""Tool-call formats with XML-like tags around calls and around each argument.

Text stands in tags as it is; other values are JSON. The function's schema says which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import regex

from .argument_values import TEXT
from .incremental import BLANKS
from .tool_call_format import FunctionSignature, GrammarSpec, SectionToolCallFormat
from .xml_call_parser import XmlToolCallFormat

_NAME = r"(?P<name>[\w.-]{1,64})"


class Qwen3Coder(XmlToolCallFormat):
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, each in a line of its own.

    Qwen3-Coder, Qwen3.5, Nemotron 3. In long answers these models forget to close values.
    """

    name = "qwen3-coder"
    taught_by = ("<tool_call>", "<function=", "<parameter=")
    triggers = ("<tool_call>", "<function=")  # Qwen3-Coder may omit the first
    marks = ("<tool_call>", "</tool_call>")
    first = rf"(?:<tool_call>{BLANKS})?<function={_NAME}>"
    key = r"<parameter=(?P<key>[^<>\n]{1,200})>(?:\n|(?=[^\n]))"
    value_close = r"\n?</parameter>"
    forgotten_close = rf"\n?</function>{BLANKS}</tool_call>|\n<parameter=(?P<known_key>[^<>\n]{{1,200}})>\n"
    close = "</function>|</tool_call>"
    tail = "</tool_call>"
    style = "qwen_xml"
    opening, closing, separator = "<tool_call>\n<function=%s>\n", "</function>\n</tool_call>", "\n"

    def text_and_calls_grammar(
        self, functions: Sequence[FunctionSignature], *, at_most_one: bool = False
    ) -> GrammarSpec:
        """Also constrain calls without the outer tags, which the parser accepts."""
        opening = self.opening.removeprefix("<tool_call>\n")
        bare = [self._tag(function, opening, "</function>") for function in functions]
        grammar = super().text_and_calls_grammar(functions, at_most_one=at_most_one)
        return {**grammar, "tags": [*grammar["tags"], *bare]}


class Glm45(XmlToolCallFormat):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 and later.

    Tags are in lines of their own up to GLM-4.6, in one line from GLM-4.7 on.
    """

    name = "glm4.5"
    taught_by = ("<tool_call>", "<arg_key>", "<arg_value>")
    triggers = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    first = rf"<tool_call>{BLANKS}{_NAME}"
    key = (
        rf"<arg_key>(?P<key>[^<>\n]{{1,200}})</arg_key>{BLANKS}(?:<arg_value>|(?=[^<\s]))"  # GLM-4.7 may omit the last
    )
    value_close = "</arg_value>"
    close = "</tool_call>"
    style = "glm_xml"
    opening, closing, separator = "<tool_call>%s", "</tool_call>", "\n"

    def adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Replace null content, which these templates would write as Python does."""
        return {**message, "content": message["content"] or ""}


_ATTRIBUTE = r'(?P<key>[^<>"\n]{1,200})'


class MiniMaxM2(SectionToolCallFormat, XmlToolCallFormat):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>`.

    Each tag is in a line of its own, with any number of calls between the outer tags: MiniMax-M2 to M2.7.
    """

    name = "minimax-m2"
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    taught_by = (begin, "<invoke name=", "<parameter name=")
    triggers = (begin,)
    marks = (begin, end)
    next = rf'<invoke name="{_NAME}">'
    more = "<invoke name="
    first = rf"{begin}{BLANKS}{next}"
    key = rf'<parameter name="{_ATTRIBUTE}">'
    value_close, close, tail = "</parameter>", "</invoke>", end
    style = "minimax_xml"
    section_lead, opening, closing = r"\n", '<invoke name="%s">\n', "</invoke>\n"


class DeepSeek32(SectionToolCallFormat, XmlToolCallFormat):
    """MiniMax's format with other tags, which say of each value whether it is text: DeepSeek-V3.2.

    https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/encoding_dsv32.py
    """

    name = "deepseek3.2"
    begin, end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    taught_by = (
        "｜DSML｜",
        "function_calls",
        "invoke name=",
        "parameter name=",
    )  # templates insert the mark in between
    triggers = (begin,)
    marks = ("｜DSML｜",)
    next = rf'<｜DSML｜invoke name="{_NAME}">'
    more = "<｜DSML｜invoke name="
    first = rf"{begin}{BLANKS}{next}"
    key = rf'<｜DSML｜parameter name="{_ATTRIBUTE}" string="(?P<is_text>true|false)">'
    value_close, close, tail = "</｜DSML｜parameter>", "</｜DSML｜invoke>", end
    style = "deepseek_xml"
    section_lead, opening, closing = r"\n", '<｜DSML｜invoke name="%s">\n', "</｜DSML｜invoke>\n"

    def types(self, key: regex.Match[str], allowed: frozenset[str]) -> frozenset[str]:
        """Let the model decide if the schema does not."""
        return (allowed & TEXT if key["is_text"] == "true" else allowed - TEXT) or allowed
