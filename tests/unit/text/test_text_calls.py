"""Tool calls are parsed from text that arrives in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.text import ContentPart, ParserConfig, ReasoningStart, ToolCallArguments, ToolCallStart
from baton.engine.text.parsers import tool_call_format

from ...helpers.family_answers import FUNCTIONS, WRITERS, Call, Writer, dumped, joined, told
from .call_texts import FORMS, call, named, read, some_sizes, untimed

pytestmark = pytest.mark.exhaustive

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=8) | st.sampled_from(['}]"', "</tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
some_calls = st.lists(
    st.tuples(st.sampled_from(list(FUNCTIONS)), st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    max_size=3,
)
some_words = st.text("abc äß,.!?\n<>|[]{}", max_size=20).map(str.strip).filter(lambda words: not words.startswith("{"))


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@untimed
@given(words=some_words, thought=some_words, calls=some_calls, sizes=some_sizes)
def test_calls_content_and_reasoning_are_parsed_with_any_split(
    writer: Writer, words: str, thought: str, calls: list[Call], sizes: list[int]
) -> None:
    calls = calls[:1] if writer.takes_one else calls
    if writer.takes_names:
        calls = [(name, named(given)) for name, given in calls]
    words = words if writer.takes_both or not calls else ""
    if writer.thinks:
        assert read(writer.write(words, calls, thought), writer.form, sizes) == told(words, calls, thought)
        return
    assert read(writer.write(words, calls), writer.form, sizes) == told(words, calls)
    if thought:
        text = f"<think>{thought}</think>\n\n{writer.write(words, calls)}"
        assert read(text, writer.form, sizes, thoughts=ReasoningStart.POSSIBLE) == told(words, calls, thought)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_only_the_first_call_is_kept_if_one_is_allowed(writer: Writer) -> None:
    calls: list[Call] = [("look", {"at": 1}), ("cut-2", {})]
    assert read(writer.write("", calls) + " and words", writer.form, at_most_one=True) == told("", calls[:1])


CALLS: list[Call] = [
    ("look", {"string_0": '{"here"}\n</', "object_0": {"a": [{"b": {}}]}, "integer_0": 15}),
    ("cut-2", {}),
]
ENDS = pytest.mark.parametrize("finished", [False, True], ids=["cut off", "ended by the model"])


def check_ended_early(writer: Writer, words: str, calls: list[Call], length: int, sizes: list[int], end: bool) -> None:
    """Check what is parsed of an answer's first `length` characters, in pieces of these sizes and as a whole."""
    text = writer.write(words, calls)[:length]
    reader, at_once = (ParserConfig(FORMS[writer.form], FUNCTIONS).new_parser() for _ in range(2))
    parts, rest = [], text
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        parts += reader.push(piece)
    parts = joined(parts + reader.push(rest) + reader.push("", finished=end))
    assert joined(at_once.push(text, finished=end)) == parts
    assert (at_once.num_calls, at_once.is_in_call) == (reader.num_calls, reader.is_in_call)
    begun = [part for part in parts if isinstance(part, ToolCallStart)]
    assert begun == [ToolCallStart(index, name) for index, (name, _) in enumerate(calls)][: reader.num_calls]
    arguments = dict.fromkeys(range(reader.num_calls), "")
    arguments |= {part.index: part.text for part in parts if isinstance(part, ToolCallArguments)}
    for index, came in arguments.items():
        written = dumped(calls[index][1])
        if reader.is_in_call and index == reader.num_calls - 1:
            assert written.startswith(came)
            assert came != written
        else:
            assert came == written or (writer.form == "harmony" and end and came == "{}"), "a message without content"
    said = "".join(part.text for part in parts if isinstance(part, ContentPart))
    assert end or words.startswith(said)


@ENDS
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_call_is_complete_only_if_the_model_wrote_its_end(writer: Writer, finished: bool) -> None:
    """The beginning of a call that was cut off is not content either."""
    words = "1 < 2." if writer.takes_both else ""
    calls = CALLS[:1] if writer.takes_one else CALLS
    for length in range(len(writer.write(words, calls))):
        check_ended_early(writer, words, calls, length, [3] * (length // 3), finished)


@pytest.mark.slow
@ENDS
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@untimed
@given(data=st.data(), words=some_words, calls=some_calls, sizes=some_sizes)
def test_a_call_with_any_arguments_is_complete_only_at_its_end(
    writer: Writer, data: st.DataObject, words: str, calls: list[Call], sizes: list[int], finished: bool
) -> None:
    calls = calls[:1] if writer.takes_one else calls
    if writer.takes_names:
        calls = [(name, named(given)) for name, given in calls]
    words = words if writer.takes_both or not calls else ""
    length = data.draw(st.integers(0, len(writer.write(words, calls))))
    check_ended_early(writer, words, calls, length, sizes, finished)


STREAMING = {name: writer for name, writer in WRITERS.items() if writer.streams}


@ENDS
@pytest.mark.parametrize("writer", STREAMING.values(), ids=STREAMING)
def test_an_unfinished_call_has_the_arguments_so_far(writer: Writer, finished: bool) -> None:
    text = writer.write("", [("look", {"at": "here and there"})])
    reader = ParserConfig(FORMS[writer.form], FUNCTIONS).new_parser()
    parts = joined(reader.push(text[: text.index(" and there")], finished=finished))
    assert parts == [ToolCallStart(0, "look"), ToolCallArguments(0, '{"at": "here')]
    assert reader.is_in_call


CUT_WORDS = {
    "llama3": [
        '{"name": "Ada", "par',
        '{"type": "function", "name": "Ada", "par',
        '{"type": "function", "of',
        '{"name": "lookup',
        '{"name": 5',
        '{"colors',
    ],
    "pythonic": ["[1, ", "[red, green", "[unknown(at=1, by="],
    "hermes": ['<tool_call>{"name": "unknown", "arguments": {', "a <b>", '{"name": "look"'],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in CUT_WORDS.items() for text in texts])
def test_text_that_only_began_like_a_call_is_content_when_it_is_cut_off(form: str, text: str) -> None:
    assert joined(ParserConfig(FORMS[form], FUNCTIONS).new_parser().push(text)) == [ContentPart(text)]


@pytest.mark.parametrize("writer", STREAMING.values(), ids=STREAMING)
def test_arguments_are_streamed_as_they_arrive(writer: Writer) -> None:
    text = writer.write("", [("look", {"at": 1, "by": 2})])
    reader = ParserConfig(FORMS[writer.form], FUNCTIONS).new_parser()
    at = text.index(', "by"')
    assert joined(reader.push(text[:at])) == [ToolCallStart(0, "look"), ToolCallArguments(0, '{"at": 1')]
    assert reader.push(text[at : at + 3]) == [ToolCallArguments(0, ', "')]
    assert joined(reader.push(text[at + 3 :], finished=True)) == [ToolCallArguments(0, 'by": 2}')]


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("name", ["unknown", "loo"])
def test_a_call_of_an_unknown_function_is_text(writer: Writer, name: str) -> None:
    text = writer.write("", [(name, {"at": 1})])
    assert read(text, writer.form) == [ContentPart(text)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"arguments": {"at": "größe}"}, "name": "look"}\n</tool_call> and words'),
        ("mistral-list", '[TOOL_CALLS] [{"arguments": {"at": "größe}"}, "name": "look"}] and words'),
    ],
)
def test_the_name_may_come_last(form: str, text: str) -> None:
    assert read(text, form) == [
        ToolCallStart(0, "look"),
        ToolCallArguments(0, '{"at": "größe}"}'),
        ContentPart(" and words"),
    ]


def test_text_is_allowed_between_calls() -> None:
    text = f"Let me see.\n{call('look', '{}')}\nand \n{call('größe', '{}')}"
    calls = [ToolCallStart(0, "look"), ToolCallArguments(0, "{}")]
    more = [ToolCallStart(1, "größe"), ToolCallArguments(1, "{}")]
    assert read(text) == [ContentPart("Let me see."), *calls, ContentPart("\nand"), *more]


def test_a_call_to_a_function_without_arguments_may_be_empty() -> None:
    header = "<|channel|>commentary to=functions.look<|message|>"
    for text in (header, f"{header}<|call|>", f"{header} <|end|>"):
        assert read(text, "harmony") == [ToolCallStart(0, "look"), ToolCallArguments(0, "{}")]


def test_several_messages_of_one_kind_are_separated_by_an_empty_line() -> None:
    thoughts = ["<|channel|>analysis<|message|>a<|end|>", "<|start|>assistant<|channel|>analysis<|message|>b<|end|>"]
    words = [
        "<|start|>assistant<|channel|>commentary<|message|>c<|end|>",
        "<|start|>assistant<|channel|>final<|message|>d",
    ]
    parts = read("".join(thoughts + words), "harmony")
    assert [part.text for part in parts if not isinstance(part, ToolCallStart)] == ["a\n\nb", "c\n\nd"]


QWEN = (
    '# Tools\n<tools>{{ tools }}</tools>\nFor each call:\n<tool_call>\n{\\"name\\": <function-name>, \\"arguments\\": '
    "<args-json-object>}\n</tool_call>"
)
QWEN_XML = "<tool_call>\n<function=example_function_name>\n<parameter=arguments>"
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
NEMO = '{% if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}{{ "[TOOL_CALLS] [" }}'
SMALL = '{% if tools %}{{ tools }}{% endif %}{{ "[TOOL_CALLS]" + call.name + "[ARGS]" + call.arguments }}'
V3 = "{{ tools }}{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json' }}"
V31 = "{{ tools }}{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}"
V32 = "{% set d = '｜DSML｜' %}{{ tools }}<{{ d }}function_calls><{{ d }}invoke name='f'><{{ d }}parameter name='a'"
M2 = '{% set begin = "<minimax:tool_call>" %}<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1'
OSS = "<|channel|>commentary json<|message|>{{ arguments | tojson }}<|call|>"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        *[(QWEN, "hermes"), (LLAMA, "llama3"), (NEMO, "mistral-list"), (SMALL, "mistral-named")],
        ("Respond as [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        *[(V3, "deepseek3"), (V31, "deepseek3.1"), (OSS, "harmony"), (QWEN_XML, "qwen3-coder"), (GLM, "glm4.5")],
        *[(M2, "minimax-m2"), (V32, "deepseek3.2")],
        ("{{ messages }}", None),
    ],
)
def test_the_call_format_is_derived_from_the_template(template: str, form: str | None) -> None:
    assert tool_call_format(template) is (FORMS[form] if form else None)


def test_constants_are_parsed_in_the_spelling_of_python_and_of_json() -> None:
    text = "[look(a=True, b=null, c={'d': [false, None]}, e='it\\'s', f=-1.5), cut-2()]"
    given = '{"a": true, "b": null, "c": {"d": [false, null]}, "e": "it\'s", "f": -1.5}'
    calls = [
        ToolCallStart(0, "look"),
        ToolCallArguments(0, given),
        ToolCallStart(1, "cut-2"),
        ToolCallArguments(1, "{}"),
    ]
    assert read(text, "pythonic") == calls
    assert read(text.replace("cut-2", "unknown"), "pythonic") == [*calls[:2], ContentPart(", unknown()]")]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"at": "\\ud800"}, "name": "look"}</tool_call>'),
        ("pythonic", "[look(at='\\ud800')]"),
    ],
)
def test_half_a_surrogate_pair_stays_an_escape(form: str, text: str) -> None:
    assert read(text, form) == [ToolCallStart(0, "look"), ToolCallArguments(0, '{"at": "\\ud800"}')]


def test_samples_are_json() -> None:
    for arguments in ({"at": '}]"</tool_call>'}, {}):
        assert json.loads(dumped(arguments)) == arguments
