"""Tokenizer, incremental detokenizer and chat templates, on a byte-level BPE and on a SentencePiece-style BPE
with byte fallback."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from penstock.api.text.chat_template import ChatTemplate
from penstock.api.text.detokenize import Pieces
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import CheckpointError, RequestError, UnsupportedModelError

DATA = Path(__file__).parents[3] / "shared" / "data"
QWEN, STORIES = "tokenizer_qwen_hf", "stories260k_hf"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="needs the real material in ../shared/data, which is not here"
)


@cache
def load(name: str) -> Tokenizer:
    return Tokenizer.from_directory(DATA / name)


@pytest.fixture(params=[QWEN, STORIES])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


def in_chunks(tokens: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """The tokens in pieces of these sizes, over and over; a size of 0 is an empty push."""
    at, turn = 0, 0
    while at < len(tokens):
        size = sizes[turn % len(sizes)] if any(sizes) else 1
        yield tokens[at : at + size]
        at, turn = at + size, turn + 1


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3fd"
snippets = st.sampled_from(
    [
        FAMILY,
        "🇩🇪",
        "日本語",
        "e\u0301",
        "\ufffd",
        "  ",
        "\n\n",
        "<s>",
        "<|im_start|>",
        "<0x41>",
        " the",
        "▁",
        "Ġ",
        "\x00",
        "❤️",
    ]
)
texts = st.lists(snippets | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12).map(
    "".join
)
sizes = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@pytest.mark.parametrize("name", [QWEN, STORIES])
@given(text=texts, sizes=sizes, skip_special=st.booleans())
@settings(max_examples=150)
def test_stream_of_encoded_text_equals_decode(
    name: str, text: str, sizes: list[int], skip_special: bool
) -> None:
    tokenizer = load(name)
    tokens = tokenizer.encode(text)
    stream = tokenizer.detokenizer(skip_special=skip_special)
    pushed = [stream.push(chunk) for chunk in in_chunks(tokens, sizes)]
    rest = stream.finish()
    assert rest == "", "a complete text leaves nothing behind"
    assert "".join(pushed) == stream.text == tokenizer.decode(tokens, skip_special=skip_special)
    assert "\ufffd" in text or "\ufffd" not in stream.text


@given(
    tokens=st.lists(st.integers(0, 151_700) | st.integers(0, 255), max_size=30),
    sizes=sizes,
    skip_special=st.booleans(),
)
@settings(max_examples=300)
def test_byte_level_stream_of_any_tokens_equals_decode(
    tokens: list[int], sizes: list[int], skip_special: bool
) -> None:
    stream = load(QWEN).detokenizer(skip_special=skip_special)
    pushed = "".join(stream.push(chunk) for chunk in in_chunks(tokens, sizes))
    assert pushed + stream.finish() == load(QWEN).decode(tokens, skip_special=skip_special)


def well_formed(tokens: list[int], skip_special: bool) -> list[int]:
    """Every run of byte tokens (3 to 258, bytes 0 to 255) that is not UTF-8 rewritten with U+FFFD.

    Left out, and so no end of a run: skipped special tokens (0 to 2) and those the tokenizer does not know
    (from 512 on).
    """
    out: list[int] = []
    run = bytearray()
    for token in [token for token in tokens if token < 512 and not (skip_special and token <= 2)]:
        if 3 <= token < 259:
            run.append(token - 3)
            continue
        out += [byte + 3 for byte in run.decode("utf-8", "replace").encode()] + [token]
        run.clear()
    return out + [byte + 3 for byte in run.decode("utf-8", "replace").encode()]


byte_runs = st.binary(min_size=1, max_size=6) | st.text(max_size=3).map(
    lambda text: text.encode("utf-8", "replace")
)
byte_tokens = byte_runs.map(lambda run: [byte + 3 for byte in run])
any_tokens = st.lists(byte_tokens | st.lists(st.integers(0, 520), max_size=4), max_size=10).map(
    lambda runs: [token for run in runs for token in run]
)


@given(tokens=any_tokens, sizes=sizes, skip_special=st.booleans())
@settings(max_examples=400)
def test_byte_fallback_stream_of_any_tokens_equals_decode_of_their_well_formed_rewriting(
    tokens: list[int], sizes: list[int], skip_special: bool
) -> None:
    stream = load(STORIES).detokenizer(skip_special=skip_special)
    pushed = "".join(stream.push(chunk) for chunk in in_chunks(tokens, sizes))
    assert pushed + stream.finish() == load(STORIES).decode(
        well_formed(tokens, skip_special), skip_special=skip_special
    )


def test_ill_formed_run_keeps_the_characters_already_given_out() -> None:
    tokens = [byte + 3 for byte in "é".encode() + b"\xff"]
    stream = load(STORIES).detokenizer()
    assert [stream.push([token]) for token in tokens] == ["", "é", "\ufffd"]
    assert load(STORIES).decode(tokens) == "\ufffd\ufffd\ufffd"


def test_half_a_character_waits_and_comes_as_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x\U00013000", special=False)
    stream = tokenizer.detokenizer()
    for at in range(len(tokens) - 1):
        assert "\ufffd" not in stream.push(tokens[at : at + 1])
    assert stream.finish() == "\ufffd"


def test_first_space_goes_with_the_first_token_that_has_text() -> None:
    for unseen in (1, 600):  # one skipped, one that the tokenizer does not know
        assert (
            load(STORIES).detokenizer().push([unseen, 265, 265])
            == load(STORIES).decode([unseen, 265, 265])
            == "the the"
        )


def test_output_that_continues_a_text_keeps_its_first_space() -> None:
    the = load(STORIES).token_to_id("▁the")
    assert the is not None
    assert load(STORIES).detokenizer().push([the, the]) == "the the" == load(STORIES).decode([the, the])
    assert load(STORIES).detokenizer(continues=True).push([the, the]) == " the the"


def cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The rule, read one character at a time: the stop that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if stop and text[:end].endswith(stop)]:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize("name", [QWEN, STORIES])
@given(
    text=st.text("ab \né😀", max_size=30),
    stops=st.lists(st.text("ab \né😀", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    sizes=sizes,
)
@settings(max_examples=300)
def test_stop_strings(name: str, text: str, stops: list[str], include: bool, sizes: list[int]) -> None:
    tokens = load(name).encode(text)
    text = load(name).decode(tokens)
    stream, plain = load(name).detokenizer(stops, include), load(name).detokenizer()
    for chunk in in_chunks(tokens, sizes):
        stream.push(chunk)
        plain.push(chunk)
        seen, stopped = cut(plain.text, stops, include)
        begun = [n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])]
        held = 0 if stopped else max(begun, default=0)
        assert (stream.text, stream.stopped) == (seen[: len(seen) - held], stopped), (
            "all that is certain and no more"
        )
    rest = stream.finish()
    assert (stream.text, stream.stopped) == cut(text, stops, include)
    if stream.stopped:
        assert (rest, stream.push(tokens), stream.finish()) == ("", "", "")


def test_stop_string_may_hold_a_replacement_character_that_only_the_end_reveals() -> None:
    stream = load(STORIES).detokenizer(["a\ufffd"])
    assert stream.push([ord("a") + 3, 0xE2 + 3]) == ""
    assert (stream.finish(), stream.stopped) == ("", True)


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (None, "b a b"),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, "bab c"),
    ],
)
def test_other_decoders(decoder: object, text: str) -> None:
    vocabulary = {"a": 0, "b": 1, "▁c": 2, "[UNK]": 3}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    inner = tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": decoder})
    )
    tokenizer = Tokenizer(inner, {}, {})
    tokens = [1, 0, 1] if decoder is None else [1, 0, 1, 2]
    assert tokenizer.detokenizer().push(tokens) == tokenizer.decode(tokens) == text


def test_added_tokens_of_a_byte_level_tokenizer() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "é": 1}, []))
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(["two words", "naïve", "日"])  # the second is written in letters that stand for bytes
    tokens = [0, 2, 1, 3, 4, 0]
    tokenizer = Tokenizer(inner, {}, {})
    assert tokenizer.detokenizer().push(tokens) == tokenizer.decode(tokens) == "atwo words\ufffdna\ufffdve日a"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Strip(" ", 0, 1),
        decoders.Strip(" ", 2, 0),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_decoder_that_looks_at_neighbours_is_refused(decoder: object) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json has the decoder .* is not supported"):
        Pieces(inner)


def test_encode_decode_and_what_a_token_shows(tokenizer: Tokenizer) -> None:
    text = f"Once upon a time {FAMILY}\n"
    tokens = tokenizer.encode(text, special=False)
    assert tokenizer.decode(tokens) == text
    assert b"".join(tokenizer.token_bytes(token) for token in tokens).lstrip() == text.encode()
    assert (tokenizer.token_bytes(10**6), tokenizer.token_text(10**6)) == (b"", "")
    assert tokenizer.encode_batch([text, "x"], special=False) == [
        tokens,
        tokenizer.encode("x", special=False),
    ]


def test_special_tokens_go_round_a_text_only_when_asked() -> None:
    stories = load(STORIES)
    assert (stories.bos_token, stories.eos_token, stories.vocabulary_size) == ("<s>", "</s>", 512)
    assert stories.encode("a") == [1, *stories.encode("a", special=False)]
    assert (load(QWEN).bos_token, load(QWEN).vocabulary_size) == (None, 151_646)
    assert (stories.decode([1, 2]), stories.decode([1, 2], skip_special=False)) == ("", "<s></s>")
    assert (stories.token_text(265), stories.token_text(3 + 0xE2)) == (" the", "\ufffd")


@pytest.mark.parametrize(
    ("text", "where"),
    [("ab\udcff", "byte 0xff at character 2"), ("\ud83d", r"surrogate U\+D83D at character 0")],
)
def test_prompt_that_is_not_unicode(tokenizer: Tokenizer, text: str, where: str) -> None:
    with pytest.raises(RequestError, match=f"not valid UTF-8: {where}"):
        tokenizer.encode(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small tokenizer alone, for a test to add files to."""
    (tmp_path / "tokenizer.json").write_bytes((DATA / STORIES / "tokenizer.json").read_bytes())
    return tmp_path


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


HELLO = [{"role": "user", "content": "Hello"}]


def test_length_limits_in_the_file_are_ignored(folder: Path) -> None:
    table = json.loads((folder / "tokenizer.json").read_text())
    table["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    table["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<unk>",
                        "pad_to_multiple_of": None}  # fmt: skip
    write(folder / "tokenizer.json", table)
    assert Tokenizer.from_directory(folder).encode("a longer text") == load(STORIES).encode("a longer text")


def test_names_of_special_tokens(folder: Path) -> None:
    write(
        folder / "tokenizer_config.json",
        {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None, "add_bos_token": True},
    )
    assert (Tokenizer.from_directory(folder).bos_token, Tokenizer.from_directory(folder).eos_token) == (
        "<s>",
        None,
    )
    write(folder / "special_tokens_map.json", {"bos_token": "</s>"})
    assert Tokenizer.from_directory(folder).bos_token == "</s>"
    write(folder / "tokenizer_config.json", {"bos_token": "<s>", "added_tokens_decoder": {}})
    assert Tokenizer.from_directory(folder).bos_token == "<s>"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", "{}", "is not a tokenizer: Model missing"),
        ("tokenizer.json", b"\xff\xfe", "cannot be read: not UTF-8"),
        ("tokenizer.json", None, "cannot be read: No such file"),
        ("tokenizer.json", Path("pipe"), "cannot be read: it is not a regular file"),
        ("tokenizer_config.json", Path("pipe"), "cannot be read: it is not a regular file"),
        (
            "chat_template.jinja",
            Path("/dev/zero"),
            "is a link to /dev/zero, outside of the model's directory",
        ),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[" * 100_000, "is not JSON"),
        ("tokenizer_config.json", "[1]", "holds a list"),
    ],
)
def test_damaged_file_is_named(
    folder: Path, file: str, content: str | bytes | Path | None, says: str
) -> None:
    """content: of the file; a Path is what it is a link to."""
    if content is None:
        (folder / file).unlink()
    elif isinstance(content, Path):
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / "pipe")
        (folder / file).symlink_to(folder / content)
    else:
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(folder / file))} {says}") as caught:
        Tokenizer.from_directory(folder)
    assert "\n" not in str(caught.value)


def test_where_chat_templates_are_looked_for(folder: Path) -> None:
    def rendered(**options: object) -> str:
        return Tokenizer.from_directory(folder).render_chat(HELLO, **options)  # type: ignore[arg-type]

    with pytest.raises(RequestError, match="no chat template; use plain generation"):
        rendered()
    write(folder / "chat_template.json", {"chat_template": "old {{ messages[0].content }}"})
    assert rendered() == "old Hello"
    named = [
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
        {"name": "rag", "template": "rag"},
    ]
    write(folder / "tokenizer_config.json", {"chat_template": named})
    with pytest.raises(RequestError, match="no default chat template, only rag, tool_use"):
        rendered()
    write(
        folder / "tokenizer_config.json",
        {"chat_template": [*named, {"name": "default", "template": "config {{ add_generation_prompt }}"}]},
    )
    assert (rendered(), rendered(add_generation_prompt=False), rendered(tools=[{}])) == (
        "config True",
        "config False",
        "tools 1",
    )
    write(folder / "chat_template.jinja", "file")
    assert rendered(tools=[]) == "file"
    write(folder / "additional_chat_templates" / "tool_use.jinja", "file tools")
    assert (rendered(), rendered(tools=[])) == ("file", "file tools")


def test_encode_chat_adds_no_second_start_token(folder: Path) -> None:
    write(
        folder / "tokenizer_config.json",
        {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ more }}"},
    )
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.encode_chat(HELLO, more="!").count(1) == 1
    assert tokenizer.encode_chat(HELLO, bos_token="") == tokenizer.encode("Hello", special=False)


def test_template_language() -> None:
    source = """{% for word in words %}
    {% generation %}
{{- word }}{% set leak = 1 %}
    {% endgeneration %}
    {% if loop.index == 2 %}{% break %}{% endif %}
{% endfor %}
{{- {"a": "<é>"} | tojson }}{{ strftime_now("%Y") | length }}{{ leak is defined }}{{ 2 * 3 }}{{ "ab" * 2 }}
"""
    assert ChatTemplate(source).render({"words": ["x", "y", "z"]}) == 'xy{"a": "<é>"}4False6abab'


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('no such\nrole') }}", ": no such role; change the messages"),
        ("\n{% if %}", "has an error in line 2"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ absent.field }}", "'absent' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
            "more than 5000 steps",
        ),
        (
            "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
            "more than 5000 steps",
        ),
        ("{% for a in range(4000) %}{{ 'x' * 99999 }}{% endfor %}", "more than 67108864 characters"),
        ("{{ 'x' * 99999999999 }}", r"str \* int may become too large"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
    ],
)
def test_bad_template_is_one_line(monkeypatch: pytest.MonkeyPatch, source: str, says: str) -> None:
    monkeypatch.setattr("penstock.api.text.chat_template.MOST_STEPS", 5000)
    with pytest.raises(RequestError, match=says) as caught:
        ChatTemplate(source).render({"messages": []})
    assert "\n" not in str(caught.value)


def test_template_recovers_after_it_ran_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.text.chat_template.MOST_STEPS", 5000)
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done")
    with pytest.raises(RequestError, match="steps"):
        template.render({"n": 100})
    assert [template.render({"n": 54}) for _ in range(2)] == ["done"] * 2, (
        "each rendering has its own count of steps"
    )


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "messages must be a list"),
        ([], "at least one"),
        (["hello"], r"messages\[0\] must be a mapping with a role"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] must be a mapping with a role"),
        ([{"role": "bot", "content": "x"}], r"messages\[0\].role 'bot' is none; use one of system, dev"),
        ([*HELLO, {"role": "User", "content": "x"}], r"messages\[1\].role 'User' is none; use one of"),
        ([{"role": 3, "content": "x"}], "with a role"),
        ([{"role": "user"}], "has content of type"),
        ([{"role": "user", "content": 3}], "of type int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
        ([{"role": "user", "content": "x", "extra": object()}], "must be JSON values"),
    ],
)
def test_messages_of_another_form(folder: Path, messages: list[dict[str, object]], says: str) -> None:
    write(folder / "chat_template.jinja", "{{ messages }}")
    with pytest.raises(RequestError, match=says):
        Tokenizer.from_directory(folder).render_chat(messages)


def test_what_a_template_sees_of_messages(folder: Path) -> None:
    write(folder / "chat_template.jinja", "{{ messages | tojson(sort_keys=True) }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    seen = Tokenizer.from_directory(folder).render_chat(
        [
            {"role": "user", "content": parts, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [], "reasoning": "r"},
        ]
    )
    assert json.loads(seen) == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [],
            "reasoning": "r",
            "thinking": "r",
            "reasoning_content": "r",
        },
    ]


def test_threads_share_a_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.api.text.chat_template.MOST_STEPS", 5000
    )  # enough for one rendering, not for two at once
    write(folder / "chat_template.jinja", "{% for n in range(4000) %}{{ messages[0].content }}{% endfor %}")
    tokenizer = Tokenizer.from_directory(folder)

    def work(n: int) -> bool:
        prompt = tokenizer.render_chat([{"role": "user", "content": f"{n} 日本 "}])
        tokens = tokenizer.encode(prompt)
        stream = tokenizer.detokenizer()
        return prompt == f"{n} 日本 " * 4000 and stream.push(tokens) + stream.finish() == prompt

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # Threads take turns within each rendering.
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(12)))
    finally:
        sys.setswitchinterval(interval)


def test_imports_stay_light() -> None:
    code = (
        "import sys, penstock.api.text.tokenizer; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'jinja2', 'numpy', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
