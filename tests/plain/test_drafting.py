"""Drafts: what is looked up, what is verified, and that nobody sees anything of it before it is accepted."""

import logging
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from halls import Hall
from liars import (
    Bold,
    BoldModel,
    DraftHall,
    ModelLiar,
    Propose,
    Restless,
    RestlessBold,
    RestlessModel,
    Told,
    liar,
)
from penstock.kv.ledger.blocks import BlockLedger
from penstock.sched.request import Request
from penstock.sched.resting import DraftBudget
from penstock.sched.rules import PrefixRule, SchedulerLimits
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import (
    FOLLOWED,
    LEAST,
    LONGER,
    MOST_MATCHED,
    NO_DRAFT,
    Draft,
    TokenHistory,
    look_up,
)
from penstock.sched.survival import Survival
from penstock.step.plan import Plan, RequestId, Row, Share, ShareKind
from penstock.step.request import FinishReason
from worlds import ALPHABET, END, ROOT, sampling

# -- looking up
# ------------------------------------------------------------------------------------------------------------


def slowly(history: list[int], most: int) -> Draft:
    """What `look_up` is to find, place by place and token by token."""

    def matched(place: int) -> int:
        """How many tokens up to this place equal the newest ones."""
        count = 0
        while count <= place and history[place - count] == history[len(history) - 1 - count]:
            count += 1
        return min(count, MOST_MATCHED)

    longest = max(map(matched, range(len(history) - 1)), default=0)
    if not longest or most < 1:
        return Draft()
    text, scores = list(history), list[float]()
    places = [place + 1 for place in range(len(history) - 1) if matched(place) == longest][-FOLLOWED:]
    followed = len(places)
    for _ in range(min(most, LONGER * longest)):
        counts = Counter(text[place] for place in places)
        likeliest = max(counts.values())
        if likeliest < LEAST * followed:
            break
        token = next(text[place] for place in reversed(places) if counts[text[place]] == likeliest)
        text.append(token)
        scores.append(likeliest / len(places))
        places = [place + 1 for place in places if text[place] == token]
    return Draft(tuple(text[len(history) :]), tuple(scores), longest)


def test_what_followed_the_longest_match_is_found() -> None:
    chance = random.Random(1)
    shared = reached = 0
    for _ in range(700):
        letters = chance.choice([1, 2, 2, 3, 5, 40])
        history = [chance.randrange(letters) for _ in range(chance.choice([0, 1, 2, 5, 9, 30, 30, 700]))]
        history += history[len(history) // 2 :] * chance.choice([0, 0, 1, 3])
        most = chance.choice([0, 1, 2, 7, 32])
        found = look_up(np.array(history, dtype=np.int32), most)
        assert found == slowly(history, most)
        assert all(type(token) is int for token in found.tokens)
        shared += any(score < 1 for score in found.scores)
        reached += len(history) < len(found.tokens)
    assert shared > 28, "places hardly ever disagree"
    assert reached > 46, "repetitions hardly ever go on into the draft itself"


@pytest.mark.parametrize("length", [30, 31, 32, 33, 34, 35, 80])
def test_a_match_is_counted_up_to_a_length(length: int) -> None:
    """The older place has the longer match; beyond the cap the later one is as good."""
    chance = random.Random(length)
    text = [chance.randrange(9) for _ in range(length)]
    history = [*text, 10, *text[1:], 11, *text]
    found = look_up(np.array(history, dtype=np.int32), 1)
    assert found == slowly(history, 1)
    assert found.matched == min(length, MOST_MATCHED)
    assert found.tokens == ((10,) if length <= MOST_MATCHED else (11,))


def test_a_history_follows_its_request() -> None:
    history, tokens, chance = TokenHistory(), list[int](), random.Random(2)
    for _ in range(60):
        tokens += [chance.randrange(50) for _ in range(chance.choice([0, 1, 3, 40]))]
        history.follow(tokens, len(tokens))
        assert history.tokens.tolist() == tokens
    # Some are taken back, which it is told, and others come.
    del tokens[300:]
    history.follow(tokens, 300)
    tokens += [77] * 9
    history.follow(tokens, 309)
    assert history.tokens.tolist() == tokens


# -- what is verified
# ------------------------------------------------------------------------------------------------------------


def asking(*prompts: list[int]) -> list[Request]:
    """Requests with these prompts."""
    scheduler = Scheduler(BlockLedger(50), SchedulerLimits(4, 16, 8, 1000), PrefixRule(ROOT))
    for prompt in prompts:
        scheduler.submit(prompt, sampling(), 100)
    return list(scheduler._requests.values())


def sure(matched: int) -> Told:
    """Drafts as long as may be, on which all places agree."""
    return Told(lambda request, most: Draft((1,) * most, (1.0,) * most, matched))


def first(count: int) -> Callable[[int, Draft], int]:
    """So many tokens of every draft hold."""
    return lambda row, draft: min(count, len(draft.tokens))


def share_of(row: int, drafted: int) -> Share:
    kind = ShareKind.VERIFY if drafted else ShareKind.DECODE
    return Share(Row(row), 0, (0,) * (1 + drafted), 0, (), True, 1, kind)


def step(
    speculation: Speculation,
    requests: list[Request],
    held: Callable[[int, Draft], int],
    seconds: Callable[[int], float],
    spare: int = 60,
    most: int = 10,
) -> tuple[int, int, float]:
    """A step, of which every request may have `most` tokens of a draft: drafted tokens, all tokens, and the
    seconds that it took."""
    drafts = speculation.choose(
        speculation.propose([(request, most) for request in requests], spare), len(requests), spare
    )
    shares = [share_of(row, len(draft.tokens)) for row, draft in enumerate(drafts)]
    yielded = len(requests)
    for share, draft, request in zip(shares, drafts, requests, strict=True):
        if draft.tokens:
            speculation.verifies(share, draft)
            count = held(share.row, draft)
            speculation.learn(request, share, (0,) * (count + 1), count + 1)
            yielded += count
    took = seconds(sum(len(share.tokens) for share in shares))
    speculation.stepped(Plan((), tuple(shares)), took)
    return sum([len(draft.tokens) for draft in drafts]), yielded, took


def test_what_survives_is_learnt_by_the_length_of_the_match() -> None:
    survival = Survival()
    short, long, unsure = (
        Draft((1, 2, 3), (1.0, 1.0, 1.0), 2),
        Draft((1, 2, 3), (1.0, 1.0, 1.0), 32),
        Draft((1, 2, 3), (0.6, 0.6, 0.6), 2),
    )
    first, second, third = survival.of(short)
    assert (first, second, third) == pytest.approx((2 / 6, 2 / 6 * 3 / 7, 2 / 6 * 3 / 7 * 4 / 8))
    assert survival.of(unsure)[0] == pytest.approx(0.6 * 2 / 6)
    for _ in range(300):
        survival.learn(short, 1)
    first, second, third = survival.of(short)
    assert first > 0.98
    assert second < 0.02
    assert third <= second
    assert survival.of(unsure)[0] == pytest.approx(0.6 * 2 / 6), "those of which places disagree are others"
    assert survival.of(long)[0] == pytest.approx(32 / 36)
    # What holds now counts more than what did not long ago.
    for _ in range(40):
        survival.learn(short, 3)
    assert 0.45 < survival.of(short)[1] < 0.65
    for _ in range(1500):
        survival.learn(short, 3)
    assert survival.of(short)[1] > 0.97


def test_a_token_never_survives_the_one_before_it() -> None:
    survival, chance = Survival(), random.Random(3)
    for _ in range(400):
        count = chance.randint(0, 32)
        scores = tuple(chance.choice([0.0, 0.3, 1.0]) for _ in range(count))
        draft = Draft((0,) * count, scores, chance.randint(0, 40))
        of = survival.of(draft)
        assert len(of) == count
        assert all(1 >= sooner >= later >= 0 for sooner, later in zip([1.0, *of], of, strict=False))
        survival.learn(draft, chance.randint(0, count))


def rate(speculation: Speculation, survival: list[list[float]], counts: Sequence[int]) -> float:
    """Tokens a second if so many of each draft are verified."""
    gained = sum(sum(some[:count]) for some, count in zip(survival, counts, strict=True))
    return (len(survival) + gained) / speculation._at(len(survival) + sum(counts))


def test_those_tokens_are_verified_that_give_most_tokens_a_second() -> None:
    chance = random.Random(4)
    chosen = none = mixed = 0
    for _ in range(250):
        rows = chance.randint(1, 3)
        speculation = Speculation(Told(lambda request, most: Draft()))
        fixed, each = chance.choice([0.1, 1, 5, 50]), chance.choice([0.1, 1.0, 3.0])
        for tokens in range(1, 30):
            speculation._seconds.add(tokens, fixed + each * tokens)
        survival = [
            sorted((chance.random() for _ in range(chance.randint(0, 4))), reverse=True) for _ in range(rows)
        ]
        spare = chance.randint(0, 10)

        found = tuple(speculation._best(survival, rows, spare))
        every = [
            counts for counts in product(*(range(len(some) + 1) for some in survival)) if sum(counts) <= spare
        ]
        assert found in every
        best = max(rate(speculation, survival, counts) for counts in every)
        if best > 1.02 * rate(speculation, survival, (0,) * rows) * (1 + 1e-9):
            assert rate(speculation, survival, found) == pytest.approx(best)
            chosen += 1
            mixed += len(set(found)) > 1
        else:
            assert not any(found)
            none += 1
    assert min(chosen, none, mixed) > 30


@pytest.mark.parametrize("rows", [1, 3])
def test_what_pays_is_verified_and_what_does_not_is_left(rows: int) -> None:
    """Where weights stream, a step of more tokens takes as long."""
    requests = asking(*([0, 1, 2],) * rows)
    for seconds, holds, least, most in (
        (lambda tokens: 1.0, 10, 9.0, 11.0),
        (lambda tokens: 1.0, 0, 0.98, 1.0),
        (lambda tokens: 1.0 * tokens, 10, 0.97, 1.01),
        (lambda tokens: 0.9 + 0.1 * tokens, 2, 1.5, 3.0),
    ):
        speculation = Speculation(sure(8))
        done = [step(speculation, requests, first(holds), seconds)
                for _ in range(500)]  # fmt: skip
        tokens, time = sum(one[1] for one in done), sum(one[2] for one in done)
        gain = tokens / time / (rows / seconds(rows))
        assert least <= gain <= most, (gain, holds)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_that_never_pays_costs_little(rows: int) -> None:
    """Two tokens take twice as long as one, and nothing ever holds. What is not known at first costs some
    steps; then only probes do, of one token."""
    speculation = Speculation(sure(20))
    requests = asking(*([0, 1, 2],) * rows)
    done = [step(speculation, requests, first(0), float) for _ in range(2000)]
    lost = [(time - rows) / rows for _, _, time in done]
    assert sum(lost[:128]) < 16, "what is not known costs too much"
    assert 0.004 <= sum(lost[1000:]) / 1000 <= 0.01
    assert max(sum(lost[at : at + 64]) for at in range(128, 1936)) <= 0.02 * 64
    assert {drafted for drafted, _, _ in done[1000:]} == {0, 1}


def test_a_draft_that_never_holds_is_left_where_it_is_cheap() -> None:
    """Thirty tokens of the longest match cost a seventh of a step. Where none has held for long, no belief of
    the beginning keeps them in."""
    for matched in (1, 31):
        speculation = Speculation(sure(matched))
        requests = asking([0, 1, 2])
        done = [
            step(speculation, requests, first(0), lambda tokens: 0.995 + 0.005 * tokens, most=32)
            for _ in range(1500)
        ]
        assert sum(time - 1 for _, _, time in done[:500]) < 30
        assert sum(time - 1 for _, _, time in done[500:]) / 1000 < 0.02


def test_a_probe_comes_at_the_stated_rate_where_it_costs_little() -> None:
    """What does not hold now is seen to hold when it does."""
    speculation = Speculation(sure(3))
    requests = asking([0, 1, 2])

    def seconds(tokens: int) -> float:
        return 0.99 + 0.01 * tokens

    for _ in range(1000):
        step(speculation, requests, first(0), seconds)
    probes = [step(speculation, requests, first(0), seconds)[0] for _ in range(640)]
    assert sum(map(bool, probes)) == 10
    assert set(probes) == {0, 4}
    gained = [step(speculation, requests, first(32), seconds)[1] for _ in range(1000)]
    assert sum(gained[-50:]) > 50 * 8


def test_where_a_probe_holds_more_follow_at_once() -> None:
    """A token takes a tenth of a step: several have to hold until that pays."""
    speculation = Speculation(sure(3))
    [request] = asking([0, 1, 2])

    def seconds(tokens: int) -> float:
        return 0.9 + 0.1 * tokens

    for _ in range(1000):
        step(speculation, [request], first(0), seconds)
    drafted = [step(speculation, [request], first(32), seconds)[0] for _ in range(400)]
    begins = next(at for at, count in enumerate(drafted) if count)
    assert begins < 200
    assert all(drafted[begins : begins + 100])


@pytest.mark.parametrize("spare", range(12))
def test_no_step_verifies_more_than_there_is_to_spare(spare: int) -> None:
    requests = asking(*([0, 1, 2],) * 5)
    for most, seconds, in_vain in ((10, 1.0, 0), (2, 1.0, 0), (10, 0.0, 0), (10, 1e-9, 300)):
        speculation = Speculation(sure(20))
        speculation.stepped(Plan((), (share_of(0, 0),)), 1.0)
        for _ in range(in_vain):
            speculation.survival.learn(Draft((1,) * 10, (1.0,) * 10, 20), 0)
        for _ in range(90):
            drafts = speculation.choose(
                speculation.propose([(request, most) for request in requests], spare), 5, spare
            )
            assert sum(len(draft.tokens) for draft in drafts) <= spare
            assert all(len(draft.tokens) <= most for draft in drafts)
            tokens = 5 + sum(len(draft.tokens) for draft in drafts)
            speculation.stepped(Plan((), (share_of(0, tokens - 1),)), seconds * tokens + 1.0 * bool(seconds))


# -- in the scheduler
# ------------------------------------------------------------------------------------------------------------


def crowd(seed: int, *, bold: bool = True, model: bool = False, restless: bool = False) -> DraftHall:
    """A hall with little memory and much to do, which it has done, where everyone is lied to."""
    chance = random.Random(seed)
    size = chance.choice([1, 2, 4, 8])
    hall: DraftHall
    propose = liar(seed, lambda: hall)
    chosen: Speculation
    if model:
        chosen = (RestlessModel if restless else BoldModel)(propose, seed)
    else:
        chosen = (RestlessBold if restless else Bold if bold else Speculation)(Told(propose))
    if isinstance(chosen, Restless):
        chosen.chance = random.Random(seed)
    hall = DraftHall(
        chosen,
        blocks=chance.randint(4, 24),
        host_blocks=(0, chance.randint(8, 20))[seed % 3 > 0],
        block_size=size,
        max_step_tokens=max(size, 6, chance.choice([4, 7, 16, 64])),
        max_sequences=chance.randint(1, 6),
        long_from=chance.choice([None, 4 * size]),
        recent=chance.randint(0, 2),
        rope_from=chance.choice([None, None, 3 * size]),
        near=(0, None)[seed % 2],
        store=("off", "eager", "lazy")[seed % 5 % 3],
        disk=(0, 6, 60)[seed // 3 % 3],
        ahead=seed % 7 < 4,
        share=seed % 11 != 0,
    )
    hall.worker.lossy, hall.worker.seconds = seed % 4 == 0, (1e-3, 0.03)[seed % 5 == 0]
    beginnings = [[chance.randrange(ALPHABET) for _ in range(4 * size)] for _ in range(2)]
    for _ in range(80):
        room = hall.scheduler.longest - 1
        what = chance.random()
        if hall.scheduler.waiting < 3 and what < 0.4:
            prompt = chance.choice(beginnings) + [chance.randrange(2) for _ in range(chance.randint(0, 9))]
            prompt = prompt[: room // 2 + 1]
            most = chance.choice([None, *range(1, min(room - len(prompt) + 2, 40))])
            hall.submit(prompt, most, end=[END] if chance.random() < 0.4 else ())
        elif hall.live and what > 0.97:
            hall.stop(chance.choice(list(hall.live)))
        elif what > 0.95:
            hall.interrupt()
        else:
            hall.step()
    hall.drain()
    return hall


@pytest.mark.parametrize("seed", range(3))
def test_drafts_change_no_token_and_leave_nothing(seed: int) -> None:
    verified = accepted = preemptions = hits = demoted = stopped = 0
    for one in range(8 * seed, 8 * seed + 8):
        hall = crowd(one, bold=one % 5 > 0)
        verified += hall.verifier.verified
        accepted += hall.verifier.accepted
        preemptions += hall.scheduler.preemptions
        hits += sum(bool(known.cached) for known in hall.ended)
        demoted += hall.demoted
        stopped += sum(known.reason is FinishReason.STOP for known in hall.ended)
    assert verified > 150, "these halls speculate too little to prove anything"
    assert 50 < accepted < verified, "these drafts are too good or too bad to prove anything"
    assert preemptions > 3, "these halls are too large to prove anything"
    assert min(hits, demoted, stopped) > 3, "in these halls too little happens to prove anything"


@pytest.mark.parametrize("model", [False, True])
def test_nor_where_it_wakes_and_rests_at_random(model: bool) -> None:
    verified = accepted = preemptions = woke = ran_ahead = unknown = 0
    for one in range(60, 80):
        hall = crowd(one, model=model, restless=True)
        assert isinstance(hall.speculation, Restless)
        verified += hall.verifier.verified
        accepted += hall.verifier.accepted
        preemptions += hall.scheduler.preemptions
        ran_ahead += hall.ran_ahead
        woke += hall.speculation.woke
        unknown += hall.speculation.unknown
    assert verified > 150
    assert 50 < accepted < verified
    assert preemptions > 3
    assert min(woke, ran_ahead, unknown) > 100, "it hardly ever wakes, or rests"


def test_a_draft_model_changes_no_token_and_leaves_nothing() -> None:
    verified = accepted = drafted = preemptions = 0
    for one in range(40, 52):
        hall = crowd(one, model=True)
        assert isinstance(hall.speculation, BoldModel)
        verified += hall.verifier.verified
        accepted += hall.verifier.accepted
        drafted += hall.speculation.liar.drafted
        preemptions += hall.scheduler.preemptions
    assert drafted >= verified > 150
    assert 50 < accepted < verified
    assert preemptions > 3


def model_of(seconds: float) -> Speculation:
    """A speculation whose draft model takes so long for a token, and which looks nothing up."""
    speculation = Speculation(Told(lambda request, most: NO_DRAFT))
    speculation.model = ModelLiar(lambda request, most: NO_DRAFT)
    speculation.model.seconds = seconds
    return speculation


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.2])
@pytest.mark.parametrize("holds", [0.5, 0.9, 1.0])
def test_a_draft_model_drafts_as_many_tokens_as_pay(rows: int, seconds: float, holds: float) -> None:
    speculation = model_of(seconds)
    for tokens in (rows, 2 * rows, 4 * rows, 8 * rows, 16 * rows, 33 * rows):
        share = share_of(0, tokens - 1)
        speculation.stepped(Plan((), (share,)), 0.1 + 0.002 * tokens)
    chance = random.Random(1)
    for _ in range(900):
        draft = Draft((1,) * 20, (1.0,) * 20, by_model=True)
        speculation.survival.learn(draft, next((at for at in range(20) if chance.random() > holds), 20))
    speculation.budget = DraftBudget()
    chances = speculation.survival.of_model(20)
    assert chances[0] == pytest.approx(holds, abs=0.06)

    def rate(depth: int) -> float:
        return rows * (1 + sum(chances[:depth])) / (speculation._at(rows * (1 + depth)) + depth * seconds)

    spare = 20 * rows
    (depth, *_) = depths = speculation.depths([NO_DRAFT] * rows, rows, spare)
    best = max(range(21), key=rate)
    assert depths == [depth] * rows
    assert rate(depth) == rate(best) if rate(best) > 1.02 * rate(0) else depth == 0


def test_a_draft_model_is_left_where_it_does_not_pay_and_asked_again_now_and_then() -> None:
    speculation = model_of(0.05)
    assert isinstance(speculation.model, ModelLiar)
    speculation.model.spent = 0.2
    for tokens in (1, 2, 4, 8, 16):
        speculation.stepped(Plan((), (share_of(0, tokens - 1),)), 0.1)
    for _ in range(400):
        speculation.survival.learn(Draft((1,) * 4, (1.0,) * 4, by_model=True), 0)
    asked = [speculation.depths([NO_DRAFT], 1, 30)[0] for _ in range(1200)]
    # Each takes 4 steps of the model, two of the target's: one in 128 may come.
    assert set(asked) == {0, 4}
    assert 7 <= asked.count(4) <= 10


def test_a_draft_model_is_asked_again_where_a_probe_has_more_tokens_than_any_step_had() -> None:
    speculation = model_of(0.01)
    speculation.stepped(Plan((), tuple(share_of(row, 0) for row in range(8))), 0.1)
    for _ in range(400):
        speculation.survival.learn(Draft((1,) * 4, (1.0,) * 4, by_model=True), 0)
    assert any(speculation.depths([NO_DRAFT] * 8, 8, 300)[0] for _ in range(300))


def test_what_is_looked_up_goes_before_a_draft_model_where_more_is_expected_of_it() -> None:
    speculation = model_of(0.0001)
    speculation.stepped(Plan((), (share_of(0, 0),)), 0.1)
    long, short = Draft((1,) * 8, (1.0,) * 8, 32), Draft((1,), (0.2,), 1)
    assert speculation.depths([long, short, NO_DRAFT], 3, 12)[0] == 0
    assert min(speculation.depths([long, short, NO_DRAFT], 3, 12)[1:]) > 0


def test_what_once_did_not_hold_is_tried_again_where_all_before_it_holds() -> None:
    """Else a draft would stay as short as the worst ones before it asked for."""
    [request], seen = asking([1, 2, 3]), list[int]()
    speculation = Speculation(sure(1))
    in_vain = [
        step(speculation, [request], first(2), lambda tokens: 1 + 0.05 * tokens)[0] for _ in range(400)
    ]
    assert in_vain[200:].count(2) >= 196, "what is tried in vain is tried more and more rarely"
    assert speculation._best([speculation.survival.of(Draft((1,) * 10, (1.0,) * 10, 1))], 1, 60) == [2]
    for _ in range(200):
        seen.append(step(speculation, [request], first(10), lambda tokens: 1 + 0.05 * tokens)[0])
    assert 4 in seen[:70]
    assert set(seen[150:]) == {10}


def test_before_a_draft_model_was_measured_it_drafts_a_few_tokens() -> None:
    assert model_of(0.0).depths([NO_DRAFT] * 2, 2, 30) == [4, 4]
    assert model_of(0.0).depths([NO_DRAFT] * 2, 2, 3) == [1, 1]


def test_a_draft_model_computes_while_nothing_of_the_target_is_under_way() -> None:
    """Steps end in the order in which they begin, and those of the model end before a plan is made."""
    chunk = Share(Row(0), 0, (1, 2), 0, (), False, 9, ShareKind.CHUNK)
    for speculation, waits in ((model_of(0.1), True), (Speculation(Told(fails)), False)):
        hall = DraftHall(speculation, blocks=20, host_blocks=0)
        assert hall.scheduler._drafting is not None
        speculation.resting = False
        assert hall.scheduler._drafting.waits([Plan((), (chunk,))], []) is waits
        assert not hall.scheduler._drafting.waits([], [])
        speculation.resting = True
        assert not hall.scheduler._drafting.waits([Plan((), (chunk,))], [])


# -- beside others
# ------------------------------------------------------------------------------------------------------------


def always_wrong(hall: Callable[[], DraftHall]) -> Propose:
    """Drafts of which not even the first token holds."""

    def propose(request: Request, most: int) -> Draft:
        wrong = (hall().truth(request)[0] + 1) % ALPHABET
        return Draft((wrong, *[END] * (most - 1)), (1.0,) * most, 9)

    return propose


def always_right(hall: Callable[[], DraftHall]) -> Propose:
    """Drafts that all hold, and go on behind the request's end if there is a place."""

    def propose(request: Request, most: int) -> Draft:
        tokens = [*hall().truth(request), *[0] * most][:most]
        return Draft(tuple(tokens), (1.0,) * most, 9)

    return propose


def told(how: Callable[[Callable[[], DraftHall]], Propose], **settings: Any) -> DraftHall:
    """A hall whose drafts are all verified."""
    halls = list[DraftHall]()
    halls.append(DraftHall(Bold(Told(how(lambda: halls[0]))), **settings))
    return halls[0]


Served = list[tuple[list[tuple[RequestId, int, tuple[int, ...]]], int, int]]


def served(hall: Hall, seed: int, **more: Any) -> Served:
    """What is computed in each step of a busy hall, without drafts, and how many were admitted and
    preempted so far."""
    chance, done = random.Random(seed), Served()
    plan = hall.scheduler.plan

    def watched() -> Plan:
        made, rows = plan(), hall.scheduler._queues.by_row
        shares = [
            (rows[one.row].id, one.start, one.tokens[: 1 if one.kind is ShareKind.VERIFY else None])
            for one in made.shares
        ]
        done.append((sorted(shares), len(made.admissions), hall.scheduler.preemptions))
        return made

    hall.scheduler.plan = watched  # type: ignore[method-assign]
    beginnings = [[chance.randrange(ALPHABET) for _ in range(9)] for _ in range(2)]
    for _ in range(60):
        prompt = chance.choice(beginnings) + [chance.randrange(2) for _ in range(chance.randint(0, 9))]
        prompt, most = prompt[: hall.scheduler.longest // 2], chance.choice([1, 2, 5, 12, 30])
        ends = chance.choice([(), (), (END,)])
        if hall.scheduler.waiting < 3 and chance.random() < 0.6:
            hall.submit(prompt, min(most, hall.scheduler.longest - len(prompt)), end=ends)
        else:
            hall.step()
    hall.drain()
    return done


def test_a_draft_takes_nothing_that_a_request_needs() -> None:
    """Whoever is admitted, preempted, and computes how much: it is the same, step by step, with drafts of
    which nothing holds. No block is shared here, since what is cached longest may give way to a draft."""
    preempted = verified = 0
    for seed in range(10):
        settings: dict[str, Any] = {
            "blocks": 6 + 2 * (seed % 3),
            "host_blocks": (0, 12)[seed % 2],
            "block_size": (1, 2, 4, 8)[-seed % 4],
            "max_step_tokens": (16, 9, 16, 64)[seed % 5 % 4],
            "max_sequences": 3 + seed % 4,
            "recent": seed % 3,
            "near": (0, None)[seed % 5 % 2],
            "share": False,
        }
        hall = told(always_wrong, **settings)
        assert served(hall, seed) == served(Hall(**settings), seed)
        assert not hall.verifier.accepted
        preempted += hall.scheduler.preemptions
        verified += hall.verifier.verified
    assert preempted > 3
    assert verified > 500


@pytest.mark.parametrize("long_from", [None, 16])
@pytest.mark.parametrize("how", [always_wrong, always_right])
def test_the_same_is_cached_as_without_drafts(
    how: Callable[[Callable[[], DraftHall]], Propose], long_from: int | None
) -> None:
    """Also of what a draft has ended with, but for the tail of a long request."""
    room: dict[str, Any] = {"blocks": 200, "host_blocks": 200, "long_from": long_from, "max_step_tokens": 64}
    hall, plain = told(how, **room), Hall(**room)
    for one in (hall, plain):
        for seed in range(12):
            chance = random.Random(seed)
            prompt = [chance.randrange(ALPHABET) for _ in range(3 + seed)]
            one.submit(prompt, 9 + seed, end=(END,) if seed % 3 == 0 else ())
        one.drain()
    assert set(hall.host._by_key) <= set(plain.host._by_key)
    assert set(hall.ledger._by_key) <= set(plain.ledger._by_key)
    assert long_from or set(hall.ledger._by_key) == set(plain.ledger._by_key)
    assert len(plain.ledger._by_key) > 10
    assert hall.verifier.verified > 100


@pytest.mark.parametrize("end", [(), (END,)])
def test_a_request_ends_where_it_ends_inside_a_draft(end: tuple[int, ...]) -> None:
    """At every length. With drafts that hold it takes no more steps than it must."""
    for most in range(1, 24):
        hall = told(always_right, blocks=20, host_blocks=0, long_from=None)
        id = hall.submit([0, 1, 0, 1, 1], most, end=end)
        known, steps = hall.live[id], 0
        while hall.live:
            assert all(share.stop < 5 + most for share in hall.step().shares), "a token that is not wanted"
            steps += 1
        left = most - 1  # Behind the first token, each step verifies fifteen tokens and yields sixteen.
        assert steps == 1 + (-(-min(left, len(known.expected) - 1) // 16))
        assert hall.speculation.counts.accepted < len(known.expected)


def test_who_comes_later_decodes_in_the_same_steps() -> None:
    """Where steps run ahead: otherwise each of two would have every second step from then on."""
    hall = told(always_wrong, ahead=True, blocks=40, host_blocks=0, long_from=None)
    hall.submit([0, 1, 2], 30)
    for _ in range(3):
        hall.step()
    hall.submit([0, 1, 1], 30)
    together = [len(hall.step().shares) for _ in range(12)]
    assert {count for count in together[2:] if count} == {2}
    hall.drain()


def test_prompts_run_ahead_while_nobody_decodes() -> None:
    hall = told(always_wrong, ahead=True, blocks=40, host_blocks=0, long_from=None, max_step_tokens=4)
    hall.submit([0, 1, 2, 0] * 5, 3)
    hall.step()
    assert [share.start for share in hall.step().shares] == [0]
    assert [share.start for share in hall.flight[0].shares] == [4] if hall.flight else False
    hall.drain()


def test_who_ends_while_its_draft_is_verified_leaves_nothing() -> None:
    hall = told(always_right, blocks=60, host_blocks=0, long_from=None, max_step_tokens=90)
    first, second = hall.submit([0, 1, 0], 60), hall.submit([1, 1, 0], 60)
    hall.step()
    plan = hall.scheduler.plan()
    assert [share.kind for share in plan.shares] == [ShareKind.VERIFY] * 2
    outcome = hall.worker.run(plan)
    hall.stop(first)
    hall._take(plan, outcome)
    assert len(hall.live[second].output) > 1
    hall.drain()


def test_a_draft_that_is_too_large_for_the_memory_ends_no_request() -> None:
    """The step without it is smaller, and drafts come back later, each time after twice as many steps."""
    hall = told(always_wrong, blocks=90, long_from=None, max_sequences=1, max_step_tokens=4)
    hall.submit([0, 1, 0], 300)
    hall.step()
    for pause in (64, 128):
        plan = hall.scheduler.plan()
        assert [(share.kind, len(share.tokens)) for share in plan.shares] == [(ShareKind.VERIFY, 4)]
        assert hall.scheduler.narrow(plan) is None
        hall.recover(hall.worker.spoil(plan))
        plain = 0
        while not hall.verifier.verified and hall.live:
            hall.step()
            plain += 1
        assert pause <= plain <= pause + 30
        hall.verifier.verified = 0
    hall.drain()


def test_a_plan_with_drafts_may_be_interrupted_anywhere() -> None:
    """It has an order to the host, and drafts of a long request and of a short one."""
    lines, unfinished, before = 0, True, sys.gettrace()
    while unfinished:
        hall = told(always_wrong, blocks=20, max_sequences=2, max_step_tokens=64)
        hall.submit([0, 1, 2] * 7, 30)
        hall.submit([0, 1, 1], 9)
        for _ in range(5):
            hall.step()
        left = lines

        def trace(frame: Any, event: str, arg: object) -> Any:
            nonlocal left
            if not frame.f_globals["__name__"].startswith("penstock."):
                return None
            left -= event == "line"
            if left < 0:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            plan = hall.scheduler.plan()
            unfinished = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        hall.recover()
        hall.drain()
        lines += 41
    assert [share.kind for share in plan.shares].count(ShareKind.VERIFY) == 2
    assert lines > 150


# -- drafters that fail
# ------------------------------------------------------------------------------------------------------------


def fails(request: Request, most: int) -> Draft:
    raise ValueError("no such token")


NONSENSE: dict[str, Propose] = {
    "ValueError: no such token": fails,
    "AttributeError": lambda request, most: None,  # type: ignore[dict-item,return-value]
    "2 tokens with 1 scores": lambda request, most: Draft((1, 1), (1.0,), 3),
    "1 tokens with 2 scores": lambda request, most: Draft((1,), (1.0, 1.0), 3),
    "tokens, where": lambda request, most: Draft((1,) * (most + 1), (1.0,) * (most + 1), 3),
    "does not know (negative)": lambda request, most: Draft((-1,), (1.0,), 3),
    "does not know (too large)": lambda request, most: Draft((ALPHABET,), (1.0,), 3),
    "does not know (no number)": lambda request, most: Draft((0.5,), (1.0,), 3),  # type: ignore[arg-type]
    "no probabilities (above one)": lambda request, most: Draft((1,), (1.5,), 3),
    "no probabilities (nan)": lambda request, most: Draft((1,), (math.nan,), 3),
    "less than nothing": lambda request, most: Draft((1,), (1.0,), -1),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_drafter_that_fails_in_a_request_is_dropped_from_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails for the second request with its third draft. The answer goes on, and so do others' drafts."""
    asked = Counter[int]()

    def propose(request: Request, most: int) -> Draft:
        asked[request.id] += 1
        nonsense = request.id == 1 and asked[1] == 3
        return NONSENSE[name](request, most) if nonsense else Draft((0,), (1.0,), 1)

    speculation = Bold(Told(propose), vocabulary=ALPHABET)
    hall = DraftHall(speculation, blocks=90, host_blocks=0, long_from=None)
    with caplog.at_level(logging.WARNING, "penstock"):
        for _ in range(3):
            hall.submit([0, 1, 1], 40)
        hall.drain()
    assert all(known.reason is FinishReason.LENGTH for known in hall.ended)
    assert asked[1] == 3
    assert min(asked[0], asked[2]) > 15
    assert speculation.counts.failed == 1
    (line,) = caplog.messages
    assert name.split(" (")[0] in line
    assert "request 1" in line
    assert "Told" in line


def test_a_drafter_that_stalls_in_a_request_is_dropped_from_it(caplog: pytest.LogCaptureFixture) -> None:
    now, asked = 0.0, 0

    def propose(request: Request, most: int) -> Draft:
        nonlocal now, asked
        asked += 1
        now += 0.1 if asked < 3 else 9.0
        return Draft((0,), (1.0,), 1)

    hall = DraftHall(Bold(Told(propose), clock=lambda: now), blocks=30, host_blocks=0, long_from=None)
    with caplog.at_level(logging.WARNING, "penstock"):
        hall.submit([0, 1, 1], 20)
        hall.drain()
    assert asked == 3
    (line,) = caplog.messages
    assert "9.0 s" in line


def test_an_interrupt_is_no_fault_of_a_drafter() -> None:
    def propose(request: Request, most: int) -> Draft:
        raise KeyboardInterrupt

    hall = DraftHall(Bold(Told(propose)), blocks=30, host_blocks=0, long_from=None)
    hall.submit([0, 1, 1], 20)
    hall.step()
    with pytest.raises(KeyboardInterrupt):
        hall.step()
    assert hall.speculation is not None
    assert not hall.speculation.counts.failed
