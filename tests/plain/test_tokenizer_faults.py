"""Tokenizers that the library panics over, or that make texts many times as long: one request or one model is refused, no more."""

import json
from pathlib import Path

import pytest

from penstock.api.text import Tokenizer
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
def test_a_file_over_which_the_library_panics_is_no_tokenizer(tmp_path: Path, changed: dict[str, object]) -> None:
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
