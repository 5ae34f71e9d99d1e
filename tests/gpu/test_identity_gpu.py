"""Graphs, compiled kernels and tuned launches are kept by shape: models that differ in weights alone are not
mixed up."""

import shutil
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.api.llm import SHIPPED_MODEL
from penstock.weights.checkpoint.reader import Checkpoint
from safetensor_files import flip

PROMPTS = [[*range(20, 20 + length)] for length in (3, 17, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def edited(path: Path) -> Path:
    """The shipped model with the signs of a norm's weights turned around: every token is another."""
    shutil.copytree(SHIPPED_MODEL, path)
    with Checkpoint.open(path) as checkpoint:
        stored = checkpoint._shards.tensors["model.norm.weight"]
    size = stored.entry.size // checkpoint.spec.hidden_size
    for at in range(stored.entry.offset + size - 1, stored.entry.offset + stored.entry.size, size):
        flip(stored.file.path, at, 7)
    return path


def said(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(found.tokens) for found in llm.generate(PROMPTS, GREEDY)]


def test_recorded_steps_of_two_models(tmp_path: Path) -> None:
    """At once, and one after the other, where the second has the first one's addresses."""
    settings = {"device": "cuda", "device_memory": "2GiB", "max_length": 256, "max_sequences": 4}
    paths = SHIPPED_MODEL, edited(tmp_path / "edited")
    right = []
    for path in paths:
        with LLM(path, graphs=False, **settings) as llm:  # type: ignore[arg-type]
            right.append(said(llm))
    assert right[0] != right[1]
    for path, expected in zip((*paths, *paths), right * 2, strict=True):
        with LLM(path, **settings) as llm:  # type: ignore[arg-type]
            assert said(llm) == expected
    with LLM(paths[0], **settings) as one, LLM(paths[1], **settings) as other:  # type: ignore[arg-type]
        for _ in range(2):
            assert said(one) == right[0]
            assert said(other) == right[1]
