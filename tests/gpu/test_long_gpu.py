"""Contexts in host memory on CUDA: what they answer is what the same engine answers with all KV on the
device, whatever is late."""

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import BudgetError
from penstock.engine import parts
from penstock.memory.streams import CudaStream, Pieces, Stream

CUDA = torch.device("cuda")
LATE = 400_000
"""Clock cycles, a fifth of a millisecond: longer than any copy or kernel here."""
ALL = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=1)
SETTINGS = {"device": "cuda", "max_length": 400, "beyond_trained": True, "check": True}


class Slow(CudaStream):
    cycles = 0

    def _late(self) -> None:
        if self.cycles:
            with torch.cuda.stream(self._queue()):
                torch.cuda._sleep(self.cycles)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._late()
        super().copy(target, source)

    def copy_rows(self, target: Tensor, source: Tensor) -> None:
        self._late()
        super().copy_rows(target, source)

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        self._late()
        super().copy_pieces(target, source, pieces)


def slow_streams(late: str) -> tuple[Stream, Stream, Stream]:
    copies = Slow(CUDA)
    streams = {
        "in": copies,
        "out": Slow(CUDA, clock=copies.clock),
        "compute": Slow(CUDA, current=True, clock=copies.clock),
    }
    if late in streams:
        streams[late].cycles = LATE
    return streams["in"], streams["out"], streams["compute"]


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    common = [rng.randrange(90) for _ in range(150)]
    return [common + [rng.randrange(90) for _ in range(count)] for count in (110, 64, 7)] + [
        [5, 6, 7],
        common[:60],
    ]


def apart(got: list[Completion], expected: list[Completion]) -> float:
    """The largest difference of log-probabilities, of outputs and of prompts."""
    pairs = [
        pair
        for one, other in zip(got, expected, strict=True)
        for pair in (
            *zip(one.logprobs, other.logprobs, strict=True),
            *zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True),
        )
    ]
    return max(abs(one.logprob - other.logprob) for one, other in pairs)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_windows", "qwen3_moe"])
def test_long_is_resident(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.checkpoint(name)
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    with LLM(path, dtype="float32", block_size=8, max_step_tokens=64, **SETTINGS) as llm:
        expected = llm.generate(prompts(), ALL)
    for pages, tile, step, late in (
        (9, 32, 64, ""),
        (8, 8, 16, "in"),
        (12, 400, 48, "out"),
        (9, 24, 40, "compute"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(parts, "streams_both_ways", lambda device, late=late: slow_streams(late))
            sizes = {
                "block_size": 8,
                "kv_blocks": pages,
                "kv_tile": tile,
                "max_step_tokens": step,
                "host_kv_memory": "8MiB",
            }
            with LLM(path, dtype="float32", max_sequences=4, **SETTINGS, **sizes) as llm:
                found = llm.generate(prompts(), ALL)
                again = llm.generate(prompts(), plain)
        assert (
            [one.tokens for one in found] == [one.tokens for one in again] == [one.tokens for one in expected]
        ), (pages, tile, step, late)
        assert apart(found, expected) < 5e-5, (pages, tile, step, late)
        assert again[0].cached_tokens > 200


def test_long_in_half_precision() -> None:
    path = tiny.write(next(iter(tiny.WIDE.values())), tiny.folder() / "wide_long")
    settings = {"device": "cuda", "dtype": "bfloat16", "max_length": 2500, "max_step_tokens": 1024}
    wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    with LLM(path, **settings) as llm:
        expected = llm.generate(tiny.long_prompts()[:3], wanted)
    for tile in (64, 1024, 2048):
        with LLM(
            path, kv_blocks=12, kv_tile=tile, host_kv_memory="64MiB", max_sequences=4, **settings
        ) as llm:
            found = llm.generate(tiny.long_prompts()[:3], wanted)
        first = [
            abs(one.logprobs[0].logprob - other.logprobs[0].logprob)
            for one, other in zip(found, expected, strict=True)
        ]
        assert max(first) < 0.1, tile


@pytest.mark.parametrize("name", ["llama", "qwen2_windows"])
def test_recorded_steps_have_the_bits_of_others(name: str) -> None:
    found = []
    sizes = {"block_size": 8, "kv_blocks": 9, "kv_tile": 32, "max_step_tokens": 64, "host_kv_memory": "8MiB"}
    for graphs in (True, False):
        with LLM(tiny.checkpoint(name), dtype="bfloat16", graphs=graphs, **SETTINGS, **sizes) as llm:
            recorded = llm.booted.engine._ranks.target.graphs
            assert bool(recorded and recorded.cold) == graphs
            found.append(llm.generate(prompts()[:1], ALL)[0])
    assert found[0].tokens == found[1].tokens
    assert found[0].logprobs == found[1].logprobs


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(BudgetError, match="host memory were asked for KV"):
        LLM(tiny.checkpoint("llama"), host_kv_memory="100TiB", **SETTINGS)
