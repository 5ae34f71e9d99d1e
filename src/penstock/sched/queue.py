"""Keeps the waiting and running requests, each in order of turns, and the rows of the running ones."""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from itertools import takewhile

from penstock.sched.request import Phase, Request
from penstock.step.plan import Row


class RequestQueues:
    """Holds both queues. The last running request is the first to be preempted."""

    def __init__(self, rows: int) -> None:
        """Begin empty. rows: most requests that run at a time."""
        self._rows = rows
        self.reset(())

    def reset(self, requests: Iterable[Request]) -> None:
        """Put all of these in the waiting queue, in order of turns, and none in the running one."""
        self.waiting = deque(sorted(requests, key=lambda request: request.turn))
        self.running: list[Request] = []
        self.by_row: dict[Row, Request] = {}
        self.free_rows = [Row(row) for row in reversed(range(self._rows))]
        for request in self.waiting:
            request.phase, request.row = Phase.WAITING, None

    def wait(self, request: Request) -> None:
        """Put a request into the queue, at its turn."""
        request.phase = Phase.WAITING
        if not self.waiting or self.waiting[-1].turn < request.turn:
            self.waiting.append(request)
        else:
            sooner = takewhile(lambda other: other.turn < request.turn, self.waiting)
            self.waiting.insert(sum(1 for _ in sooner), request)

    def run_next(self) -> Row:
        """Move the first waiting request to the running queue, and return its row."""
        request = self.waiting.popleft()
        row = self.free_rows.pop()
        request.phase, request.row = Phase.RUNNING, row
        self.by_row[row] = request
        insort(self.running, request, key=lambda other: other.turn)
        return row

    def remove(self, request: Request) -> None:
        """Take a request out of its queue, and its row back."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
            return
        assert request.row is not None
        self.running.remove(request)
        del self.by_row[request.row]
        self.free_rows.append(request.row)
        request.row = None
