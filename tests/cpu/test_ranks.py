"""Ranks carry out the same plans, whatever strikes the thread that asks for them; and whatever befalls one of
them, the run ends with an error that says so, and nothing is left behind."""

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

import forks
from crews import CPU, NOTHING, Sum, Sums, _there, absent, children, led, nothing_left, order, tell_end, work
from penstock.base.config import launched
from penstock.base.errors import CheckpointError, ConfigError, DeviceError
from penstock.parallel.group import Group
from penstock.parallel.launch import Crew, launch
from penstock.parallel.store import SharedStore
from penstock.step.adapter import LoadedAdapter
from penstock.step.plan import BlockId, HostBlockId, Landed, Outcome, Plan, Route, Transfer, TransferId
from penstock.worker import rank
from penstock.worker.rank import _MESSAGES, Leader, _Kind, _Message, serve
from streams import LONG, OURS_AND_LOCKS, cut_short, everywhere, within

TESTS = Path(__file__).resolve().parents[1]
RANKS = 3


def transfer(id: int) -> Transfer:
    return Transfer(TransferId(id), Route.DOWN, (BlockId(1), BlockId(2)), (HostBlockId(3), HostBlockId(4)))


def landed(id: int) -> Landed:
    """As ranks 0 to 2 together say it: see Sums."""
    return Landed(TransferId(id), 2.0, (0, 1), (b"0", b"1"))


@pytest.fixture(scope="module")
def leader() -> Iterator[Leader]:
    with nothing_left():
        leader, _ = led(RANKS)
        yield leader
        assert within(LONG, leader.close)
        leader.close()
        part = leader._part
        assert isinstance(part, Sums)
        assert part.closed == 1


def ran(outcome: Outcome) -> int:
    """How many plans each rank had run before; it is the same on all of them, and they are all there."""
    total, ones, _ = (result.tokens[0] for result in outcome.results)
    assert ones == RANKS
    assert total is not None
    assert total % RANKS == 0
    return total // RANKS


def test_all_ranks_run_every_plan(leader: Leader) -> None:
    before = ran(leader.run(NOTHING))
    assert [ran(leader.run(NOTHING)) for _ in range(20)] == [before + 1 + step for step in range(20)]


def test_a_transfer_has_landed_when_it_has_on_all_ranks(leader: Leader) -> None:
    """Two steps after its own on the last; of its blocks those are lost which any rank has lost."""
    plans = [
        Plan((), (), transfers=(transfer(1),)),
        Plan((), (), transfers=(transfer(2), transfer(3))),
        NOTHING,
        NOTHING,
        NOTHING,
    ]
    assert [leader.run(plan).landed for plan in plans] == [(), (), (landed(1),), (landed(2), landed(3)), ()]
    leader.run(plans[0])
    assert leader.settle() == (landed(1),)
    assert leader.run(NOTHING).landed == ()
    assert leader.settle() == ()


def test_a_step_may_be_begun_before_the_last_has_ended(leader: Leader) -> None:
    """They end in their order, on all ranks; what has landed is told once."""
    assert leader.ahead
    before = ran(leader.run(NOTHING))
    for count in range(1, 20):
        first = leader.begin(Plan((), (), transfers=(transfer(100 + count),)))
        second = leader.begin(NOTHING)
        assert ran(first.outcome()) == before + 1
        third = leader.begin(NOTHING)
        outcomes = second.outcome(), third.outcome()
        assert [ran(outcome) for outcome in outcomes] == [before + 2, before + 3]
        assert [outcome.landed for outcome in outcomes] == [(), (landed(100 + count),)]
        before += 3
    leader.begin(Plan((), (), transfers=(transfer(120),)))
    assert leader.settle() == (landed(120),), "told of what was taken, or not of what was begun"
    assert ran(leader.run(NOTHING)) == before + 2


def test_all_ranks_give_back_the_memory_of_kv(leader: Leader) -> None:
    def freed() -> int | None:
        return leader.run(NOTHING).results[2].tokens[0]

    before = freed()
    assert before is not None
    leader.free_kv()
    assert freed() == before + RANKS


def test_an_adapter_that_one_rank_cannot_read_is_on_none(leader: Leader) -> None:
    """And the ranks go on."""
    own = LoadedAdapter("a", "", b"", 1)
    for whom in range(1, RANKS):
        loaded = replace(own, path=f"damaged on {whom}")
        with pytest.raises(CheckpointError, match=f"^rank {whom}: an adapter of the test's is damaged$"):
            leader.load_adapter(loaded, loaded)  # type: ignore[arg-type]
    before = ran(leader.run(NOTHING))
    leader.load_adapter(own, own)  # type: ignore[arg-type]
    assert ran(leader.run(NOTHING)) == before + 1


def test_an_interrupt_anywhere_in_a_step_leaves_all_ranks_with_its_plan_or_none(leader: Leader) -> None:
    """And one anywhere in settling, which is then done again; no transfer is forgotten that was begun, nor
    made up."""
    seen = {False: 0, True: 0}

    def strike(where: int) -> bool:
        early, late = 2 * where, 2 * where + 1
        leader.run(Plan((), (), transfers=(transfer(early),)))
        before = ran(leader.run(NOTHING))
        flight, got = leader.begin(NOTHING), list[Outcome]()

        def step() -> None:
            under_way = leader.begin(Plan((), (), transfers=(transfer(late),)))
            flight.outcome()
            got.append(under_way.outcome())

        struck: bool = cut_short(step, where, OURS_AND_LOCKS)
        cut_short(leader.settle, where % 23, OURS_AND_LOCKS)
        last = leader.settle()
        after = ran(leader.run(NOTHING))
        has_run = after == before + 3
        assert has_run or after == before + 2
        assert has_run or not got
        assert last == (landed(early), landed(late))[: 1 + has_run]
        if struck:
            seen[has_run] += 1
        return struck

    assert everywhere(strike) > 10
    assert all(seen.values()), "some plans were run and some not, or nothing is shown"


def test_a_message_that_is_missing_or_comes_twice_is_an_error(leader: Leader) -> None:
    """And not another order of plans than on other ranks."""
    for numbers in ((1,), (0, 0), (0, 2)):
        sent = iter([_MESSAGES.encode(_Message(number, _Kind.SETTLE, None, False)) for number in numbers])
        with pytest.raises(
            DeviceError, match=rf"was sent message {numbers[-1]} where message {len(numbers) - 1} comes next"
        ):
            serve(partial(next, sent), Sums(leader._group), leader._group)


def test_a_signal_while_ranks_compute_changes_nothing(leader: Leader) -> None:
    """It comes to a thread that waits, not behind an instruction; and an interrupt from the terminal reaches
    the followers too."""
    before = ran(leader.run(NOTHING))
    for child in children():
        os.kill(child, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        leader.run(order("interrupt", 0))
    leader.settle()
    assert ran(leader.run(NOTHING)) == before + 2


def test_an_interrupt_anywhere_in_closing_leaves_it_to_be_done_again() -> None:
    """Of a leader without followers: more of them would take their time to start, for each place."""

    def strike(where: int) -> bool:
        with nothing_left():
            leader, _ = led(1)
            struck: bool = cut_short(leader.close, where, OURS_AND_LOCKS)
            assert within(LONG, leader.close)
            part = leader._part
            assert isinstance(part, Sums)
            assert part.closed == 1
        return struck

    assert everywhere(strike) > 10


# ---- failures


def failing(call: Callable[[], object], text: str, others: list[int]) -> None:
    """The call ends in time with an error of this text in one line, when no follower is left but the
    others."""

    def run() -> None:
        with pytest.raises(DeviceError, match=text) as error:
            call()
        assert "\n" not in str(error.value)
        assert children() == others

    assert within(2 * LONG, run)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("kill", "rank 1 of 3 was killed by SIGKILL; the other ranks were ended too"),
        (
            "raise",
            "rank 1 of 3 ended with exit code 1: .*ValueError: a fault of the test's own; the other ranks "
            "were ended too",
        ),
        ("stop", r"rank 1 of 3 \(process \d+\) has given no sign for \d s; the other ranks were ended too"),
    ],
    ids=["kill", "raise", "stop"],
)
def test_what_befalls_a_follower_in_the_midst_of_a_step_is_everybodys_end(what: str, text: str) -> None:
    with nothing_left():
        others = children()
        leader, crew = led(RANKS, patience=2.0)
        leader.run(NOTHING)
        failing(lambda: leader.run(order(what, 1)), text, others)
        for again in (partial(leader.run, NOTHING), leader.settle):
            failing(again, text, others)
        assert re.search(text, str(crew.failure))
        assert within(LONG, leader.close)


def test_a_rank_that_lives_but_does_not_come_is_everybodys_end() -> None:
    """And so is a fault of rank 0, for which the others would wait."""
    with nothing_left():
        leader, _ = led(2, timeout=2.0)
        leader.run(NOTHING)
        with pytest.raises(DeviceError, match=r"a sum of rank 0 with 1 others failed: .*Timed out"):
            leader.run(order("sleep", 1))
        assert within(LONG, leader.close)
    with nothing_left():
        leader, _ = led(2)
        for _ in range(2):
            with pytest.raises(
                DeviceError, match="rank 0 of 2 failed with ValueError: a fault of the test's own"
            ):
                leader.run(order("raise", 0))
        assert within(LONG, leader.close)


INCOMPLETE = "an all-reduce of rank {} is incomplete: one of 1 others is gone, or has not come within 60 s"


@pytest.mark.parametrize("what", ["incomplete", "incomplete at its end"])
def test_a_sum_that_is_incomplete_on_a_follower_is_everybodys_end(what: str) -> None:
    """Its device says so by itself; its part of later sums is wrong. Rank 0, whose own are complete, gets at
    most the step that was under way."""
    with nothing_left():
        others = children()
        leader, _ = led(2)
        leader.run(NOTHING)

        def run() -> None:
            leader.run(order(what, 1))
            leader.run(NOTHING)

        failing(run, f"rank 1 of 2 ended with exit code 1: .*{INCOMPLETE.format(1)}", others)
        assert within(LONG, leader.close)


@pytest.mark.parametrize("what", ["incomplete", "incomplete at its end", "adapter"])
def test_a_sum_that_is_incomplete_on_rank_0_gives_nobody_a_token(what: str) -> None:
    """What was begun with it is never told, nor waited for; and no adapter is there."""
    loaded = LoadedAdapter("a", "incomplete on 0", b"", 1)
    with nothing_left():
        leader, _ = led(2)
        leader.run(NOTHING)
        if what == "incomplete":
            leader.begin(order(what, 0))
        calls: list[Callable[[], object]] = [leader.settle, partial(leader.run, NOTHING), leader.free_kv]
        if what == "incomplete at its end":
            calls.insert(0, partial(leader.run, order(what, 0)))
        if what == "adapter":
            calls.insert(0, partial(leader.load_adapter, loaded, loaded))  # type: ignore[arg-type]
        for call in calls:
            with pytest.raises(DeviceError, match=INCOMPLETE.format(0)):
                call()
        assert within(LONG, leader.close)


class Waiting(Sums):
    """Rank 0's part, on a device that computes by itself: an ordered step, or else its closing, waits until
    `met` says that what is there waits for others no more. Before it closes, an ordered step may have failed,
    behind the others' back."""

    def __init__(self, group: Group, met: Callable[[], object], at: str) -> None:
        super().__init__(group)
        self._met, self._at = met, at

    def begin(self, plan: Plan) -> Sum:
        if plan.forget and self._at == "step":
            self._met()
        step = super().begin(plan)
        if plan.forget and self._at == "failed":
            raise ValueError("a fault of the test's own")
        return step

    def close(self) -> None:
        if self._at != "step":
            self._met()
        super().close()


@contextlib.contextmanager
def waiting(met: Callable[[Group], object], at: str) -> Iterator[tuple[Leader, list[bool]]]:
    """Of two ranks, and whether this process was alone, each time that it was said to be. In the end the
    thread is there no more."""
    with nothing_left():
        others, said = children(), list[bool]()
        crew = launch(2, work, patience=LONG, timeout=2 * LONG)
        group = crew.group(CPU)
        leader = Leader(
            Waiting(group, partial(met, group), at), crew, group, lambda: said.append(children() == others)
        )
        leader.run(NOTHING)
        yield leader, said
        assert children() == others
        assert leader._job is not None
        assert within(LONG, leader._job.wait)
        assert within(LONG, leader._workers.close)


def shared_memory() -> set[object]:
    """What this process has open."""
    return {one for one in _there()["descriptors"] if "memfd" in str(one)}


@pytest.mark.parametrize("at", ["step", "close", "failed"])
def test_a_device_that_hangs_is_left_behind(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the thread that waits for it, and with what may be let go of only when nobody uses it any more;
    all else is closed. The other rank is gone, by force or since it was told to close, or is well and waits
    to be told."""
    monkeypatch.setattr(rank, "_LET_GO", 0.2)
    forks.ready()
    others, memory, comes_back = children(), shared_memory(), threading.Event()
    with waiting(lambda _: comes_back.wait(), at) as (leader, said):
        try:
            if at == "step":
                failing(
                    lambda: leader.run(order("kill", 1)),
                    "rank 1 of 2 was killed by SIGKILL; the other ranks were ended too",
                    others,
                )
            if at == "failed":
                with pytest.raises(
                    DeviceError, match="rank 0 of 2 failed with ValueError: a fault of the test's own"
                ):
                    leader.run(order("nothing", 9))
            for _ in range(2):
                assert within(LONG, leader.close)
            assert not said
            assert (
                len(shared_memory() - memory) == 1
            )  # By which ranks have met: collectives write into it when they end.
            pipes = [os.pipe() for _ in range(16)]  # They would write into one of these, and abort.
        finally:
            comes_back.set()
        assert leader._job is not None
        assert within(LONG, leader._job.wait)
        for end in chain(*pipes):
            os.close(end)
        assert shared_memory() == memory


@pytest.mark.parametrize(("whom", "at"), [(1, "step"), (0, "close")], ids=["follower", "rank 0"])
def test_a_device_that_waits_for_ranks_that_failed_is_not_left_behind(
    whom: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is to wait any more, so it comes back, and all is closed."""
    monkeypatch.setattr(rank, "_LET_GO", LONG)

    def over(group: Group) -> None:
        while not group.over.item():
            time.sleep(1e-3)

    with waiting(over, at) as (leader, said):
        text = (
            "rank 1 of 2 was killed by SIGKILL"
            if whom
            else "rank 0 of 2 failed with ValueError: a fault of the test's own"
        )
        with pytest.raises(DeviceError, match=text):
            leader.run(order("kill" if whom else "raise", whom))
        assert within(LONG, leader.close)
        assert said == [True]


def test_a_rank_that_is_lost_between_steps_is_an_error_of_the_next_call_and_of_one_under_way() -> None:
    """Also of a call for which ranks exchange nothing, and which is done here."""
    forks.ready()
    text = "rank 1 of 2 was killed by SIGKILL; the other ranks were ended too"
    for under_way in (False, True):
        with nothing_left():
            others = children()
            leader, crew = led(2, patience=LONG)

            def lose(others: list[int] = others, crew: Crew = crew) -> None:
                [follower] = {*children()} - {*others}
                os.kill(follower, signal.SIGKILL)
                while crew.failure is None:
                    time.sleep(1e-3)

            with contextlib.closing(leader):
                leader.run(NOTHING)
                leader.check()
                if under_way:
                    with patch.object(leader._part, "free_kv", lose), pytest.raises(DeviceError, match=text):
                        leader.free_kv()
                else:
                    lose()
                with pytest.raises(DeviceError, match=text):
                    leader.check()


def test_work_that_comes_back_after_a_follower_failed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes many glances: nobody waits for others any more, but the device has more to do."""
    monkeypatch.setattr(rank, "_LET_GO", LONG)
    monkeypatch.setattr(rank, "_GLANCE", 1e-3)

    def later(group: Group) -> None:
        while not group.over.item():
            time.sleep(1e-3)
        time.sleep(0.3)

    with waiting(later, "step") as (leader, said):
        with pytest.raises(DeviceError, match="rank 1 of 2 was killed by SIGKILL"):
            leader.run(order("kill", 1))
        assert leader._job is not None
        assert leader._job.done
        assert within(LONG, leader.close)
        assert said == [True]


def test_followers_close_their_parts_and_the_group(tmp_path: Path) -> None:
    """Of their own accord, when rank 0 closes."""
    with nothing_left():
        crew = launch(2, tell_end, str(tmp_path / "end"), patience=LONG)
        group = crew.group(CPU)
        leader = Leader(Sums(group), crew, group)
        leader.run(NOTHING)
        assert within(LONG, leader.close)
        assert (tmp_path / "end").read_text() == "1 False"


def test_a_follower_that_ends_before_it_has_come_is_noticed() -> None:
    with nothing_left():
        others, text = (
            children(),
            "rank 1 of 2 ended with exit code 1: ConfigError: a setting that does not suit; choose another; "
            "the",
        )
        crew = launch(2, work, "refuse")
        try:
            failing(lambda: crew.group(CPU), text, others)
        finally:
            crew.close()


def test_a_rank_that_is_gone_before_it_meets_the_others_is_not_waited_for() -> None:
    """As it would be otherwise, for as long as a collective may take: what waits for it is left to itself. It
    has all closed in the end."""
    with nothing_left():
        crew = launch(2, absent, patience=LONG, timeout=5.0)
        with contextlib.closing(crew), pytest.raises(DeviceError, match="rank 1 of 2 was killed by SIGKILL"):
            crew.group(CPU)
        assert "penstock meeting" in {thread.name for thread in threading.enumerate()}
        del crew
        while "penstock meeting" in {thread.name for thread in threading.enumerate()}:
            time.sleep(0.1)
        gc.collect()


@pytest.mark.parametrize(
    "closed",
    ["01", "02", "12", "012"] if "PENSTOCK_THOROUGH" in os.environ else ["012"],
)
def test_ranks_meet_though_standard_streams_are_closed(closed: str, tmp_path: Path) -> None:
    """As those of a program that a daemon starts may be: what ranks share must not take their numbers, which
    a follower's own have."""
    code = """
import os, sys
for one in map(int, sys.argv[2]):
    setattr(sys, ("stdin", "stdout", "stderr")[one], None)
    os.close(one)
from crews import NOTHING, led
leader, _ = led(2)
leader.run(NOTHING)
leader.close()
open(sys.argv[1], "w").write("met")
"""
    with nothing_left(), _python("-c", code, str(tmp_path / "told"), closed) as process:
        assert process.wait(4 * LONG) == 0
    assert (tmp_path / "told").read_text() == "met"


def test_a_store_writes_into_no_file_that_has_the_number_of_its_own(tmp_path: Path) -> None:
    """In the end, when its own is closed."""
    file = os.memfd_create("a test's")
    shared = SharedStore(file, 1)
    store, own = shared.store, shared._own
    store.set("key", "value")
    shared.asking = True
    shared.close()
    os.fstat(own)
    shared.asking = False
    shared.close()
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == own
        shared.close()
        del store, shared
        assert not os.fstat(own).st_size
    os.close(file)


def test_what_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/there/is/no/such/python")
    with (
        nothing_left(),
        pytest.raises(
            DeviceError, match=r"a process of another rank, of 3 ranks, cannot be started: .*no/such"
        ),
    ):
        launch(3, work)


@pytest.mark.parametrize("what", ["kill", "end"])
def test_followers_end_with_rank_0(what: str) -> None:
    """Though it closes nothing, and though one of them is stopped."""
    code = """
import os, signal, sys
from crews import NOTHING, children, led
leader, crew = led(3)
leader.run(NOTHING)
os.kill(children()[0], signal.SIGSTOP)
print(*children(), flush=True)
sys.stdin.readline()
"""
    with nothing_left(), _python("-c", code, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        followers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(followers) == 2
        if what == "kill":
            process.kill()
            process.wait()
        else:
            process.communicate("\n", timeout=LONG)
        assert not psutil.wait_procs(followers, LONG)[1]


def test_ranks_that_were_all_stopped_for_a_while_go_on() -> None:
    """As from a terminal, for longer than a rank may be silent."""
    code = """
import sys
from crews import NOTHING, children, led
leader, crew = led(2, patience=1.0)
leader.run(NOTHING)
print(*children(), flush=True)
sys.stdin.readline()
print(leader.run(NOTHING).results[0].tokens[0])
leader.close()
"""
    with nothing_left(), _python("-c", code, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        ranks = [process.pid, int(process.stdout.readline())]
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        for pid in ranks:  # Rank 0 looks before the other can give a sign.
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        output, error = process.communicate("\n", timeout=LONG)
        assert (output, process.returncode) == ("2\n", 0), error


# ---- processes that others have started

UNDER_TORCHRUN = """
import sys
from crews import NOTHING, led, order
leader, crew = led(2)
print(*(leader.run(NOTHING).results[0].tokens[0] for _ in range(3)), flush=True)
try:
    if len(sys.argv) > 1:
        leader.run(order(sys.argv[1], 1))
finally:  # As an engine does after a failure.
    leader.close()
print("closed", flush=True)
"""


def test_under_torchrun_nothing_is_started_and_others_follow(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    with nothing_left(), _torchrun(script) as process:
        output, error = process.communicate(timeout=4 * LONG)
        assert (process.returncode, output.split()) == (0, ["0", "2", "4", "closed"]), error


def test_without_an_agent_a_rank_that_dies_ends_the_other(tmp_path: Path) -> None:
    """As on two machines: each process has only the environment, and the loopback is not known to be
    enough."""
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with nothing_left(), contextlib.ExitStack() as stack:
        places = [{**place, "RANK": str(rank), "LOCAL_RANK": "0"} for rank in (0, 1)]
        first, second = (stack.enter_context(_python(str(script), "kill", environment=one)) for one in places)
        output, error = first.communicate(timeout=4 * LONG)
        assert first.returncode == 1
        assert output.split() == ["0", "2", "4"]
        assert re.search("DeviceError: a sum of rank 0 with 1 others failed: ", error), error
        assert second.wait(LONG) == -signal.SIGKILL


def test_torchrun_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="tensor_parallel=2, but torchrun has started 4 processes"):
        launch(2, work)


def test_an_environment_that_is_half_torchruns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "first",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK=first"):
        launch(2, work)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK=2 is not below WORLD_SIZE=2"):
        launch(2, work)
    monkeypatch.delenv("MASTER_PORT")
    assert launched() is None


def _torchrun(script: Path) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
    return _python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))


@contextlib.contextmanager
def _python(
    *arguments: str, environment: dict[str, str] | None = None, stdin: int = subprocess.DEVNULL
) -> Iterator["subprocess.Popen[str]"]:
    """A Python that can import what tests share, killed in the end."""
    paths = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    process = forks.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **paths, **(environment or {})},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
