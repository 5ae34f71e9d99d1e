"""Makes the raw material of the training: the tokenizer and pools of tokenized prose and chat."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import stories
from chat_words import small_talk, story_request
from needles import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END_OF_TEXT,
    END_OF_TURN,
    GRASS,
    INSTRUCTIONS,
    SPECIAL_TOKENS,
    SYSTEM,
    SYSTEM_PROMPTS,
    USER,
    FactMaker,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# Weights of the loss, in tenths (rows carry them as bytes).
PROSE, HAY, ANSWER_HEAD, VALUE, STOP = 10, 3, 5, 80, 10


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; every digit is a token of its own, so that numbers can be copied digit by digit."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def tokenizer_texts(books: list[str], seed: int, count: int) -> Iterator[str]:
    """What the tokenizer is trained on: stories, facts with questions, and paragraphs of the books."""
    rng = random.Random(seed)
    paragraphs = [stories.unwrap(p) for book in books for p in stories.book_paragraphs(book)]
    for _ in range(count):
        yield stories.make_story(rng).text
        yield rng.choice(paragraphs) if paragraphs else stories.make_description(rng)
        fact = FactMaker(rng).draw()
        yield f"{fact.statement} {fact.question} {fact.answer}"
        yield f"{rng.choice(INSTRUCTIONS)} {rng.choice(SYSTEM_PROMPTS)} {small_talk(rng)[1]}"


def save_tokenizer(tok: Tokenizer, folder: Path, max_length: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Every text begins with <|endoftext|>, as the documents of the training do.
    tok.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B:1",
        special_tokens=[(END_OF_TEXT, tok.token_to_id(END_OF_TEXT))],
    )
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def prose_document(rng: random.Random, book: list[str]) -> list[tuple[str, int]]:
    """One document of prose or chat without hidden facts: pieces of text with the weight of their loss."""
    draw = rng.random()
    if draw < 0.6:
        text = stories.make_story(rng).text
        return [((stories.from_the_middle(text, rng) if rng.random() < 0.4 else text) + END_OF_TEXT, PROSE)]
    if draw < 0.66:
        return [
            ((stories.make_note(rng) if draw < 0.64 else stories.make_description(rng)) + END_OF_TEXT, PROSE)
        ]
    if draw < 0.7 and book:
        at = rng.randrange(len(book))
        return [("\n\n".join(book[at : at + rng.choice((1, 2, 4, 8))]), PROSE), (END_OF_TEXT, 0)]
    pieces = [(f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END_OF_TURN}", 0)] if rng.random() < 0.15 else []
    turns = [
        small_talk(rng)
        for _ in range(rng.choice((0, 0, 0, 1)) if draw < 0.85 else rng.choice((1, 1, 1, 2, 3)))
    ]
    if draw < 0.83:
        turns.append(story_request(rng))
    elif draw < 0.85:
        text = stories.make_story(rng).text
        cut = max(text.rfind(". ", 0, rng.randrange(80, 400)) + 1, text.index(". ") + 1)
        ask = rng.choice(
            (
                "Continue this story: ",
                "Continue the story: ",
                "Continue: ",
                "How does this story go on? ",
                "Please go on: ",
            )
        )
        turns.append((ask + text[:cut], text[cut:].strip()))
    for asked, said in turns:
        pieces += [(f"{USER}{asked}{END_OF_TURN}{ASSISTANT}", 0), (said + END_OF_TURN, PROSE)]
    return [*pieces, (END_OF_TEXT, 0)]


@dataclass
class Pool:
    """Tokenized text. `cuts`: where a sentence begins (with its blank or newline); `starts`: the first word
    of a paragraph."""

    tokens: np.ndarray  # int16 [n]
    weights: np.ndarray  # uint8 [n]
    cuts: np.ndarray  # int64
    starts: np.ndarray  # int64


class Marks:
    """Which tokens end a sentence and which may begin one, to find the places where a fact may stand."""

    def __init__(self, tok: Tokenizer) -> None:
        texts = [tok.id_to_token(i) for i in range(tok.get_vocab_size())]
        decoded = [tok.decode([i]) if t not in SPECIAL_TOKENS else "" for i, t in enumerate(texts)]
        self.ends = np.array([d.rstrip('"').endswith((".", "!", "?")) for d in decoded])
        self.begins = np.array(
            [d == "\n" or (d[:1] == " " and (d[1:2].isupper() or d[1:2] == '"')) for d in decoded]
        )
        self.newline = tok.encode("\n").ids[0]

    def pool(self, tokens: np.ndarray, weights: np.ndarray) -> Pool:
        cuts = np.flatnonzero(self.ends[tokens[:-1]] & self.begins[tokens[1:]]) + 1
        newline = tokens == self.newline
        starts = np.flatnonzero(newline[:-2] & newline[1:-1] & ~newline[2:]) + 2
        return Pool(tokens, weights, cuts, starts)


_shared: tuple[Tokenizer, list[str], int] | None = None  # what a forked process of `prose_chunk` needs


def prose_chunk(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` prose documents: tokens, weights, and where documents start."""
    seed, count = job
    tok, book, _ = _shared  # type: ignore[misc]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng = random.Random(seed)
    documents = [prose_document(rng, book) for _ in range(count)]
    encoded = iter(tok.encode_batch([text for doc in documents for text, _ in doc], add_special_tokens=False))
    ids: list[int] = []
    weights: list[np.ndarray] = []
    starts = []
    for doc in documents:
        starts.append(len(ids))
        for _, weight in doc:
            piece = next(encoded).ids
            ids += piece
            weights.append(np.full(len(piece), weight, np.uint8))
    return np.array(ids, np.int16), np.concatenate(weights), np.array(starts, np.int64)


def hay_chunk(job: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """`count` stories, each with a blank line before it. That the next story begins is not to be learned,
    hence weight 0 there."""
    seed, count = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng = random.Random(seed)
    texts = ["\n\n" + stories.make_story(rng).text for _ in range(count)]
    ids: list[int] = []
    begins = []
    for e in _shared[0].encode_batch(texts, add_special_tokens=False):  # type: ignore[index]
        begins += [len(ids), len(ids) + 1]
        ids += e.ids
    weights = np.full(len(ids), _shared[2], np.uint8)  # type: ignore[index]
    weights[begins] = 0
    return np.array(ids, np.int16), weights


@dataclass
class Corpus:
    """All prose of a training run."""

    tok: Tokenizer
    prose: Pool  # of this pool, `starts` are the starts of documents
    hay: list[tuple[float, Pool]]  # share of the rows, pool


def build_corpus(
    tok: Tokenizer,
    books: list[str],
    seed: int,
    documents: int,
    ctx: BaseContext,
    processes: int,
    hay_weight: int = HAY,
) -> Corpus:
    """Generate and tokenize everything, in parallel (in this process if `processes` is 0). hay_weight: in
    tenths."""
    global _shared
    paragraphs = [p for book in books for p in stories.book_paragraphs(book)]
    unwrapped = [stories.unwrap(p) for p in paragraphs]
    _shared = (tok, unwrapped, hay_weight)
    marks = Marks(tok)
    size = max(1, min(500, documents // 4))
    jobs = [(seed * 1_000_003 + i, size) for i in range(documents // size)]
    hay_jobs = [(-job[0] - 1, size) for job in jobs[: max(1, len(jobs) // 6)]]
    if processes:
        with ctx.Pool(processes) as workers:  # type: ignore[attr-defined]
            prose_parts = workers.map(prose_chunk, jobs, chunksize=1)
            hay_parts = workers.map(hay_chunk, hay_jobs, chunksize=1)
    else:
        prose_parts, hay_parts = [prose_chunk(job) for job in jobs], [hay_chunk(job) for job in hay_jobs]
    offsets = np.cumsum([0, *(len(p[0]) for p in prose_parts[:-1])])
    starts = np.concatenate([p[2] + o for p, o in zip(prose_parts, offsets, strict=True)])
    prose = Pool(
        np.concatenate([p[0] for p in prose_parts]),
        np.concatenate([p[1] for p in prose_parts]),
        np.zeros(0, np.int64),
        starts,
    )

    def flat(text: str) -> Pool:
        ids = np.array(tok.encode(text, add_special_tokens=False).ids, np.int16)
        return marks.pool(ids, np.full(len(ids), hay_weight, np.uint8))

    hay = [
        (
            0.6,
            marks.pool(np.concatenate([p[0] for p in hay_parts]), np.concatenate([p[1] for p in hay_parts])),
        )
    ]
    if paragraphs:
        hay += [(0.2, flat("\n\n" + "\n\n".join(unwrapped))), (0.14, flat("\n\n" + "\n\n".join(paragraphs)))]
    grass = flat("\n\n" + (GRASS * 4000).strip())
    grass.weights[:] = 0
    return Corpus(tok, prose, [*hay, (0.06, grass)])
