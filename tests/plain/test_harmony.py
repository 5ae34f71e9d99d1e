"""Outputs in channels: the same parts however a text was cut, as a reader of whole messages finds them; no
mark in any text, and no text lost."""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.api.text.rendering import Template
from penstock.server.parsing.dialects import dialect_of
from penstock.server.parsing.harmony import APART, MARKS, HarmonyParser, answer_after, begun
from penstock.server.parsing.output_parser import Called, _joined, whole
from penstock.server.parsing.reading import Arguments, Begin, Broken, Content, End, Part, Reasoning
from penstock.server.parsing.tools import template_messages, tools_of
from penstock.server.parsing.turns import channel_tools
from penstock.server.wire.conversation import Message

FUNCTIONS: dict[str, dict[str, Any]] = {"weather": {}, "now": {}, "a.b-c_d": {}}


def parts(pieces: list[str], functions: Any = FUNCTIONS, **how: Any) -> list[Part]:
    """Of all pieces, neighbours of a kind as one."""
    made = HarmonyParser(functions, **how)
    return _joined([*(part for piece in pieces for part in made.push(piece)), *made.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


def call(name: str, arguments: str, index: int = 0) -> list[Part]:
    return [Begin(index, name), Arguments(index, arguments), End(index)]


THOUGHT, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
WELL: list[tuple[str, list[Part]]] = [
    (f"{THOUGHT}Why?{NEXT}{ANSWER}4.\n", [Reasoning("Why?"), Content("4.\n")]),
    (f"{THOUGHT}\n a \n{NEXT}{ANSWER} b", [Reasoning("\n a \n"), Content(" b")]),
    (f'{THOUGHT}x{NEXT}{TO}{{"city": "Köln"}}', [Reasoning("x"), *call("weather", '{"city": "Köln"}')]),
    (f'{TO}{{"a": 1}}<|call|>', call("weather", '{"a": 1}')),
    (
        ' to=functions.a.b-c_d<|channel|>commentary json<|message|>{"a": [1, {}]}',
        call("a.b-c_d", '{"a": [1, {}]}'),
    ),
    (" to=now<|channel|>commentary code<|message|>{}", call("now", "{}")),
    ("<|channel|>commentary to=functions.other<|message|> {}\n", call("other", "{}")),
    ("<|channel|>analysis to=functions.now<|message|>{}", call("now", "{}")),
    (TO, call("weather", "{}")),
    (f"{TO} \n<|call|>", call("weather", "{}")),
    (
        f"<|channel|>commentary<|message|>I look.{NEXT}{TO}{{}}",
        [Content("I look."), *call("weather", "{}")],
    ),
    (f"{TO}{{}}{NEXT} to=functions.now<|message|>{{}}", [*call("weather", "{}"), *call("now", "{}", 1)]),
    (f"{THOUGHT}a{NEXT}{THOUGHT}b{NEXT}{ANSWER}c", [Reasoning(f"a{APART}b"), Content("c")]),
    (f"{ANSWER}a{NEXT}{THOUGHT}b{NEXT}{ANSWER}c", [Content("a"), Reasoning("b"), Content(f"{APART}c")]),
    ("<|channel|>final <|constrain|>json<|message|>[1]<|return|>", [Content("[1]")]),
    ("<|channel|>commentary to=python code<|message|>print(1)<|call|>", [Content("print(1)")]),
    ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", [Reasoning("{}")]),
    ("<|channel|>analysis<|message|>cut sho", [Reasoning("cut sho")]),
]  # fmt: skip
ILL: list[tuple[str, list[Part]]] = [
    ("Plain text, as from any model.", [Content("Plain text, as from any model.")]),
    (" \n a < b <|", [Content(" \n a < b <|")]),
    ("<|channel|>final Hello there<|return|>", [Content(" Hello there")]),
    ("<|channel|>final你好", [Content("你好")]),
    ("<|channel|>analysisWe need", [Reasoning("We need")]),
    (f"<|channel|>analysis We need{NEXT}{ANSWER}x", [Reasoning(" We need"), Content("x")]),
    ("<|start|>assistant Hello", [Content(" Hello")]),
    ("<|channel|>wibble<|message|>x", [Content("x")]),
    ("<|message|>x", [Content("x")]),
    (f"{THOUGHT}a<|channel|>final<|message|>b", [Reasoning("a"), Content("b")]),
    (f"{ANSWER}a<|message|>b<|constrain|>c", [Content("abc")]),
    (f"{ANSWER}a<|end|>b<|end|>", [Content(f"a{APART}b")]),
    (f"{TO}print(1)<|call|>", [Content("print(1)")]),
    (f"{TO}[1]", [Content("[1]")]),
    (f"{TO}{{}} and", [*call("weather", "{}"), Content("and")]),
    ('<|channel|>commentary to=functions.now json{"a"}', [Content(' to=functions.now json{"a"}')]),
    ("<|channel|>commentary to=functions.now <|channel|>final<|end|>x", [Content("x")]),
    ("to=5", [Content("to=5")]),
    ("to=5 is it", [Content("to=5 is it")]),
    ("<|channel|>commentary to=functions.<|message|>x", [Content("x")]),
    ("<|channel|>final" + " x" * 300, [Content(" x" * 300)]),
    (f"<|channel|>{'x' * 300}", [Content("x" * 44)]),
]
CUT = [
    "",
    " \n",
    "<|channel|>",
    "<|channel|>anal",
    "<|channel|>analysis",
    "<|channel|>commentary to=func",
    "<|channel|>commentary to=functions.wea",
    "<|channel|>commentary to=functions.weather ",
    "<|channel|>commentary to=functions.weather js",
    "<|channel|>commentary to=functions.weather <|constrain|>js",
    "<|channel|>final<|message|>",
    " to=functions.w",
    "<|return|>",
    "<|start|>assis",
    "<|start|>assistant<|end|>",
]


@pytest.mark.parametrize(("text", "expected"), [*WELL, *ILL], ids=range(len(WELL) + len(ILL)))
def test_messages_are_told_apart_by_their_headers(text: str, expected: list[Part]) -> None:
    assert parts([text]) == expected
    assert parts(list(text)) == expected


@pytest.mark.parametrize("text", CUT)
def test_a_header_that_is_cut_short_is_no_text(text: str) -> None:
    assert parts([text]) == parts(list(text)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [('{"a": "x', '{"a": "x'), ('{"a": tru}', '{"a": '), ('{"a"; 1}', '{"a"'), ('{"a": "\\d"}', '{"a": "')],
)
def test_a_call_that_breaks_off_is_content_where_it_was_not_told_yet(text: str, told: str) -> None:
    for more, last in (("", ""), (f"{NEXT}{ANSWER}", "Sorry.")):
        found = parts([f"{TO}{text}{more}{last}"])
        assert found == parts(list(f"{TO}{text}{more}{last}"))
        assert found[:2] == [Begin(0, "weather"), Arguments(0, told)]
        assert isinstance(found[2], Broken)
        said = whole(HarmonyParser(FUNCTIONS), f"{TO}{text}{more}{last}")
        assert len(said) == 1
        assert isinstance(said[0], Content)
        assert said[0].text.replace(APART, "") == text + last


def test_nothing_of_a_call_that_is_cut_off_is_content_nor_a_call() -> None:
    text = f'{THOUGHT}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{TO}{{"city": "K<o"}}<|call|>'
    end = text.index("}<|call|>")
    for size in range(len(text) + 1):
        found = whole(HarmonyParser(FUNCTIONS), text[:size], cut="")
        assert [one for one in found if isinstance(one, Called)] == (
            [Called("weather", '{"city": "K<o"}')] if size > end else []
        )
        said = "".join(one.text for one in found if isinstance(one, Content))
        if not any(text[:size].endswith(mark[:n]) for mark in MARKS for n in range(1, len(mark))):
            assert "I look.".startswith(said)  # A mark is one token: none is ever cut.
            assert said == "I look." or size < text.index(TO)
    # A mark behind it says that the model has ended it.
    broken = f'{TO}{{"a": "x<|call|>'
    assert whole(HarmonyParser(FUNCTIONS), broken, cut="") == [Content('{"a": "x')]


def test_calls_are_text_where_there_are_no_functions_and_one_is_enough_where_one_is_asked_for() -> None:
    assert parts([f"{TO}{{}}"], {}) == [Content("{}")]
    assert parts([f"{TO}{{}} more{NEXT}{TO}{{}}{NEXT}{ANSWER}x"], several=False) == call("weather", "{}")
    assert whole(HarmonyParser(FUNCTIONS), f"{TO}{{}}{NEXT}{TO}{{}}") == [Called("weather", "{}")] * 2


def test_parts_are_given_out_as_soon_as_they_are_certain() -> None:
    made = HarmonyParser(FUNCTIONS)
    assert made.push("<|channel|>ana") == made.push("lysis<|mes") == []
    assert not made.thinking
    assert made.push("sage|>I th") == [Reasoning("I th")]
    assert made.thinking
    assert made.push("ink <|") == [Reasoning("ink ")]
    assert made.push("no|> <|end|") == [Reasoning("<|no|> ")]
    assert made.push("><|start|>assistant") == []
    assert not made.thinking
    assert made.push('<|channel|>commentary to=functions.weather json<|message|>{"a": "b') == [
        Begin(0, "weather"),
        Arguments(0, '{"a": "b'),
    ]
    assert made.push('c", "n": 12') == [Arguments(0, 'c", "n": ')]
    assert made.push("3}") == [Arguments(0, "123}"), End(0)]
    assert made.push(f"{NEXT}{ANSWER}a\n") == [Content("a\n")]
    assert made.finish() == []
    plain = HarmonyParser(FUNCTIONS)
    assert plain.push("Hello") == [Content("Hello")]


HEADERS = [
    ("<|start|>user<|message|>a<|end|><|start|>assistant", "assistant", f"{ANSWER}x", Content("x")),
    (f"<|start|>assistant{THOUGHT}", f"assistant{THOUGHT}", "x", Reasoning("x")),
    (f"<|start|>assistant{ANSWER}So", f"assistant{ANSWER}", "x", Content("x")),
    ("<|start|>user<|message|>a<|end|>", "", f"<|start|>assistant{ANSWER}x", Content("x")),
    ("Nothing of the kind", "Nothing of the kind", " x", Content(" x")),
]


@pytest.mark.parametrize(("prompt", "header", "text", "said"), HEADERS, ids=range(len(HEADERS)))
def test_an_output_goes_on_where_the_prompt_ends(prompt: str, header: str, text: str, said: Part) -> None:
    assert begun(prompt) == header
    if header.startswith("N"):
        return
    assert parts([text], header=header) == parts(list(text), header=header) == [said]
    assert begun(prompt + answer_after(header)) == f"assistant{ANSWER}"


# ---- against a reader of whole messages, which knows nothing of pieces


@dataclass
class Told:
    """What an output comes to: of messages of a kind one text, and the calls."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def told(pieces: list[str]) -> Told:
    found = parts(pieces)
    calls = [[part.name, ""] for part in found if isinstance(part, Begin)]
    for part in found:
        if isinstance(part, Arguments):
            calls[part.index][1] += part.text
    text = {
        kind: "".join(part.text for part in found if isinstance(part, kind)) for kind in (Reasoning, Content)
    }
    return Told(text[Reasoning], text[Content], [(name, given) for name, given in calls])


def read_whole(text: str) -> Told:
    reasoning, content, calls = [], [], []
    for message in re.split(r"<\|start\|>", f"assistant{text}"):
        header, _, rest = message.partition("<|message|>")
        body = re.split(r"<\|(?:end|return|call)\|>", rest)[0]
        channel = re.search(r"<\|channel\|>(\w+)", header)
        to = re.search(r"to=functions\.([\w.-]+)", header)
        if to:
            calls.append((to[1], body))
        elif channel and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return Told(APART.join(filter(None, reasoning)), APART.join(filter(None, content)), calls)


WORDS = [
    "We", " need", "\n\n", " a < b", " <|", "|>", "{", '"x"', " 你好", " to=functions.now", "é", " assistant",
    "analysis", "final", " json", "<", "\t",
]  # fmt: skip


def an_output(random: Random) -> str:
    """Messages as models write them, in each way that the format allows."""
    text = ""
    for number in range(random.randint(1, 6)):
        text += "<|start|>assistant" if number else ""
        body = "".join(random.choices(WORDS, k=random.randint(0, 6)))
        kind = random.choice(["analysis", "commentary", "final", "call", "call"])
        if kind != "call":
            typed = random.choice(["", "", " <|constrain|>json"])
            text += f"<|channel|>{kind}{typed}<|message|>{body}"
        else:
            to = f" to=functions.{random.choice(list(FUNCTIONS))}"
            typed = random.choice(["", " json", " code", "<|constrain|>json", " <|constrain|>json"])
            channel = f"<|channel|>{random.choice(['commentary', 'analysis'])}"
            text += f"{to}{channel}{typed}" if random.random() < 0.5 else f"{channel}{to}{typed}"
            given = {body.replace("<|", ""): [random.random(), None, {"a": body.replace("|>", "")}]}
            text += f"<|message|>{json.dumps(given, ensure_ascii=random.random() < 0.5)}"
        text += "<|call|>" if kind == "call" and random.random() < 0.5 else "<|end|>"
    return text.removesuffix("<|end|>").removesuffix("<|call|>") + random.choice(["", "<|return|>"])


@pytest.mark.parametrize("seed", range(40))
def test_hundreds_of_outputs_read_as_whole_messages_do(seed: int) -> None:
    random = Random(seed)
    for _ in range(25):
        text = an_output(random)
        pieces = cut(text, [random.randrange(10**6) for _ in range(random.randint(0, 30))])
        assert told(pieces) == told([text]) == read_whole(text), text


_SOUP = st.lists(
    st.sampled_from(
        [*MARKS, "assistant", "analysis", "final", "commentary", " to=functions.weather", "to=", " json",
         '{"', '":', "1}", "}", "{", "[", "<|", "|>", "\n", " ", "<|chan", "W", "W", "W"]
    ),
    max_size=24,
)  # fmt: skip


@given(_SOUP, st.lists(st.integers(0, 10**6), max_size=12), st.booleans(), st.booleans())
@example(["<|channel|>", "final", " ", "W", "<|message|>", "W"], [3], True, True)
@example(
    ["<|channel|>", "commentary", " to=functions.weather", "<|message|>", '{"', "W", "<|end|>", "W"],
    [],
    True,
    True,
)
@settings(max_examples=400, deadline=None)
def test_parts_do_not_depend_on_cuts_no_mark_is_text_and_no_word_is_lost(
    pieces: list[str], places: list[int], functions: bool, several: bool
) -> None:
    words = iter(range(1000, 9999))
    text = "".join(f" w{next(words)} " if piece == "W" else piece for piece in pieces)
    how: dict[str, Any] = {"functions": FUNCTIONS if functions else {}, "several": several}
    found = parts([text], **how)
    assert found == parts(cut(text, places), **how) == parts(list(text), **how)
    said = "".join(
        part.name if isinstance(part, Begin) else "" if isinstance(part, End) else part.text for part in found
    )
    assert not any(mark in said for mark in MARKS)
    if several:  # A word that is the whole of a header's entry is a name there: of a role, a channel, a type.
        kept = re.sub(
            r"<\|(?:start|channel|constrain)\|>\s*w\d{4}|w\d{4}\s*<\|message\|>|to=w\d{4}", "", text
        )
        assert set(re.findall(r"w\d{4}", kept)) <= set(re.findall(r"w\d{4}", said))


# ---- what templates are given


def asks(*calls: tuple[str, str], **more: Any) -> Message:
    return Message(
        role="assistant",
        tool_calls=[
            {"id": name, "type": "function", "function": {"name": function, "arguments": "{}"}}
            for name, function in calls
        ],
        **more,
    )


def answer(name: str) -> Message:
    return Message(role="tool", tool_call_id=name, content=f"of {name}")


CHANNELS = dialect_of({"default": "<|start|>assistant<|channel|>final<|message|>"})


def test_a_template_with_channels_says_that_its_model_writes_in_them() -> None:
    assert CHANNELS.channels
    assert CHANNELS.channel_calls
    assert (CHANNELS.calls, CHANNELS.thought) == (None, None)
    assert not dialect_of({"default": "<|message|> before <|channel|>"}).channels
    source = {"default": "<|channel|> <|message|> <think>"}
    assert dialect_of(source).channels
    assert not dialect_of(source, "none").channel_calls
    assert not dialect_of(source, "none", "none").channels
    assert not dialect_of(source, "hermes", "think").channels
    assert dialect_of({"default": ""}, "harmony").channels


def test_calls_come_one_by_one_each_with_its_answers_behind_it() -> None:
    talk = [
        Message(role="user", content="a"),
        asks(("x", "f"), ("y", "g"), reasoning_content="hm"),
        answer("y"),
        answer("z"),
        answer("x"),
        Message(role="user", content="b"),
        asks(("x", "f")),
    ]
    read: Any = template_messages(talk, CHANNELS)
    assert [one["role"] for one in read] == [
        "user", "assistant", "tool", "assistant", "tool", "tool", "user", "assistant",
    ]  # fmt: skip
    assert [one["tool_calls"][0]["function"]["name"] for one in read if "tool_calls" in one] == [
        "f",
        "g",
        "f",
    ]
    assert [one["content"] for one in read if one["role"] == "tool"] == ["of x", "of y", "of z"]
    assert [one.get("reasoning_content") for one in read if "tool_calls" in one] == ["hm", None, None]


def test_what_is_said_before_a_call_stands_in_its_channel_behind_the_reasoning() -> None:
    [read] = template_messages([asks(("x", "f"), content="I look.", reasoning="hm")], CHANNELS)
    assert read["content"] == ""
    assert read["reasoning_content"] == ("hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.")
    [alone] = template_messages([asks(("x", "f"), content="I look.")], CHANNELS)
    assert alone["content"] == "I look."


def test_instructions_are_one_message_at_the_head() -> None:
    talk = [
        Message(role="system", content="A"),
        Message(role="developer", content="B"),
        Message(role="user", content="a"),
        Message(role="system", content="C"),
        Message(role="system", content=""),
    ]
    read = template_messages(talk, CHANNELS)
    assert [(one["role"], one["content"]) for one in read] == [
        ("system", f"A{APART}B{APART}C"),
        ("user", "a"),
    ]
    assert template_messages(talk[2:3], CHANNELS) == [{"role": "user", "content": "a"}]


def test_tools_are_described_as_such_templates_take_for_granted() -> None:
    parameters = {
        "properties": {
            "n": {"enum": [1, 2], "default": 1},
            "m": {"default": 3},
            "o": True,
            "s": {"enum": ["a"]},
        }
    }
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "g", "description": "G."}},
    ]
    read: Any = channel_tools(tools_of(tools, None, None).described)
    assert [one["function"]["description"] for one in read] == ["", "G."]
    assert read[0]["function"]["parameters"]["properties"] == {
        "n": {"enum": [1, 2], "default": "1"},
        "m": {"default": 3},
        "o": True,
        "s": {"enum": ["a"]},
    }


def test_a_template_may_look_from_each_message_of_a_long_conversation_at_all_later_ones() -> None:
    later = (
        "{% for a in messages %}{% for b in messages[loop.index:] %}{% endfor %}{{ a.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}] * 1400
    assert Template(later).render({"messages": messages}) == "a" * 1400
