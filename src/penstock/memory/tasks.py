"""Tasks for threads, handed out by a thread that an interrupt may strike anywhere.

Why this is safe. A KeyboardInterrupt strikes the main thread only, between two instructions; a worker always
ends what it has begun. What the two have in common is a queue in C, whose calls are done or not done, and in
each task a bare lock, which only a worker releases. So an interrupt leaves no lock held. All that it can do
is to keep a task from being put. Whoever notes a task before putting it knows of all that may be under way.
`call_off` puts what is not done once more, so that it is reached whether or not it had been put, and
`call_off` may itself be cut short and begun anew. A task that is met twice is done once: whoever pops its
work from the list does it.

Tasks are begun in the order in which they were put. One may wait for others if these were put before it, for
the first time: they have been begun before, so no tasks wait in a circle, however few threads there are.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from penstock.memory.streams import HostTicket


class CalledOff(Exception):
    """The result of a task raises CalledOff if it was called off before it began."""


class Task(HostTicket):
    """A Task is reached when its work is over, or was called off before it began.

    fault: the error that the work has raised, once it is done.
    """

    __slots__ = ("_work", "called_off", "fault")

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = [work]
        """Empty as soon as a thread does it."""
        self.fault: BaseException | None = None
        """What the work has raised, once it is done."""
        self.called_off = False

    def do(self) -> None:
        """Do the work, on a worker, if none has begun it."""
        try:
            work = self._work.pop()
        except IndexError:
            return
        try:
            if self.called_off:
                raise CalledOff
            work()
        except BaseException as fault:
            self.fault = fault
        del work  # Its references are gone when the task is reached.
        self.reach()
        del self  # The fault's traceback holds this frame, which must not hold the fault.

    def result(self) -> None:
        """Wait, and raise what the work has raised."""
        self.wait()
        try:
            if self.fault is not None:
                raise self.fault
        finally:
            del self


def wait(tasks: Iterable[Task]) -> None:
    """Wait for all tasks, whatever they raise."""
    for task in tasks:
        task.wait()


class Workers:
    """Workers are `count` threads that do tasks, first come, first begun. One thread calls everything."""

    def __init__(self, count: int, name: str) -> None:
        """Start the threads."""
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        """None: there is nothing more to do, for any of them."""
        self._closing, self._process = False, os.getpid()
        self._ended = [HostTicket() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._serve, args=(ended,), name=f"penstock {name}", daemon=True)
            for ended in self._ended
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._tasks.put(None)
            raise

    def put(self, task: Task) -> None:
        """Queue a task. Note it first, or it cannot be called off if an interrupt strikes."""
        assert not self._closing, "a task for workers that end"
        self._tasks.put(task)

    def call_off(self, tasks: Sequence[Task]) -> None:
        """Keep tasks from beginning if they have not begun; all of them come to be done.

        So do those that an interrupt has kept from being put.
        """
        for task in tasks:
            if not task.done:
                task.called_off = True
                self._tasks.put(task)

    def close(self) -> None:
        """Finish what has begun, call off what has not, and end.

        Call it again if it was interrupted; else that does nothing, nor does it in a forked process, which
        has none of the threads.
        """
        self._closing = True
        if os.getpid() != self._process:
            return
        self._tasks.put(None)
        for ended in self._ended:  # An interrupted join may mark a running thread as ended.
            ended.wait()
        for thread in self._threads:
            thread.join()

    def _serve(self, ended: HostTicket) -> None:
        while (task := self._tasks.get()) is not None:
            if self._closing:
                task.called_off = True
            task.do()
            del task
        self._tasks.put(None)
        ended.reach()
