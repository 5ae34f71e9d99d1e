"""Random models under random schedules say what transformers says; and faults that are planted in the engine
are found."""

import gc
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FunctionType

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))  # scripts, not a package

import fuzz_transformers as fuzz

import tiny
from penstock.arch import reading, rope
from penstock.engine.store import root_of
from penstock.kv.ledger import keys
from penstock.models import mixers
from penstock.ops import norm, route
from penstock.ops.attention import dense
from penstock.sched.rules import PrefixRule
from penstock.sched.span import KVSpan
from penstock.worker.inputs import InputBuilder

CASES = 100 if tiny.THOROUGH else 4
"""Of each family, with those that find a planted fault: a few seconds. `make fuzz` goes on for an hour."""
LARGEST = 1_000_000 if tiny.THOROUGH else 400
"""Tokens of output times layers: larger cases cost as much as ten others, and are drawn as those are."""


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    gc.collect()
    gc.freeze()


def seeds(family: str) -> list[int]:
    begin = 0 if family in fuzz.FAMILIES else fuzz.MIXED if family in fuzz.MIXTURES else 2 * fuzz.MIXED
    its = [seed for seed in range(begin, begin + fuzz.MIXED) if fuzz.family_of(seed) == family]
    small = [*islice((seed for seed in its if size_of(seed) <= LARGEST), CASES)]
    finding = {first for first, *_ in FAULTS.values()}
    return [*small, *(seed for seed in its if seed in finding and seed not in small)]


def size_of(seed: int) -> int:
    case = fuzz.draw(seed)
    asks = [ask for run in case.runs for asks in run.rounds for ask in asks]
    return sum(ask.tokens for ask in asks) * int(str(case.kind.config["num_hidden_layers"]))


@pytest.mark.timeout(240 * (10 if tiny.THOROUGH else 1))
@pytest.mark.parametrize("family", fuzz.FAMILIES + fuzz.MIXTURES + fuzz.LATER)
def test_random_models_say_what_transformers_says(family: str) -> None:
    tally = fuzz.Tally()
    for seed in seeds(family):
        fuzz.check(fuzz.draw(seed), tally)
    assert tally.models >= CASES * 0.9
    assert tally.tokens > 30 * CASES
    assert tally.unclear < 0.02 * tally.positions


# ---- planted faults


@contextmanager
def planted(function: Callable[..., object], there: str, instead: str) -> Iterator[None]:
    """A function of the engine with one piece of its source replaced, for all that have imported it."""
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(there) == 1, f"{function.__qualname__} has {source.count(there)} times: {there}"
    made: dict[str, object] = {}
    exec(compile(source.replace(there, instead), "<planted>", "exec"), dict(function.__globals__), made)
    other, code = made[function.__name__], function.__code__
    assert isinstance(other, FunctionType)
    function.__code__ = other.__code__
    try:
        yield
    finally:
        function.__code__ = code


FAULTS: dict[str, tuple[int, Callable[..., object], str, str]] = {
    "yarn: a falling ramp is a step": (50, rope._yarn, "high - low or 0.001", "max(high - low, 0.001)"),
    "yarn: a ramp over one pair more": (
        2,
        rope._yarn,
        "min(high, rope.dim - 1)",
        "min(high, rope.dim - 1) + 1",
    ),
    "yarn: factor of attention forgotten": (
        68,
        rope.attention_scale,
        "return rope.attention_factor",
        "return 1.0",
    ),
    "llama3: blended the wrong way": (
        3,
        rope._llama3,
        "(1 - keep) * frequency / rope.factor + keep",
        "keep * frequency / rope.factor + (1 - keep)",
    ),
    "dynamic: stretched too far": (15, rope.inverse_frequencies, " - (rope.factor - 1)", ""),
    "window: one token more": (
        15,
        InputBuilder._group,
        "key >= lengths_here - window",
        "key >= lengths_here - window - 1",
    ),
    "window: one token less in chunks": (
        15,
        dense.fold_past,
        "distance - window + 1",
        "distance - window + 2",
    ),
    "window: tiles hidden too soon": (8, InputBuilder._seen, "start - window + 1", "start"),
    "window: left out": (1, reading.window_of, 'config.whole("sliding_window")', "None"),
    "softmax: scaled by the width of all heads": (
        1,
        mixers.scores_of,
        "mixer.head_dim**-0.5",
        "mixer.query_size**-0.5",
    ),
    "norm: an epsilon of its own": (
        30,
        norm.rms_norm,
        "F.rms_norm(x, weight.shape, weight, eps)",
        "F.rms_norm(x, weight.shape, weight, 1e-6)",
    ),
    "router: normalised where it should not be": (29, route.route, "if router.normalise", "if True"),
    "router: not normalised where it should be": (4, route.route, "if router.normalise", "if False"),
    "preemption: positions of what was sent back": (
        4,
        KVSpan.reset,
        "self.computed = self.host_sealed",
        "self.host_sealed",
    ),
    "merge: sums of exponentials forgotten": (
        31,
        dense.merge,
        "torch.logaddexp(lse, other_lse, out=lse)",
        "pass",
    ),
    "KV: shared whatever comes before": (7, keys.block_keys, "digest.update(parent)", "pass"),
    "KV: shared but for the last token": (
        5,
        keys.block_keys,
        "start : start + width]",
        "start : start + width - 4]",
    ),
    "KV: shared between lengths under dynamic rope": (
        15,
        PrefixRule.root_of,
        "return root_key(root, prompt_length)",
        "return root",
    ),
    "KV: shared with another model": (
        3,
        root_of,
        "fingerprint = model.fingerprint()",
        "model.fingerprint()",
    ),
}
"""A small case's seed that finds each, what is planted where, and what stands there."""


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    """Within the cases that the test above runs. It begins with the one that is known to; the others are for
    when cases change."""
    first, function, there, instead = FAULTS[name]
    every = [seed for family in fuzz.FAMILIES for seed in seeds(family)]
    every.remove(first)
    with planted(function, there, instead):
        for seed in (first, *every):
            try:
                fuzz.check(fuzz.draw(seed), fuzz.Tally())
            except (fuzz.Mismatch, AssertionError):
                return
    pytest.fail(f"{1 + len(every)} cases say nothing of it")
