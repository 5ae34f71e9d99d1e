"""Threads of a step: which are chosen, that none of them changes a result, and that they are given back."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import tiny
from penstock.api.llm import LLM
from penstock.base.cores import CoreLimits, CoreTimes
from penstock.engine import threads
from penstock.engine.threads import StepThreads, StepWork
from penstock.ops.linear import add_linear, dense_linear
from penstock.ops.matrix import Matrix
from penstock.ops.native.few_bits import find_library
from penstock.step.params import SamplingParams

FOUR = CoreLimits(frozenset(range(4)))
LARGE = StepWork(1e9, torch.float32)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock, and cores of which others take some."""

    def __init__(self) -> None:
        self.time = self.busy = 0.0
        self.looks = 0

    def wait(self, seconds: float, others: float = 0.0) -> None:
        self.time, self.busy = self.time + seconds, self.busy + seconds * others

    def look(self, limits: CoreLimits) -> CoreTimes:
        self.looks += 1
        return CoreTimes(self.time, self.busy, 0.0)


def made(
    machine: Machine, work: StepWork | None = LARGE, say: Callable[[str], object] = lambda _: None
) -> StepThreads:
    return StepThreads(4, FOUR, work, say=say, since=None, look=machine.look, clock=lambda: machine.time)


def run(threads: StepThreads, machine: Machine, seconds: float, others: float, rows: int = 1) -> int:
    """Do a step each tenth of a second. Return the threads of the last."""
    for _ in range(round(seconds * 10)):
        machine.wait(0.1, others)
        threads.wanted(rows)
    return threads.wanted(rows)


def test_threads_follow_what_others_take() -> None:
    machine = Machine()
    threads = made(machine)
    assert run(threads, machine, 2, 0.0) == 4
    assert run(threads, machine, 2, 1.0) == 3
    assert run(threads, machine, 2, 3.0) == 1
    assert run(threads, machine, 2, 7.0) == 1
    assert run(threads, machine, 2, 0.1) == 4
    assert machine.looks <= 12, "it looks about once a second"


def test_a_step_of_many_rows_has_all_threads() -> None:
    machine = Machine()
    threads = made(machine)
    run(threads, machine, 2, 2.0)
    assert [threads.wanted(rows) for rows in (1, 16, 17, 512)] == [2, 2, 4, 4]
    half = made(machine, StepWork(1e9, torch.bfloat16))
    run(half, machine, 2, 2.0)
    assert [half.wanted(rows) for rows in (1, 2)] == [2, 4]


def test_a_small_model_has_few_threads() -> None:
    assert made(Machine(), StepWork(1e6, torch.float32)).wanted(1) == 1
    assert made(Machine(), StepWork(12e6, torch.float32)).wanted(1) == 2


def test_a_pause_says_nothing_of_now() -> None:
    machine = Machine()
    threads = made(machine)
    run(threads, machine, 2, 0.0)
    machine.wait(600, 3.0)  # others worked, and have ended
    assert threads.wanted(1) == 4
    assert run(threads, machine, 0.5, 0.0) == 4
    machine.wait(600, 0.0)
    assert run(threads, machine, 0.5, 3.0) == 1


@pytest.mark.parametrize(("work", "others", "told"), [(LARGE, 3.0, 0), (LARGE, 3.8, 1), (None, 1.0, 1)])
def test_one_word_says_that_the_load_exceeds_the_cores(
    work: StepWork | None, others: float, told: int
) -> None:
    machine, lines = Machine(), list[str]()
    threads = made(machine, work, lines.append)
    run(threads, machine, 2, 0.0)
    assert not lines
    run(threads, machine, 0.3, others)
    run(threads, machine, 2.5, 0.0)
    assert not lines, "what is over soon is not worth a word"
    run(threads, machine, 10, others)
    assert len(lines) == told
    assert not told or f"other processes keep {others} of 4 cores busy" in lines[0]


def test_without_a_choice_all_steps_have_the_same_threads() -> None:
    machine = Machine()
    assert run(made(machine, None), machine, 4, 3.0) == 4


class Changing:
    """Other threads in each step of few rows."""

    now = 1

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._counts = itertools.cycle(counts)
        self.seen = set[int]()

    @contextmanager
    def of(self, rows: int) -> Iterator[None]:
        before, wanted = torch.get_num_threads(), 2 if rows > 16 else next(self._counts)
        self.seen.add(wanted)
        torch.set_num_threads(wanted)
        yield
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shipped() -> Iterator[LLM]:
    with LLM(device="cpu", dtype="float32", max_length=512, prefix_cache=False) as llm:
        yield llm


def test_results_do_not_depend_on_the_threads_of_steps(shipped: LLM) -> None:
    """Prompts are computed by the same threads; what is decoded, alone and together, by any."""
    engine, found = shipped.driver._engine, list[object]()
    for counts in ((2,), (1,), (3, 1, 2)):
        engine._threads = changing = Changing(counts)
        outputs = list[object]()
        for count, temperature in ((1, 0.0), (4, 0.9)):
            params = SamplingParams(
                max_tokens=4, temperature=temperature, seed=3, logprobs=3, ignore_eos=True
            )
            prompts = ["Once there was a sea, and a boat on it that nobody had seen before. " * 2] * count
            outputs += [[one.logprobs for one in each.outputs] for each in shipped.generate(prompts, params)]
        found.append(outputs)
        assert changing.seen >= {*counts}
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("inner", [1, 7, 33, 96, 300, 1376])
@pytest.mark.parametrize("height", [1, 50, 1000])
def test_a_single_row_is_the_same_on_any_number_of_threads(inner: int, height: int) -> None:
    assert not find_library()
    torch.manual_seed(0)
    x, wide = torch.randn(1, inner), torch.randn(height, inner + 3)
    weight, results = wide[:, :inner], []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(dense_linear(x, weight))
    assert all(torch.equal(results[0], one) for one in results[1:])
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=2e-5 * inner**0.5)


@pytest.mark.parametrize("rows", [2, 5, 6, 7, 9, 11, 16])
def test_what_is_added_is_the_same_on_any_number_of_threads(rows: int) -> None:
    torch.manual_seed(0)
    x, weight, before, results = torch.randn(rows, 300), torch.randn(256, 300), torch.randn(rows, 256), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(before.clone())
        add_linear(x, Matrix.of(weight), results[-1])
    assert all(torch.equal(results[0], one) for one in results[1:])
    exact = before.double() + x.double() @ weight.double().T
    torch.testing.assert_close(results[0].double(), exact, rtol=1e-5, atol=5e-4)


def test_threads_that_are_asked_for_are_taken_and_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "core_limits", lambda: CoreLimits(frozenset({0, 1})))
    caplog.set_level("INFO", "penstock")
    with LLM(tiny.checkpoint("llama"), device="cpu", dtype="float32", max_length=64, threads=3) as llm:
        seen, begin = list[int](), type(llm.driver._engine._ranks).begin

        def noted(self: object, plan: object) -> object:
            seen.append(torch.get_num_threads())
            return begin(self, plan)  # type: ignore[arg-type]

        monkeypatch.setattr(type(llm.driver._engine._ranks), "begin", noted)
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert set(seen) == {3}
        assert "threads: 3 are more than the 2 cores there, and slower; leave them out" in caplog.messages
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_that_the_environment_names_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    for one in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(one, raising=False)
    settings = {"device": "cpu", "dtype": "float32", "max_length": 64}
    with LLM(tiny.checkpoint("llama"), **settings) as llm:  # type: ignore[arg-type]
        assert llm.driver._engine._threads.chosen
    monkeypatch.setenv(name, "2")
    with LLM(tiny.checkpoint("llama"), **settings) as llm:  # type: ignore[arg-type]
        assert not llm.driver._engine._threads.chosen
