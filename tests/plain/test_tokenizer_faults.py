"""Tokenizers that the library panics over, or that make texts many times as long: one request or one model is
refused, no more."""

import json
import random
from pathlib import Path

import pytest
import tokenizers

from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import CheckpointError, RequestError

WHOLE = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}
DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LOST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def tokenizer(path: Path, **changed: object) -> Tokenizer:
    (path / "tokenizer.json").write_text(json.dumps(WHOLE | changed))
    return Tokenizer.from_directory(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": WHOLE["model"] | {"continuing_subword_prefix": "##"}},  # type: ignore[operator]
    ],
    ids=["charsmap", "prefix"],
)
def test_a_file_over_which_the_library_panics_is_no_tokenizer(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        tokenizer(tmp_path, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"post_processor": LOST},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "[UNK]"}},
    ],
    ids=["panic behind", "panic before", "no unknown token"],
)
def test_a_text_over_which_it_panics_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="has no tokens for this text"):
        tokenizer(tmp_path, **changed).encode("ab")


def test_an_interrupt_is_none_of_its_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tokenizer(tmp_path)

    class Interrupted:
        def encode_batch_fast(self, *args: object, **more: object) -> list[object]:
            raise KeyboardInterrupt

    monkeypatch.setattr(ours, "_tokenizer", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        ours.encode("a")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_multiply_are_refused(tmp_path: Path, part: str) -> None:
    def of(times: int) -> dict[str, object]:
        inner = {"type": "Sequence", f"{part}s": [DOUBLED] * 3}
        return {part: {"type": "Sequence", f"{part}s": [inner, *[DOUBLED] * (times - 3)]}}

    tokenizer(tmp_path, **of(6))
    with pytest.raises(CheckpointError, match=r"1,073,741,824 times as long"):
        tokenizer(tmp_path, **of(30))


def test_an_expression_that_matches_nothing_multiplies_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"101 times as long"):
        tokenizer(tmp_path, normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 100})


def test_a_tokenizer_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as out:
        out.truncate(4 << 30)
    with pytest.raises(CheckpointError, match="4,294,967,296 bytes"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_qwen_hf", "stories260k_hf"])
def test_no_text_has_fewer_tokens_than_is_said(shared_data: Path, file: str) -> None:
    ours = Tokenizer.from_directory(shared_data / file)
    rng = random.Random(0)
    words = [
        "the",
        " a",
        "\n\n",
        "=" * 200,
        " " * 300,
        "日本語",
        "e\u0301",
        "\u1100\u1161\u11a8",
        "\u03b1\u0313\u0300\u0345",
        "0123456789",
        "<|im_end|>",
    ]
    for _ in range(300):
        text = "".join(rng.choices(words, k=rng.randrange(1, 60)))
        assert ours.least_tokens(text) <= len(ours.encode(text, special=False))
    assert ours.least_tokens("a" * 1_000_000) > 2_000


@pytest.mark.parametrize(
    "changed",
    [
        {
            "model": {
                "type": "WordPiece",
                "vocab": {"[UNK]": 0},
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 9,
            }
        },
        {"model": WHOLE["model"]},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": "a"},
                "behavior": "Removed",
                "invert": False,
            }
        },
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}},
        {"normalizer": {"type": "NFKC"}},
    ],
    ids=["words", "unknown characters", "removed", "replaced", "compatibility"],
)
def test_nothing_is_said_where_text_may_vanish(tmp_path: Path, changed: dict[str, object]) -> None:
    """All bytes have tokens in the first of each pair, but for what is changed."""
    names = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    whole = {
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
    }
    if "model" not in changed:
        whole["model"] = {
            "type": "BPE",
            "vocab": {name: at for at, name in enumerate(sorted(names))},
            "merges": [],
        }
        assert tokenizer(tmp_path, **whole).least_tokens("a" * 1000) == 500  # The longest name has two bytes.
    assert tokenizer(tmp_path, **whole | changed).least_tokens("a" * 1000) == 0


def test_tokens_over_which_it_panics_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders that are known to panic are not taken, so it is the panic of another text that is raised."""
    ours = tokenizer(tmp_path, post_processor=LOST)
    with pytest.raises(BaseException, match=r"[a-z]") as panic:
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("ab")
    assert not isinstance(panic.value, Exception)

    class Panicking:
        def decode(self, *args: object, **more: object) -> str:
            raise panic.value

    with monkeypatch.context() as patch:
        patch.setattr(ours, "_tokenizer", Panicking())
        with pytest.raises(RequestError, match="cannot turn these tokens into text"):
            ours.decode([0])
    assert ours.decode([2]) == "ab"
