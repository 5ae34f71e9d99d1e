"""GGUF files on a GPU: the tokens of the same model dense."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf_files
import tiny
from gguf_files import Writing, source
from penstock.api.llm import LLM
from penstock.step.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def tokens(path: Path, **settings: object) -> list[tuple[int, ...]]:
    with LLM(path, device="cuda", dtype="float32", max_length=64, **settings) as llm:  # type: ignore[arg-type]
        return [one.tokens for one in llm.generate(tiny.prompts()[1:4], GREEDY)]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS", "Q4_1", "Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe_normalised"])
def test_tokens(kind: str, name: str, tmp_path: Path) -> None:
    made = gguf_files.write(source(name), tmp_path, Writing(kind))
    same = tokens(made.dense)
    assert tokens(made.file) == same
    assert tokens(made.file, kernels=False) == same
