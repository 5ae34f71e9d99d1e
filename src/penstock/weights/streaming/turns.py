"""Decides which passes a CPU shares: in these it computes feed-forwards where they rest, and fewer groups
come through the link.

Only steps of few decode rows may be such passes. Going from the one kind of pass to the other costs a fill of
the ring each way, since the rings hold different groups. So after other steps the decision waits until what
was missed since then pays for that (as one who rents before buying), and for what earlier changes have cost
in vain. What passes take is measured by class of rows. Where shared ones turn out to be slower, there are
none for a while.

Nothing here reaches torch or a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FADES = 0.8
"""A pass leaves so much of what was measured before it."""
TRIAL = 4
"""Passes of a kind that are measured before their times count."""
AGAIN = 256
"""Passes after which what was slower is tried again, at the soonest."""
WORTH = 100
"""Trials of what was slower take at most one of so many parts of the time."""


@dataclass(slots=True)
class PassTimes:
    """PassTimes hold what passes of a kind take, by class of rows.

    predicted: seconds. means: seconds that were measured, of which old ones count less and less. counts:
    passes that were measured.
    """

    predicted: Sequence[float]
    means: list[float] = field(init=False)
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with nothing measured."""
        self.means, self.counts = list(self.predicted), [0] * len(self.predicted)

    def note(self, kind: int, seconds: float) -> None:
        """Note that a pass of a class took so long. The first one is left out: kernels are loaded for it."""
        self.counts[kind] += 1
        if (before := self.counts[kind] - 1) > 0:
            self.means[kind] += max(1 / before, 1 - FADES) * (seconds - self.means[kind])

    def known(self, kind: int) -> bool:
        """Tell whether enough passes of a class have been measured."""
        return self.counts[kind] >= TRIAL

    def seconds(self, kind: int) -> float:
        """Return what a pass of a class takes."""
        return self.means[kind] if self.known(kind) else self.predicted[kind]

    def forget(self, kind: int) -> None:
        """Go by what is predicted of a class, until it is measured again."""
        self.counts[kind] = 0


@dataclass(slots=True)
class CpuTurns:
    """CpuTurns say of each pass whether the CPU shares it.

    cost: seconds that a change to shared passes and back takes. streamed, shared: what passes of both kinds
    take. always: whether all steps of few decode rows are shared, whatever they take.
    """

    cost: float
    streamed: PassTimes
    shared: PassTimes
    always: bool
    sharing: bool = False
    """The kind of the last pass."""
    passes: int = 0
    closed: list[int] = field(init=False)
    """Passes from which on sharing may be tried again, by class of rows."""
    missed: float = 0.0
    """Seconds that sharing would have saved since the last step of another kind."""
    owed: float = field(init=False)
    """Seconds that must be missed before the next change to shared passes."""

    def __post_init__(self) -> None:
        """Begin with passes that the CPU does not share."""
        self.owed, self.closed = self.cost, [0] * len(self.shared.predicted)

    def choose(self, kind: int | None) -> bool:
        """Return whether the CPU shares the next pass, of few decode rows of a class; None for any other."""
        self.passes += 1
        if kind is None:
            self.missed = 0.0
        shares = kind is not None and (self.always or self._is_faster(kind))
        if shares and not self.sharing:
            self.owed, self.missed = self.owed + self.cost, 0.0
        self.sharing = shares
        return shares

    def note(self, kind: int, seconds: float, *, shared: bool) -> None:
        """Note what a pass of a class of rows took that came behind one of its own kind."""
        (self.shared if shared else self.streamed).note(kind, seconds)
        if not shared or self.always or not self.shared.known(kind):
            return
        slower = self.shared.seconds(kind) / self.streamed.seconds(kind)
        if slower >= 1:
            self.closed[kind] = self.passes + max(AGAIN, round(TRIAL * WORTH * (slower - 1)))
            self.shared.forget(kind)

    def _is_faster(self, kind: int) -> bool:
        """Tell whether to share a pass of a class of rows, and count what is missed or saved by that."""
        if self.passes < self.closed[kind] or not self.streamed.known(kind):
            return False
        gain = self.streamed.seconds(kind) - self.shared.seconds(kind)
        if gain <= 0:
            return False
        if self.sharing:
            self.owed = max(self.owed - gain, 0.0)
            return True
        self.missed += gain
        return self.missed >= self.owed
