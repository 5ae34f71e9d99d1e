"""Forecasts on the event loop when calls have their first tokens.

The loop must not wait for a step, so it goes by what the backend saw of its queues after the last one, and by
the calls that it has sent since. The backend counts the calls that it has met, in the order in which they
were sent: what it had not met when it looked is what the loop adds.

Of long prompts the backend gives the engine one at a time, behind the short ones that are there by then. So
short ones do not wait for those that are held back, and these wait for all short ones.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from weakref import WeakValueDictionary

from penstock.api.sequences import PreparedPrompt
from penstock.sched.outlook import MOST_FOLLOWED, Course, Outlook, QueuedRequest, WaitForecast
from penstock.server.broker.calls import Call

_MOST_LONG = 16
"""Long prompts that are followed one by one, when another request has come before them."""
_MOST_QUEUES = 4
"""Priorities whose queues are followed. Another one is told what the next less urgent one is."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Holds what a backend saw after a step.

    course: of the outlook's queue.
    met: calls that it had met since it began.
    held: outputs that wait with it, before the engine's queue.
    """

    outlook: Outlook
    course: Course
    met: int = 0
    held: tuple[QueuedRequest, ...] = ()


class _Queue:
    """Follows a sight, and the calls that have come since, up to a priority."""

    def __init__(self, sight: Sight, upto: float, fresh: Iterable[tuple[QueuedRequest, float]]) -> None:
        """fresh: outputs that the sight is without, and when they came."""
        outlook = sight.outlook.before(upto)
        self._most, self._when = outlook.tokens // 2, outlook.when
        self.course = sight.course.copy() if outlook is sight.outlook else Course(outlook)
        self.place = outlook.place
        """Outputs that wait before the next one."""
        self._reads = any(one.length > self._most for one in outlook.waiting) or any(
            one.tokens and one.length > self._most for one in outlook.running
        )
        """Whether the engine has a long prompt."""
        self._held: list[QueuedRequest] = []
        """Long prompts that wait until it has not."""
        self._behind: tuple[int, Course, float] | None = None
        """The course that takes these in too, up to a number of them, and the seconds that those take which
        it leaves out. It holds as long as no other request comes."""
        entered = [(one, outlook.when) for one in sight.held if one.priority <= upto]
        entered += [(one, came) for one, came in fresh if one.priority <= upto]
        for queued, came in entered[:MOST_FOLLOWED]:
            if not self._holds(queued):
                self._enter(queued, came)
        rest = entered[MOST_FOLLOWED:]
        self.course.skip(sum([not self._holds(queued) for queued, _ in rest]))
        self.place += len(entered)

    def add(self, queued: QueuedRequest, came: float) -> float | None:
        """Take in the next request. Return the seconds from when it came to its first token, or None."""
        self.place += 1
        if not self._holds(queued):
            return self._enter(queued, came)
        count, course, more = self._behind or (0, self.course.copy(), 0.0)
        before = self._held[count:-1]
        times = [course.add(one) for one in before[:_MOST_LONG]]
        if (rest := len(before) - len(times)) > 0:  # They are assumed to be as these.
            more += rest * max(times[-1] - times[0], 0.0) / (len(times) - 1)
        seconds = course.forecast(queued, came)
        self._behind = len(self._held), course, more
        return None if seconds is None else seconds + more

    def _holds(self, queued: QueuedRequest) -> bool:
        """Hold a long prompt back, if the engine has one. Return whether that is so."""
        if holds := self._reads and queued.length > self._most:
            self._held.append(queued)
        return holds

    def _enter(self, queued: QueuedRequest, came: float) -> float | None:
        """Take in a request that goes to the engine's queue at once."""
        self._reads |= queued.length > self._most
        self._behind = None
        return self.course.forecast(queued, came)


class WaitForecaster:
    """Forecasts calls in the order in which they are sent. Runs on the loop.

    A sight is followed once for each priority, and each call that comes is added to that: what one call costs
    does not grow with the queue. Calls that were not met yet are followed again with the next sight, those
    behind the first of them as a number.
    """

    def __init__(
        self, sight: Callable[[], Sight], found: Callable[[PreparedPrompt], int], longest: int
    ) -> None:
        """sight: returns the newest. found: counts the tokens of a prompt whose KV is there now. longest:
        tokens of a request."""
        self._sight, self._found, self._longest = sight, found, longest
        self._sent = 0
        self._fresh: deque[tuple[int, float, Call]] = deque()
        """Calls that the newest sight is without: their numbers, and when they came."""
        self._seen: Sight | None = None
        self._queues: dict[int, _Queue] = {}
        """Of priorities, for that sight."""
        self._ends: Course | None = None
        """The course by which outputs end, for that sight."""
        self._alike: WeakValueDictionary[tuple[bytes, str, tuple[int, ...]], Call] = WeakValueDictionary()
        """The newest call whose prompt begins with a block, while it is there."""

    def forecast(self, call: Call) -> WaitForecast:
        """Return what a call has before it that is about to be sent, and note how much of its prompt will be
        found."""
        now, sight = monotonic(), self._look()
        found = self._found_of(call, sight.outlook) if sight.outlook.shares else 0
        if found != call.prompt.found:
            call.prompt = replace(call.prompt, found=found)
        prompt = call.prompt
        call.queued = prompt.queued(sight.outlook, self._longest)
        own = self._of(sight, prompt.priority)
        queue = self._queues[own]
        place, seconds = queue.place, queue.add(call.queued[0], now)
        for one in call.queued[1:]:
            queue.add(one, now)
        for upto, other in self._queues.items():
            if upto > own:
                for one in call.queued:
                    other.add(one, now)
        self._fresh.append((self._sent, now, call))
        self._sent += 1
        return WaitForecast(place, seconds)

    def waiting(self, most: int) -> list[tuple[int, float | None]]:
        """Return the first that wait, at most so many: the tokens of each prompt, and the seconds until its
        first token, or None."""
        sight, now = self._look(), monotonic()
        passed, known = now - sight.outlook.when, sight.course.reliable
        times = sight.course.times or [0.0] * len(sight.outlook.waiting)
        found: list[tuple[int, float | None]] = [
            (queued.length, max(time - passed, 0.0) if known else None)
            for queued, time in zip(sight.outlook.waiting[:most], times, strict=False)
        ]
        if len(found) < most:
            queue = _Queue(replace(sight, held=()), inf, ())
            held = [(one, sight.outlook.when) for one in sight.held]
            for one, came in [*held, *self._unmet()][: most - len(found)]:
                seconds = queue.add(one, came)
                found.append((one.length, None if seconds is None else max(seconds - (now - came), 0.0)))
        return found

    def first_end(self, count: int) -> float | None:
        """Return the seconds until so many outputs have ended; None if that is not known."""
        sight = self._look()
        if self._ends is None:
            self._ends = _Queue(sight, inf, self._unmet()).course
        end = self._ends.first_end(count)
        return None if end is None else max(end - (monotonic() - sight.outlook.when), 0.0)

    def _look(self) -> Sight:
        """Return the newest sight, and forget what was said of the one before."""
        sight = self._sight()
        if sight is not self._seen:
            self._seen, self._ends = sight, None
            self._queues.clear()
            while self._fresh and self._fresh[0][0] < sight.met:
                self._fresh.popleft()
        return sight

    def _unmet(self) -> list[tuple[QueuedRequest, float]]:
        return [(one, came) for _, came, call in self._fresh if not call.over for one in call.queued]

    def _of(self, sight: Sight, priority: int) -> int:
        """Return the priority whose queue tells what is before one of this priority."""
        if priority in self._queues:
            return priority
        if len(self._queues) < _MOST_QUEUES:
            self._queues[priority] = _Queue(sight, priority, self._unmet())
            return priority
        return min((one for one in self._queues if one > priority), default=max(self._queues))

    def _found_of(self, call: Call, outlook: Outlook) -> int:
        """Return how many tokens of the prompt will be found: those that are there, or that a call before it
        computes."""
        prompt, size = call.prompt, outlook.size
        if prompt.samplings[0].prompt_logprobs is not None:
            return 0
        begin = prompt.salt, prompt.lora, prompt.tokens[:size]
        before = self._alike.get(begin)
        self._alike[begin] = call
        found = 0
        if before is not None and not (before.over or before.first_token_time):
            last = (len(prompt.tokens) - 1) // size
            found = min(_common(prompt.tokens, before.prompt.tokens) // size, last) * size
        return max(found, self._found(prompt))


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
