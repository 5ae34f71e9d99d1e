"""Forecasts when the first token of a prompt comes: it follows the queue, request by request, through steps
that take what steps have taken.

A step decodes a token of each row, and what is left of its tokens is for prompts, in the order of their
turns. A prompt waits until there are a row and KV blocks for it, so until outputs before it have ended. How
long these become nobody knows: an output ends by itself with the chance that was measured, or at its limit.
The chances are spread evenly over the outputs, so that as many are short and long as is likely. Long prompts
are computed one after the other beside the short ones, as the scheduler does it.

Nothing here changes what the scheduler decides. Values are frozen, so any thread may follow them.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import ceil, log, log1p

from penstock.sched.pace import StepSeconds

_SPREAD = 64
_GOLDEN = (5**0.5 - 1) / 2
_LIVES = [-log(1 - (0.5 + number * _GOLDEN) % 1) for number in range(_SPREAD)]
"""Lives of outputs in units of their mean, evenly spread."""
MOST_FOLLOWED = 256
"""Requests of the queue that are followed one by one. More are assumed to be as these."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """Describes a request that has a row.

    tokens: tokens that it has still to compute before its next token, but for the newest; 0 if it decodes.
    output: most tokens of output that may still come. pages: KV blocks that are free when it ends. length: of
    prompt and output.
    """

    tokens: int
    output: int
    pages: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Describes a request that waits.

    tokens: tokens that it has to compute before its first token, without those whose KV is found.
    output: most tokens of output. priority: the smallest number is served first. length: of its prompt.
    """

    tokens: int
    output: int
    priority: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class WaitForecast:
    """Says what a request has before it.

    place: requests that wait before it. seconds: until its first token; None if that is not known, since
        nothing of the kind has been measured yet.
    """

    place: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """Shows what is before a new request, at a moment between two steps.

    when: the moment, in seconds of monotonic().
    running: requests that have a row. waiting: those in the queue, in order; of many the first.
    more: how many wait behind these: priorities, in order, and how many have each.
    pages: KV blocks that could be given to requests. rows, tokens: most of a step. size: tokens of a block.
    doubles_at: position at which a token takes twice as long to compute as the first.
    under_way: whether a step has been begun that takes in no other requests.
    shares: whether the KV of equal prefixes is found.
    """

    when: float
    running: tuple[RunningRequest, ...]
    waiting: tuple[QueuedRequest, ...]
    more: tuple[tuple[int, int], ...]
    pages: int
    rows: int
    tokens: int
    size: int
    doubles_at: float
    under_way: bool
    shares: bool
    steps: StepSeconds

    @property
    def place(self) -> int:
        """Return how many wait."""
        return len(self.waiting) + sum([count for _, count in self.more])

    def before(self, priority: float) -> "Outlook":
        """Return what is before a request of a priority: those that are less urgent wait behind it. It is the
        same outlook if nobody is."""
        waiting = tuple([one for one in self.waiting if one.priority <= priority])
        more = tuple([one for one in self.more if one[0] <= priority])
        if len(waiting) == len(self.waiting) and len(more) == len(self.more):
            return self
        return replace(self, waiting=waiting, more=more)


class Course:
    """Follows an outlook. Times are in seconds since its moment, steps are counted from there."""

    def __init__(self, outlook: Outlook) -> None:
        self._outlook, self._steps, self._size = outlook, outlook.steps, outlook.size
        self._free = float(outlook.pages)
        self._now, self._step = 0.0, 0
        self._filled, self._work = 0, 0.0
        """Tokens of prompts in the step, and the same with later positions counted as more."""
        self._long, self._long_work = 0, 0.0
        """Tokens that long prompts lack, likewise."""
        self._runs = self._joining = self._decoding = self._held = 0
        """Short prompts in the step, requests that decode from the next step on, rows that decode now, and
        rows that are taken."""
        self._context, self._joining_context = 0, 0
        """Tokens that these rows attend to, and those of requests that decode from the next step on."""
        self._mean = -1 / log1p(-min(outlook.steps.ends, 0.99)) if outlook.steps.ends else 0.0
        """Mean tokens of an output that ends by itself; 0 if none does."""
        self._met = 0
        self._begins: list[tuple[int, int]] = []
        """The step from which each long prompt decodes, and its length: a heap."""
        self._ends: list[tuple[int, int, int]] = []
        """The step before which each output has ended, the blocks that it gives back, and its length."""
        self._ended: list[float] = []
        """When outputs have ended, one after the other."""
        self._taken = deque[float](maxlen=MOST_FOLLOWED // 2)
        """When the last requests were taken in."""
        self.relied = False
        """Whether it had to wait for outputs to end."""
        self.times: list[float] = []
        """When each request of the queue has its first token; of none where nothing was measured."""
        if not outlook.steps.known:
            return
        self._run(outlook.running)
        if outlook.under_way and self._held:
            self._close()
        self.times = [self.add(queued) for queued in outlook.waiting]
        self.skip(outlook.place - len(outlook.waiting))

    def _run(self, running: Sequence[RunningRequest]) -> None:
        self._held, self._decoding = len(running), sum(not one.tokens for one in running)
        self._context = sum(one.length for one in running if not one.tokens)
        for one in running:
            if not one.tokens:
                life = self._life(one.output)
                self._ends.append((life, one.pages, one.length + life))
        heapify(self._ends)
        for one in running:
            if one.tokens:
                self._admit(QueuedRequest(one.tokens, one.output, 0, one.length), one.pages)

    def copy(self) -> "Course":
        """Return the same course, to be followed another way."""
        other = copy(self)
        other._begins, other._ends = self._begins[:], self._ends[:]
        other._ended, other._taken = self._ended[:], self._taken.copy()
        return other

    # ---- one request after the other

    def skip(self, count: int) -> None:
        """Take in so many more without following them: they are assumed to be as the last that were."""
        if len(self._taken) > 1:
            self._now += count * (self._taken[-1] - self._taken[0]) / (len(self._taken) - 1)

    def add(self, queued: QueuedRequest, since: float = 0.0) -> float:
        """Take in the next request of the queue. Return when its first token comes; 0 if that is not known.

        since: when it has come; steps that were begun before are without it.
        """
        if not self._steps.known:
            return 0.0
        pages = -(-queued.tokens // self._size)
        while self._ends and (self._held >= self._outlook.rows or self._free - self._held < pages):
            self.relied = True
            self._pass(self._ends[0][0])
        if self._now < since:
            self._wait(since)
        self._held += 1
        self._free -= pages
        seconds = self._admit(queued, pages)
        self._taken.append(self._now)
        return seconds

    def _admit(self, queued: QueuedRequest, pages: int) -> float:
        tokens = queued.tokens
        work = 1 + (queued.length - tokens / 2) / self._outlook.doubles_at
        if tokens > self._outlook.tokens // 2:
            # It is computed behind other long ones and beside short ones.
            self._long += tokens
            self._long_work += tokens * work
            room = max(self._outlook.tokens - self._decoding, 1)
            whole, rest = divmod(self._long, room)
            each = self._long_work / self._long
            heappush(self._begins, (self._step + whole + bool(rest), queued.length))
            self._end_with(self._step + whole + 1, queued, pages)
            last = self._steps.chunk(rest * each, self._decoding, 1, self._context) if rest else 0.0
            return self._now + whole * self._steps.chunk(room * each, self._decoding, 1, self._context) + last
        self._compute(tokens, work)
        self._joining += 1
        self._joining_context += queued.length
        self._end_with(self._step + 1, queued, pages)
        return self._now + self._last()

    def _end_with(self, begin: int, queued: QueuedRequest, pages: int) -> None:
        life = self._life(queued.output)
        heappush(self._ends, (begin + life - 1, pages + life // self._size, queued.length + life))

    def _life(self, output: int) -> int:
        """Return how many tokens an output has: the most that it may have, or fewer."""
        self._met += 1
        if not self._mean:
            return output
        return min(output, ceil(self._mean * _LIVES[self._met % _SPREAD]))

    def _compute(self, tokens: int, work: float) -> None:
        """Compute tokens of a prompt: in this step, and in as many more as it takes. work: of each."""
        whole = max(self._outlook.tokens - self._decoding, 1)
        if self._long:  # A prompt that is not finished leaves half of a step to those that are.
            whole -= whole // 2
        if tokens > (room := max(whole - self._filled, 0)):
            self._filled += room
            self._work += room * work
            self._runs += room > 0
            count, tokens = divmod(tokens - room - 1, whole)
            tokens += 1
            self._close()
            if count:
                self._end(count, self._steps.chunk(whole * work, self._decoding, 1, self._context))
                self._give_back()
        self._filled += tokens
        self._work += tokens * work
        self._runs += tokens > 1  # A single one is computed as a row.

    # ---- steps

    def _last(self) -> float:
        """Return the seconds of the step as it is filled now."""
        rows, work, runs = self._decoding, self._work, self._runs
        if self._long and (part := min(self._outlook.tokens - rows - self._filled, self._long)) > 0:
            work += part * self._long_work / self._long
            runs += 1
        if work:
            return self._steps.chunk(work, rows, runs, self._context)
        return self._steps.decode(rows, self._context) if rows else 0.0

    def _end(self, count: int, seconds: float) -> None:
        """End so many steps, each of which takes so long. Their outputs have one more token of each."""
        self._now += count * seconds
        self._step += count
        self._free -= count * self._decoding / self._size
        self._context += count * self._decoding

    def _close(self) -> None:
        """End the step."""
        self._end(1, self._last())
        if self._long:
            part = min(max(self._outlook.tokens - self._decoding - self._filled, 0), self._long)
            self._long_work -= part * self._long_work / self._long
            self._long -= part
        self._decoding += self._joining
        self._context += self._joining_context
        self._filled = self._runs = self._joining = self._joining_context = 0
        self._work = 0.0
        self._give_back()

    def _fill(self, count: int, room: int) -> None:
        """End so many steps that a long prompt fills, but for the rows that they decode."""
        work = self._long_work * room / self._long
        self._end(count, self._steps.chunk(work, self._decoding, 1, self._context))
        self._long -= count * room
        self._long_work -= count * work

    def _give_back(self) -> None:
        """Let long prompts decode that have been computed, and outputs go that have ended."""
        begins, ends, step = self._begins, self._ends, self._step
        while begins and begins[0][0] <= step:
            self._decoding += 1
            self._context += heappop(begins)[1]
        while ends and ends[0][0] <= step:
            _, pages, length = heappop(ends)
            self._free += pages
            self._ended.append(self._now)
            self._held -= 1
            self._decoding = max(self._decoding - 1, 0)
            self._context = max(self._context - length, 0)

    def _pass(self, step: int) -> None:
        """End all steps before this one. Between two ends of outputs all steps are alike."""
        if self._filled or self._joining:
            self._close()
        while self._long and self._step < step and (room := self._outlook.tokens - self._decoding) > 0:
            if (count := min(self._long // room, step - self._step) - 1) > 0:
                self._fill(count, room)
            self._close()
        count = step - self._step
        if count > 0:
            self._end(count, self._last())
        self._give_back()

    def _wait(self, since: float) -> None:
        """End all steps that were begun before this moment."""
        if self._held:
            self._close()
        while self._now < since and self._ends and (each := self._last()) > 0:
            step = self._step + ceil((since - self._now) / each)
            self._pass(min(step, max(self._ends[0][0], self._step + 1)))
        self._now = max(self._now, since)

    # ---- what is asked

    def forecast(self, queued: QueuedRequest, now: float) -> float | None:
        """Take in one more request, which comes now, in seconds of monotonic(). Return the seconds until its
        first token; None if that is not known."""
        if not self._steps.known:
            return None
        since = now - self._outlook.when
        seconds = max(self.add(queued, since) - since, 0.0)
        return seconds if self.reliable else None

    @property
    def reliable(self) -> bool:
        """Tell whether all was measured that the times up to now depend on."""
        return self._steps.known and not (self.relied and self._steps.ends is None)

    def first_end(self, count: int) -> float | None:
        """Return when so many outputs have ended; None if that is not known."""
        if self._steps.ends is None or not self._steps.known:
            return None
        while len(self._ended) < count and self._ends:
            self._pass(self._ends[0][0])
        return self._ended[min(count, len(self._ended)) - 1] if self._ended else self._now
