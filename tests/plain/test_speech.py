"""Reasoning, content and tool calls told apart: the same parts however a text was cut, and no text lost."""

import json
import re
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.server.parsing import schemas
from penstock.server.parsing.jsontext import MalformedError, Value
from penstock.server.parsing.output_parser import (
    FORMATS,
    LIST,
    REASONING_MARKS,
    Called,
    OutputParser,
    _joined,
    whole,
)
from penstock.server.parsing.reading import Arguments, Begin, Broken, Content, End, Part, Reasoning
from penstock.server.parsing.schemas import kinds_of, typed

FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "places": {"$ref": "#/$defs/places"},
            "level": {"enum": ["low", 3]},
            "any": {},
        },
        "$defs": {"places": {"anyOf": [{"type": "array"}, {"type": "object"}]}},
    },
    "now": {"type": "object", "properties": {}},
}
THINK, BRACKETS = REASONING_MARKS["think"], REASONING_MARKS["mistral"]


def speech(name: str | None, **how: Any) -> OutputParser:
    return OutputParser(LIST if name == "list" else FORMATS[name] if name else None, FUNCTIONS, **how)


def parts(name: str | None, pieces: list[str], **how: Any) -> list[Part]:
    """Of all pieces, neighbours of a kind as one."""
    made = speech(name, **how)
    return _joined([*(part for piece in pieces for part in made.push(piece)), *made.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    """In pieces, of which some may be empty."""
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


def calls(*expected: tuple[str, str]) -> list[Part]:
    return [
        part
        for n, (name, given) in enumerate(expected)
        for part in (Begin(n, name), Arguments(n, given), End(n))
    ]


XML = """I look.

<tool_call>
<function=weather>
<parameter=city>
Say "a\\b"

and </b>
</parameter>
<parameter=days>
3
</parameter>
<parameter=exact>
True
</parameter>
<parameter=note>
None
</parameter>
<parameter=places>
["x", {"y": 1}]
</parameter>
<parameter=level>
low
</parameter>
<parameter=any>
1.5
</parameter>
<parameter=unknown>
7
</parameter>
</function>
</tool_call>"""
READ_XML = {
    "city": 'Say "a\\b"\n\nand </b>',
    "days": 3,
    "exact": True,
    "note": None,
    "places": ["x", {"y": 1}],
    "level": "low",
    "any": 1.5,
    "unknown": "7",
}
WELL: list[tuple[str | None, dict[str, Any], str, list[Part]]] = [
    (None, {}, "plain <tool_call>\n", [Content("plain <tool_call>\n")]),
    ("hermes", {}, "1 < 2\n\n", [Content("1 < 2\n\n")]),
    (
        "hermes",
        {},
        'Both.\n<tool_call>\n{"name": "weather", "arguments": {"city": '
        '"Köln"}}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>',
        [Content("Both."), *calls(("weather", '{"city": "Köln"}'), ("now", "{}"))],
    ),
    ("hermes", {}, '<tool_call>{"arguments": {"a": [1]}, "id": 3, "name": "x"}</tool_call>', calls(("x",
    '{"a": [1]}'))),
    ("hermes", {}, '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', calls(("x", '{"a": '
                                                                                                    '1}'))),
    ("hermes", {}, '<tool_call>{"name": "x", "arguments": null}', calls(("x", "{}"))),
    ("hermes", {}, '<tool_call>{"name": "x", "arguments": {"a": "l1\nl2\t"}}', calls(("x", '{"a": '
                                                                                           '"l1\\nl2\\t"}'))),
    ("hermes", {}, '<tool_call>{"name": "now"}</tool_call>\n\nThere.', [*calls(("now", "{}")),
    Content("There.")]),
    ("hermes", {"several": False}, '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": '
                                   '"x"}</tool_call>', calls(("now", "{}"))),
    ("qwen3_coder", {}, XML, [Content("I look."), *calls(("weather", json.dumps(READ_XML)))]),
    ("qwen3_coder", {}, "<function=now>\n</function>", calls(("now", "{}"))),
    ("qwen3_coder", {}, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', calls(("now", "{}"))),
    ("llama3_json", {}, ' {"name": "now", "parameters": {"a": -1.5e3}}', calls(("now", '{"a": -1.5e3}'))),
    (
        "llama3_json",
        {},
        '{"type": "function", "name": "now", "parameters": {}} ; {"parameters": {}, "name": "weather"}',
        calls(("now", "{}"), ("weather", "{}")),
    ),
    ("llama3_json", {}, '<|python_tag|>{"name": "other", "parameters": {}}', calls(("other", "{}"))),
    ("llama3_json", {}, 'So: {"name": "now", "parameters": {}}', [Content('So: {"name": "now", '
                                                                          '"parameters": {}}')]),
    (
        "mistral",
        {},
        'Well[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "x", "arguments": {"a": {}}, "id": '
        '"123456789"}]',
        [Content("Well"), *calls(("now", "{}"), ("x", '{"a": {}}'))],
    ),
    (
        "mistral",
        {"thought": BRACKETS},
        '[THINK]hm[/THINK][TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]x.y-z[CALL_ID]a1[ARGS]{"a": 1}',
        [Reasoning("hm"), *calls(("now", "{}"), ("x.y-z", '{"a": 1}'))],
    ),
    ("mistral", {"several": False}, '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "x"}]',
    calls(("now", "{}"))),
    ("list", {}, '[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "a"}}]',
     calls(("now", "{}"), ("weather", '{"city": "a"}'))),
    ("list", {}, '[{"name": "now"}', calls(("now", "{}"))),
    ("mistral", {}, '[TOOL_CALLS][{"name": "now"}', calls(("now", "{}"))),
    (None, {"thought": THINK}, "\n<think>\n\na\n\nb\n\n</think>\n\n\n  c\n", [Reasoning("a\n\nb"),
    Content("  c\n")]),
    (None, {"thought": THINK, "thinking": True}, "\na <think> b</think>c", [Reasoning("a <think> b"),
    Content("c")]),
    (None, {"thought": THINK, "thinking": True}, "a\n", [Reasoning("a\n")]),
    (None, {"thought": THINK}, " \n <think", [Content(" \n <think")]),
    (None, {"thought": THINK}, "a<think>b</think>", [Content("a<think>b</think>")]),
    ("llama3_json", {"thought": THINK}, '<think>a</think>\n\n{"name": "now", "parameters": {}}',
    [Reasoning("a"), *calls(("now", "{}"))]),
    ("hermes", {"thought": THINK}, '<think>a<tool_call></think><tool_call>{"name":"x"}',
    [Reasoning("a<tool_call>"), *calls(("x", "{}"))]),
]  # fmt: skip
ILL: list[tuple[str, str]] = [
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("qwen3_coder", "a\n\n\n<function=></function>"),
    ("hermes", "a\n\n<tool_call>\nno</tool_call> b"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "x", "arguments": "[1]"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "x", }</tool_call>'),
    ("hermes", '<tool_call>{"name": "x"'),
    ("hermes", '<tool_call>{"nam'),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "title": "x"}</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=weather"),
    ("llama3_json", '{"answer": {"name": "now", "parameters": {}}}'),
    ("llama3_json", '{"name": "Anna", "parameters": {}}'),
    ("llama3_json", '{"name": "now"}'),
    ("llama3_json", '<|python_tag|>print("a")'),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),
    ("mistral", "[TOOL_CALLS] {} and [TOOL_CALLS]"),
    ("mistral", f"[TOOL_CALLS]{'a' * 1000}{{}}"),
    ("qwen3_coder", f"<function={'a' * 1000}></function>"),
    ("list", "[]"),
    ("list", "[5]"),
]
BROKEN: list[tuple[str, str, str]] = [  # and what was told of the arguments
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": "long te', '{"a": "long te'),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": tru}}</tool_call>', '{"a": '),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": "\\d"}}', '{"a": "'),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": 1}, 5}', '{"a": 1}'),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>Köl", '{"city": "Köl'),
    ("qwen3_coder", "<tool_call><function=weather><parameter=days>3", '{"days": '),
    ("llama3_json", '{"name": "now", "parameters": {"a": 01}}', '{"a": '),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a"; 1}}]', '{"a"'),
]


@pytest.mark.parametrize(("name", "how", "text", "expected"), WELL, ids=range(len(WELL)))
def test_what_is_well_formed_is_told_apart(
    name: str | None, how: dict[str, Any], text: str, expected: list[Part]
) -> None:
    assert parts(name, [text], **how) == expected
    assert parts(name, list(text), **how) == expected


@pytest.mark.parametrize(("name", "text"), ILL, ids=range(len(ILL)))
def test_what_is_no_call_after_all_is_content(name: str, text: str) -> None:
    assert parts(name, [text]) == parts(name, list(text)) == [Content(text)]
    assert whole(speech(name), text) == [Content(text)]


@pytest.mark.parametrize(("name", "text", "told"), BROKEN, ids=range(len(BROKEN)))
def test_a_call_that_breaks_off_is_content_where_it_was_not_told_yet(name: str, text: str, told: str) -> None:
    found = parts(name, [text])
    assert found == parts(name, list(text))
    assert found[1] == Arguments(0, told)
    assert isinstance(found[2], Broken)
    assert found[2].text + "".join(part.text for part in found[3:] if isinstance(part, Content)) == text
    assert whole(speech(name), text) == [Content(text)]


MARKS_OF_CALLS = [mark for one in FORMATS.values() for mark in (*one.markers, *one.others)]


@pytest.mark.parametrize(
    ("name", "how", "text", "expected"),
    [one for one in WELL if one[0] is not None],
    ids=[at for at, one in enumerate(WELL) if one[0] is not None],
)
def test_nothing_of_a_call_that_is_cut_off_is_content(
    name: str, how: dict[str, Any], text: str, expected: list[Part]
) -> None:
    """Wherever it is cut: content is what comes before and behind calls, and calls are those that are whole.
    Only up to three characters of a marker may be text."""
    every = whole(speech(name, **how), text)
    named = [one for one in every if isinstance(one, Called)]
    said = "".join(one.text for one in every if isinstance(one, Content))
    for size in range(len(text) + 1):
        begun = text[:size]
        found = whole(speech(name, **how), begun, cut="")
        calls_of = [one for one in found if isinstance(one, Called)]
        assert calls_of == named[: len(calls_of)]
        told = "".join(one.text for one in found if isinstance(one, Content))
        begins = ["", *(mark[:n] for mark in MARKS_OF_CALLS for n in range(1, 4))]
        assert any(one.begin.startswith(begun) for one in REASONING_MARKS.values()) or any(
            told.endswith(begin) and said.startswith(told.removesuffix(begin).strip()) for begin in begins
        ), (begun, told)
        made = speech(name, **how)
        given = [part for one in begun for part in made.push(one)] + made.finish(cut="")
        assert "".join(one.text for one in given if isinstance(one, Content | Broken)) == told
        if not any(isinstance(one, Begin) for one in expected):
            assert told == said[: len(told)]


def test_what_may_be_no_call_is_kept_where_an_answer_is_cut_off() -> None:
    for text in ('{"ans', '{"name": "Anna', '{"nowhere"', "a < b", "a <to", "a [TODO", '{"answer": {"name":'):
        assert whole(speech("llama3_json"), text, cut="") == [Content(text)]
        assert whole(speech("hermes"), text, cut="") == [Content(text)]
    for text in ('{"name": "no', '{ "name"', '{"type": "function", "name": "weather", "para'):
        assert whole(speech("llama3_json"), text, cut="") == []
        assert whole(speech("llama3_json"), text) == [Content(text)]
    assert whole(speech("hermes"), "a\n<too", cut="") == [Content("a\n")]
    for text, stop in (("a <", "tool"), ("a <tool", "_call>"), ("a <to", "ol_call>{")):
        assert whole(speech("hermes"), text, cut=stop) == [Content("a ")]
        assert whole(speech("hermes"), text, cut="!") == [Content(text)]
    assert whole(speech("hermes"), "a\n<tool_c") == [Content("a\n<tool_c")]
    # What is malformed before the cut is content as ever.
    text = '<tool_call>no</tool_call> b <tool_call>{"name": "x", "arg'
    assert whole(speech("hermes"), text, cut="") == [Content("<tool_call>no</tool_call> b ")]


def test_a_call_behind_a_broken_one_is_a_call() -> None:
    text = '<tool_call>{"name": "x", "arguments": {,}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    assert whole(speech("hermes"), text) == [
        Content('<tool_call>{"name": "x", "arguments": {,}}</tool_call>'),
        Called("now", "{}"),
    ]
    assert whole(speech("list"), '[{"name": "now"}, 5]') == [Called("now", "{}"), Content(", 5]")]


def test_line_breaks_are_left_out_before_a_marker_and_nowhere_else() -> None:
    for more in ("", "\n", "\n\n\n"):
        made, expected = speech("hermes"), [f"a\n\n{more}b", "c"]
        told = [
            part
            for piece in ("a", "\n", f"\n{more}", "b\n", more, '<tool_call>{"name": "now"}\n', more, "c")
            for part in made.push(piece)
        ]
        assert [
            part.text for part in _joined([*told, *made.finish()]) if isinstance(part, Content)
        ] == expected
        ends = parts("hermes", ["a\n", more, "\n"])
        assert ends == [Content(f"a\n{more}\n")]
        assert parts("hermes", ["a\n", more, "<tool_call>", "\n!"]) == [Content(f"a\n{more}<tool_call>\n!")]


def test_no_more_is_held_back_than_may_be_a_marker() -> None:
    made = speech("hermes", thought=THINK)
    assert made.push(" \n<th") == []
    assert made.push("ick> a < b") == [Content(" \n<thick> a < b")]
    assert made.push(" <tool_cal") == [Content(" ")]
    assert made.push("m>\n") == [Content("<tool_calm>")]
    assert made.push('x\n<tool_call>{"name": "now", "arguments": {"a": "b') == [
        Content("\nx"),
        Begin(0, "now"),
        Arguments(0, '{"a": "b'),
    ]
    assert made.push("c\\u00") == [Arguments(0, "c")]
    assert made.push('e9"') == [Arguments(0, '\\u00e9"')]
    assert made.push(', "n": 12') == [Arguments(0, ', "n": ')]
    assert made.push("3}") == [Arguments(0, "123}")]
    assert made.push("}") == [End(0)]
    plain = speech(None)
    assert plain.push("a\n<too") == [Content("a\n<too")]


_SOUP = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
        "[TOOL_CALLS]", "[ARGS]", "<think>",
         "</think>", "<|python_tag|>", '{"name":"', '{"name":"now","arguments":{', '"arguments":{', '"',
         '",', '":', "{", "}", "[", "]",
         ",", ";", ">", "\\", "\\u12", "1.", "true", "<", "</", "[TOOL", "\n", " ", "W", "W", "W"]
    ),
    max_size=24,
)  # fmt: skip


@given(
    st.sampled_from([*FORMATS, "list", None]),
    _SOUP,
    st.lists(st.integers(0, 10**6), max_size=12),
    st.booleans(),
    st.booleans(),
)
@example("hermes", ["<tool_call>", '{"name":"now","arguments":{', '"', "W", "\\", "W"], [1, 50], False, True)
@settings(max_examples=250, deadline=None)
def test_parts_do_not_depend_on_cuts_and_no_word_is_lost(
    name: str | None, pieces: list[str], places: list[int], thinking: bool, several: bool
) -> None:
    words = iter(range(1000, 9999))
    text = "".join(f"w{next(words)}" if piece == "W" else piece for piece in pieces)
    how: dict[str, Any] = {"thought": THINK, "thinking": thinking}
    found = parts(name, [text], several=several, **how)
    assert (
        found
        == parts(name, cut(text, places), several=several, **how)
        == parts(name, list(text), several=several, **how)
    )
    said = "".join(
        part.name if isinstance(part, Begin) else "" if isinstance(part, End) else part.text
        for part in parts(name, [text], **how)
    )
    # A whole call may have keys that mean nothing.
    kept = re.sub(r"(?s)\{.*\}", "", text) if any(isinstance(part, End) for part in found) else text
    assert set(re.findall(r"w\d{4}", kept)) <= set(re.findall(r"w\d{4}", said))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_JSON, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 10**6), max_size=8))
@settings(max_examples=80, deadline=None)
def test_any_json_is_read_to_its_end_and_no_further(
    value: object, plain: bool, indent: int | None, places: list[int]
) -> None:
    text = json.dumps({"a": value}, ensure_ascii=plain, indent=indent)
    arguments = "".join(
        part.text
        for part in parts("mistral", cut(f"[TOOL_CALLS]x{text} rest", places))
        if isinstance(part, Arguments)
    )
    assert arguments == text


@pytest.mark.parametrize("text", ['{"a" 1}', "{1: 2}", "[1,]", "[,1]", '{"a": 1,}', "01,", "1.,", "+1,",
"tru,", "nul]", "'a'", "]",
                                  '"\\x"', "NaN,", "-,", "1e,", '{"a": }', "[1 2]", '"\\u12g4"',
                                  "9" * 500 + ","])  # fmt: skip
def test_what_is_no_json_is_refused(text: str) -> None:
    def read() -> None:
        value, at = Value(), 0
        while not value.done:
            before, (_, at) = at, value.take(text, at)
            assert at > before, "it waits for more"

    with pytest.raises(MalformedError):
        read()


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [("city", "5", '"5"'), ("days", " 5 ", "5"), ("days", "five", '"five"'), ("exact", "False", "false"),
    ("exact", "maybe", '"maybe"'),
     ("note", "null", "null"), ("note", "7", '"7"'), ("places", '{"a": 1}', '{"a": 1}'), ("places", "[1",
     '"[1"'), ("level", "3", '"3"'),
     ("any", "[1]", "[1]"), ("any", "NaN", '"NaN"'), ("any", '"a"', '"\\"a\\""'), ("else", "1", '"1"')],
)  # fmt: skip
def test_arguments_written_as_text_have_the_types_of_their_schema(key: str, text: str, expected: str) -> None:
    assert typed(text, kinds_of(FUNCTIONS["weather"], key)) == expected


def test_schemas_that_go_in_circles_or_are_none_leave_it_open() -> None:
    circle = {
        "properties": {
            "a": {"$ref": "#/properties/a"},
            "b": {"anyOf": [{"$ref": "#/nowhere"}, 5]},
            "c": True,
            "d": {"const": 1.5},
        }
    }
    assert [sorted(kinds_of(circle, key)) for key in "abcd"] == [[], [], [], ["number"]]
    assert kinds_of({"properties": 3}, "a") == {"string"}
    many = {
        "properties": {
            "a": {"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}, {"$ref": "#/properties/a"}] * 2}
        }
    }
    with patch.object(schemas, "_found", wraps=schemas._found) as found:
        assert kinds_of(many, "a") == {"null"}
    assert found.call_count < 10, "each schema is looked into once"


def test_long_texts_take_time_in_proportion() -> None:
    """A run of line breaks, an endless number and a long argument are each looked through once, or nearly
    so."""
    made = speech("hermes")
    for _ in range(5_000):
        made.push("\n")
    assert made._reader.left == 0, "they are looked through again and again"
    assert made.push("a") == [Content("\n" * 5_000 + "a")]
    made.push('<tool_call>{"name": "x", "arguments": {"a": "')
    for _ in range(5_000):
        assert made.push("word ") == [Arguments(0, "word ")]
    assert len(whole(speech("hermes"), '<tool_call>{"name": "now"}</tool_call>\n' * 5_000)) == 5_000
    assert whole(speech("qwen3_coder"), "<tool_call>x" * 10_000) == [Content("<tool_call>x" * 10_000)]
    assert whole(speech("hermes", thought=THINK), "\n" * 50_000 + "<think>" + "\n" * 50_000 + "a") == [
        Reasoning("a")
    ]
