"""A step for which there is too little memory: smaller ones take its place, and a request that fits into none
of them ends alone.

What runs out is real: in the midst of a pass more is asked for than any machine has, and torch's allocator
refuses it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import far
import heads
import penstock.engine.boot
import tiny
from cpu.test_speculation import always
from drafters import Adversary
from pairs import near
from penstock import LLM, Completion, SamplingParams
from penstock.base.errors import BudgetError, DeviceError, EngineClosedError
from penstock.engine.drafter import ModelDrafter
from penstock.engine.tree_drafter import TreeDrafter
from penstock.memory.device import shortage
from penstock.models.decoder import Decoder
from penstock.step.plan import ModelRole, Plan
from penstock.step.request import FinishReason
from penstock.worker.runner import Runner

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 24,
    "max_sequences": 6,
    "block_size": 4,
    "kv_blocks": 200,
}
TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
MORE_THAN_THERE_IS = 1 << 55


@contextmanager
def too_large(judge: Callable[[Plan], bool]) -> Iterator[list[Plan]]:
    """Steps of such plans run out of memory in their second layer. Those plans."""
    begin, forward, failed = Runner._begin, Decoder._feed_forward, list[Plan]()
    now: list[Plan] = []

    def begun(self: Runner, plan: Plan, layers: tuple[int, ...] | None) -> object:
        now[:] = [plan]
        return begin(self, plan, layers)

    def fed(self: Decoder, layer: int, *rest: object) -> Tensor | None:
        if layer == 1 and judge(now[0]):
            failed.append(now[0])
            torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
        return forward(self, layer, *rest)  # type: ignore[arg-type]

    with patch.object(Runner, "_begin", begun), patch.object(Decoder, "_feed_forward", fed):
        yield failed


@contextmanager
def no_room_for_drafts(which: slice) -> Iterator[list[Plan]]:
    """These of the steps that draft run out of memory. Their plans."""
    begin, seen, failed = Runner._begin, list[Plan](), list[Plan]()

    def begun(self: Runner, plan: Plan, layers: tuple[int, ...] | None) -> object:
        if plan.model is ModelRole.DRAFT:
            seen.append(plan)
            if len(seen) - 1 in range(*which.indices(len(seen))):
                failed.append(plan)
                torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)
        return begin(self, plan, layers)

    with patch.object(Runner, "_begin", begun):
        yield failed


def answers(llm: LLM, name: str) -> list[Completion]:
    return llm.generate([reference.prompt for reference in tiny.references(name)], GREEDY)


def right(found: Sequence[Completion], name: str) -> None:
    for one, reference in zip(found, tiny.references(name), strict=True):
        assert list(one.tokens) == reference.tokens[:TOKENS]
        assert one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("name", "tokens", "rows", "ahead"),
    [("llama", 5, 99, False), ("llama", 99, 2, True), ("qwen3_moe", 3, 2, False), ("llama", 5, 1, True)],
)
def test_smaller_steps_take_its_place(
    name: str, tokens: int, rows: int, ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with patch.object(Runner, "ahead", ahead), LLM(tiny.checkpoint(name), **SETTINGS) as llm:  # type: ignore[arg-type]
        with too_large(lambda plan: plan.tokens > tokens or len(plan.shares) > rows) as failed:
            right(answers(llm, name), name)
        assert failed
        assert "cpu has too little memory for a step" in caplog.text
        assert "is tried again with at most" in caplog.text
        scheduler = llm.booted.engine.scheduler
        scheduler.check()
        assert scheduler.ledger.available == scheduler.ledger.blocks
        # What was too large is tried again after a while, when there may be more room.
        assert scheduler.narrowed is not None
        scheduler._width._wait = min(scheduler._width._wait, 8)
        right(answers(llm, name), name)
        right(answers(llm, name), name)
        assert scheduler.narrowed is None


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("drafter", ["lines", "trees", "head"])
def test_a_step_that_drafts_and_does_not_fit_ends_nothing(
    drafter: str, rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the engine, before the first step of the target, nor a request, behind its smallest step."""
    head = drafter == "head"
    draft = heads.random_head(tmp_path / "head", "llama") if head else near("llama", 0.02)
    settings = SETTINGS | {"max_sequences": rows, "speculate": str(draft), "max_length": 80}
    for failing in (slice(None), slice(2, 4)):
        with (
            no_room_for_drafts(failing) as failed,
            patch.object(
                penstock.engine.boot, "ModelDrafter", TreeDrafter if drafter == "trees" else ModelDrafter
            ),
            always(Adversary({}, tiny.VOCAB, kinds="n")),
            LLM(tiny.checkpoint("llama"), **settings) as llm,  # type: ignore[arg-type]
        ):
            found = answers(llm, "llama")
            assert llm.booted.engine.scheduler.narrowed is None
        right(found, "llama")
        assert failed
    assert "nothing is drafted for a while" in caplog.text


def test_a_request_that_fits_into_no_step_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The last one, when it comes to its fiftieth token: what it has said by then is right, and so is all
    that others say."""
    references = tiny.references("llama")
    longest = max(range(len(references)), key=lambda index: len(references[index].prompt))
    most = len(references[longest].prompt) + 9
    assert most > max(len(one.prompt) for index, one in enumerate(references) if index != longest) + 5

    def judge(plan: Plan) -> bool:
        return any(
            share.prompt_length == len(references[longest].prompt) and share.stop > most
            for share in plan.shares
        )

    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:  # type: ignore[arg-type]
        with too_large(judge) as failed, caplog.at_level(logging.ERROR):
            found = answers(llm, "llama")
        assert len(failed[-1].shares) == failed[-1].tokens == 1
        output = found.pop(longest).outputs[0]
        assert output.finish_reason is FinishReason.ERROR
        assert list(output.tokens) == references[longest].tokens[: len(output.tokens)]
        assert len(output.tokens) == 10
        for sign in (
            "cpu has too little memory for a step",
            "raise device_memory",
            "does not fit even alone",
        ):
            assert sign in output.error
            assert sign in caplog.text
        for one, reference in zip(
            found, [one for index, one in enumerate(references) if index != longest], strict=True
        ):
            assert list(one.tokens) == reference.tokens[:TOKENS]
            assert not one.outputs[0].error
        scheduler = llm.booted.engine.scheduler
        assert not scheduler.busy
        assert scheduler.ledger.available == scheduler.ledger.blocks
        right(answers(llm, "llama"), "llama")


def test_contexts_in_host_memory_go_on_in_smaller_chunks() -> None:
    room = far.Room()
    prompt = tuple(token % tiny.VOCAB for token in range(3, 303))
    ask = far.Ask(prompt, tokens=12)
    with far.opened("llama", room) as llm, too_large(lambda plan: plan.tokens > 2 * room.block) as failed:
        [found] = far.answers(llm, [ask])
        assert failed
        assert found.tokens == far.expected("llama", ask).tokens
        llm.booted.engine.scheduler.check()


def test_of_several_ranks_all_end() -> None:
    with LLM(tiny.checkpoint("llama"), **SETTINGS, tensor_parallel=2) as llm:  # type: ignore[arg-type]
        with (
            too_large(lambda plan: plan.tokens > 5),
            pytest.raises(DeviceError, match="rank 0 of 2 failed with StepMemoryError: cpu has"),
        ):
            answers(llm, "llama")
        with pytest.raises(EngineClosedError):
            answers(llm, "llama")


def test_a_largest_step_that_does_not_fit_is_refused_at_the_start() -> None:
    def fed(*_: object) -> Tensor:
        return torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8)

    match = "the largest step does not fit into device memory: cpu has too little memory"
    with patch.object(Decoder, "_feed_forward", fed), pytest.raises(BudgetError, match=match):
        LLM(tiny.checkpoint("llama"), **SETTINGS)  # type: ignore[arg-type]


def test_weights_beside_which_the_largest_step_does_not_fit_are_refused_at_the_start() -> None:
    """Room for the largest group is taken before the step runs."""
    fault = torch.OutOfMemoryError("Tried to allocate 1004.00 MiB. 993.11 MiB allowed")
    match = "the largest step does not fit into device memory: cpu has too little memory for a step"
    with (
        patch("penstock.engine.measuring.Blank", side_effect=fault),
        pytest.raises(BudgetError, match=match),
    ):
        LLM(tiny.checkpoint("llama"), **SETTINGS)  # type: ignore[arg-type]


def test_other_faults_are_none_of_it() -> None:
    for fault in (
        ValueError("out of memory"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError(1),
    ):
        assert not shortage(fault, torch.device("cpu"))
    for fault in (
        MemoryError("Unable to allocate 8.00 EiB for an array"),
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB. 3 GiB"),
    ):
        assert "too little memory" in shortage(fault, torch.device("cpu"))
