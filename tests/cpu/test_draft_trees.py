"""Drafts that are trees change no token, whatever they hold: by the real engine, for every family."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

import penstock.engine.boot
import tiny
from cpu.test_run_ahead import alike
from cpu.test_speculation import (
    BRIEF,
    FAMILIES,
    SETTINGS,
    WAYS,
    always,
    answers,
    formed,
    later,
    plainly,
    truth_of,
    wanted,
)
from drafters import Adversary, TreeAdversary
from layouts import kv_of_heads
from pairs import near
from penstock import LLM, Completion, SamplingParams
from penstock.arch.layout import KVLayout
from penstock.arch.mixers.mixer import Plane
from penstock.engine.tree_drafter import GrowingTree, TreeDrafter, grows_trees
from penstock.kv.movement.pool import KVPool
from penstock.sched.drafter import flaw
from penstock.sched.speculation import Speculation
from penstock.sched.suffix import Draft
from penstock.sched.survival import Survival
from penstock.step.plan import MOST_NODES, Admission, BlockId, Plan, Row, Share, ShareKind
from penstock.step.tree import depths, lines, sights, walk
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler
from penstock.worker.trees import moves_of
from worlds import sampling


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many trees are verified meanwhile, and how many tokens are accepted off their first line."""
    counts, begin, accepted = {"trees": 0, "beside": 0}, Runner.begin, Share.accepted

    def begun(self: Runner, plan: Plan) -> object:
        counts["trees"] += sum(bool(share.parents) for share in plan.shares)
        return begin(self, plan)

    def walked(self: Share, drawn: Sequence[int]) -> list[int]:
        nodes = accepted(self, drawn)
        counts["beside"] += sum(node > at for at, node in enumerate(nodes))
        return nodes

    with patch.object(Runner, "begin", begun), patch.object(Share, "accepted", walked):
        yield counts


def compared(name: str, plain: Sequence[Completion], seed: int = 0, **more: object) -> None:
    """Compare answers to `wanted` with plain ones, with trees in all steps, running ahead or not."""
    for ahead in (False, True):
        drafter = TreeAdversary(truth_of(plain), tiny.VOCAB, ends=[3, 0, 1, 2], seed=seed + ahead)
        with patch.object(Runner, "ahead", ahead), always(drafter), counted() as counts:
            found = answers(name, wanted(), speculate="suffix", **more)
        alike(found, plain, 1e-4)
        assert counts["trees"] > 20
        assert counts["beside"] > 5
        assert sum(one.accepted_tokens for one in found) > 20


@pytest.mark.parametrize("name", FAMILIES)
def test_no_token_is_another_whatever_trees_hold(name: str) -> None:
    compared(name, plainly(name), seed=len(name))


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks": 24, "max_sequences": 6},  # Requests push each other out.
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"max_sequences": 1, "max_step_tokens": 24},
    ],
    ids=["preempted", "long", "two ranks", "tiers of two ranks", "alone"],
)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_nor_where_room_is_short_or_ranks_are_two(name: str, more: dict[str, object]) -> None:
    """gpt_oss has windows shorter than trees, and sinks."""
    if name == "gpt_oss" and "tensor_parallel" in more:
        pytest.skip("as of llama")
    compared(name, plainly(name), **more)


def test_nor_where_speculation_rests_and_wakes_at_random() -> None:
    plain = plainly("llama")
    for seed in range(2):
        drafter = TreeAdversary(truth_of(plain), tiny.VOCAB, ends=[3], seed=seed)
        with patch.object(Runner, "ahead", True), always(drafter, restless=seed), counted() as counts:
            found = answers("llama", wanted(), speculate="suffix", kv_blocks=24, max_sequences=6)
        alike(found, plain, 1e-4)
        assert counts["trees"] > 10


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"host_kv_memory": "1MiB", "kv_blocks": 40},
        {"host_kv_memory": "1MiB", "kv_blocks": 40, "tensor_parallel": 2},
    ],
    ids=["pages", "host", "host of two ranks"],
)
def test_what_is_found_later_was_accepted(more: dict[str, object]) -> None:
    """A later request finds the KV that trees have left, and goes on as one that computes it anew."""
    asked = [(prompt, wish) for prompt, wish in wanted() if wish.n == 1]
    plain = answers("llama", asked)
    more_of_it = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    said = [([*one.prompt_tokens, *one.tokens][:60], more_of_it) for one in plain]
    after, moved = answers("llama", said, prefix_cache=False), 0
    for seed in range(2):
        drafter = TreeAdversary(truth_of(plain), tiny.VOCAB, ends=[3], seed=seed)
        with (
            always(drafter),
            counted() as counts,
            LLM(tiny.checkpoint("llama"), **(SETTINGS | more), speculate="suffix") as llm,
        ):
            found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
            alike(found, plain, 1e-4)
            again = llm.generate([prompt for prompt, _ in said], [params for _, params in said])
        alike(again, after, 1e-4)
        moved += counts["beside"]
        assert sum(one.cached_tokens for one in again) > 100
    assert moved > 3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_structure_is_kept_along_every_line(ahead: bool) -> None:
    pytest.importorskip("llguidance")
    prompts, params = formed()
    settings = {"device": "cpu", "dtype": "float32", "check": True, "max_length": 256}
    with LLM(**settings) as llm:
        plain = llm.generate(prompts, params)
    drafter = TreeAdversary(truth_of(plain), 4096, ends=[0, 1], seed=ahead)
    with (
        patch.object(Runner, "ahead", ahead),
        always(drafter),
        counted() as counts,
        LLM(**settings, speculate="suffix") as llm,
    ):
        found = llm.generate(prompts, params)
    alike(found, plain, 1e-4)
    assert counts["beside"] > 10


# ---- trees of a draft model


@contextmanager
def of_trees(nodes: int, restless: int | None = None) -> Iterator[None]:
    """Draft models grow trees of so many nodes, wherever weights rest."""

    def depths(self: Speculation, found: Sequence[Draft], tokens: int, spare: int) -> list[int]:
        return [min(nodes, spare // len(found))] * len(found)

    with (
        patch.object(penstock.engine.boot, "ModelDrafter", TreeDrafter),
        always(Adversary({}, tiny.VOCAB, kinds="n"), restless),
        patch.object(Speculation, "depths", depths),
    ):
        yield


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tensor_parallel": 2, "max_step_tokens": 32},
        {"kv_blocks": 24, "max_sequences": 6},
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
    ],
    ids=["alone", "two ranks", "preempted", "tiers"],
)
def test_a_draft_models_trees_change_no_token(more: dict[str, object]) -> None:
    plain, draft = plainly("llama", BRIEF), near("llama", 0.05)
    for ahead, restless in WAYS[-1:] if "kv_blocks" in more else WAYS:
        with patch.object(Runner, "ahead", ahead), of_trees(14, restless), counted() as counts:
            found = answers("llama", wanted(BRIEF), speculate=str(draft), **more)
        alike(found, plain, 1e-4)
        assert counts["trees"] > 5
        assert sum(one.accepted_tokens for one in found) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_nor_do_those_of_a_copy_that_uses_the_models_kv(name: str, tmp_path: Path) -> None:
    """Nor when prefixes are found that were computed beside drafts: no KV of a draft is among them."""
    asked = wanted()
    prompts, params = [prompt for prompt, _ in asked], [wishes for _, wishes in asked]
    plain, (said, longer, after) = plainly(name), later(name)
    settings = SETTINGS | {"speculate": "self", "cache": tmp_path}
    with of_trees(20), counted() as counts, LLM(tiny.checkpoint(name), **settings) as llm:
        alike(llm.generate(prompts, params), plain, 1e-4)
        assert counts["trees"] > 20
        found_after = llm.generate(said, longer)
    alike(found_after, after, 1e-4)
    assert sum(one.cached_tokens for one in found_after) > 40


@pytest.mark.parametrize("name", ["llama", "llama_dynamic", "qwen2_windows"])
def test_a_draft_model_that_is_the_model_knows_what_comes(name: str) -> None:
    """At any temperature: its trees are computed at the right positions, and it knows the noise of each."""
    prompt = tiny.prompts()[0][:20]
    params = [
        SamplingParams(temperature=heat, seed=3, max_tokens=40, ignore_eos=True, top_k=top)
        for heat, top in ((0, 0), (0.6, 0), (1, 0), (1, 9))
    ]
    asked = [(prompt, one) for one in params]
    plain = answers(name, asked)
    with of_trees(48):
        found = answers(name, asked, speculate=str(near(name, 0.0)), max_step_tokens=256)
    alike(found, plain, 1e-4)
    assert max(len(one.tokens) - one.accepted_tokens for one in found) <= 7


def test_trees_are_grown_where_passes_over_weights_are_long() -> None:
    """On a GPU, where the steps that grow them are launched one by one. A CPU has no other steps."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [grows_trees(cpu, seconds) for seconds in (0.0, 0.0004, 0.25)] == [False, True, True]
    assert [grows_trees(gpu, seconds) for seconds in (0.0, 0.0004, 0.25)] == [False, False, True]


def test_the_likeliest_lines_are_the_tree() -> None:
    """Of all that was offered; end tokens have no children, and none is likelier than its parent."""
    chance = random.Random(7)
    for count in (1, 2, 7, 20, MOST_NODES):
        request = SimpleNamespace(tokens=[4, 5], sampling=replace(sampling(), end_tokens=frozenset({3})))
        tree = GrowingTree(request, count)  # type: ignore[arg-type]
        known = {(): 1.0}
        coming = [()]
        for _ in range(9):
            offers = [[(token, chance.choice([1.0, chance.random()])) for token in range(5)] for _ in coming]
            tree.offer(offers)
            for line, some in zip(coming, offers, strict=True):
                known.update({(*line, token): known[line] * own for token, own in some})
            before, tokens, parents = len(tree.computed), tree.widen(), tree.parents_computed()
            assert len(tree.computed) == before + len(tokens) <= 1 + count
            every = lines([0] * len(parents), parents)
            assert all(parent < node for node, parent in enumerate(parents, 1))
            computed = [tree._tokens[node] for node in tree.computed[1:]]
            coming = lines(computed, parents)[before:]
            assert all(len(line) == len(same) for line, same in zip(coming, every[before:], strict=True))
            assert 3 not in [token for line in coming for token in line[:-1]]
            if not tokens:
                break
        draft = tree.draft()
        assert not flaw(draft, count, 5)
        found = lines(draft.tokens, draft.parents)[1:]
        del known[()]
        best = sorted(known.values(), reverse=True)[:count]
        assert [known[line] for line in found] == pytest.approx(best)
        assert len(set(found)) == len(found)


def test_what_trees_hold_is_learnt_of_their_scores() -> None:
    """Of scores that say too much, by what held of nodes before which all has held."""
    chance, survival = random.Random(2), Survival()
    draft = Draft((1, 2, 3, 4), (0.9, 0.9, 0.05, 0.9), 0, by_model=True, parents=(0, 1, 0, 3))
    for _ in range(600):
        held = [1] if chance.random() < 0.4 else []
        held += [2] if held and chance.random() < 0.4 else []
        survival.learn_drawn(draft, (*held, 0))
    first, second, third, fourth = survival.of(draft)
    assert first == pytest.approx(0.4, abs=0.15)
    assert second == pytest.approx(first * first)
    assert third < 0.05
    assert fourth == pytest.approx(third * first)
    assert survival.of_model(2, tree=True) == pytest.approx([first, second], abs=0.1)


# ---- its parts


def random_tree(chance: random.Random, count: int, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents, of which many siblings are equal."""
    parents = tuple(chance.randint(max(0, node - 5), node) for node in range(count))
    return tuple(chance.randrange(tokens) for _ in parents), parents


def tree_share(row: int, draft: tuple[int, ...], parents: tuple[int, ...]) -> Share:
    blocks = (BlockId(0),)
    return Share(Row(row), 9, (0, *draft), 0, blocks, True, 5, ShareKind.VERIFY, parents=parents)


def test_the_walk_on_a_device_is_that_on_the_host() -> None:
    """And what it accepts is counted, each token once."""
    chance, vocab = random.Random(5), 3
    for count in (*range(1, 30), 63):
        trees = [random_tree(chance, count, vocab) for _ in range(4)]
        sampler = Sampler(vocab, 4, torch.device("cpu"))
        for row in range(4):
            settings = replace(sampling(), presence_penalty=1e-9)
            sampler.admit(Admission(Row(row), settings, (0,), ()))
        logits = torch.rand(4 * (1 + count), vocab)
        drawn = logits.argmax(-1).tolist()
        shares = [tree_share(row, *tree) for row, tree in enumerate(trees)]
        assert sampler.sample(logits.clone(), shares).read()[0] == drawn
        for row, (draft, parents) in enumerate(trees):
            own = drawn[row * (1 + count) : (row + 1) * (1 + count)]
            nodes = walk(own, draft, parents)
            assert sampler.newest[row] == own[nodes[-1]]
            counts = sampler._rows[Row(row)].counts
            assert counts is not None
            said = [own[node] for node in nodes]
            assert counts.output.tolist() == [said.count(token) for token in range(vocab)]
            line = lines(draft, parents)[nodes[-1]]
            assert line == tuple(said[:-1])
            assert depths(parents)[nodes[-1]] == len(line)
            ends = [node for node, above in enumerate(parents, 1) if above == nodes[-1]]
            assert said[-1] not in [draft[node - 1] for node in ends]


def test_a_node_sees_its_line_as_far_as_its_window() -> None:
    parents = (0, 1, 2, 0, 4)
    assert sights(parents) == [0b1, 0b11, 0b111, 0b1111, 0b10001, 0b110001]
    assert sights(parents, 2) == [0b1, 0b11, 0b110, 0b1100, 0b10001, 0b110000]
    assert sights(parents, 1) == [1 << node for node in range(6)]


@pytest.mark.parametrize("parents", [(0, 2), (0, 3), (0, -1), (0,), (1, 0)])
def test_what_is_no_tree_is_not_verified(parents: tuple[int, ...]) -> None:
    assert flaw(Draft((5, 6), (1.0, 1.0), 0, parents=parents), 8, 10) == (
        "a tree in which a token is not behind its parent"
    )
    assert not flaw(Draft((5, 6), (1.0, 1.0), 0, parents=(0, 0)), 8, 10)


def test_the_first_line_of_a_tree_comes_first() -> None:
    draft = Draft((7, 8, 9, 7, 5), (0.5, 0.4, 0.3, 0.2, 0.1), 0, parents=(0, 0, 1, 2, 3))
    found = draft.heavy_first()
    assert (found.tokens, found.parents) == ((7, 9, 5, 8, 7), (0, 1, 2, 0, 4))
    assert found.scores == (0.5, 0.3, 0.1, 0.4, 0.2)
    chance = random.Random(1)
    for count in range(1, 40):
        tokens, parents = random_tree(chance, count, 50)
        found = Draft(tokens, (1.0,) * count, 0, parents=parents).heavy_first()
        assert sorted(lines(found.tokens, found.parents)) == sorted(lines(tokens, parents))
        assert all(parent < node for node, parent in enumerate(found.parents, 1))
        first = [0]
        while first[-1] in parents:
            first.append(1 + parents.index(first[-1]))
        assert lines(found.tokens, found.parents)[len(first) - 1] == lines(tokens, parents)[first[-1]]
        assert found.parents[: len(first) - 1] == tuple(range(len(first) - 1))


UNEQUAL = KVLayout(
    (
        (Plane("k", 2, 6), Plane("v", 2, 4)),
        (Plane("latent", 1, 7),),
        (Plane("k", 1, 7), Plane("v", 1, 7)),
    ),
    4,
    "bfloat16",
)


@pytest.mark.parametrize(
    "layout", [kv_of_heads(3, 8, 2, 5, "bfloat16"), kv_of_heads(2, 4, 2, 8, "float32"), UNEQUAL]
)
def test_kv_of_tokens_is_moved_in_all_layers(layout: KVLayout) -> None:
    """Also where a place is read and written at once."""
    pool = KVPool(layout, 5, torch.device("cpu"))
    noise = np.random.default_rng(3).integers(0, 256, pool.bytes.numel(), dtype=np.uint8)
    pool.bytes.copy_(torch.from_numpy(noise))
    before = [[plane.flatten(0, 1).view(torch.uint8).clone() for plane in layer] for layer in pool.layers]
    share = tree_share(0, (1,) * 7, (0, 0, 1, 2, 4, 5, 5))
    moves = moves_of(share, [0, 2, 4, 5, 7])
    assert moves == [(0, 11, 10), (0, 13, 11), (0, 14, 12), (0, 16, 13)]
    sources, targets = torch.tensor([[one, other] for _, one, other in moves]).T
    pool.move(sources, targets)
    for planes, known in zip(pool.layers, before, strict=True):
        for plane, then in zip(planes, known, strict=True):
            expected = then.clone()
            expected[targets] = then[sources]
            assert torch.equal(plane.flatten(0, 1).view(torch.uint8), expected)
