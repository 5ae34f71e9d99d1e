"""What sampling settings mean, through the API: distributions, supports, penalties, ends, seeds, streams."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

import tiny
from penstock import LLM, SamplingParams

PROMPT = tiny.prompts()[2]
EOS = 2
"""The model's own end token."""


def engine(**settings: object) -> LLM:
    return LLM(
        tiny.checkpoint("llama"),
        **{"device": "cpu", "dtype": "float32", "max_length": 256, "block_size": 32, "check": True}
        | settings,
    )


def scarce(blocks: int = 30) -> LLM:
    """Room for one request of 105 tokens and a little more."""
    return engine(block_size=4, max_step_tokens=7, max_sequences=5, kv_blocks=blocks)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    """Whatever a test did, no request is left behind."""
    yield
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def after(llm: LLM, prompt: Sequence[int]) -> Tensor:
    """`[vocab]` log-probabilities of the model itself after the prompt."""
    [completion] = llm.generate(list(prompt), SamplingParams(temperature=0, max_tokens=1, logprobs=-1))
    assert completion.logprobs is not None
    return tiny.dense(completion.logprobs[0])


def first_tokens(llm: LLM, prompt: list[int], params: SamplingParams, draws: int) -> Counter[int]:
    seeded = [replace(params, max_tokens=1, seed=seed) for seed in range(draws)]
    return Counter(completion.tokens[0] for completion in llm.generate([prompt] * draws, seeded))


# -- seeds
# ------------------------------------------------------------------------------------------------------------


SEEDED = SamplingParams(
    temperature=1.0, top_p=0.95, repetition_penalty=1.2, max_tokens=60, ignore_eos=True, seed=11
)


def test_a_seed_means_the_same_tokens_whatever_else_runs(llm: LLM) -> None:
    [alone] = llm.generate(PROMPT, SEEDED)
    others = [replace(SEEDED, seed=None, temperature=heat) for heat in (0.0, 0.5, 1.5, 2.0)]
    prompts = [*tiny.prompts()[:4], PROMPT]
    assert llm.generate(prompts, [*others, SEEDED])[-1].tokens == alone.tokens
    assert llm.generate(prompts[::-1], [SEEDED, *others])[0].tokens == alone.tokens
    with scarce() as other:
        assert other.generate([*tiny.prompts()[-3:], PROMPT], SEEDED)[-1].tokens == alone.tokens
        assert other.stats().preemptions > 0


def test_other_seeds_and_no_seed_give_other_tokens(llm: LLM) -> None:
    params = [replace(SEEDED, seed=seed) for seed in (0, 1, -1, 2**63, 11, None, None)]
    outputs = {completion.tokens for completion in llm.generate([PROMPT] * len(params), params)}
    assert len(outputs) == len(params)


def test_several_outputs(llm: LLM) -> None:
    llm.clear_prefix_cache()
    prompt, params = tiny.prompts()[-1], replace(SEEDED, n=4)
    [completion] = llm.generate(prompt, params)
    assert [output.index for output in completion.outputs] == [0, 1, 2, 3]
    assert len({output.tokens for output in completion.outputs}) == 4
    assert {output.finish_reason for output in completion.outputs} == {"length"}
    assert completion.tokens == completion.outputs[0].tokens
    [again] = llm.generate(prompt, params)
    assert again.outputs == completion.outputs
    assert again.cached_tokens == 32
    greedy = replace(params, temperature=0.0)
    [same] = llm.generate(prompt, greedy)
    assert {output.tokens for output in same.outputs} == {
        llm.generate(prompt, replace(greedy, n=1))[0].tokens
    }


def test_params_for_each_prompt_keep_their_order(llm: LLM) -> None:
    prompts = tiny.prompts()
    params = [
        SamplingParams(temperature=0, max_tokens=1 + 3 * at, ignore_eos=True) for at in range(len(prompts))
    ][::-1]
    completions = llm.generate(prompts, params)
    for completion, reference, one in zip(completions, tiny.references("llama"), params, strict=True):
        assert completion.prompt is None
        assert completion.prompt_tokens == tuple(reference.prompt)
        assert list(completion.tokens) == reference.tokens[: one.max_tokens]
        assert completion.text == ""


# -- distributions
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.8}, {"temperature": 1.3}, {"temperature": 1.7, "top_k": 40}], ids=str
)
def test_tokens_come_up_as_often_as_their_probability_says(llm: LLM, settings: dict[str, float]) -> None:
    draws = 2000
    counts = first_tokens(llm, PROMPT, SamplingParams(**settings), draws)
    logits = after(llm, PROMPT) / settings["temperature"]
    if "top_k" in settings:
        logits[logits < logits.topk(int(settings["top_k"])).values[-1]] = -math.inf
    expected = logits.softmax(-1) * draws
    often = expected >= 5
    observed = torch.tensor([counts[token] for token in range(tiny.VOCAB)], dtype=torch.float64)
    terms = (observed - expected)[often] ** 2 / expected[often]
    rest = expected[~often].sum()
    chi_square = float(terms.sum() + (observed[~often].sum() - rest) ** 2 / rest.clamp(min=1))
    freedom = int(often.sum())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
    assert freedom > 5, "a sharper distribution would show little"


def test_draws_at_successive_positions_are_independent_and_uniform(llm: LLM) -> None:
    """Each token's place in its own cumulative distribution is a uniform number, and tells nothing of the
    next one's."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, logprobs=-1, seed=seed)
        for seed in range(6)
    ]
    rng = torch.Generator().manual_seed(0)
    series = []
    for completion in llm.generate([PROMPT] * len(params), params):
        assert completion.logprobs is not None
        rows = torch.stack([tiny.dense(entry) for entry in completion.logprobs]).exp()
        chosen = torch.tensor(completion.tokens)[:, None]
        jitter = torch.rand(chosen.shape, generator=rng, dtype=torch.float64)
        series.append((rows.cumsum(-1).gather(1, chosen) - jitter * rows.gather(1, chosen))[:, 0])
    places = torch.stack(series)
    histogram = torch.histc(places, bins=10, min=0, max=1)
    assert float(((histogram - 120) ** 2 / 120).sum()) < 9 + 5 * math.sqrt(18)
    deviation = places - 0.5
    for lag in (1, 2):
        assert abs(float((deviation[:, lag:] * deviation[:, :-lag]).mean() * 12)) < 5 / math.sqrt(1200)
    assert abs(float((deviation[1:] * deviation[:-1]).mean() * 12)) < 5 / math.sqrt(1000)


def kept_by_top_k(probabilities: Tensor) -> set[int]:
    return set(probabilities.topk(5).indices.tolist())


def kept_by_top_p(probabilities: Tensor) -> set[int]:
    order = probabilities.argsort(descending=True).tolist()
    size = next(size for size in range(1, tiny.VOCAB) if probabilities[order[:size]].sum() >= 0.7)
    return set(order[:size])


def kept_by_min_p(probabilities: Tensor) -> set[int]:
    return set((probabilities >= 0.2 * probabilities.max()).nonzero()[:, 0].tolist())


def kept_by_top_p_of_top_k(probabilities: Tensor) -> set[int]:
    few = torch.zeros_like(probabilities)
    few[list(kept_by_top_k(probabilities))] = 1
    return kept_by_top_p(few * probabilities / (few * probabilities).sum())


@pytest.mark.parametrize("prompt", [1, 2, 4])
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 5}, kept_by_top_k),
        ({"top_p": 0.7}, kept_by_top_p),
        ({"min_p": 0.2}, kept_by_min_p),
        ({"top_k": 5, "top_p": 0.7}, kept_by_top_p_of_top_k),
    ],
    ids=["top_k", "top_p", "min_p", "both"],
)
def test_exactly_the_expected_tokens_can_come_up(
    llm: LLM, prompt: int, settings: dict[str, float], kept: Callable[[Tensor], set[int]]
) -> None:
    tokens, heat = tiny.prompts()[prompt], 1.3
    probabilities = (after(llm, tokens) / heat).softmax(-1)
    expected = kept(probabilities)
    assert 1 < len(expected) < tiny.VOCAB
    assert min(probabilities[token] for token in expected) > 0.02, "rare tokens need more draws"
    assert set(first_tokens(llm, tokens, SamplingParams(temperature=heat, **settings), 500)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-9},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 1e-4},
        {"temperature": 1e-40},
    ],
    ids=str,
)
def test_the_narrowest_choice_is_greedy(llm: LLM, settings: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=tiny.OUTPUT, ignore_eos=True, **settings)
    for completion, reference in zip(
        llm.generate(tiny.prompts(), params), tiny.references("llama"), strict=True
    ):
        assert list(completion.tokens) == reference.tokens


# -- penalties and bias
# ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def oracle(prompt: list[int], params: SamplingParams, steps: int) -> tuple[list[int], Tensor]:
    """Greedy decoding with bias and penalties, step by step on transformers' logits. Also the least lead of
    any choice."""
    model = tiny.load(tiny.checkpoint("llama"))
    tokens, leads = list(prompt), []
    repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty or 1.0)
    for _ in range(steps):
        ids = torch.tensor([tokens])
        logits = model(ids).logits[:, -1]
        for token, bias in params.logit_bias.items():
            logits[0, token] += bias
        logits = repetition(ids, logits)[0]
        counts = torch.bincount(ids[0, len(prompt) :], minlength=tiny.VOCAB)
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        best = logits.topk(2)
        leads.append(best.values[0] - best.values[1])
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], torch.stack(leads).min()


STEPS = 18


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.1},
        {"frequency_penalty": -0.4},
        {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.9,
            "frequency_penalty": 0.3,
            "logit_bias": {5: 1.5, 40: -2.0, 61: -math.inf},
        },
    ],
    ids=str,
)
def test_penalties_as_an_oracle_applies_them(llm: LLM, settings: dict[str, float]) -> None:
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=-1, **settings)
    prompts = tiny.prompts()
    expected = []
    for prompt in prompts:
        tokens, lead = oracle(prompt, params, steps=STEPS)
        assert lead > 1e-4
        expected.append(tokens)
    assert expected[0] != tiny.references("llama")[0].tokens[:STEPS]
    completions = llm.generate(prompts, params)
    assert [list(completion.tokens) for completion in completions] == expected
    with scarce(26) as other:
        assert [list(completion.tokens) for completion in other.generate(prompts, params)] == expected
        assert other.stats().preemptions > 0
    # What is reported is the model's own distribution, which knows nothing of penalties.
    reported = completions[-1].logprobs
    assert reported is not None
    assert tiny.distance(tiny.dense(reported[0]), tiny.references("llama")[-1].after_prompt[0]) < tiny.LIMIT


def test_bias_forces_and_bans(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [free] = llm.generate(PROMPT, greedy)
    [forced] = llm.generate(PROMPT, replace(greedy, logit_bias={7: 1000.0}))
    assert set(forced.tokens) == {7}
    for ban in (-math.inf, -1000.0):
        banned = dict.fromkeys(free.tokens[:5], ban)
        [without] = llm.generate(PROMPT, replace(greedy, logit_bias=banned))
        assert not set(without.tokens) & set(banned)
        tokens, _ = oracle(PROMPT, replace(greedy, logit_bias=banned), steps=30)
        assert list(without.tokens) == tokens
    all_but_one = dict.fromkeys(range(tiny.VOCAB - 1), -math.inf)
    [hot] = llm.generate(
        PROMPT, SamplingParams(temperature=1.0, max_tokens=50, ignore_eos=True, logit_bias=all_but_one)
    )
    assert set(hot.tokens) == {tiny.VOCAB - 1}


# -- where an output ends
# ----------------------------------------------------------------------------------------------------


def test_end_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logit_bias={EOS: 1000.0})
    [ended] = llm.generate(PROMPT, params)
    assert (ended.tokens, ended.finish_reason) == ((EOS,), "stop")
    [ignored] = llm.generate(PROMPT, replace(params, ignore_eos=True))
    assert (ignored.tokens, ignored.finish_reason) == ((EOS,) * 6, "length")
    [late] = llm.generate(PROMPT, replace(params, min_tokens=3))
    assert (late.tokens[3:], late.finish_reason) == ((EOS,), "stop")
    assert EOS not in late.tokens[:3]
    [never] = llm.generate(PROMPT, replace(params, min_tokens=6))
    assert (len(never.tokens), never.finish_reason) == (6, "length")
    assert EOS not in never.tokens
    [last] = llm.generate(PROMPT, replace(params, max_tokens=1))
    assert last.finish_reason == "stop"


def test_stop_token_ids(llm: LLM) -> None:
    reference = tiny.references("llama")[2].tokens
    stop = reference[12]
    first = reference.index(stop)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
    [ended] = llm.generate(PROMPT, params)
    assert (list(ended.tokens), ended.finish_reason) == (reference[: first + 1], "stop")
    [late] = llm.generate(PROMPT, replace(params, min_tokens=first + 1))
    assert list(late.tokens[:first]) == reference[:first]
    assert late.tokens[first] != stop


def test_outputs_go_on_to_the_end_of_the_context_and_of_the_blocks() -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    reference = tiny.references("llama")[2]
    with engine(max_length=60) as llm:
        [full] = llm.generate(PROMPT, params)
    assert (len(full.tokens), full.finish_reason) == (60 - len(PROMPT), "length")
    assert list(full.tokens) == reference.tokens[: 60 - len(PROMPT)]
    with engine(kv_blocks=10, block_size=4, prefix_cache=False) as llm:
        [full] = llm.generate(PROMPT, params)
    assert (len(full.tokens), full.finish_reason) == (
        41 - len(PROMPT),
        "length",
    )  # the last token needs no place
    assert list(full.tokens) == reference.tokens[: 41 - len(PROMPT)]


# -- log-probabilities
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 97, 1000])
def test_logprobs_of_the_likeliest(llm: LLM, count: int) -> None:
    params = SamplingParams(
        temperature=1.5, seed=1, max_tokens=30, ignore_eos=True, logprobs=count, prompt_logprobs=count
    )
    [few] = llm.generate(PROMPT, params)
    [full] = llm.generate(PROMPT, replace(params, logprobs=-1, prompt_logprobs=-1))
    assert few.tokens == full.tokens
    assert few.logprobs is not None
    assert full.logprobs is not None
    assert few.prompt_logprobs is not None
    assert full.prompt_logprobs is not None
    assert few.prompt_logprobs[0] is full.prompt_logprobs[0] is None
    assert len(few.prompt_logprobs) == len(PROMPT)
    ranks = set()
    for got, all_of_it in zip(
        [*few.logprobs, *few.prompt_logprobs[1:]], [*full.logprobs, *full.prompt_logprobs[1:]], strict=True
    ):
        assert got is not None
        assert all_of_it is not None
        row = tiny.dense(all_of_it)
        assert math.isclose(float(row.exp().sum()), 1, abs_tol=1e-5)
        assert (got.token, got.rank) == (all_of_it.token, all_of_it.rank)
        assert math.isclose(got.logprob, float(row[got.token]), abs_tol=1e-5)
        assert got.rank == 1 + int((row > row[got.token]).sum())
        assert len(got.top) == min(count, tiny.VOCAB)
        assert [logprob for _, logprob in got.top] == sorted(
            (logprob for _, logprob in got.top), reverse=True
        )
        assert [token for token, _ in got.top] == [token for token, _ in all_of_it.top[:count]]
        ranks.add(got.rank)
    assert len(ranks) > 5, "at this temperature not only the likeliest is chosen"


def test_nothing_is_reported_unasked(llm: LLM) -> None:
    [completion] = llm.generate(PROMPT, SamplingParams(max_tokens=3))
    assert completion.logprobs is None
    assert completion.prompt_logprobs is None


def test_prompt_logprobs_do_not_depend_on_the_cache(llm: LLM) -> None:
    """Asking for them has every position computed, and later requests may still share its blocks."""
    prompt = tiny.prompts()[-1]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    llm.clear_prefix_cache()
    [cold] = llm.generate(prompt, params)
    [warm] = llm.generate(prompt, params)
    assert warm.cached_tokens == cold.cached_tokens == 0
    assert cold.prompt_logprobs is not None
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert len(cold.prompt_logprobs) == len(prompt)
    assert llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))[0].cached_tokens == 32


# -- streams
# ------------------------------------------------------------------------------------------------------------


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:
    params = replace(SEEDED, logprobs=2)
    [whole] = llm.generate(PROMPT, params)
    deltas = list(llm.stream(PROMPT, params))
    assert [token for delta in deltas for token in delta.tokens] == list(whole.tokens)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) > 30


def test_a_stream_of_several_outputs(llm: LLM) -> None:
    params = replace(SEEDED, n=3)
    [whole] = llm.generate(PROMPT, params)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ends = []
    for delta in llm.stream(PROMPT, params):
        tokens[delta.index].extend(delta.tokens)
        if delta.finish_reason is not None:
            ends.append(delta.index)
    assert {index: tuple(got) for index, got in tokens.items()} == {
        output.index: output.tokens for output in whole.outputs
    }
    assert sorted(ends) == [0, 1, 2]


def test_an_abandoned_stream_frees_its_blocks() -> None:
    prompt = tiny.prompts()[-1]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with engine(block_size=4, kv_blocks=26, prefix_cache=False) as llm:
        for _ in range(3):  # each takes most of what there is
            stream = llm.stream(prompt, params)
            assert [next(stream).finish_reason for _ in range(50)] == [None] * 50
            assert llm.stats().running == 1
            stream.close()
            assert llm.stats().running == 0
        [whole] = llm.generate(prompt, params)
        assert list(whole.tokens) == tiny.references("llama")[-1].tokens[:60]
        assert llm.stats().preemptions == 0


def test_a_stream_ends_with_the_step_in_which_it_was_told_to() -> None:
    prompt = tiny.prompts()[-1]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with engine(block_size=4, kv_blocks=60, max_step_tokens=8) as llm:
        running, seen = llm.booted.engine, list[int]()
        with llm.stream(prompt, params, until=lambda: running.progress.reached >= 20) as stream:
            assert list(stream) == []
        assert stream.completion.finish_reason == "abort"
        now = llm.stats()
        assert (now.steps, now.computed_tokens, now.running, now.waiting) == (3, 24, 0, 0)
        assert now.kv_blocks_free == now.kv_blocks
        for delta in llm.stream(prompt, params, until=lambda: len(seen) >= 2):
            seen.extend(delta.tokens)
        assert seen == tiny.references("llama")[-1].tokens[:2]
        assert llm.stats().running == 0
        assert list(llm.generate(prompt, params)[0].tokens) == list(tiny.references("llama")[-1].tokens[:60])


def test_a_stream_closed_before_its_first_piece(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SEEDED)
    assert llm.stats().waiting == 1
    stream.close()
    assert llm.stats().waiting == 0
    llm.stream(PROMPT, SEEDED)  # and one that nobody holds
    gc.collect()
    assert llm.stats().waiting == 0


def test_a_stream_that_the_garbage_collector_finds_during_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = torch.nn.functional.embedding

    def collect_first(*arguments: Tensor) -> Tensor:
        gc.collect()
        return embedding(*arguments)

    params = replace(SEEDED, max_tokens=4)
    [expected] = llm.generate(PROMPT, params)
    stream = llm.stream(PROMPT, SEEDED)
    next(stream)
    circle: list[object] = [stream]
    circle.append(circle)
    gc.disable()
    try:
        del stream, circle
        monkeypatch.setattr(torch.nn.functional, "embedding", collect_first)
        [completion] = llm.generate(PROMPT, params)
    finally:
        gc.enable()
    assert completion.tokens == expected.tokens


def test_streams_may_be_read_in_turns(llm: LLM) -> None:
    prompts = tiny.prompts()[1:4]
    params = [replace(SEEDED, seed=seed) for seed in range(3)]
    expected = [completion.tokens for completion in llm.generate(prompts, params)]
    streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    got: list[list[int]] = [[], [], []]
    unfinished = {0, 1, 2}
    while unfinished:
        for at in sorted(unfinished):
            for _ in range(at + 1):  # at different speeds
                delta = next(streams[at], None)
                if delta is None:
                    unfinished.discard(at)
                    break
                got[at].extend(delta.tokens)
    assert [tuple(tokens) for tokens in got] == expected


def test_generate_between_the_deltas_of_a_stream(llm: LLM) -> None:
    [expected] = llm.generate(PROMPT, SEEDED)
    stream = llm.stream(PROMPT, SEEDED)
    tokens = [token for _ in range(5) for token in next(stream).tokens]
    between = llm.generate(
        tiny.prompts(), SamplingParams(temperature=0, max_tokens=tiny.OUTPUT, ignore_eos=True)
    )
    assert [list(completion.tokens) for completion in between] == [
        reference.tokens for reference in tiny.references("llama")
    ]
    tokens += [token for delta in stream for token in delta.tokens]
    assert tuple(tokens) == expected.tokens


def test_threads_share_an_engine(llm: LLM) -> None:
    """Whoever waits drives the engine for all; everyone gets their own."""
    expected = [completion.tokens for completion in llm.generate(tiny.prompts(), SEEDED)]

    def ask(at: int) -> tuple[int, ...]:
        if at % 2:
            return tuple(
                token for delta in llm.stream(tiny.prompts()[at % 6], SEEDED) for token in delta.tokens
            )
        return llm.generate(tiny.prompts()[at % 6], SEEDED)[0].tokens

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(18))) == expected * 3
