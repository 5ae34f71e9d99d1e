"""Structures compiled for a model's tokens, and how far each output has come in its own; by llguidance.

A structure is compiled where a request is read, while its reader waits, so one that is none is refused before
anything runs. What was compiled is there for as long as the request that it was compiled for, and a while
longer for others. On the engine's thread an output gets a copy, in microseconds. Copies share what the
library learns of a structure as it goes along, which makes them fast, and fills up: an output that meets the
end of that room gets the structure anew, and says there what it has said.

The library cannot be stopped. What takes it too long is refused and left to itself; where several such
go on, nothing new is begun.

Why this is safe. What is compiled changes under the library's own lock; a compiled structure is put in its
place in one assignment. Rows are the engine's thread's alone.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary, ref

import numpy as np
from numpy.typing import NDArray

from penstock.api.grammars import grammar_of, placed, said
from penstock.api.matching import Matcher, fill_mask
from penstock.api.text.tokenizer import Tokenizer
from penstock.base.errors import StructureError
from penstock.step.params import Sampling
from penstock.step.plan import Row
from penstock.step.structure import Structure

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

T = TypeVar("T")
_LOG = logging.getLogger("penstock")
_MANY = 8
"""Rows from which masks are worth several threads."""
_WEIGHT = 8 << 10
"""Characters that a structure counts for beside its own: most compiled ones take a few hundred kilobytes,
those of long texts up to some hundred megabytes."""
_KEPT, _HELD = 128 * _WEIGHT, 256 * _WEIGHT
"""Weights up to which compiled structures are kept for later requests, and up to which requests hold
theirs."""
_PATIENCE = 10.0
"""Seconds for which a reader waits for its structure, and before that for its turn: most take milliseconds,
hard ones a second."""
_MOST_LATE = 2
"""Structures that are not waited for any more, and that the library still compiles."""
_STACK = 256 << 20
"""Bytes for the thread that compiles: the library goes down into rules one within the other, which may be
thousands."""
_TRIED = 4
"""Tokens of an output that are tried before a structure is accepted."""
_CANONICAL = 1024
"""Characters of a text that a structure leaves no choice of, for which the tokens are those of the model's
tokenizer."""
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 60_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
"""Limits of the library, below its own: a mask takes some milliseconds at most, a structure some tens of
megabytes."""
_MARK = b"\xff"
"""This byte, which no text has, stands before the name of a special token."""
_STARTING = threading.Lock()
_LATE: list[threading.Thread] = []
"""Threads that compile what is not waited for any more; some may have ended."""


class CrowdedError(StructureError):
    """The structure may be as good as any, but others take all the time that there is."""


class _SlowError(StructureError):
    """Says that the structure took too long."""


class Structures:
    """Compiles the structures of one model, and guides its worker. Before anything runs it says whether a
    structure can be one."""

    def __init__(
        self, tokenizer: Callable[[], Tokenizer | None], vocab_size: int, end_tokens: Collection[int]
    ) -> None:
        """tokenizer: asked when there is a first structure; None if the model has none. vocab_size: of the
        model's logits. end_tokens: the model's own, which are never text."""
        self._tokenizer, self._size, self._ends = tokenizer, vocab_size, frozenset(end_tokens)
        self._compiling = threading.Lock()
        """One at a time: the others compute meanwhile."""
        self._noting = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._known: OrderedDict[Structure, _Compiled] = OrderedDict()
        """The latest; as keys there are only copies, since those that requests have hold what was
        compiled."""
        self._alive: WeakValueDictionary[Structure, _Compiled] = WeakValueDictionary()
        """All compiled structures that are held."""
        self._held: dict[int, tuple[ref[Structure], _Compiled]] = {}
        """By those that were checked, for as long as they are there: by their ids, as there may be several
        that are equal."""
        self._rows: dict[Row, Matcher] = {}
        self._executor: LLExecutor | None = None

    def check(self, structure: Structure, end_tokens: Collection[int]) -> None:
        """Compile a structure, to be there as long as the structure is. end_tokens: those that would end an
        output. Raise StructureError."""
        if not end_tokens:
            raise StructureError(
                "structured output ends with an end token, and the model's files name none; give "
                "stop_token_ids"
            )
        compiled, held, name = self._compiled(structure), self._held, id(structure)
        with self._noting:
            room = _weight(self._alive) <= _HELD
        if room:
            held[name] = ref(structure, lambda _: held.pop(name, None)), compiled

    def is_whole(self, structure: Structure, output: Sequence[int]) -> bool:
        """Tell whether an output could end where it does, by its structure. Raise StructureError."""
        ends = self._ends
        tokens = [*output[:-1], *(token for token in output[-1:] if token not in ends)]
        matcher, _ = self._compiled(structure).copy()
        return matcher.consume_tokens(tokens) and matcher.is_accepting()

    def close(self) -> None:
        """Free the tokens, which the library has a copy of. Nothing is compiled afterwards."""
        if self._vocabulary is not None:
            self._vocabulary.words.trie = None
        self._vocabulary = None
        self._known.clear()
        self._held.clear()
        self._rows.clear()

    # -- a worker's guide

    def begin(self, row: Row, sampling: Sampling) -> None:
        """Begin to guide a row's output."""
        assert sampling.structure is not None
        self._rows[row] = matcher = Matcher(sampling.end_tokens)
        try:
            matcher.follow(self._compiled(sampling.structure).copy)
        except StructureError as error:  # It could not be held, and the second time there is no room for it.
            matcher.break_off(str(error))

    def end(self, row: Row) -> None:
        """Forget a row."""
        self._rows.pop(row, None)

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        """Follow tokens that were added to a row's output."""
        matcher = self._rows[row]
        for token in tokens:
            matcher.take(token)

    def masks(
        self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.int32], frozenset[int]]:
        """Return the masks of tokens that rows may have next, and behind each token of their drafts: `[masks,
        ceil(vocab / 32)]` bits in int32; and the places of those whose structure could not be held.

        Behind a token that the structure does not allow, anything is allowed. parents: of drafts that are
        trees.
        """
        found = list[tuple[int, Matcher]]()
        place = 0
        for row, draft, above in zip(rows, drafts, parents, strict=True):
            matcher = self._rows[row]
            found.append((place, matcher))
            ahead = matcher.ahead(draft, above) if draft else {}
            found += [(place + number, other) for number, other in ahead.items()]
            place += 1 + len(draft)
        masks = np.full((place, self._size // 32 + 1), -1, dtype=np.int32)
        masks[[at for at, _ in found]] = 0
        self._fill(found, masks)
        for at, matcher in found:
            matcher.finish(masks[at], self._size)
        return masks, frozenset(at for at, matcher in found if matcher.broken)

    def _fill(self, matchers: Sequence[tuple[int, Matcher]], masks: NDArray[np.int32]) -> None:
        """Fill the masks at these places as the library says, for those that have not ended."""
        going = [(matcher.inner, place) for place, matcher in matchers if matcher.inner is not None]
        if len(going) >= _MANY:
            from llguidance import LLExecutor
            from llguidance.numpy import fill_next_token_bitmask_par

            if self._executor is None:
                self._executor = LLExecutor()
            fill_next_token_bitmask_par(self._executor, going, masks)
        else:
            for inner, place in going:
                fill_mask(inner, masks[place])

    # -- compiling

    def _compiled(self, structure: Structure) -> "_Compiled":
        """Return the compiled structure, known or new. Raises StructureError."""
        if (known := self._found(structure)) is not None:
            return known
        with self._turn():
            if (known := self._found(structure)) is not None:
                return known
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer(), self._size, self._ends)
            made = _Compiled(structure, self._vocabulary)
            own = Structure(structure.kind, structure.text)
            with self._noting:
                self._known[own] = self._alive[own] = made
                while _weight(self._known) > _KEPT:
                    self._known.popitem(last=False)
        return made

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the turn to compile. Raises CrowdedError if it does not come."""
        with _STARTING:
            _LATE[:] = [thread for thread in _LATE if thread.is_alive()]
        if len(_LATE) >= _MOST_LATE or not self._compiling.acquire(timeout=_PATIENCE):
            raise CrowdedError(
                "the server is busy compiling the schemas and grammars of other requests; send the request "
                "again in a few seconds"
            )
        try:
            yield
        finally:
            self._compiling.release()

    def _found(self, structure: Structure) -> "_Compiled | None":
        with self._noting:
            if structure in self._known:
                self._known.move_to_end(structure)
                return self._known[structure]
            return self._alive.get(structure)


def _weight(structures: Iterable[Structure]) -> int:
    return sum(_WEIGHT + len(structure.text) for structure in list(structures))


class _Vocabulary:
    """Gives the model's tokens to the library: with one more, beyond the last, that stands for the end."""

    def __init__(self, tokenizer: Tokenizer | None, size: int, ends: frozenset[int]) -> None:
        if tokenizer is None:
            raise StructureError(
                "structured output needs a tokenizer, and the model's directory has no tokenizer.json; add "
                "the file"
            )
        try:
            import llguidance
        except ModuleNotFoundError as missing:
            raise StructureError(
                "structured output needs llguidance, which is not installed; pip install 'penstock[grammar]'"
            ) from missing
        self.size = size
        self.words = _Words(tokenizer, size, ends)
        self.tokenizer: LLTokenizer = llguidance.LLTokenizer(self.words, n_vocab=size + 1, eos_token=size)  # type: ignore[arg-type]
        self.words.trie = self.tokenizer
        self._limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
        self._matcher = llguidance.LLMatcher

    def compile(self, grammar: str) -> "LLMatcher":
        """Compile a grammar as the library writes them. Raises StructureError with what the library says."""
        try:
            matcher = _deep(lambda: self._matcher(self.tokenizer, grammar, log_level=0, limits=self._limits))
        except RuntimeError as fault:
            raise StructureError(
                f"llguidance has failed on it: {fault}; simplify it, or report this to its maintainers"
            ) from fault
        if matcher.is_error():
            raise StructureError(said(matcher.get_error()))
        return matcher

    def try_out(self, matcher: "LLMatcher") -> None:
        """Say a few tokens, the shortest there are. Raises StructureError if nothing can be said, or that
        takes too much."""
        mask = np.zeros(self.size // 32 + 1, dtype=np.int32)
        for _ in range(_TRIED):
            fill_mask(matcher, mask)
            if matcher.is_error():
                break
            found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.size])
            if not len(found) or not matcher.consume_token(
                min(found.tolist(), key=lambda token: len(self.words.tokens[token]))
            ):
                break
        if matcher.is_error():
            why = said(matcher.get_error())
            raise StructureError(
                "no text matches it; make it less strict" if why == "NoExtensionBias" else why
            )

    def error_of(self, schema: dict[str, object]) -> str | None:
        """Return what is wrong with a JSON schema; None if nothing is."""
        try:
            self.try_out(self.compile(grammar_of(Structure.json_schema(schema))))
        except StructureError as error:
            return str(error)
        return None


class _Words:
    """Answers what the library asks a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> None:
        self.eos_token_id = size
        self.special_token_ids = [
            token for token in range(size) if token in ends or tokenizer.is_special(token)
        ] + [size]
        # A token that the tokenizer does not know has no bytes, and is never said.
        self.tokens = [*map(tokenizer.token_bytes, range(size)), b"<end>"]
        for token in self.special_token_ids:
            self.tokens[token] = _MARK + (self.tokens[token] or f"<{token}>".encode())
        self.trie: LLTokenizer | None = None
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a structure leaves no choice of: those that the model knows it by,
        as far as they are just its bytes.

        Some tokenizers put a space before a text, but none within a line; and it is long work for a long
        text.
        """
        assert self.trie is not None
        head, rest = text[:_CANONICAL], text[_CANONICAL:]
        for before in ("", "\n"):
            if (
                tokens := self._last(self._tokenizer.encode(before + head, special=False), head.encode())
            ) is not None:
                break
        else:
            tokens, rest = [], text
        return tokens + self.trie.greedy_tokenize(rest) if rest else tokens

    def _last(self, tokens: list[int], text: bytes) -> list[int] | None:
        """Return the last of the tokens, which are this text; None if it begins within one."""
        pieces = [self.tokens[token] if token < self.eos_token_id else _MARK for token in tokens]
        at, left = len(pieces), len(text)
        while left > 0 and at:
            at -= 1
            left -= len(pieces[at])
        return tokens[at:] if b"".join(pieces[at:]) == text else None


class _Compiled:
    """Keeps a compiled structure, ready to be followed by any number of outputs."""

    def __init__(self, structure: Structure, vocabulary: _Vocabulary) -> None:
        """Compile a structure and try it out. Raises StructureError."""
        self._vocabulary = vocabulary
        try:
            self._grammar = grammar_of(structure)
            self._first = vocabulary.compile(self._grammar)
            vocabulary.try_out(self._first.deep_copy())
        except StructureError as error:
            slow = isinstance(error, _SlowError)  # And would be in parts, too.
            why = str(error) if slow else placed(structure, str(error), vocabulary.error_of)
            raise StructureError(f"the {structure.kind.value} cannot be followed: {why}") from error

    def copy(self, since: "LLMatcher | None" = None) -> "tuple[LLMatcher, LLMatcher]":
        """Return a copy for one more output, and its original. since: the last original, which is full."""
        first = self._first
        if first is since:
            first = self._first = self._vocabulary.compile(self._grammar)
        return first.deep_copy(), first


def _deep(work: Callable[[], T]) -> T:
    """Run on a thread with a large stack; only what is used of it is taken. Raises RuntimeError if it
    fails, StructureError if it takes too long."""
    results: list[T] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as fault:  # Also what the library calls a panic, which is no Exception.
            faults.append(fault)

    thread = threading.Thread(target=run, name="penstock-structure", daemon=True)
    with _STARTING:
        usual = threading.stack_size(_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join(_PATIENCE)
    if thread.is_alive():
        with _STARTING:
            _LATE.append(thread)
        raise _SlowError(f"it takes more than {_PATIENCE:g} seconds to compile; make it simpler")
    if faults:
        raise RuntimeError(f"{type(faults[0]).__name__}: {faults[0]}") from faults[0]
    return results[0]
