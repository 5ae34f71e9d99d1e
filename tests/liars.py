"""Drafters who are wrong in every way, and halls whose steps verify their drafts."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from halls import Hall, Worker
from penstock.kv.ledger.keys import block_keys
from penstock.sched.drafter import SuffixDrafter
from penstock.sched.request import Request
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import NO_DRAFT, Draft
from penstock.step.plan import MOST_DRAFTED, Outcome, Plan, RequestId, Result, Share, ShareKind
from worlds import ALPHABET, END, chosen

Propose = Callable[[Request, int], Draft]


class Told:
    """Proposes what a function says."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose

    def propose(self, request: Request, most: int) -> Draft:
        return self._propose(request, most)


class Bold(Speculation):
    """Verifies all that there is a place for, whatever it costs, and never rests."""

    def look(self, requests: Sequence[tuple[Request, int]], tokens: int, spare: int, *, ahead: bool) -> None:
        self.resting = False

    def _payable(self, tokens: int, most: int) -> int:
        return most

    def _best(self, survival: Sequence[Sequence[float]], tokens: int, spare: int) -> list[int]:
        counts = []
        for some in survival:
            counts.append(min(len(some), spare))
            spare -= counts[-1]
        return counts


class ModelLiar:
    """Drafts as a model does, as many tokens as it is asked for, of what a function proposes."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose
        self.seconds, self.spent = 0.01, 0.04
        self.drafted, self.most, self.trees = 0, MOST_DRAFTED, False

    def levels(self, count: int) -> int:
        return count

    def propose(self, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        drafts = []
        for request, share, count in asked:
            kv = request.kv
            assert not kv.long
            assert share.start + 1 == len(request.tokens), "a draft begins behind the newest token"
            assert len(kv.pages) * kv.pools.size >= len(request.tokens) + count, "a draft without a place"
            assert kv.drafted < len(request.tokens), "what the model has is more than is known"
            kv.drafted = len(request.tokens) + count - 1
            tokens = [*self._propose(request, count).tokens, *[0] * count][:count]
            drafts.append(Draft(tuple(tokens), (1.0,) * count, by_model=True))
            self.drafted += count
        return drafts


class BoldModel(Bold):
    """Lets the model draft for all, as many tokens as are drawn."""

    def __init__(self, propose: Propose, seed: int) -> None:
        super().__init__(Told(lambda request, most: NO_DRAFT))
        self.model = self.liar = ModelLiar(propose)
        self._chance = random.Random(seed)

    def depths(self, found: Sequence[Draft], tokens: int, spare: int) -> list[int]:
        return [min(self._chance.randint(0, 9), spare // len(found)) for _ in found]


class Restless(Speculation):
    """Wakes and rests at random. When it is awake, it drafts as the class beside it does."""

    woke = unknown = 0
    chance = random.Random()

    def look(self, requests: Sequence[tuple[Request, int]], tokens: int, spare: int, *, ahead: bool) -> None:
        for request, most in requests:
            assert most > 0
            self._propose(request, most + request.unknown)
            self.unknown += request.unknown
        if self.chance.random() < 0.3:
            self.resting = False
            self.woke += 1

    def stepped(self, plan: Plan, seconds: float) -> None:
        super().stepped(plan, seconds)
        if self.chance.random() < 0.4:
            self.rest()


class RestlessBold(Restless, Bold):
    """Wakes and rests at random, and verifies all that there is a place for."""


class RestlessModel(Restless, BoldModel):
    """The same with a draft model."""


class Verifier(Worker):
    """Computes drafts as well: their KV is in memory until others are written over it."""

    verified = accepted = 0

    def _extend(self, share: Share) -> None:
        if share.kind is ShareKind.VERIFY:
            assert share.sample, "a draft of which nothing is drawn"
            self.rows[share.row].tokens += share.tokens[1:]
        super()._extend(share)

    def _result(self, share: Share) -> Result:
        if share.kind is not ShareKind.VERIFY:
            return super()._result(share)
        table = self.rows[share.row]
        facts, tokens = table.facts(share.stop), list[int]()
        for place, position in enumerate(range(share.start, share.stop), 1):
            tokens.append(chosen(facts[position], table.sampling.seed))
            if share.tokens[place : place + 1] != (tokens[-1],):
                break
        self.verified += len(share.tokens) - 1
        self.accepted += len(tokens) - 1
        table.tokens[share.start + 1 :] = tokens
        del table.known_facts[share.start + len(tokens) :]
        last = (share.start + len(tokens) - 1) // self.size
        table.pages = {index: page for index, page in table.pages.items() if index <= last}
        return Result(tuple(tokens))


class DraftHall(Hall):
    """A hall that speculates, and in which nobody may find what was never accepted."""

    def __init__(self, speculation: Speculation, **settings: Any) -> None:
        self.speculation = speculation
        super().__init__(**settings)
        plain = self.worker
        self.worker = self.verifier = Verifier(
            self.ledger.blocks, self.host.blocks, plain.size, plain.rope_from
        )
        self._names: dict[RequestId, list[bytes]] = {}
        self._true = set[bytes]()

    def submit(self, prompt: Sequence[int], *more: Any, **settings: Any) -> RequestId:
        id = super().submit(prompt, *more, **settings)
        self._note(id, list(prompt), len(prompt))
        return id

    def truth(self, request: Request) -> list[int]:
        """What the request is going to say behind what is known."""
        known = self.live[request.id]
        return known.expected[request.known - len(known.prompt) :]

    def _take(self, plan: Plan, outcome: Outcome) -> None:
        involved = [self.live[request.id] for request in self._involved()]
        super()._take(plan, outcome)
        for known in involved:
            self._note(known.id, [*known.prompt, *known.output], len(known.prompt))
        self.prove_names()

    def _involved(self) -> list[Request]:
        return [one for one in self.scheduler._requests.values() if one.id in self.live]

    def _note(self, id: RequestId, tokens: list[int], prompt: int) -> None:
        names, size = self._names.setdefault(id, []), self.limits.block_size
        parent = names[-1] if names else self.scheduler.prefixes.root_of(prompt)
        fresh = block_keys(parent, tokens[len(names) * size : len(tokens) // size * size], size)
        names += fresh
        self._true.update(fresh)

    def prove_names(self) -> None:
        """All that can be found, on any tier, is of tokens that a request has."""
        disk = self.scheduler.tiers.disk
        found = {*self.ledger._by_key, *self.host._by_key, *self.worker.disk}
        found.update(disk._by_key if disk is not None and hasattr(disk, "_by_key") else ())
        assert found <= self._true, "what was never accepted is found"


def liar(seed: int, hall: Callable[[], DraftHall]) -> Propose:
    """Garbage, duplicates, ends, the truth, the truth with a lie in it, and nothing."""
    chance, look = random.Random(seed), SuffixDrafter()

    def propose(request: Request, most: int) -> Draft:
        assert most > 0, "a draft was asked for where there is no place"
        found = look.propose(request, most)
        assert request.history is not None
        known = request.tokens[: request.known]
        assert request.history.tokens.tolist() == known, "the history is of other tokens"
        truth = hall().truth(request)[:most]
        tokens = {
            0: [chance.randrange(ALPHABET) for _ in range(most)],
            1: [known[-1]] * most,
            2: [END] * most,
            3: truth,
            4: [*truth[: most // 2], chance.randrange(ALPHABET), *truth[most // 2 + 1 :]][:most],
            5: [],
            6: list(found.tokens),
            7: [*truth, *[0] * most][:most],
            8: [10**6 + chance.randrange(9)] * most,
        }[chance.randrange(9)]
        tokens = tokens[: chance.choice([most, most, chance.randint(0, most)])]
        scores = tuple(chance.choice([0.0, 0.5, 1.0]) for _ in tokens)
        return Draft(tuple(tokens), scores, chance.choice([0, 1, 7, 100]))

    return propose
