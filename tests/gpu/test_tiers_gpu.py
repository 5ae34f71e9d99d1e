"""Prefixes that come from host memory and disk on CUDA: conversations go as they do where every prefix stays
on the device, whatever is late."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.kv.movement import carrier
from penstock.memory.streams import CudaStream, Pieces, Stream, ThreadStream
from penstock.models.decoder import Decoder
from penstock.sched import arrivals
from penstock.sched.rates import TransferRates
from penstock.step.plan import Route

CYCLES, SECONDS = 400_000, 2e-4
"""A fifth of a millisecond: longer than any copy or kernel here."""
PLAIN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
SETTINGS = {"block_size": 8, "max_length": 400, "max_sequences": 4, "beyond_trained": True, "check": True}
FEW = {"kv_blocks": 64, "host_kv_memory": "512KiB", "disk_kv_memory": "64MiB"}
"""Pages for two conversations at their end, host blocks for a few more, and records for all."""
Turns = list[list[list[int]]]
"""Of each conversation, what its user says in each turn."""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


class Slow(CudaStream):
    """Copies of pieces set out late."""

    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        with torch.cuda.stream(self._queue()):
            torch.cuda._sleep(CYCLES)
        super().copy_pieces(target, source, pieces)


class SlowThread(ThreadStream):
    def copy_pieces(self, target: Tensor, source: Tensor, pieces: Pieces) -> None:
        self.run(lambda: time.sleep(SECONDS))
        super().copy_pieces(target, source, pieces)


def block_streams(device: torch.device, copies: Stream, late: str) -> tuple[Stream, Stream]:
    """Up and down."""
    if isinstance(copies, CudaStream):
        up, down = (
            (Slow if way == late else CudaStream)(device, clock=copies.clock) for way in ("up", "down")
        )
        return up, down
    slow_up, slow_down = (
        (SlowThread if way == late else ThreadStream)(f"blocks {way}") for way in ("up", "down")
    )
    return slow_up, slow_down


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are loaded however fast they are to compute, and waited for: models as small as these are faster
    than any disk."""
    monkeypatch.setattr(arrivals, "_LEAST_PATIENCE", 60.0)
    monkeypatch.setattr(TransferRates, "loading_pays", lambda *_: True)
    monkeypatch.setattr(TransferRates, "computed_first", lambda *_: 0)


def be_late(patched: pytest.MonkeyPatch, device: torch.device, late: str) -> None:
    patched.setattr(carrier, "more_streams", lambda device, copies: block_streams(device, copies, late))
    if late == "compute" and device.type == "cuda":
        forward = Decoder.forward

        def slow(self: Decoder, *arguments: object) -> Tensor:
            torch.cuda._sleep(CYCLES)
            return forward(self, *arguments)  # type: ignore[arg-type]

        patched.setattr(Decoder, "forward", slow)


def some_turns(rng: random.Random, talks: int, turns: int, most: int) -> Turns:
    """Every second conversation begins as another one does."""
    opening = [rng.randrange(90) for _ in range(70)]
    found = [
        [[rng.randrange(90) for _ in range(rng.randrange(5, most))] for _ in range(turns)]
        for _ in range(talks)
    ]
    for talk in found[::2]:
        talk[0] = opening + talk[0]
    return found


def order_of(rng: random.Random, turns: Turns, at_once: int) -> list[list[int]]:
    """Which conversations go on together, until all are at their end."""
    left = Counter({talk: len(said) for talk, said in enumerate(turns)})
    order = []
    while left:
        order.append(rng.sample(sorted(left), min(len(left), rng.randrange(1, at_once + 1))))
        left -= Counter(order[-1])
    return order


def talk(
    llm: LLM,
    turns: Turns,
    order: list[list[int]],
    answers: Sequence[Sequence[list[int]]] | None = None,
    rest: float = 0.0,
) -> list[list[Completion]]:
    """Of each conversation, what was answered. answers: what its history shall have, instead of what was
    answered. rest: seconds for blocks to land in between."""
    histories: list[list[int]] = [[] for _ in turns]
    found: list[list[Completion]] = [[] for _ in turns]
    for together in order:
        for one in together:
            histories[one] = histories[one] + turns[one][len(found[one])]
        for one, completion in zip(
            together, llm.generate([histories[one] for one in together], PLAIN), strict=True
        ):
            histories[one] = histories[one] + (
                list(completion.tokens) if answers is None else answers[one][len(found[one])]
            )
            found[one].append(completion)
        if rest:
            llm.booted.engine.tend(rest)
    return found


def tokens_of(found: list[list[Completion]]) -> list[list[list[int]]]:
    return [[list(completion.tokens) for completion in talk] for talk in found]


def apart(found: list[list[Completion]], expected: list[list[Completion]]) -> float:
    """The largest difference of a log-probability."""
    pairs = zip(
        (one for talk in found for one in talk), (one for talk in expected for one in talk), strict=True
    )
    return max(
        abs(a.logprob - b.logprob)
        for one, other in pairs
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


def moved(llm: LLM) -> Counter[Route]:
    counts = llm.booted.engine.scheduler.tiers.counts
    assert not any(counts.lost.values()), counts
    return Counter(counts.moved)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_windows", "qwen3_moe"])
def test_conversations_are_those_without_tiers(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    path, rng = tiny.checkpoint(name), random.Random(name)
    settings = {"device": str(device), "dtype": "float32", **SETTINGS}
    turns = some_turns(rng, 8, 4, 40)
    order = order_of(rng, turns, 3)
    with LLM(path, max_step_tokens=64, **settings) as llm:
        expected = talk(llm, turns, order)
    answers, all_moved = tokens_of(expected), Counter[Route]()
    for late, store, step in (
        ("", "eager", 64),
        ("up", "eager", 24),
        ("down", "eager", 48),
        ("compute", "lazy", 16),
        ("down", "lazy", 64),
    ):
        with monkeypatch.context() as patched:
            be_late(patched, device, late)
            with LLM(
                path, max_step_tokens=step, kv_store=store, kv_directory=tmp_path, **settings, **FEW
            ) as llm:
                # In another order than before: what comes back is not what was there last.
                found = talk(llm, turns, order_of(rng, turns, 3), answers)
                all_moved += moved(llm)
        if late:  # The first run has left it there.
            assert any(said[0].cached_disk for said in found), (
                f"nothing was found on disk after a restart: {late}"
            )
        assert tokens_of(found) == answers, (name, late, store, step)
        assert apart(found, expected) < 5e-5, (name, late, store, step)
    assert all(all_moved[route] > 0 for route in Route), all_moved


def test_half_precision_is_the_same_from_every_tier(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    """One at a time, and found to the same block as without tiers: then not a bit differs."""
    path, rng = tiny.write(tiny.WIDE["llama_128"], tiny.folder() / "wide_tiers"), random.Random(3)
    settings = {
        "device": str(device),
        "dtype": "bfloat16",
        "max_step_tokens": 128,
        **SETTINGS | {"block_size": 16, "max_length": 1200},
    }
    turns = some_turns(rng, 9, 4, 250)
    order = order_of(rng, turns, 1)
    with LLM(path, **settings) as llm:
        expected = talk(llm, turns, order)
    assert all(one.cached_tokens for said in expected for one in said[1:])
    few = {"kv_blocks": 80, "host_kv_memory": "2560KiB", "disk_kv_memory": "64MiB"}
    for late in ("up", "down", "compute"):
        with monkeypatch.context() as patched:
            be_late(patched, device, late)
            with LLM(path, kv_directory=tmp_path / late, **settings, **few) as llm:
                found = talk(llm, turns, order, tokens_of(expected), rest=10.0)
                assert all(moved(llm)[route] > 0 for route in Route), (late, moved(llm))
        for mine, theirs in zip(found, expected, strict=True):
            assert [one.cached_tokens for one in mine] == [one.cached_tokens for one in theirs], late
            assert [one.outputs for one in mine] == [one.outputs for one in theirs], late
        assert any(one.cached_disk for said in found for one in said), late
        assert any(one.cached_host for said in found for one in said), late
