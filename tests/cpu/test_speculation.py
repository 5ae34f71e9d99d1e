"""Speculative decoding changes no token, whatever is drafted: by the real engine, for every family."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

import adapters
import tiny
from cpu.test_run_ahead import alike
from drafters import Adversary
from pairs import near
from penstock import LLM, Completion, SamplingParams, Structure
from penstock.base.errors import ConfigError
from penstock.sched.request import Request
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft
from penstock.server.monitoring.counts import SpeculationState
from penstock.step.plan import UNKNOWN, Plan
from penstock.weights.pack.directory import PackError
from penstock.worker.runner import Runner
from toys import hybrid_checkpoint, hybrid_known

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "check": True,
    "max_step_tokens": 64,
    "block_size": 4,
    "max_length": 80,
}
FAMILIES = ["llama", "llama_dynamic", "qwen2_windows", "qwen3", "qwen3_moe", "gpt_oss", "glm4_moe"]

WAYS = ((False, None), (True, None), (True, 1))
"""Whether steps run ahead, and what draws when speculation rests; see `always`."""
EVERY_WAY = ("llama", "qwen3_moe")
"""Families that are tried in each of WAYS; the others are in the last."""

BRIEF = 14
"""Tokens of an output at most where an engine has several ranks or little room, which is as ever in each
step."""


def wanted(most: int = 40) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, some of them alike, and each with other wishes. most: tokens of an output."""
    prompts = [prompt[:30] for prompt in tiny.prompts()]
    wishes = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.6, seed=3, max_tokens=17, logprobs=2),
        SamplingParams(
            temperature=0.6, top_p=0.8, seed=4, max_tokens=25, repetition_penalty=1.3, frequency_penalty=0.2
        ),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, logprobs=-1),
        SamplingParams(temperature=1.0, seed=9, max_tokens=30, min_tokens=8, logit_bias={5: 2.0, 7: -100.0}),
        SamplingParams(temperature=1.0, seed=6, max_tokens=9, n=3, presence_penalty=0.4, min_p=0.02),
        SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[3, 11, 40], min_tokens=3),
        SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=40, ignore_eos=True),
    ]
    wishes = [replace(wish, max_tokens=min(wish.max_tokens, most)) for wish in wishes]
    return [(prompts[index % len(prompts)], wish) for index, wish in enumerate(wishes)]


@contextmanager
def always(drafter: Adversary | None, restless: int | None = None) -> Iterator[None]:
    """Every draft of this drafter is verified as far as there is room.

    restless: seed by which it is drawn when speculation wakes and rests; else it never rests.
    """
    chance = random.Random(restless)

    def best(self: Speculation, survival: Sequence[Sequence[float]], tokens: int, spare: int) -> list[int]:
        counts = []
        for some in survival:
            counts.append(min(len(some), spare))
            spare -= counts[-1]
        return counts

    def depths(self: Speculation, found: Sequence[Draft], tokens: int, spare: int) -> list[int]:
        return [min(5, spare // len(found)) if self.model else 0] * len(found)

    def look(
        self: Speculation, requests: Sequence[tuple[Request, int]], tokens: int, spare: int, *, ahead: bool
    ) -> None:
        for request, most in requests:
            self._propose(request, most + request.unknown)
        self.resting = restless is not None and chance.random() > 0.3

    def stepped(self: Speculation, plan: Plan, seconds: float) -> None:
        step_ended(self, plan, seconds)
        if restless is not None and chance.random() < 0.4:
            self.rest()

    make, step_ended = Speculation.__init__, Speculation.stepped
    with (
        patch.object(Speculation, "look", look),
        patch.object(Speculation, "stepped", stepped),
        patch.object(Speculation, "_payable", lambda self, tokens, most: most),
        patch.object(Speculation, "__init__", lambda self, own, **more: make(self, drafter or own, **more)),
        patch.object(Speculation, "_best", best),
        patch.object(Speculation, "depths", depths),
    ):
        yield


def answers(name: str, asked: Sequence[tuple[list[int], SamplingParams]], **more: object) -> list[Completion]:
    with LLM(tiny.checkpoint(name), **(SETTINGS | more)) as llm:
        return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])


@cache
def plainly(name: str, most: int = 40) -> list[Completion]:
    """Answers to `wanted` without drafts, with which many tests compare those with them."""
    return answers(name, wanted(most))


@cache
def later(name: str) -> tuple[list[list[int]], list[SamplingParams], list[Completion]]:
    """Prompts that `wanted` and its answers are the beginning of, wishes, and the answers without drafts."""
    prompts = [[*one.prompt_tokens, *one.tokens][:60] for one in plainly(name)]
    wishes = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * len(prompts)
    return prompts, wishes, answers(name, list(zip(prompts, wishes, strict=True)))


def truth_of(plain: Sequence[Completion]) -> dict[tuple[int, ...], list[Sequence[int]]]:
    """The outputs of each prompt."""
    truth: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for completion in plain:
        truth.setdefault(completion.prompt_tokens, []).extend(output.tokens for output in completion.outputs)
    return truth


@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_is_another_whatever_is_drafted(name: str) -> None:
    asked = wanted()
    plain = plainly(name)
    for ahead in (False, True):
        drafter = Adversary(truth_of(plain), tiny.VOCAB, ends=[3, 0, 1, 2], seed=len(name))
        with patch.object(Runner, "ahead", ahead), always(drafter):
            found = answers(name, asked, speculate="suffix")
        alike(found, plain, 1e-4)
        assert 0 < sum(one.accepted_tokens for one in found) < sum(one.drafted_tokens for one in found)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks": 24, "max_sequences": 6},  # Requests push each other out.
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"tensor_parallel": 2},
        {"max_sequences": 1, "max_step_tokens": 16},
    ],
    ids=["preempted", "long", "two ranks", "alone"],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_nor_where_room_is_short_or_ranks_are_two(more: dict[str, object], ahead: bool) -> None:
    asked = wanted()
    plain = plainly("llama")
    drafter = Adversary(truth_of(plain), tiny.VOCAB, ends=[3], kinds="tbbg")
    with patch.object(Runner, "ahead", ahead), always(drafter):
        found = answers("llama", asked, speculate="suffix", **more)
    alike(found, plain, 1e-4)
    assert sum(one.accepted_tokens for one in found)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_blocks": 24, "max_sequences": 6},
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"tensor_parallel": 2},
    ],
    ids=["with room", "preempted", "long", "two ranks"],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_nor_where_speculation_rests_and_wakes_at_random(more: dict[str, object], ahead: bool) -> None:
    asked = wanted()
    plain = plainly("llama")
    kinds = {"unknown": 0, "verified": 0}
    begin = Runner.begin

    def noted(self: Runner, plan: Plan) -> object:
        kinds["unknown"] += any(UNKNOWN in share.tokens for share in plan.shares)
        kinds["verified"] += any(share.draft for share in plan.shares)
        return begin(self, plan)

    for seed in range(3):
        drafter = Adversary(truth_of(plain), tiny.VOCAB, ends=[3], kinds="tbbg", seed=seed)
        with (
            patch.object(Runner, "ahead", ahead),
            patch.object(Runner, "begin", noted),
            always(drafter, restless=seed),
        ):
            found = answers("llama", asked, speculate="suffix", **more)
        alike(found, plain, 1e-4)
        assert sum(one.accepted_tokens for one in found)
    assert kinds["verified"] > 10
    assert (kinds["unknown"] > 10) is ahead


def formed() -> tuple[list[str], list[SamplingParams]]:
    """Prompts of the shipped model, whose outputs are to be JSON, as an expression says, or anything."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    forms = [Structure.json_schema(schema), Structure.regex("(red|blue|reddish)( [0-9]{3})*"), None]
    params = [
        SamplingParams(structure=form, temperature=heat, seed=seed, max_tokens=40, presence_penalty=penalty)
        for seed, (heat, penalty) in enumerate([(0, 0), (0.6, 0), (1, 0.3), (1, 0)])
        for form in forms
    ]
    prompts = [f"{seed} Once upon a time" for seed in range(len(params))]
    return prompts, params


@pytest.mark.parametrize("ahead", [False, True])
def test_a_structure_is_kept_along_every_draft(ahead: bool) -> None:
    pytest.importorskip("llguidance")
    prompts, params = formed()
    settings = {"device": "cpu", "dtype": "float32", "check": True, "max_length": 256}
    with LLM(**settings) as llm:
        plain = llm.generate(prompts, params)
    drafter = Adversary(truth_of(plain), 4096, ends=[0, 1], seed=ahead)
    with patch.object(Runner, "ahead", ahead), always(drafter), LLM(**settings, speculate="suffix") as llm:
        found = llm.generate(prompts, params)
    alike(found, plain, 1e-4)
    assert sum(one.accepted_tokens for one in found[::3]) > 20


def test_an_output_that_repeats_is_drafted_from_itself() -> None:
    """A model whose output runs in a circle: look-up finds that, and few steps do."""
    prompt = tiny.prompts()[0][:12]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias={5: 90.0})
    (plain,) = answers("llama", [(prompt, params)])
    with always(None), LLM(tiny.checkpoint("llama"), **SETTINGS, speculate="suffix") as llm:
        (found,) = llm.generate([prompt], params)
        stats = llm.stats()
    assert found.tokens == plain.tokens
    assert found.accepted_tokens > 40
    assert stats.steps < 20
    assert stats.drafts[1:] == (found.drafted_tokens, found.accepted_tokens)


def test_a_pass_within_whose_draft_an_output_ends_is_counted() -> None:
    prompt = tiny.prompts()[3]
    wish = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (plain,) = answers("llama", [(prompt, wish)])
    at = next(at for at in range(8, 20) if plain.tokens[at] not in plain.tokens[:at])
    drafter = Adversary(truth_of([plain]), tiny.VOCAB, kinds="t")
    with always(drafter), LLM(tiny.checkpoint("llama"), **SETTINGS, speculate="suffix") as llm:
        llm.generate([prompt], replace(wish, stop_token_ids=[plain.tokens[at]]))
        stats = llm.stats()
    assert stats.output_tokens == at + 1
    assert stats.cut == 1
    assert SpeculationState.of(stats, "suffix").passes == stats.steps == 2


def test_outputs_that_have_finished_are_looked_in_and_no_token_is_another() -> None:
    asked = wanted()
    prompts, params = [prompt for prompt, _ in asked], [wishes for _, wishes in asked]
    plain = plainly("llama")
    for ahead in (False, True):
        settings = SETTINGS | {"speculate": "suffix", "suffix_decoding_max_cached_requests": 20}
        with (
            patch.object(Runner, "ahead", ahead),
            always(None),
            LLM(tiny.checkpoint("llama"), **settings) as llm,
        ):
            first, second = llm.generate(prompts, params), llm.generate(prompts, params)
        alike(first, plain, 1e-4)
        alike(second, plain, 1e-4)
        before, after = (sum(one.accepted_tokens for one in found) for found in (first, second))
        assert after > 3 * before + 50


def test_a_model_with_state_takes_no_drafts(tmp_path: Path) -> None:
    with hybrid_known():
        path = hybrid_checkpoint(tmp_path / "hybrid")
        with pytest.raises(ConfigError, match="could not be taken back; leave speculate out"):
            LLM(path, device="cpu", speculate="suffix")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tensor_parallel": 2, "max_step_tokens": 16},
        {"kv_blocks": 24, "max_sequences": 6},
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"tensor_parallel": 2, "kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
    ],
    ids=["alone", "two ranks", "preempted", "tiers", "tiers of two ranks"],
)
def test_a_draft_model_changes_no_token(more: dict[str, object]) -> None:
    """One that is nearly the model itself draws nearly as the model does, also at temperature 1."""
    asked = wanted(24)
    plain = plainly("llama", 24)
    draft = near("llama", 0.02)
    ranks, tiers = "tensor_parallel" in more, "host_kv_memory" in more
    for ahead, restless in WAYS[-1:] if ranks and tiers else WAYS:
        drafter = Adversary({}, tiny.VOCAB, kinds="n")
        with patch.object(Runner, "ahead", ahead), always(drafter, restless):
            found = answers("llama", asked, speculate=str(draft), **more)
        alike(found, plain, 1e-4)
        drafted = sum(one.drafted_tokens for one in found)
        assert sum(one.accepted_tokens for one in found) > drafted / 3 > 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_in_few_bits_that_uses_the_models_kv_changes_no_token(name: str, tmp_path: Path) -> None:
    """Nor when prefixes are found that were computed beside drafts: no KV of a draft is among them."""
    asked = wanted()
    prompts, params = [prompt for prompt, _ in asked], [wishes for _, wishes in asked]
    plain, (said, longer, after) = plainly(name), later(name)
    for ahead in (False, True) if name in EVERY_WAY else (True,):
        settings = SETTINGS | {"speculate": "self", "cache": tmp_path}
        with (
            patch.object(Runner, "ahead", ahead),
            always(Adversary({}, tiny.VOCAB, kinds="n")),
            LLM(tiny.checkpoint(name), **settings) as llm,
        ):
            found = llm.generate(prompts, params)
            alike(found, plain, 1e-4)
            found_after = llm.generate(said, longer)
            alike(found_after, after, 1e-4)
            assert sum(one.cached_tokens for one in found_after) > 40
        drafted = sum(one.drafted_tokens for one in found)
        assert sum(one.accepted_tokens for one in found) > drafted / 4 > 10


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks": 24, "max_sequences": 6},
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
    ],
    ids=["preempted", "long"],
)
def test_nor_where_room_for_its_drafts_is_short(more: dict[str, object], tmp_path: Path) -> None:
    asked = wanted()
    plain = plainly("llama")
    for ahead in (False, True):
        with patch.object(Runner, "ahead", ahead), always(Adversary({}, tiny.VOCAB, kinds="n")):
            found = answers("llama", asked, speculate="self", cache=tmp_path, **more)
        alike(found, plain, 1e-4)
        assert sum(one.accepted_tokens for one in found) > 10


@pytest.mark.parametrize("speculate", ["suffix", "self"])
def test_drafts_beside_prompts_are_drawn_with_their_own_adapters(speculate: str, tmp_path: Path) -> None:
    """Of a step with chunks of prompts, the last layer computes some rows alone: several of a draft."""
    base = tiny.checkpoint("llama")
    modules = {
        "a": adapters.write(tmp_path / "a", base, 4, seed=1),
        "b": adapters.write(tmp_path / "b", base, 8, ["q_proj", "up_proj", "down_proj"], seed=2),
    }
    prompts = [prompt[:50] for prompt in tiny.prompts() * 3]
    params = [
        SamplingParams(temperature=heat, seed=at, max_tokens=8 + 3 * (at % 8), ignore_eos=True, logprobs=0)
        for at, heat in enumerate([0.0, 1.0] * len(prompts))
    ][: len(prompts)]
    wanted = [(None, "a", "b")[at % 3] for at in range(len(prompts))]
    settings = SETTINGS | {"lora_modules": modules, "max_step_tokens": 96, "max_sequences": 3}

    def said(**more: object) -> list[Completion]:
        with LLM(base, **(settings | more)) as llm:
            return llm.generate(prompts, params, lora=wanted)

    plain = said()
    kinds = "n" if speculate == "self" else "tb"
    with always(Adversary(truth_of(plain), tiny.VOCAB, kinds=kinds)):
        found = said(speculate=speculate, cache=tmp_path)
    alike(found, plain, 1e-4)
    assert sum(one.accepted_tokens for one in found) > 10


def test_a_copy_needs_no_kv_of_its_own(tmp_path: Path) -> None:
    """The memory that it takes is that of its weights, and its pack is made once."""
    settings = SETTINGS | {"kv_blocks": 64, "cache": tmp_path}
    totals, said = [], list[list[str]]()
    for speculate in ("suffix", "self", "self"):
        with LLM(tiny.checkpoint("llama"), **settings, speculate=speculate) as llm:
            budget = llm.booted.budget
            totals.append((budget.block_bytes, budget.blocks))
        said.append([path.name for path in tmp_path.glob("llama-*")])
    assert totals[0] == totals[1] == totals[2]
    assert not said[0]
    assert said[1] == said[2]
    assert len(said[1]) == 1


def test_a_model_of_few_bits_has_no_copy_of_fewer(tmp_path: Path) -> None:
    with LLM(tiny.checkpoint("llama"), **SETTINGS, speculate="self", cache=tmp_path):
        pass
    [pack] = tmp_path.glob("llama-*")
    with pytest.raises(ConfigError, match=r"in four bits, but .* is a pack"):
        LLM(pack, **SETTINGS, speculate="self", cache=tmp_path)


def test_a_copy_that_cannot_be_kept_names_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match=r"is no directory; name another directory as cache$"):
        LLM(tiny.checkpoint("llama"), **SETTINGS, speculate="self", cache=tmp_path / "file")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the ranks of one test keep their parts, and those of the next find them."""
    return tmp_path_factory.mktemp("parts")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_step_tokens": 16},
        {"kv_blocks": 24, "max_sequences": 6},
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
    ],
    ids=["with room", "small steps", "preempted", "tiers"],
)
def test_each_rank_has_its_own_part_of_a_copy(more: dict[str, object], parts: Path) -> None:
    asked = wanted(BRIEF)
    plain = plainly("llama", BRIEF)
    settings = {"speculate": "self", "tensor_parallel": 2, "cache": parts} | more
    for ahead in (True,) if "kv_blocks" in more else (False, True):
        with patch.object(Runner, "ahead", ahead), always(Adversary({}, tiny.VOCAB, kinds="n")):
            found = answers("llama", asked, **settings)
        alike(found, plain, 1e-4)
        assert sum(one.accepted_tokens for one in found) > 10
    assert sorted(path.name[-6:] for path in parts.glob("llama-*")) == ["0-of-2", "1-of-2"]


@pytest.mark.parametrize("name", ["qwen2_windows", "qwen3_moe", "gpt_oss", "glm4_moe"])
def test_a_copy_on_ranks_changes_no_token_of_any_family(name: str, tmp_path: Path) -> None:
    """Experts are as wide as real ones are, of which groups divide each rank's part."""
    wide = {"moe_intermediate_size": 64, "intermediate_size": 64} if name != "qwen2_windows" else {}
    path, asked = tiny.write(tiny.CASES[name], tmp_path / name, **wide), wanted(BRIEF)
    prompts, params = [prompt for prompt, _ in asked], [wishes for _, wishes in asked]
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(prompts, params)
    more = {"speculate": "self", "tensor_parallel": 2, "cache": tmp_path}
    with always(Adversary({}, tiny.VOCAB, kinds="n")), LLM(path, **(SETTINGS | more)) as llm:
        found = llm.generate(prompts, params)
    alike(found, plain, 1e-4)
    drafted = sum(one.drafted_tokens for one in found)
    assert sum(one.accepted_tokens for one in found) > drafted / 4 > 10


def test_a_copy_whose_groups_divide_no_ranks_part_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"columns are no multiple of 8 on each rank; give speculate suffix"
    ):
        LLM(tiny.checkpoint("qwen3_moe"), **SETTINGS, speculate="self", tensor_parallel=2)
