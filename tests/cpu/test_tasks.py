"""Tasks are done once, in order, or called off; whatever an interrupt strikes, nobody waits for ever."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest

from penstock.memory.tasks import CalledOff, Task, Workers, wait
from streams import BRIEF, LONG, OURS_AND_LOCKS, cut_short, everywhere, no_thread_left, within


@contextmanager
def workers(count: int = 1) -> Iterator[Workers]:
    with no_thread_left():
        some = Workers(count, "under test")
        try:
            yield some
        finally:
            assert within(LONG, some.close)


def held(workers: Workers) -> tuple[Task, threading.Event]:
    """A task that has begun, and what lets it end."""
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert end.wait(LONG)

    task = Task(work)
    workers.put(task)
    assert begun.wait(LONG)
    return task, end


def test_tasks_are_begun_in_order_and_reached_when_they_are_over() -> None:
    order: list[int] = []
    with workers() as some:
        first, end = held(some)
        tasks = [Task(partial(order.append, number)) for number in range(100)]
        for task in tasks:
            some.put(task)
        assert not first.done
        assert not within(BRIEF, partial(wait, tasks))
        end.set()
        assert within(LONG, partial(wait, tasks))
        assert order == list(range(100))
        assert all(task.done and task.fault is None for task in [first, *tasks])


def test_as_many_at_once_as_there_are_threads_with_their_name() -> None:
    with workers(3) as some:
        meeting, names = threading.Barrier(3), []

        def work() -> None:
            names.append(threading.current_thread().name)
            meeting.wait(LONG)

        tasks = [Task(work) for _ in range(3)]
        for task in tasks:
            some.put(task)
        for task in tasks:
            assert within(LONG, task.result)
        assert names == ["penstock under test"] * 3


def test_a_fault_is_raised_where_the_result_is_wanted_and_harms_nobody_else() -> None:
    def work() -> None:
        raise ValueError("its own")

    with workers() as some:
        tasks = [Task(work), Task(int)]
        for task in tasks:
            some.put(task)
        assert within(LONG, partial(wait, tasks))
        for _ in range(2):
            with pytest.raises(ValueError, match="its own"):
                tasks[0].result()
        tasks[1].result()


def test_what_has_not_begun_is_called_off() -> None:
    done: list[int] = []
    with workers() as some:
        first, end = held(some)
        tasks = [Task(partial(done.append, number)) for number in range(4)]
        for task in tasks[:3]:
            some.put(task)
        some.call_off([first, tasks[1], tasks[3]])
        end.set()
        assert within(LONG, partial(wait, tasks)), "one that was never put is reached too"
        assert done == [0, 2]
        first.result()
        for task in (tasks[1], tasks[3]):
            with pytest.raises(CalledOff):
                task.result()


def test_a_task_that_is_met_twice_is_done_once() -> None:
    done: list[int] = []
    with workers(4) as some:
        tasks = [Task(partial(done.append, number)) for number in range(300)]
        for task in tasks:
            for _ in range(4):
                some.put(task)
        some.call_off(tasks)
        assert within(LONG, partial(wait, tasks))
        assert within(LONG, some.close)
        assert len(done) == len(set(done))
        assert set(done) == {number for number, task in enumerate(tasks) if task.fault is None}


def test_tasks_that_wait_for_earlier_ones_need_no_more_than_one_thread() -> None:
    """Even for one that was called off because nobody can tell whether it has been put."""
    with workers() as some:
        first, end = held(some)
        torn, other = Task(int), Task(int)
        some.put(other)
        some.call_off([torn])
        last = Task(partial(wait, [first, torn, other]))
        some.put(last)
        end.set()
        assert within(LONG, last.result)


def test_a_forked_process_waits_for_no_thread_of_its_parents() -> None:
    """It has none of them."""
    done = list[int]()
    with workers(2) as some:
        if not (child := os.fork()):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            some.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        task = Task(partial(done.append, 1))
        some.put(task)
        wait([task])
    assert done == [1]


def test_close_finishes_what_has_begun_and_calls_off_the_rest() -> None:
    done: list[int] = []
    with workers(2) as some:
        begun = [held(some) for _ in range(2)]
        rest = [Task(partial(done.append, number)) for number in range(3)]
        for task in rest:
            some.put(task)
        closing = threading.Thread(target=some.close)
        closing.start()
        closing.join(BRIEF)
        assert closing.is_alive()
        for _, end in begun:
            end.set()
        closing.join(LONG)
        assert not closing.is_alive()
        for task, _ in begun:
            task.result()
        assert all(isinstance(task.fault, CalledOff) for task in rest)
        assert not done


def test_what_a_task_holds_goes_with_it() -> None:
    """Before it is reached, or, after a fault, with the fault. No cycle keeps pinned memory."""

    class Memory:
        pass

    def fail(memory: Memory) -> None:
        raise ValueError

    gc.disable()
    try:
        with workers() as some:
            memory = Memory()
            first, reached = Task(partial(id, memory)), []
            watch = weakref.ref(memory, lambda _: reached.append(first.done))
            del memory
            some.put(first)
            assert within(LONG, first.wait)
            assert reached == [False]
            assert watch() is None
            memory = Memory()
            kept, task = weakref.ref(memory), Task(partial(fail, memory))
            del memory
            some.put(task)
            with pytest.raises(ValueError):  # noqa: PT011
                task.result()
            assert within(LONG, some.close)
            del task
            assert kept() is None
    finally:
        gc.enable()


def test_threads_that_cannot_be_had_leave_none_behind() -> None:
    start, started = threading.Thread.start, []

    def scarce(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with no_thread_left(), patch.object(threading.Thread, "start", scarce), pytest.raises(RuntimeError):
        Workers(4, "under test")
    assert len(started) == 2


# ---- interrupts


def test_an_interrupt_anywhere_in_putting_and_calling_off_leaves_nobody_waiting() -> None:
    """And a second one, anywhere in calling off what the first has left."""
    done: list[int] = []
    with workers(2) as some:

        def strike(where: int) -> bool:
            tasks = [Task(partial(done.append, where)) for _ in range(4)]

            def put() -> None:
                for task in tasks:
                    some.put(task)
                some.call_off(tasks[2:])

            struck: bool = cut_short(put, where, OURS_AND_LOCKS)
            cut_short(partial(some.call_off, tasks), where % 7, OURS_AND_LOCKS)
            some.call_off(tasks)
            last = Task(partial(wait, tasks))
            some.put(last)
            assert within(LONG, last.result)
            assert within(LONG, partial(wait, tasks))
            assert done.count(where) == sum(task.fault is None for task in tasks)
            return struck

        assert everywhere(strike) > 10


def test_an_interrupt_anywhere_in_waiting_leaves_nobody_waiting() -> None:
    """Neither for the task nor for others, while it is not done and when it is."""
    with workers(2) as some:

        def strike(where: int) -> bool:
            tasks = [Task(partial(time.sleep, 1e-3 * (where % 2))) for _ in range(3)]
            for task in tasks:
                some.put(task)
            waiting = threading.Thread(target=wait, args=(tasks,), daemon=True)
            waiting.start()
            struck: bool = cut_short(lambda: [task.result() for task in tasks], where, OURS_AND_LOCKS)
            assert within(LONG, partial(wait, tasks))
            waiting.join(LONG)
            assert not waiting.is_alive()
            return struck

        assert everywhere(strike) > 5


def test_an_interrupt_anywhere_in_closing_leaves_it_to_be_done_again() -> None:
    def strike(where: int) -> bool:
        with workers(3) as some:
            tasks = [Task(partial(time.sleep, 1e-4)) for _ in range(6)]
            for task in tasks:
                some.put(task)
            struck: bool = cut_short(some.close, where, OURS_AND_LOCKS)
            assert within(LONG, some.close)
            assert all(task.done for task in tasks)
        return struck

    assert everywhere(strike) > 10


@pytest.mark.parametrize("name", ["result", "close"])
def test_a_signal_while_a_task_is_waited_for_changes_nothing(name: str) -> None:
    """One that comes to a thread which sleeps, not behind an instruction: the task is not taken for done, nor
    its thread for ended."""
    begun, waiting, end = (threading.Event() for _ in range(3))
    main = threading.main_thread().ident
    assert main is not None

    def work() -> None:
        begun.set()
        assert waiting.wait(LONG)
        time.sleep(BRIEF)
        signal.pthread_kill(main, signal.SIGINT)
        assert end.wait(LONG)

    with workers() as some:
        task = Task(work)
        calls: dict[str, Callable[[], object]] = {"close": some.close, "result": task.result}

        def call() -> None:
            waiting.set()
            calls[name]()

        some.put(task)
        assert begun.wait(LONG)
        with pytest.raises(KeyboardInterrupt):
            call()
        assert not within(BRIEF, calls[name])
        assert not task.done
        end.set()
        assert within(LONG, calls[name])
        task.result()
