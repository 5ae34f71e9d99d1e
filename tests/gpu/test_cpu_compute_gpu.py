"""The CPU computes experts, and feed-forwards, that a GPU lacks: asked by flags in pinned memory, in recorded
steps or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import tiny
from penstock import LLM, SamplingParams
from penstock.arch.spec import SWIGLU
from penstock.base.errors import DeviceError
from penstock.engine import placing, plan
from penstock.memory.streams import CudaStream
from penstock.ops.handover import StepRows
from penstock.ops.matrix import GroupViews, Matrix
from penstock.ops.native.few_bits import find_library, library
from penstock.ops.row_classes import CLASSES, MOST_TOKENS
from penstock.ops.slots import ExpertParts
from penstock.weights.streaming import beside, cpu_experts, stream
from penstock.weights.streaming.cpu_dense import CpuFeedForwards
from penstock.weights.streaming.cpu_experts import CpuExperts
from penstock.weights.streaming.residency import CpuWork, padded
from stacks import in_mxfp4
from tiled import tiled_outputs

if library() is None:
    pytest.skip("no C compiler", allow_module_level=True)

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 512, 256, 32, 4, 3
SIZE = 2 * 3 * HIDDEN * INNER


class World:
    """Experts of some layers in pinned memory, and what has the CPU compute them."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)
        self.host = (torch.randn(LAYERS * EXPERTS, SIZE // 2, generator=self.rng) / 16).to(BF16).pin_memory()
        work = CpuWork((SWIGLU,) * LAYERS, TOP_K, HIDDEN, "bfloat16", always=True)
        firsts = [self.views(layer, 0) for layer in range(LAYERS)]
        self.cpu = CpuExperts(work, firsts, EXPERTS, SIZE, DEVICE, CudaStream(DEVICE, current=True))

    def views(self, layer: int, expert: int) -> GroupViews:
        row = self.host[layer * EXPERTS + expert]
        gate_up, down = row[: 2 * INNER * HIDDEN].view(2 * INNER, HIDDEN), row[2 * INNER * HIDDEN :]
        matrices = {"gate_up": Matrix.of(gate_up), "down": Matrix.of(down.view(HIDDEN, INNER))}
        return GroupViews(matrices, {}, ())


class Step:
    """A step of so many tokens at fixed addresses: `fill` chooses rows and experts anew."""

    def __init__(self, world: World, tokens: int) -> None:
        self.world, self.tokens, pairs = world, tokens, tokens * TOP_K
        self.rows = StepRows(
            torch.zeros(tokens, HIDDEN, dtype=BF16, device=DEVICE),
            torch.zeros(pairs, dtype=torch.int32, device=DEVICE),
            torch.zeros(pairs, HIDDEN, dtype=BF16, device=DEVICE),
        )
        self.pairs = torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE)
        long = {"dtype": torch.int64, "device": DEVICE}
        self.parts = ExpertParts(
            torch.zeros(2, EXPERTS, **long),  # type: ignore[arg-type]
            torch.zeros(4, **long),  # type: ignore[arg-type]
            torch.zeros(1, EXPERTS, 2, **long),  # type: ignore[arg-type]
            torch.zeros(8, dtype=torch.int32, device=DEVICE),
        )
        self.taken = list[int]()

    def fill(self, share: float) -> None:
        rng = self.world.rng
        self.x = torch.randn(self.tokens, HIDDEN, generator=rng).to(BF16)
        flat = torch.rand(self.tokens, EXPERTS, generator=rng).topk(TOP_K).indices.flatten()
        self.order, self.counts = flat.argsort(stable=True), torch.bincount(flat, minlength=EXPERTS)
        asked = [one for one in range(EXPERTS) if self.counts[one]]
        first = round((1 - share) * len(asked))
        self.taken = asked[first:][::-1]
        coming = torch.full((2, EXPERTS), -1)
        coming[0, : len(asked)] = torch.tensor([*asked[:first], *self.taken])
        self.rows.x.copy_(self.x)
        self.rows.order.copy_(self.order)
        self.pairs.copy_(self.counts)
        self.parts.coming.copy_(coming)
        self.parts.starts.copy_(torch.tensor([0, first, -1, len(asked)]))
        self.rows.y.fill_(9.0)

    def run(self, layer: int) -> None:
        self.world.cpu.give(self.rows, self.pairs, layer, self.parts)
        self.world.cpu.take(self.rows, self.parts)

    def want(self, layer: int) -> Tensor:
        out = torch.full((len(self.order), HIDDEN), 9.0, dtype=BF16)
        if self.taken:
            starts = self.counts.cumsum(0) - self.counts
            counts = [int(self.counts[one]) for one in self.taken]
            mine = torch.cat([self.order[starts[one] :][: self.counts[one]] for one in self.taken])
            views = [self.world.views(layer, one) for one in self.taken]
            out[mine] = tiled_outputs(self.x[mine // TOP_K], views, counts, SWIGLU)
        return out


@contextmanager
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.cpu.close()
        made.cpu.free()


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, MOST_TOKENS])
def test_outputs_are_those_of_experts_at_rest(tokens: int, graphs: bool) -> None:
    """To the last bit, hundreds of times, of all layers in turn, whatever the CPU's share."""
    with world() as made:
        step = Step(made, tokens)
        for turn in range(2):
            step.fill(0.5)
            step.run(turn)
        torch.cuda.synchronize()
        runs = [lambda layer=layer: step.run(layer) for layer in range(LAYERS)]
        if graphs:
            recorded = list[torch.cuda.CUDAGraph]()
            for layer in range(LAYERS):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    step.run(layer)
                recorded.append(graph)
            runs = [graph.replay for graph in recorded]  # type: ignore[misc]
        for turn in range(300 if tokens < MOST_TOKENS else 90):
            step.fill((0.0, 0.3, 0.6, 1.0)[turn % 4])
            runs[turn % LAYERS]()
            assert torch.equal(step.rows.y.cpu(), step.want(turn % LAYERS)), turn
        made.cpu.check()
        times = made.cpu.handover.times.sum((0, 2)).tolist()
        assert times[0][0] > 0, "layers without the CPU"
        assert times[1][0] == times[2][0] > 0
        assert all(0 <= spent < 1e9 * count for count, spent in times if count)


def test_layers_behind_each_other_do_not_overwrite_what_is_read() -> None:
    """Many in one go, without a wait by the host between them, and the rows changed on the device."""
    with world() as made:
        step = Step(made, 4)
        step.fill(0.7)
        kept, xs = list[Tensor](), [torch.randn(4, HIDDEN, generator=made.rng).to(BF16) for _ in range(60)]
        on_device = [x.to(DEVICE) for x in xs]
        for turn, x in enumerate(on_device):
            step.rows.x.copy_(x)
            step.run(turn % LAYERS)
            kept.append(step.rows.y.clone())
        torch.cuda.synchronize()
        for turn, (x, found) in enumerate(zip(xs, kept, strict=True)):
            step.x = x
            assert torch.equal(found.cpu(), step.want(turn % LAYERS)), turn
        made.cpu.check()


def test_a_service_that_is_gone_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "LIMIT_NS", 200_000_000)
    with world() as made:
        step = Step(made, 2)
        step.fill(1.0)
        made.cpu.service.close()
        for _ in range(20):
            step.run(0)
        torch.cuda.synchronize()
        with pytest.raises(DeviceError, match="did not answer in time"):
            made.cpu.check()


def test_closing_lets_go_what_waits() -> None:
    with world() as made:
        step = Step(made, 2)
        step.fill(1.0)
        made.cpu.service.close()
        step.run(0)
        made.cpu.close()
        torch.cuda.synchronize()


# ---- whole engines


def leave_for_weights(patched: pytest.MonkeyPatch, share: float) -> None:
    """Give weights that share of their size: they are far smaller than the activations beside them."""

    def room(total: int, layouts: list[object], demand: object, *, host_is_device: bool) -> int:
        return int(share * sum(map(padded, layouts)))  # type: ignore[arg-type]

    patched.setattr(plan, "weights_room", room)


@pytest.mark.parametrize("use", ["on", "auto"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe_128", "gpt_oss"])
def test_engines_give_nearly_the_same_log_probabilities(
    name: str, graphs: bool, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches that are padded; the first tokens' log-probabilities are those of experts that rest, but for
    roundings."""
    find_library()
    own = tiny.WIDE.get(name)
    path = in_mxfp4(tmp_path)[0] if own is None else tiny.write(own, tmp_path / name)
    prompts = [[5 + one, 6, 7 + 2 * one, 8] for one in range(5)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    settings = {
        "dtype": "bfloat16",
        "max_length": 128,
        "kv_blocks": 60,
        "cache": tmp_path,
        "max_sequences": 8,
    }
    with LLM(path, graphs=graphs, **settings) as llm:  # type: ignore[arg-type]
        want = llm.generate(prompts, params)
    leave_for_weights(monkeypatch, 0.4)
    with LLM(path, graphs=graphs, cpu_compute=use, **settings) as llm:  # type: ignore[arg-type]
        cpu = llm.booted.weights.cpu
        assert cpu is not None
        for _ in range(1 if use == "on" else 12):
            found = llm.generate(prompts, params)
        again = llm.generate(prompts[:1], params)
        counts = llm.memory.weights.experts
        assert counts.computed > 0
        assert 0 < counts.cpu_share <= 1
    close = 0
    for one, other in zip([*want, want[0]], [*found, *again], strict=True):
        assert len(other.tokens) == 24
        close += one.tokens[:4] == other.tokens[:4]
    assert close >= len(prompts) - 1, "but for a close call"


def test_preempted_requests_end_as_they_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks for many requests: some are computed again, in steps of other sizes."""
    find_library()
    path = tiny.write(tiny.WIDE["qwen3_moe_128"], tmp_path / "model")
    leave_for_weights(monkeypatch, 0.4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[5 + one, 6, 7, 8] for one in range(8)]
    settings = {
        "dtype": "bfloat16",
        "max_length": 64,
        "cache": tmp_path,
        "block_size": 16,
        "max_sequences": 8,
    }
    for blocks in (40, 12):
        with LLM(path, cpu_compute="on", kv_blocks=blocks, **settings) as llm:  # type: ignore[arg-type]
            for one in llm.generate(prompts, params):
                assert len(one.tokens) == 40
            assert llm.memory.weights.experts.computed > 0


# ---- feed-forwards of models without experts


SLOW = 400_000
"""Clock cycles before each copy, some 0.2 ms: far longer than copies take here."""


class SlowCopies(CudaStream):
    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._queue()):
            torch.cuda._sleep(SLOW)
        super().copy(target, source)


def slow_streams(device: torch.device) -> tuple[CudaStream, CudaStream]:
    copies = SlowCopies(device)
    return copies, CudaStream(device, current=True, clock=copies.clock)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("use", ["on", "auto"])
def test_engines_without_experts_give_nearly_the_same(
    use: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same to the last bit in every run, whatever is late: passes of both kinds turn, since prompts
    come between. Step by step as they come, `auto` may decide otherwise each time."""
    find_library()
    path = tiny.write(tiny.WIDE["llama_128"], tmp_path / "model", num_hidden_layers=6)
    prompts = [[5 + one, 6, 7 + 2 * one, 8] for one in range(5)]
    params = [
        SamplingParams(temperature=0, max_tokens=8 + 6 * one, ignore_eos=True, logprobs=1) for one in range(5)
    ]
    settings = {
        "dtype": "bfloat16",
        "max_length": 128,
        "kv_blocks": 60,
        "cache": tmp_path,
        "max_sequences": 3,
        "graphs": graphs,
    }
    leave_for_weights(monkeypatch, 0.5)
    monkeypatch.setattr(placing, "cpu_read", lambda *_: (1e9 if use == "on" else 1e15,) * CLASSES)
    monkeypatch.setattr(beside, "HAND_OVER", 0.0)  # Groups are so small that nothing pays.
    with LLM(path, **settings) as llm:  # type: ignore[arg-type]
        want = llm.generate(prompts, params)
    with LLM(path, cpu_compute=use, **settings) as llm:  # type: ignore[arg-type]
        weights = llm.booted.weights
        assert isinstance(weights.cpu, CpuFeedForwards)
        found = llm.generate(prompts, params)
        assert weights._turning is not None
        assert use == "auto" or weights._turning.passes_shared > 0
        assert int(weights.cpu.handover.computed) >= weights._turning.passes_shared
    close = sum(one.tokens[:4] == other.tokens[:4] for one, other in zip(want, found, strict=True))
    assert close >= len(prompts) - 1, "but for a close call"
    if use == "auto":
        return
    monkeypatch.setattr(stream, "streams_of", slow_streams)
    with LLM(path, cpu_compute=use, **settings) as llm:  # type: ignore[arg-type]
        again = llm.generate(prompts, params)
    assert [(one.tokens, one.logprobs) for one in again] == [(one.tokens, one.logprobs) for one in found]
