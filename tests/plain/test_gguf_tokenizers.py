"""Tokenizers of GGUF files: those of the original models, or refused in one line."""

import json
from pathlib import Path

import pytest

from gguf_bytes import LLAMA, TOKENS, refusal, write
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import CheckpointError, PenstockError, UnsupportedModelError
from penstock.weights.gguf.tokenizer import PRE_TOKENIZERS, read_gguf_tokenizer

TEXT = "Hello world, it's 2024-11-26: naïve façade ½ 3.14159!\n\n  x = [1, 2]\t世界 🎉 don't"


def tokenizer(path: Path, **changed: object) -> Tokenizer:
    values = LLAMA | TOKENS | {f"tokenizer.{key}": value for key, value in changed.items()}
    values = {key: value for key, value in values.items() if value is not None}
    made = Tokenizer.from_model(write(path / "m.gguf", values))
    assert made is not None
    return made


def test_pieces(tmp_path: Path) -> None:
    found = tokenizer(tmp_path)
    assert found.encode("ab ab!<|im_end|>") == [1, 8, 8, 9, 3]
    assert found.decode([1, 8, 8, 9]) == "ab ab!"
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    plain = tokenizer(tmp_path, **{"ggml.add_bos_token": False, "ggml.add_space_prefix": False})
    assert plain.encode("ab ab") == [7, 8]
    ended = tokenizer(tmp_path, **{"ggml.add_eos_token": True})
    assert ended.encode("ab") == [1, 8, 2]


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_no_tokenizer(model: str | None, tmp_path: Path) -> None:
    values = LLAMA | ({} if model is None else {"tokenizer.ggml.model": model})
    assert Tokenizer.from_model(write(tmp_path / "m.gguf", values)) is None


def test_chat_templates(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    found = tokenizer(tmp_path, chat_template=template, **{"chat_template.tool_use": "tools"})
    assert found.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert dict(found.templates) == {"default": template, "tool_use": "tools"}


GPT2: dict[str, object] = {"ggml.model": "gpt2", "ggml.pre": "qwen2", "ggml.merges": ["a b"]}
UNKNOWN: list[tuple[dict[str, object], str, type[PenstockError]]] = [
    ({"ggml.model": "bert"}, "ggml.model is 'bert'; supported: gpt2, llama", UnsupportedModelError),
    (GPT2 | {"ggml.pre": "dbrx9"}, "ggml.pre is 'dbrx9'; supported: gpt-2", UnsupportedModelError),
    (GPT2 | {"ggml.pre": None}, "ggml.pre is None; supported: gpt-2", UnsupportedModelError),
    (GPT2 | {"ggml.merges": None}, "merges must be", CheckpointError),
    (GPT2 | {"ggml.merges": ["ab"]}, "not 'ab'", CheckpointError),
    (GPT2 | {"ggml.merges": ["a z"]}, "not 'a z'", CheckpointError),
    ({"ggml.tokens": ["a", "a"], "ggml.token_type": None, "ggml.scores": [0.0] * 2, "ggml.bos_token_id": 0,
      "ggml.eos_token_id": 0}, "'a' is there twice", CheckpointError),
    ({"ggml.tokens": [b"\xff"] * 10}, "UTF-8", CheckpointError),
    ({"ggml.tokens": [1]}, "tokens must be an array of strings", CheckpointError),
    ({"ggml.token_type": [1]}, "token_type must be an array of 10", CheckpointError),
    ({"ggml.scores": None}, "scores must be an array of 10", CheckpointError),
    ({"ggml.bos_token_id": 10}, "bos_token_id must be a token of the 10", CheckpointError),
    ({"ggml.bos_token_id": "x"}, "bos_token_id must be a token of the 10", CheckpointError),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "said", "kind"), UNKNOWN)
def test_tokenizers_that_are_refused(
    changed: dict[str, object], said: str, kind: type[PenstockError], tmp_path: Path
) -> None:
    message = refusal(lambda: tokenizer(tmp_path, **changed), kind)
    assert said in message
    assert str(tmp_path) in message


def test_real_pieces(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "stories260k_hf"
    whole = json.loads((source / "tokenizer.json").read_text())
    tokens = [token for token, _ in sorted(whole["model"]["vocab"].items(), key=lambda item: item[1])]
    ranks = {
        left + right: rank for rank, (left, right) in reversed(list(enumerate(whole["model"]["merges"])))
    }
    special = {one["id"] for one in whole["added_tokens"]}
    kinds = [
        2 if at == 0 else 3 if at in special else 6 if token.startswith("<0x") else 1
        for at, token in enumerate(tokens)
    ]
    scores = [-float(ranks.get(token, 0)) for token in tokens]
    found = tokenizer(tmp_path, **{"ggml.tokens": tokens, "ggml.token_type": kinds, "ggml.scores": scores})
    expect_same(found, Tokenizer.from_directory(source), shared_data)


def expect_same(mine: Tokenizer, theirs: Tokenizer, data: Path) -> None:
    text = (data / "war_and_peace" / "2600-0.txt").read_text()[5000:60000]
    for one in (text, TEXT, "", " ", "a  b\n", "<s>x</s>"):
        assert mine.encode(one) == theirs.encode(one)
        tokens = theirs.encode(one, special=False)
        assert mine.decode(tokens) == theirs.decode(tokens)


def test_real_byte_level(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "tokenizer_qwen_hf"
    whole = json.loads((source / "tokenizer.json").read_text())
    tokens = [token for token, _ in sorted(whole["model"]["vocab"].items(), key=lambda item: item[1])]
    special = [one["content"] for one in whole["added_tokens"]]
    found = tokenizer(tmp_path, **{
        "ggml.model": "gpt2", "ggml.pre": "qwen2", "ggml.tokens": [*tokens, *special],
        "ggml.token_type": [1] * len(tokens) + [3] * len(special), "ggml.scores": None,
        "ggml.merges": [" ".join(merge) for merge in whole["model"]["merges"]],
    })  # fmt: skip
    whole["model"]["ignore_merges"] = False  # As Qwen's own file has it; this one was made of another.
    whole["normalizer"] = {"type": "NFC"}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(whole))
    expect_same(found, Tokenizer.from_directory(tmp_path / "theirs"), shared_data)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_pre_tokenizers(pre: str, tmp_path: Path) -> None:
    """Texts come back whole, and are begun where llama.cpp begins them unless told."""
    spelled = _alphabet()
    found = tokenizer(tmp_path, **{
        "ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": ["<s>", *spelled, "12", "123", "1234"],
        "ggml.token_type": [3] + [1] * 259, "ggml.merges": ["1 2", "12 3", "123 4"], "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0, "ggml.scores": None,
    })  # fmt: skip
    begun = [0] if pre in ("llama3", "llama-v3", "llama-bpe", "tekken") else []
    tokens = found.encode(TEXT)
    assert tokens[: len(begun)] == begun
    assert found.decode(tokens) == TEXT
    pieces = tuple(found.token_text(token) for token in found.encode("12345", special=False))
    digits = (
        ("1234", "5")
        if "gpt" in pre
        else ("123", "4", "5")
        if "llama" in pre or "smaug" in pre
        else tuple("12345")
    )
    assert pieces == digits


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("smaug-bpe", False)])
def test_a_token_that_no_merges_lead_to(pre: str, whole: bool, tmp_path: Path) -> None:
    """Llama 3's tokenizer keeps such a piece whole. Files of its finetunes say that theirs does not."""
    found = tokenizer(tmp_path, **{
        "ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": [*_alphabet(), "ab", "abc"],
        "ggml.token_type": [1] * 258, "ggml.merges": ["a b"], "ggml.bos_token_id": None,
        "ggml.eos_token_id": None, "ggml.scores": None,
    })  # fmt: skip
    pieces = [found.token_text(token) for token in found.encode("abc", special=False)]
    assert pieces == (["abc"] if whole else ["ab", "c"])


def _alphabet() -> list[str]:
    """The characters that stand for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + at) for at in range(len(rest))]


def test_read_gguf_tokenizer_is_the_same_every_time(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", LLAMA | TOKENS)
    assert read_gguf_tokenizer(path) == read_gguf_tokenizer(path)
