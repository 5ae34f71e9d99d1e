"""Forecasts on the event loop when calls have their first tokens.

The loop must not wait for a step, so it goes by what the backend saw of its queues after the last one, and by
the calls that it has sent since. The backend counts the calls that it has met, in the order in which they
were sent: what it had not met when it looked is what the loop adds.

Of long prompts the backend gives the engine one at a time, behind the short ones that are there by then. So
short ones do not wait for those that are held back, and these wait for all short ones.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import monotonic

from penstock.sched.outlook import Course, Outlook, QueuedRequest, WaitForecast
from penstock.server.broker.calls import Call

_MOST_ALIKE = 1024
"""Prompts under way that new ones are compared with."""
_MOST_LONG = 8
"""Long prompts that are followed one by one."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Holds what a backend saw after a step.

    course: of the outlook's queue.
    met: calls that it had met since it began.
    held: prompts that wait with it, before the engine's queue.
    """

    outlook: Outlook
    course: Course
    met: int = 0
    held: tuple[QueuedRequest, ...] = ()


class _Queue:
    """Follows a sight, and the calls that have come since, up to a priority."""

    def __init__(self, sight: Sight, upto: int | None) -> None:
        outlook = sight.outlook if upto is None else sight.outlook.before(upto)
        self._upto, self._most = upto, outlook.tokens // 2
        self.course = sight.course.copy() if upto is None else Course(outlook)
        self.place = len(outlook.waiting) + outlook.more
        """Requests that wait before the next one."""
        self._reads = any(one.length > self._most for one in outlook.waiting) or any(
            one.tokens and one.length > self._most for one in outlook.running
        )
        """Whether the engine has a long prompt."""
        self._held: list[QueuedRequest] = []
        """Long prompts that wait until it has not."""
        self._behind: tuple[int, Course] | None = None
        """The course that takes these in too, up to a number of them, as long as no other request comes."""
        for queued in sight.held:
            self.add(queued, outlook.when)

    def add(self, queued: QueuedRequest, came: float) -> float | None:
        """Take in the next request. Return the seconds from when it came to its first token, or None."""
        if self._upto is not None and queued.priority > self._upto:
            return None
        self.place += 1
        if queued.length <= self._most or not self._reads:
            self._reads |= queued.length > self._most
            self._behind = None
            return self.course.forecast(queued, came)
        self._held.append(queued)
        count, course = self._behind or (0, self.course.copy())
        more, seconds = self._held[count:], None
        for one in more[-_MOST_LONG:]:
            seconds = course.forecast(one, came)
        if len(more) <= _MOST_LONG:
            self._behind = len(self._held), course
        elif seconds is not None:  # Those before are as these.
            seconds *= len(more) / _MOST_LONG
        return seconds


class WaitForecaster:
    """Forecasts calls in the order in which they are sent. Runs on the loop."""

    def __init__(
        self, sight: Callable[[], Sight], found: Callable[[Sequence[int], bytes], int], longest: int
    ) -> None:
        """sight: returns the newest. found: counts the tokens of a prompt, with its salt, whose KV is there
        now. longest: tokens of a request."""
        self._sight, self._found, self._longest = sight, found, longest
        self._sent = 0
        self._fresh: deque[tuple[int, float, list[QueuedRequest]]] = deque()
        """Calls that the newest sight is without: their numbers, when they came, and their outputs."""
        self._seen: Sight | None = None
        self._queue: _Queue | None = None
        self._last = 0
        """The least urgent priority that the queue has taken in."""
        self._alike: dict[tuple[bytes, tuple[int, ...]], Call] = {}
        """The newest call whose prompt begins with a block, while it is under way."""

    def forecast(self, call: Call) -> WaitForecast:
        """Return what a call has before it that is about to be sent, and note how much of its prompt will be
        found."""
        now, sight = monotonic(), self._sight()
        found = self._found_of(call, sight.outlook) if sight.outlook.shares else 0
        prompt = call.prompt = replace(call.prompt, found=found)
        outputs = prompt.queued(sight.outlook, self._longest)
        queue = self._queue
        if sight is not self._seen or queue is None:
            queue = self._queue = self._begun(sight, None)
        if prompt.priority < self._last:  # Those behind it are left out, and the next one begins anew.
            queue, self._queue = self._begun(sight, prompt.priority), None
        self._last = max(self._last, prompt.priority)
        place, seconds = queue.place, queue.add(outputs[0], now)
        for one in outputs[1:]:
            queue.add(one, now)
        self._fresh.append((self._sent, now, outputs))
        self._sent += 1
        return WaitForecast(place, seconds)

    def waiting(self, most: int) -> list[tuple[int, float | None]]:
        """Return the first that wait, at most so many: the tokens of each prompt, and the seconds until its
        first token, or None."""
        sight, now = self._sight(), monotonic()
        queue, passed = _Queue(sight, None), now - sight.outlook.when
        times: list[float | None] = [max(one - passed, 0.0) for one in sight.course.times]
        known = sight.course.reliable
        found = [
            (queued.length, time if known else None)
            for queued, time in zip_longest(sight.outlook.waiting, times)
        ]
        for number, came, outputs in self._fresh:
            for one in outputs if number >= sight.met else ():
                seconds = queue.add(one, came)
                found.append((one.length, None if seconds is None else max(seconds - (now - came), 0.0)))
        return found[:most]

    def first_end(self, count: int) -> float | None:
        """Return the seconds until so many outputs have ended; None if that is not known."""
        sight = self._sight()
        end = self._begun(sight, None).course.first_end(count)
        return None if end is None else max(end - (monotonic() - sight.outlook.when), 0.0)

    def _begun(self, sight: Sight, upto: int | None) -> _Queue:
        """Return the queue as it is now, without what is behind a priority."""
        fresh = self._fresh
        while fresh and fresh[0][0] < sight.met:
            fresh.popleft()
        queue, self._seen = _Queue(sight, upto), sight
        for _, came, outputs in fresh:
            for one in outputs:
                queue.add(one, came)
        if upto is None:
            there = [*sight.outlook.waiting, *sight.held, *(outputs[0] for _, _, outputs in fresh)]
            self._last = max([one.priority for one in there], default=0)
        return queue

    def _found_of(self, call: Call, outlook: Outlook) -> int:
        """Return how many tokens of the prompt will be found: those that are there, or that a call before it
        computes."""
        prompt, size = call.prompt, outlook.size
        if prompt.samplings[0].prompt_logprobs is not None:
            return 0
        begin = prompt.salt, prompt.tokens[:size]
        before = self._alike.pop(begin, None)
        self._alike[begin] = call
        if len(self._alike) > _MOST_ALIKE:
            del self._alike[next(iter(self._alike))]
        found = 0
        if before is not None and not (before.over or before.first_token_time):
            last = (len(prompt.tokens) - 1) // size
            found = min(_common(prompt.tokens, before.prompt.tokens) // size, last) * size
        return max(found, self._found(prompt.tokens, prompt.salt))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading tokens are the same."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
