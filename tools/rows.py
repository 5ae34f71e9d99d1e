"""Assembles the training batches: rows of text with hidden facts and questions, and rows of plain prose, in
worker processes."""

from __future__ import annotations

import multiprocessing
import queue
import random
from dataclasses import dataclass
from multiprocessing.context import BaseContext

import numpy as np
from corpus import ANSWER_HEAD, STOP, VALUE, Corpus
from needles import (
    ASSISTANT,
    END_OF_TEXT,
    END_OF_TURN,
    INSTRUCTIONS,
    PLAIN_LEADS,
    QUESTION_LEADS,
    SYSTEM,
    SYSTEM_PROMPTS,
    USER,
    FactMaker,
)


@dataclass
class Batch:
    """Rows of `length + 1` tokens. spans: 0, or the number within the row of the answer whose value the token
    belongs to."""

    tokens: np.ndarray  # int16 [rows, length + 1]
    weights: np.ndarray  # uint8 [rows, length + 1], tenths
    spans: np.ndarray  # int16 [rows, length + 1]


class Assembler:
    """Draws batches from a corpus. Pieces are tokenized apart but only ever joined where the tokenizer splits
    anyway: before a blank or newline that follows the end of a sentence, or beside a special token. So a row
    has the tokens of its text as a whole."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.end_of_text = corpus.tok.token_to_id(END_OF_TEXT)
        self.shares = [share for share, _ in corpus.hay]

    def prose_batch(self, rows: int, length: int, seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        pool = self.corpus.prose
        tokens = np.full((rows, length + 1), self.end_of_text, np.int16)
        weights = np.zeros((rows, length + 1), np.uint8)
        last = np.searchsorted(pool.starts, len(pool.tokens) - length - 1)
        for row, start in enumerate(pool.starts[rng.integers(0, max(last, 1), rows)]):
            lead = int(rng.random() < 0.75)  # a quarter of the rows do without the <|endoftext|> at the start
            piece = slice(start, start + length + 1 - lead)
            count = len(pool.tokens[piece])
            tokens[row, lead : lead + count], weights[row, lead : lead + count] = (
                pool.tokens[piece],
                pool.weights[piece],
            )
        weights[:, 0] = 0
        return Batch(tokens, weights, np.zeros_like(tokens))

    def fact_batch(self, rows: int, length: int, seed: int) -> Batch:
        """Rows of one text with hidden facts each and the questions for them."""
        rng = random.Random(seed)
        plans = [_Plan(rng, length) for _ in range(rows)]
        texts = [text for plan in plans for text in plan.texts()]
        encoded = iter([e.ids for e in self.corpus.tok.encode_batch(texts, add_special_tokens=False)])
        batch = Batch(*(np.zeros((rows, length + 1), t) for t in (np.int16, np.uint8, np.int16)))
        batch.tokens[:] = self.end_of_text
        for row, plan in enumerate(plans):
            self._fill(batch, row, plan, [next(encoded) for _ in plan.texts()], length + 1, rng)
        return batch

    def _fill(
        self, batch: Batch, row: int, plan: _Plan, ids: list[list[int]], room: int, rng: random.Random
    ) -> None:
        """Write one row: head, text with facts, questions and answers; drop questions, then facts, that find
        no room."""
        head, facts = ids[0], ids[1 : 1 + plan.facts]
        asked = [ids[1 + plan.facts + 3 * i :][:3] for i in range(plan.questions)]
        while asked and len(head) + sum(map(len, facts)) + sum(len(p) for a in asked for p in a) + 48 > room:
            asked.pop()
            if not asked:
                facts, asked = facts[:1], []
        sizes = sum(map(len, facts)) + sum(len(p) for a in asked for p in a)
        budget = room - len(head) - sizes - 4
        pool = rng.choices(self.corpus.hay, self.shares)[0][1]
        if len(pool.tokens) < budget + 8:
            pool = max((p for _, p in self.corpus.hay), key=lambda p: len(p.tokens))
        first = max(np.searchsorted(pool.starts, len(pool.tokens) - budget - 4), 1)
        start = int(pool.starts[rng.randrange(first)])
        begin = (
            start - 2 if plan.joined else start
        )  # with the blank line, where something stands before the text
        low, high = np.searchsorted(pool.cuts, start + 1), np.searchsorted(pool.cuts, start + budget, "right")
        cuts = pool.cuts[low:high]
        end = int(cuts[-1]) if len(cuts) else begin
        places = sorted(
            int(cuts[min(np.searchsorted(cuts, start + rng.random() * (end - start)), len(cuts) - 1)])
            if len(cuts)
            else end
            for _ in facts[plan.fact_first :]
        )
        places = [begin] * plan.fact_first + places
        at = 0

        def put(piece: list[int] | np.ndarray, weight: int | np.ndarray, span: int = 0) -> None:
            nonlocal at
            stop = min(at + len(piece), room)
            size = stop - at
            batch.tokens[row, at:stop] = piece[:size]
            batch.weights[row, at:stop] = weight if isinstance(weight, int) else weight[:size]
            batch.spans[row, at:stop] = span
            at = stop

        put(head, 0)
        done = begin
        for place, fact in zip(places, facts, strict=False):
            put(pool.tokens[done:place], pool.weights[done:place])
            put(fact, 0)
            done = place
        put(pool.tokens[done:end], pool.weights[done:end])
        for number, (question, answer, value) in enumerate(asked, 1):
            put(question, 0)
            put(answer, ANSWER_HEAD)
            put(value, VALUE, number)
            if plan.chat:  # the value's piece ends with <|end|>, which is not part of the value
                batch.weights[row, at - 1], batch.spans[row, at - 1] = STOP, 0
        batch.weights[row, 0] = 0


class _Plan:
    """What one row shall hold, as texts still to be tokenized."""

    def __init__(self, rng: random.Random, length: int) -> None:
        most = 10 if length <= 600 else min(96, length // 70)
        maker = FactMaker(rng)
        drawn = [maker.draw() for _ in range(1 + int(most * rng.random()))]
        self.facts = len(drawn)
        self.chat = rng.random() < 0.82
        chosen = rng.sample(drawn, min(len(drawn), max(6, min(64, length // 90))))
        self.questions = len(chosen)
        instruction = rng.choice(INSTRUCTIONS)
        self.fact_first = int(
            rng.random() < 0.5 / (1 + self.facts) + 0.05
        )  # a fact before the text, which no cut of the text allows
        self.joined = bool(instruction) or bool(self.fact_first)
        lead = rng.choice((" ", " ", " ", " ", "\n", "\n\n"))
        head = END_OF_TEXT if rng.random() < 0.75 else ""
        if self.chat:
            if rng.random() < 0.1:
                head += f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END_OF_TURN}"
            head += USER
        statements = [lead + f.statement for f in drawn]
        if self.fact_first:
            statements[0] = ("\n\n" if instruction else "") + drawn[0].statement
        self._texts = [head + instruction, *statements]
        between, reply = rng.choice(PLAIN_LEADS)
        first = rng.choice(QUESTION_LEADS)
        for number, fact in enumerate(chosen):
            if self.chat:
                question = (first if number == 0 else USER) + fact.question + END_OF_TURN + ASSISTANT
                self._texts += [question, fact.answer_head, f" {fact.value}.{END_OF_TURN}"]
            else:
                self._texts += [between + fact.question, reply + fact.answer_head, f" {fact.value}."]

    def texts(self) -> list[str]:
        return self._texts


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: it ends when `until` of the progress is reached, or sooner when its facts are
    found."""

    length: int
    until: float
    mix: dict[int, float]  # row length -> share of the steps


def curriculum(lengths: tuple[int, ...], shares: list[float]) -> list[Stage]:
    """Most rows have the stage's length, some the shorter ones."""
    stages, until = [], 0.0
    for i, (length, share) in enumerate(zip(lengths, shares, strict=True)):
        until += share / sum(shares)
        earlier = lengths[:i][::-1]
        mix = {
            length: 1.0 if not i else 0.65,
            **{n: 0.35 * 0.5 ** (k + (k + 1 < len(earlier))) for k, n in enumerate(earlier)},
        }
        stages.append(Stage(length, until, mix))
    return stages


def work(
    queue_: multiprocessing.Queue,
    stage: object,
    corpus: Corpus,
    stages: list[Stage],
    sizes: tuple[int, int],
    seed: int,
    first: int,
    by: int,
) -> None:
    """A process that makes every `by`-th batch. What a batch holds depends only on the seed, its number and
    its stage."""
    assembler = Assembler(corpus)
    number = first
    while True:
        at: int = stage.value  # type: ignore[attr-defined]
        rng = random.Random(f"{seed} {number} {at}")
        mix = stages[at].mix
        length = rng.choices(list(mix), list(mix.values()))[0]
        facts = assembler.fact_batch(max(1, sizes[0] // length), length, rng.randrange(2**31))
        prose = assembler.prose_batch(max(1, sizes[0] // sizes[1]), sizes[1], rng.randrange(2**31))
        queue_.put((at, facts, prose))
        number += by


class Feed:
    """Batches from worker processes, in a fixed order. Those of an earlier stage are thrown away."""

    def __init__(
        self,
        corpus: Corpus,
        stages: list[Stage],
        sizes: tuple[int, int],
        seed: int,
        step: int,
        stage: int,
        processes: int,
        ctx: BaseContext,
    ) -> None:
        self.stage = ctx.Value("i", stage)
        self.queues = [ctx.Queue(3) for _ in range(processes)]
        self.processes = [
            ctx.Process(
                target=work,
                args=(q, self.stage, corpus, stages, sizes, seed, step + i, processes),
                daemon=True,
            )  # type: ignore[attr-defined]
            for i, q in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()
        self.turn = 0

    def next(self) -> tuple[Batch, Batch]:
        while True:
            try:
                at, facts, prose = self.queues[self.turn].get(timeout=120)
            except queue.Empty:
                raise RuntimeError(
                    "a process that makes batches has stopped; its error is printed above"
                ) from None
            self.turn = (self.turn + 1) % len(self.queues)
            if at == self.stage.value:
                return facts, prose

    def close(self) -> None:
        for process in self.processes:
            process.kill()
