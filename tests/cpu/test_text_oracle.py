"""Text in and out, and rendered conversations, against transformers: the same files must give the same tokens
and strings."""

import json
import shutil
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from penstock.api.text.tokenizer import Tokenizer  # noqa: E402

DATA = Path(__file__).parents[3] / "shared" / "data"
QWEN, STORIES = "tokenizer_qwen_hf", "stories260k_hf"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="needs the real material in ../shared/data, which is not here"
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says how it is "outside", <now> & later: 5 °C',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
SYSTEM = {"role": "system", "content": "  You are terse.\n"}
USER = {"role": "user", "content": "Wie ist das Wetter in Köln? <b>&</b> 😀"}
ANSWER = {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nCold."}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": " And\n\ttomorrow? "}],
    "ends with assistant": [USER, {"role": "assistant", "content": "Cold.", "reasoning": "a thought"}],
    "null field": [
        {**USER, "name": None},
        {"role": "assistant", "content": "Cold.", "tool_calls": None},
        USER,
    ],
    "tool call": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}'},
        USER,
    ],
    "call without content": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ],
    "two results": [
        USER,
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        *[{"role": "tool", "content": c} for c in "ab"],
    ],
}
OPTIONS = [
    {},
    {"tools": [WEATHER]},
    {"tools": [WEATHER, WEATHER], "tools_in_user_message": False, "date_string": "1 May 2025"},
    {"enable_thinking": False},
    {"enable_thinking": True, "builtin_tools": ["code_interpreter", "search"], "bos_token": "<other>"},
]


@pytest.fixture(
    scope="module", params=sorted(path.stem for path in (DATA / "chat_templates").glob("*.jinja"))
)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, object]:
    """A model's template beside the small tokenizer, as read here and as read by transformers."""
    folder = tmp_path_factory.mktemp("model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / STORIES / file, folder)
    shutil.copy(DATA / "chat_templates" / f"{request.param}.jinja", folder / "chat_template.jinja")
    return Tokenizer.from_directory(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "none")
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_rendered_chat(both: tuple[Tokenizer, object], name: str, options: dict[str, object]) -> None:
    ours, theirs = both
    messages = CONVERSATIONS[name]
    # Without content they pass none on, and a template that adds it to a string fails; here it is empty.
    filled = [{**message, "content": message["content"] or ""} for message in messages]
    for prompt in (True, False):
        asked = {"add_generation_prompt": prompt, **options}
        assert ours.render_chat(messages, **asked) == theirs.apply_chat_template(
            filled, tokenize=False, **asked
        )
        assert ours.encode_chat(messages, **asked) == theirs.apply_chat_template(
            filled, return_dict=False, **asked
        )


@pytest.mark.parametrize("name", [QWEN, STORIES])
def test_encode_and_decode(name: str) -> None:
    ours = Tokenizer.from_directory(DATA / name)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(DATA / name / "tokenizer.json"))
    text = (DATA / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")[:20_000]
    for sample in (
        text,
        "",
        " ",
        "  two  spaces . ",
        "<s>x</s><|im_start|>y<|im_end|>",
        "日本語 \U0001f468\u200d\U0001f469\u200d\U0001f467 \r\n\t",
    ):
        for special in (True, False):
            tokens = theirs(sample, add_special_tokens=special)["input_ids"]
            assert ours.encode(sample, special=special) == tokens
            for skip in (True, False):
                assert ours.decode(tokens, skip_special=skip) == theirs.decode(
                    tokens, skip_special_tokens=skip
                )
    assert ours.vocabulary_size == len(theirs)


@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}], ids=str
)
@pytest.mark.parametrize("processor", [True, False])
def test_tokens_round_a_text_come_from_the_tokenizer_file(
    tmp_path: Path, config: dict[str, bool], processor: bool
) -> None:
    table = json.loads((DATA / STORIES / "tokenizer.json").read_text(encoding="utf-8"))
    if not processor:
        table["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | config), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.encode("Once upon") == theirs("Once upon")["input_ids"]
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
