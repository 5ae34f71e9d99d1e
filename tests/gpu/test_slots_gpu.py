"""Experts that the device decides about, as a GPU does it: with recorded steps and without, whatever is late,
the tokens of experts that all rest."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

import tiny
from penstock import LLM, SamplingParams
from penstock.arch.layout import GroupId, GroupKind, GroupLayout, MixtureLayout
from penstock.engine import plan
from penstock.memory.streams import CudaStream, Ticket
from penstock.ops.kernels import pdl_launches
from penstock.ops.slots import ExpertParts, Places
from penstock.ops.triton import slots as triton_slots
from penstock.ops.triton.slots import expert_step, fetch
from penstock.step.plan import Plan
from penstock.weights.streaming import snapshots
from penstock.weights.streaming.experts import Experts
from penstock.weights.streaming.residency import ExpertRoom, padded
from penstock.weights.streaming.slots import SlotRule, SlotTable
from penstock.weights.streaming.slotted import SlotExperts
from penstock.weights.streaming.waits import StreamWaits
from penstock.worker.graphs import DecodeGraphs
from slot_chains import SlotChain
from slot_oracle import Layer
from streams import Gates, Store, layout

DEVICE = torch.device("cuda")
OFFSETS = (0, 512, 4096)


@pytest.mark.parametrize(
    ("experts", "slots", "each", "size"), [(8, 3, 2, 8192), (128, 34, 8, 1 << 20), (512, 100, 64, 4096)]
)
def test_the_kernels_do_what_plain_python_does(experts: int, slots: int, each: int, size: int) -> None:
    """And bring the bytes, from memory of the host."""
    rng = torch.Generator().manual_seed(experts)
    rule, most = SlotRule(16.0, 1.0), min(experts, 64)
    table, layer = SlotTable(1, experts, slots, DEVICE, rule), Layer(experts, slots, rule)
    host = torch.randint(256, (experts, size), dtype=torch.uint8, generator=rng).pin_memory()
    memory = torch.zeros(slots + each, size, dtype=torch.uint8, device=DEVICE)
    places = Places(0, slots, each, memory.data_ptr(), size, torch.tensor(OFFSETS, device=DEVICE))
    for now in range(1, 40):
        table.begin()
        asked = (torch.rand(most, generator=rng) ** 3 * experts).long()
        pairs = torch.bincount(asked, minlength=experts).int().to(DEVICE)
        parts = expert_step(table.arrays(0), pairs, most, rule.margin, places, places.parts(most)[0])
        want = layer.step(now, set(asked.tolist()))
        assert parts.coming[0].tolist() == [one for one, *_ in want] + [-1] * (most - len(want))
        seen = set[int]()
        for part, addresses in enumerate(parts.tables):
            fetch(parts, places, host.data_ptr(), part)
            for expert in addresses[:, 0].nonzero()[:, 0].tolist():
                place, rest = divmod(int(addresses[expert, 0]) - memory.data_ptr(), size)
                assert rest == 0
                assert addresses[expert].tolist() == [memory[place].data_ptr() + at for at in OFFSETS]
                assert torch.equal(memory[place].cpu(), host[expert])
                seen.add(expert)
        assert seen == set(asked.tolist())
        assert table.expert_of[0].tolist() == [layer.in_slot.get(slot, -1) for slot in range(slots)]


def leave_for_weights(patched: pytest.MonkeyPatch, share: float) -> None:
    """Give weights that share of their size: they are far smaller than the activations beside them."""

    def room(total: int, layouts: Sequence[GroupLayout], demand: object, *, host_is_device: bool) -> int:
        return int(share * sum(map(padded, layouts)))

    patched.setattr(plan, "weights_room", room)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.85])
def test_tokens_are_those_of_experts_that_rest(
    share: float, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches that are padded, behind prompts about which the host decides."""
    path = tiny.checkpoint("qwen3_moe")
    prompts = [one.prompt for one in tiny.references("qwen3_moe")]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {
        "dtype": "bfloat16",
        "max_length": 256,
        "kv_blocks": 200,
        "cache": tmp_path,
        "max_sequences": 12,
    }
    with LLM(path, graphs=graphs, **settings) as llm:  # type: ignore[arg-type]
        want = [one.tokens for one in llm.generate(prompts, params)]
    leave_for_weights(monkeypatch, share)
    with LLM(path, graphs=graphs, **settings) as llm:  # type: ignore[arg-type]
        experts = llm.booted.weights.experts
        assert isinstance(experts, SlotExperts)
        assert [one.tokens for one in llm.generate(prompts, params)] == want
        assert [one.tokens for one in llm.generate(prompts[:1], params)] == want[:1]
        asked = experts.counts(exact=True).asked
        assert asked > 0
        assert llm.memory.weights.copied > 0


def test_kv_beyond_the_device_passes_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps are cut where it is folded in, while experts that are foretold would be on their way."""
    path = tiny.checkpoint("qwen3_moe")
    prompts = [[(7 * i + j) % 90 for j in range(count)] for i, count in enumerate((150, 90, 5))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "max_length": 256, "cache": tmp_path, "max_sequences": 4, "block_size": 8}
    with LLM(path, **settings) as llm:  # type: ignore[arg-type]
        want = [one.tokens for one in llm.generate(prompts, params)]
    replayed, run = [], DecodeGraphs.run

    def noted(self: DecodeGraphs, plan: Plan) -> object:
        replayed.append(self._reads.cold is not None)
        return run(self, plan)

    leave_for_weights(monkeypatch, 0.85)
    monkeypatch.setattr(DecodeGraphs, "run", noted)
    far = {"kv_blocks": 12, "kv_tile": 32, "host_kv_memory": "8MiB", "max_step_tokens": 64}
    with LLM(path, **settings, **far) as llm:  # type: ignore[arg-type]
        experts = llm.booted.weights.experts
        assert isinstance(experts, SlotExperts)
        assert experts._ahead
        assert [one.tokens for one in llm.generate(prompts, params)] == want
    assert sum(replayed) > 20


# ---- the waits, one by one

SIZE, LAYERS, EXPERTS, LATE = 1 << 20, 3, 16, 2_000_000
"""Bytes; clock cycles, about a millisecond: far longer than any fetch here."""


class Queue(CudaStream):
    """Work begins late, and waits may be left out."""

    cycles, waits = 0, True

    def run(self, work: Callable[[], object]) -> None:
        def late() -> None:
            torch.cuda._sleep(self.cycles)
            work()

        super().run(late)

    def wait(self, ticket: Ticket) -> None:
        if self.waits:
            super().wait(ticket)


class World:
    """Layers of experts, some in slots. What computes with a part compares all its bytes, twice."""

    def __init__(self, slots: int, ring: int, fetch: int, kernel: int) -> None:
        ids = [GroupId(GroupKind.EXPERT, at // EXPERTS, at % EXPERTS) for at in range(LAYERS * EXPERTS)]
        layouts = [layout(id, SIZE) for id in ids]
        rng = torch.Generator().manual_seed(1)
        self.host = torch.randint(256, (len(ids), SIZE), dtype=torch.uint8, generator=rng).pin_memory()
        self.all, self.kernel_cycles = self.host.to(DEVICE), kernel
        self.memory = torch.zeros(slots + ring, SIZE, dtype=torch.uint8, device=DEVICE)
        self.right = torch.ones((), dtype=torch.bool, device=DEVICE)
        copies = CudaStream(DEVICE)
        self.link, self.compute = (
            Queue(DEVICE, clock=copies.clock),
            Queue(DEVICE, current=True, clock=copies.clock),
        )
        self.link.cycles = fetch
        room = ExpertRoom(SIZE, len(ids), 0, len(ids), ring, slots=slots, copies=True)
        slots_of = Experts(
            layouts, room, self.memory[slots:], self.host, Store(Gates()), copies, self.compute,
            StreamWaits(None),
        )  # fmt: skip
        mixtures, streams = (
            dict.fromkeys(range(LAYERS), MixtureLayout(EXPERTS, None)),
            (self.link, self.compute),
        )
        self.experts = SlotExperts(
            layouts, mixtures, slots_of, self.memory, self.host, streams, SlotRule(1.0, 0.0)
        )
        self.experts.look_ahead()
        self.scores = torch.zeros(LAYERS, EXPERTS, device=DEVICE)
        """By which experts are foretold."""
        self.kept = list[ExpertParts]()
        """What fetches read stays, also where nothing waits for them."""

    def layer(
        self, number: int, pairs: torch.Tensor, most: int, *, join: bool = True, reuse: bool = True
    ) -> None:
        parts = self.experts.recorded().parts(number, pairs, most)
        if (following := self.experts.foretells(number, most)) is not None:
            self.experts.foretell(following, self.scores[following : following + 1], most, None)
        self.compute.waits, self.link.waits = join, reuse
        for table in parts or ():
            address = table[:, 0]
            place = ((address - self.memory.data_ptr()) // SIZE).clamp(min=0)
            for _ in range(2):
                same = (self.memory[place] == self.all[number * EXPERTS :][:EXPERTS]).all(1)
                self.right.logical_and_((same | (address == 0)).all())
                torch.cuda._sleep(self.kernel_cycles)
        self.compute.waits = self.link.waits = True


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """What replays a step, which has been computed once before."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    return graph.replay


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("fetch", "kernel"), [(0, 0), (LATE, 0), (0, LATE), (LATE // 4, LATE // 4)])
@pytest.mark.parametrize(("slots", "ring"), [(0, 2), (9, 4), (24, 8)])
def test_whatever_is_late(slots: int, ring: int, fetch: int, kernel: int, graphs: bool, early: bool) -> None:
    """Before every fetch, and between what reads a part and what reads it again. early: launches are."""
    world, rng = World(slots, ring, fetch, kernel), torch.Generator().manual_seed(slots)
    pairs = torch.zeros(LAYERS, EXPERTS, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        with pdl_launches(early and torch.cuda.get_device_capability() >= (9, 0)):
            for number in range(LAYERS):
                world.layer(number, pairs[number], 7)

    work = recorded(step) if graphs else step
    for _ in range(8):
        chosen = torch.stack([torch.randperm(EXPERTS, generator=rng)[:7] for _ in range(LAYERS)])
        pairs.zero_().scatter_(1, chosen.to(DEVICE), 1)
        world.scores.copy_(pairs + torch.rand(LAYERS, EXPERTS, generator=rng).to(DEVICE) * 4)
        work()
    assert bool(world.right)
    asked, hits, foretold, right = world.experts.snapshots.exact().counts.sum(0).tolist()
    assert asked == 8 * 7 * LAYERS
    assert (hits > 0) == (slots > 0)
    assert (0 < right <= foretold <= (8 + graphs) * (LAYERS - 1)) == (ring >= 4)


@pytest.mark.parametrize("fetch", [0, LATE // 4])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("scheme", ["mxfp4", "gptq_128"])
def test_few_bits_are_read_when_they_have_come(scheme: str, graphs: bool, fetch: int) -> None:
    """By a product that reads where they are, and the first of them, before those before it have ended."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels cannot wait for each other on this device")
    copies = CudaStream(DEVICE)
    link, compute = Queue(DEVICE, clock=copies.clock), Queue(DEVICE, current=True, clock=copies.clock)
    link.cycles, rng = fetch, torch.Generator().manual_seed(1)
    chain = SlotChain(
        scheme, (link, compute, copies), device=DEVICE, sizes=(4, 16, 6, 512, 256), slots=12, ring=8
    )
    said = torch.empty_like(chain.start)
    torch.cuda.synchronize()

    def step() -> None:
        with pdl_launches():
            said.copy_(chain(rests=False))

    work = recorded(step) if graphs else step
    for turn in range(20):
        chain.start.copy_(torch.randn(1, 512, generator=rng))
        work()
        assert torch.equal(said, chain(rests=True)), turn
    asked, hits, foretold, _ = chain.experts.snapshots.exact().counts.sum(0).tolist()
    assert 0 < hits < asked
    assert foretold > 0


@pytest.mark.parametrize(("left_out", "fetch", "kernel"), [("join", LATE, 0), ("reuse", 0, LATE)])
def test_every_wait_is_needed(left_out: str, fetch: int, kernel: int) -> None:
    """But the one behind the decision, without which a fetch would read anywhere: `tests/cpu` leaves it
    out."""
    for waits in (True, False):
        world = World(3, 2, fetch, kernel)
        step = triton_slots.expert_step

        def kept(*given: Any, world: World = world, step: Any = step) -> ExpertParts:
            world.kept.append(step(*given))
            return world.kept[-1]

        with patch.object(triton_slots, "expert_step", kept):
            for first in (0, 5, 9):
                pairs = torch.zeros(EXPERTS, dtype=torch.int32, device=DEVICE)
                pairs[first : first + 7] = 1
                for number in range(LAYERS):
                    world.layer(number, pairs, 7, **{left_out: waits})
        torch.cuda.synchronize()
        assert bool(world.right) == waits


def test_what_the_device_counts_is_seen_while_steps_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the host are of one moment each, come without a wait, and lag behind by little."""
    monkeypatch.setattr(snapshots, "EVERY", 0.0)
    leave_for_weights(monkeypatch, 0.5)
    path = tiny.checkpoint("qwen3_moe")
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    settings = {"dtype": "bfloat16", "max_length": 256, "kv_blocks": 40, "cache": tmp_path}
    with LLM(path, **settings) as llm:  # type: ignore[arg-type]
        experts = llm.booted.weights.experts
        assert isinstance(experts, SlotExperts)
        asked = list[int]()
        for _ in llm.stream([5, 6, 7], params):
            counts = experts.counts(exact=False)
            asked.append(counts.asked)
            assert 0 <= counts.hit <= counts.asked
            assert 0 <= counts.age < 5
            for layer in experts.use(exact=False).layers:
                assert all(0 <= rate <= 1 for rate in layer.rates)
        assert asked == sorted(asked)
        assert len(set(asked)) > 20, "it goes on while steps run"
        exact = llm.memory.weights.experts
        assert asked[-1] <= exact.asked
        assert exact.age < 0.1
        # A token asks each layer for its experts.
        assert exact.asked >= 150 * len(experts.mixtures)
