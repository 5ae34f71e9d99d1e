"""Records passes as CUDA graphs: a pass over weights that stream in pieces, between what is taken and what is
released."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from penstock.arch.layout import GroupId
from penstock.models.inputs import ExpertWeights
from penstock.ops.matrix import GroupViews
from penstock.weights.streaming.stream import WeightStream

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_IDLE: list[torch.cuda.Stream] = []


def idle_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream to record on. The library of products keeps memory for each stream that they were
    recorded on, as long as the process lives, and recorded steps write there: so a stream is used again, but
    only when nothing is left of what was recorded on it."""
    for stream in list(_IDLE):
        if stream.device == device:
            with suppress(ValueError):  # Another thread was faster.
                _IDLE.remove(stream)
                return stream
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's


def keep_idle(stream: torch.cuda.Stream) -> None:
    """Keep a stream of which nothing is left that was recorded on it."""
    _IDLE.append(stream)


class InTime:
    """Lends experts of which none is fetched ahead of its layer."""

    def __init__(self, experts: ExpertWeights) -> None:
        self._experts = experts

    def foretells(self, layer: int, most: int) -> int | None:
        """Return None: nothing is foretold."""
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class Program:
    """Weights that are lent while a pass is recorded; then the recorded pieces of it, and what is taken and
    released between them.

    None of that refers back to it, so that graphs are gone when it is: what they recorded of NCCL keeps its
    end waiting.
    """

    all_stay = False
    """Each group is taken by itself, since the program is cut where one moves."""

    def __init__(
        self, pool: "_POOL_HANDLE", weights: WeightStream, *, shared: int = 0, ahead: bool = True
    ) -> None:
        """Recording begins, on the current stream. shared: decode rows of a pass that a CPU shares. ahead:
        whether experts may be fetched ahead, on a stream that no piece may end beside."""
        self._pool, self._weights, self._standing = pool, weights, weights.standing(shared=shared)
        experts = self._standing.experts
        self.experts = experts if ahead or experts is None else InTime(experts)
        self._acts: list[Callable[[], object]] = []
        self._released: list[GroupId] = []
        """Since the last was taken: noted in the program before the next is."""
        self._graph: torch.cuda.CUDAGraph | None = self._begin()

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads read weights and KV meanwhile, and look at events.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        return graph

    def _cut(self) -> None:
        assert self._graph is not None
        self._graph.capture_end()
        self._acts.append(self._graph.replay)

    def take(self, group: GroupId) -> GroupViews:
        """Lend a group's weights to what is recorded; where they move, the program is cut."""
        views, moves = self._standing.take(group), self._standing.moves(group)
        if (
            moves or self._released
        ):  # What was released makes room for what comes next: it does not wait until that is taken.
            self._cut()
            self._note_released()
            if moves:
                self._acts.append(partial(_take_again, self._weights, group, views))
            self._graph = self._begin()
        return views

    def release(self, group: GroupId) -> None:
        """Give a group back."""
        self._standing.release(group)
        if self._standing.moves(group):
            self._released.append(group)

    def between(self, act: Callable[[], object]) -> None:
        """Have something done whenever the program is replayed, behind what is recorded so far and before
        what follows."""
        self._cut()
        self._acts.append(act)
        self._graph = self._begin()

    def end(self) -> None:
        """Recording is over."""
        self._cut()
        self._note_released()

    def replay(self) -> None:
        """Compute the pass again."""
        for act in self._acts:
            act()

    def close(self) -> None:
        """Release what was recorded."""
        self._acts.clear()
        self._graph = None

    def _note_released(self) -> None:
        self._acts += [partial(self._weights.release, group) for group in self._released]
        self._released.clear()


def _take_again(weights: WeightStream, group: GroupId, recorded: GroupViews) -> None:
    lent = weights.take(group)
    assert lent is recorded, f"{group} is not where it was when the step was recorded"
