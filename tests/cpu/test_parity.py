"""Every family against transformers: log-probabilities of the whole vocabulary and 64 greedy tokens, however
the work is cut and shared."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import tiny
from parity import GREEDY, WITH_PROMPT, measure, prompt_error
from penstock import LLM, Completion

FAMILIES = pytest.mark.parametrize("name", tiny.CASES, scope="module")
"""One after another, each in all tests: what transformers says of it is then worked out once."""


def each(names: str, some: Sequence[str], values: Sequence[object]) -> pytest.MarkDecorator:
    """These kinds of checkpoint, each with one of the values in turn; with every one if all is to be
    tested."""
    turns = enumerate(some)
    return pytest.mark.parametrize(
        names,
        [
            (name, value)
            for turn, name in turns
            for value in (values if tiny.THOROUGH else [values[turn % len(values)]])
        ],
    )


SCARCE = (
    tiny.SOME
    if tiny.THOROUGH
    else ["llama", "llama_dynamic", *sorted(set(tiny.SOME) - {"llama", "llama_dynamic"})[::2]]
)
SHARED = (
    tiny.SOME
    if tiny.THOROUGH
    else ["llama", "llama_dynamic", *sorted(set(tiny.SOME) - {"llama", "llama_dynamic"})[1::2]]
)
"""Whose blocks are scarce, and whose prefixes are shared: each kind is in one, the plainest and the one that
shares least in both."""
WINDOWS = ["llama", "llama_dynamic", "qwen2_windows", "mixtral_window"]
FEW = 16
"""Tokens of answers that differ from earlier ones in where their KV comes from, and not in how they go on."""


def engine(name: str, **settings: object) -> LLM:
    return LLM(tiny.checkpoint(name), device="cpu", dtype="float32", max_length=128, check=True, **settings)


def assert_equal(
    completions: Sequence[Completion], references: Sequence[tiny.Reference], tokens: int = tiny.OUTPUT
) -> None:
    for completion, reference in zip(completions, references, strict=True):
        assert completion.prompt_tokens == tuple(reference.prompt)
        assert completion.finish_reason == "length"
        assert list(completion.tokens) == reference.tokens[:tokens]
        assert completion.logprobs is not None
        got = torch.stack([tiny.dense(entry) for entry in completion.logprobs])
        assert tiny.distance(got, reference.after_prompt[:tokens]) < tiny.LIMIT
        for entry, token, row in zip(completion.logprobs, reference.tokens[:tokens], got, strict=True):
            assert (entry.token, entry.rank) == (token, 1)
            assert entry.logprob == row[token]


@FAMILIES
def test_reference_is_sharp(name: str) -> None:
    """What the other tests rest on: no close calls, and logits that notice when what makes the case special
    is taken away."""
    case, references = tiny.CASES[name], tiny.references(name)
    assert min(float(tiny.leads(reference).min()) for reference in references) > tiny.CLOSE
    longest = references[-1]
    if case.without:
        with torch.inference_mode():
            changed = (
                tiny.load(tiny.checkpoint(name), **case.without)(torch.tensor([longest.prompt]))
                .logits[0]
                .double()
                .log_softmax(-1)
            )
        assert tiny.distance(changed, longest.logprobs[: len(longest.prompt)]) > 0.01


@FAMILIES
def test_one_batch_of_mixed_lengths(name: str) -> None:
    with engine(name) as llm:
        completions = llm.generate(tiny.prompts(), WITH_PROMPT)
    references = tiny.references(name)
    assert_equal(completions, references)
    for completion, reference in zip(completions, references, strict=True):
        assert completion.prompt_logprobs is not None
        first, *rest = completion.prompt_logprobs
        assert first is None
        assert [entry.token for entry in rest if entry] == reference.prompt[1:]
        for entry, row in zip(
            rest, reference.logprobs, strict=False
        ):  # the reference goes on into the output
            assert entry is not None
            assert tiny.distance(tiny.dense(entry), row) < tiny.LIMIT
            assert entry.logprob == tiny.dense(entry)[entry.token]
            assert entry.rank == 1 + int((tiny.dense(entry) > entry.logprob).sum())


@each("name, prefix_cache", SCARCE, [True, False])
def test_small_chunks_and_scarce_blocks(name: str, prefix_cache: bool) -> None:
    """Steps of seven tokens, and room for one request and a little more: every request is sent back again and
    again."""
    tokens = tiny.OUTPUT // 2
    with engine(
        name, block_size=4, max_step_tokens=7, max_sequences=5, kv_blocks=22, prefix_cache=prefix_cache
    ) as llm:
        completions = llm.generate(tiny.prompts(), replace(GREEDY, max_tokens=tokens))
        assert llm.stats().preemptions > 0
    assert_equal(completions, tiny.references(name), tokens)


@each("name, size", SHARED, [4, 32])
def test_shared_prefixes(name: str, size: int) -> None:
    references, few = tiny.references(name), replace(GREEDY, max_tokens=FEW)
    with engine(name, block_size=size) as llm:
        assert_equal(llm.generate(tiny.prompts(), GREEDY), references)
        again = llm.generate(tiny.prompts(), few)
        assert_equal(again, references, FEW)
        assert [completion.cached_tokens for completion in again] == [
            (len(prompt) - 1) // size * size for prompt in tiny.prompts()
        ]

        # The output becomes part of the next prompt, as in a conversation; all within what dynamic rope
        # leaves alone.
        short = references[1]
        [longer] = llm.generate(short.prompt + short.tokens[:20], GREEDY)
        assert longer.cached_tokens == (24 if size == 4 else 0)
        assert list(longer.tokens)[:44] == short.tokens[20:]

        assert llm.clear_prefix_cache() > 0
        [cold] = llm.generate(references[-1].prompt, few)
        assert cold.cached_tokens == 0
        assert_equal([cold], references[-1:], FEW)


@pytest.mark.parametrize("name", tiny.SOME if tiny.THOROUGH else WINDOWS)
def test_prefix_of_a_running_request(name: str) -> None:
    """Prompts that begin alike and arrive together share their blocks at once, unless dynamic rope sets them
    apart by their length."""
    prompts = tiny.prompts()[-2:]
    with engine(name, block_size=8) as llm:
        completions = llm.generate(prompts, replace(GREEDY, max_tokens=FEW))
    assert_equal(completions, tiny.references(name)[-2:], FEW)
    assert [completion.cached_tokens for completion in completions] == [
        0,
        0 if tiny.CASES[name].dynamic else 32,
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float16"),
        *((name, "bfloat16") for name in ("qwen3", "qwen2_moe", "glm4_moe", "minimax_m2")),
        *([("mixtral", "bfloat16")] if tiny.THOROUGH else []),
    ],
)
def test_half_precision(name: str, dtype: str) -> None:
    """As close to transformers in float32 as transformers itself comes in this precision, or nearly."""
    references = tiny.references(name)
    half = tiny.load(tiny.checkpoint(name), dtype=getattr(torch, dtype))
    theirs = prompt_error(
        [tiny.decode(half, reference.prompt, steps=1) for reference in references], references
    )
    with LLM(tiny.checkpoint(name), device="cpu", dtype=dtype, max_length=128, check=True) as llm:
        completions = llm.generate(tiny.prompts(), WITH_PROMPT)
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in tiny.prompts()[::4]]
    assert measure(completions, references).typical < 1.3 * theirs
    assert measure(alone, references[::4]).typical < 2 * theirs  # fewer positions, each deeper in the text
