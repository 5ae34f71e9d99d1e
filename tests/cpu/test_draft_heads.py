"""Draft heads of EAGLE-3: they draft what the published arithmetic drafts, and change no token."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

import heads
import tiny
from cpu.test_ahead_hostile import played
from cpu.test_plan import json_of, text_of
from cpu.test_run_ahead import alike
from cpu.test_speculation import BRIEF, EVERY_WAY, FAMILIES, SETTINGS, WAYS, always, answers, plainly, wanted
from drafters import Adversary
from penstock import LLM, Completion, SamplingParams
from penstock.arch.families import TensorNames
from penstock.arch.layout import GroupId, GroupKind
from penstock.base.config import Config
from penstock.base.errors import CheckpointError, ConfigError, UnsupportedModelError
from penstock.cli.main import main
from penstock.cli.shape import open_head, open_model
from penstock.engine import head_drafter
from penstock.engine.acceptance import speculation
from penstock.engine.draft import DraftModel
from penstock.engine.forecast import forecast
from penstock.engine.head_drafter import HeadDrafter
from penstock.engine.machines import BLOCK_SIZE, Machine, Work
from penstock.engine.plan import USUAL
from penstock.ops.sampling import draw, pack_sampling
from penstock.sched.arrivals import Arrivals
from penstock.sched.rates import TransferRates
from penstock.sched.request import Request
from penstock.sched.suffix import Draft
from penstock.server.hosting import Hosting
from penstock.server.settings import OnDemandSettings
from penstock.step.params import Sampling
from penstock.step.plan import Admission, ModelRole, Plan, Share
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.graphs import DecodeGraphs
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler

NOBODY = Adversary({}, tiny.VOCAB, kinds="n")
"""Drafts nothing, so that all drafts are the head's."""


@dataclass(frozen=True)
class Seen:
    """A draft of a request: behind which tokens, and from which position on there were features."""

    tokens: tuple[int, ...]
    base: int
    draft: tuple[int, ...]


@contextmanager
def watched() -> Iterator[list[Seen]]:
    """All drafts that heads make."""
    seen, propose = list[Seen](), HeadDrafter.propose

    def noted(self: HeadDrafter, asked: Sequence[tuple[Request, Share, int]]) -> list[Draft]:
        bases = [head_drafter._base(request) for request, _, _ in asked]
        drafts = propose(self, asked)
        for (request, _, _), base, draft in zip(asked, bases, drafts, strict=True):
            if draft.tokens:
                seen.append(Seen(tuple(request.tokens), base, draft.tokens))
        return drafts

    with patch.object(HeadDrafter, "propose", noted):
        yield seen


class Reference:
    """What transformers makes of a target, and plain torch of a head behind it."""

    def __init__(self, target: Path, head: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        config = json.loads((head / "config.json").read_text())
        tensors = {
            name.replace("layers.0.", "midlayer."): one
            for name, one in load_file(head / "model.safetensors").items()
        }
        embedding = tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        self.head = heads.PlainHead(config, tensors, embedding)
        inside = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        # Inside they name layers whose output is taken, outside those whose input is.
        outputs = [tap + 1 for tap in inside] if inside else None
        self.taps = outputs or config["eagle_aux_hidden_state_layer_ids"]
        self.known = list[tuple[tuple[int, ...], list[torch.Tensor]]]()

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """The target's hidden states before the layers that the head names. Those of a longer sequence begin
        with them."""
        for longer, states in self.known:
            if longer[: len(tokens)] == tuple(tokens):
                return [state[: len(tokens)] for state in states]
        last = list[torch.Tensor]()
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
        found = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        hook.remove()
        states = [*(one[0] for one in found[:-1]), last[0]]
        self.known.append((tuple(tokens), [states[tap] for tap in self.taps]))
        return self.known[-1][1]

    @torch.inference_mode()
    def drawn(self, seen: Seen, sampling: Sampling) -> list[int]:
        """What is drawn of the head's logits with the noise of the target, behind each token of a draft."""
        taps, found = self.hidden(seen.tokens[:-1]), list[int]()
        outputs = self.head.outputs(taps, [*seen.tokens, *seen.draft[:-1]][1:])
        for level, own in enumerate(map(self.head.logits, outputs)):
            logits = torch.full((1, tiny.VOCAB), -torch.inf).index_copy_(1, self.head.ids, own[None])
            chosen = logits.argmax(-1)
            asked = pack_sampling([0], [sampling], [len(seen.tokens) + level])
            draw(logits, torch.from_numpy(asked), chosen)
            found.append(int(chosen))
        return found

    def leads(self, seen: Sequence[Seen]) -> list[float]:
        """The lead of each; the longest come first, as one pass of the target serves all that begin it."""
        return [self.lead(one) for one in sorted(seen, key=lambda one: -len(one.tokens))]

    @torch.inference_mode()
    def lead(self, seen: Seen) -> float:
        """By how much a token of a draft is less likely than the likeliest there: nothing, but for
        rounding."""
        taps = [one[seen.base :] for one in self.hidden(seen.tokens[:-1])]
        outputs = self.head.outputs(taps, [*seen.tokens, *seen.draft[:-1]][seen.base + 1 :])
        worst, ids = 0.0, self.head.ids
        for token, logits in zip(seen.draft, map(self.head.logits, outputs), strict=True):
            place = (ids == token).nonzero()
            worst = max(worst, float(logits.max() - logits[int(place)]))
        return worst


def asked_of(prompts: Sequence[Sequence[int]], tokens: int = 14) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for _ in prompts]


VARIANTS: dict[str, dict[str, object]] = {
    "authors": {},
    "speculators": {"nested": True},
    "target embeds": {"embeds": False},
    "residual normed": {"nested": True, "norm_before_residual": True},
    "output normed": {"nested": True, "norm_output": True},
    "one norm of taps": {"nested": True, "norm_before_fc": True},
    "a norm of each tap": {"nested": True, "fc_norm": True},
    "numbers of outputs": {
        "eagle_aux_hidden_state_layer_ids": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
    "a layer of Qwen3": {"nested": True, "kind": "qwen3"},
    "keys without meaning": {
        "tie_word_embeddings": True,
        "sliding_window": 64,
        "use_sliding_window": False,
    },
    "two taps": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    "whole vocabulary": {"draft_vocab_size": tiny.VOCAB},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_published_arithmetic(variant: str, tmp_path: Path) -> None:
    """Of prompts in chunks and of found ones, and where some of a draft did not hold."""
    head = heads.random_head(tmp_path / "head", "llama", **VARIANTS[variant])
    reference = Reference(tiny.checkpoint("llama"), head)
    prompts = [prompt[:40] for prompt in tiny.prompts()][:4]
    settings = SETTINGS | {"max_step_tokens": 24, "max_sequences": 3}
    with (
        always(NOBODY),
        watched() as seen,
        LLM(tiny.checkpoint("llama"), **settings, speculate=str(head)) as llm,
    ):
        llm.generate(prompts, asked_of(prompts))
        again = llm.generate([prompt[:37] for prompt in prompts], asked_of(prompts, 6))
    assert sum(one.cached_tokens for one in again) > 30
    assert sum(len(one.draft) for one in seen) > 60
    assert max(reference.leads(seen)) < 1e-3


def test_drafts_are_drawn_with_the_noise_of_the_target(tmp_path: Path) -> None:
    head = heads.random_head(tmp_path / "head", "llama")
    reference, prompt = Reference(tiny.checkpoint("llama"), head), tiny.prompts()[0][:20]
    wish = SamplingParams(temperature=1.0, top_k=30, seed=5, max_tokens=40, ignore_eos=True)
    admitted = list[Sampling]()
    admit = Sampler.admit

    def noted(self: Sampler, admission: Admission) -> None:
        admitted.append(admission.sampling)
        admit(self, admission)

    with always(NOBODY), watched() as seen, patch.object(Sampler, "admit", noted):
        answers("llama", [(prompt, wish)], speculate=str(head))
    sampling = next(one for one in admitted if one.seed == 5)
    alike_ones = [one.draft == tuple(reference.drawn(one, sampling)) for one in seen]
    assert len(alike_ones) > 20
    assert all(alike_ones)


def test_features_are_left_by_recorded_steps_too(tmp_path: Path) -> None:
    """Steps of padded rows over inputs at fixed addresses, computed as a graph would replay them."""
    head = heads.random_head(tmp_path / "head", "llama")
    reference, asked = Reference(tiny.checkpoint("llama"), head), wanted()
    prompts = [prompt for prompt, _ in asked]
    replayed = 0
    run = DecodeGraphs.run

    def counted(self: DecodeGraphs, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal replayed
        replayed += 1
        return run(self, plan)

    with LLM(tiny.checkpoint("llama"), **SETTINGS) as llm:
        plain = llm.generate(prompts, asked_of(asked, 30))
    with (
        patch.object(Runner, "ahead", True),
        patch.object(DecodeGraphs, "record", played),
        patch.object(DecodeGraphs, "run", counted),
        always(NOBODY, 3),
        watched() as seen,
        LLM(tiny.checkpoint("llama"), **SETTINGS, prefix_cache=False, speculate=str(head)) as llm,
    ):
        runner, limits = llm.booted.engine._ranks, llm.booted.limits
        assert isinstance(runner, Runner)
        runner.record(limits.max_sequences, 0, limits.max_length, record_runs=False)
        found = llm.generate(prompts, asked_of(asked, 30))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert replayed > 4
    assert len(seen) > 10
    assert max(reference.leads(seen)) < 1e-3


def accepted(found: Sequence[Completion]) -> tuple[int, int]:
    """Tokens that were drafted, and those of them that were accepted."""
    return sum(one.drafted_tokens for one in found), sum(one.accepted_tokens for one in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_changes_no_token(name: str, tmp_path: Path) -> None:
    """A random one, whose drafts hardly ever hold; of every family, at every temperature, with every wish."""
    asked = wanted()
    plain = plainly(name)
    head = heads.random_head(tmp_path / "head", name, nested=name == "qwen3")
    for ahead, restless in WAYS if name in EVERY_WAY else WAYS[-1:]:
        with patch.object(Runner, "ahead", ahead), always(NOBODY, restless):
            found = answers(name, asked, speculate=str(head))
        alike(found, plain, 1e-4)
        drafted, held = accepted(found)
        assert drafted > 100
        assert held < drafted / 2


@pytest.mark.parametrize(
    "more",
    [
        {"kv_blocks": 24, "max_sequences": 6},
        {"kv_blocks": 12, "max_sequences": 3, "host_kv_memory": "1MiB"},
        {"max_sequences": 1, "max_step_tokens": 16},
    ],
    ids=["preempted", "long", "alone"],
)
def test_nor_where_room_is_short(more: dict[str, object], tmp_path: Path) -> None:
    """What is drafted is still what the published arithmetic drafts, from where its features begin."""
    asked = wanted(BRIEF)
    plain = plainly("llama", BRIEF)
    head = heads.random_head(tmp_path / "head", "llama")
    reference = Reference(tiny.checkpoint("llama"), head)
    greedy = [(prompt, params) for (prompt, _), params in zip(asked[:6], asked_of(asked[:6], 8), strict=True)]
    for ahead in (False, True):
        with patch.object(Runner, "ahead", ahead), always(NOBODY):
            found = answers("llama", asked, speculate=str(head), **more)
            with watched() as seen:
                answers("llama", greedy, speculate=str(head), prefix_cache=False, **more)
        alike(found, plain, 1e-4)
        assert accepted(found)[0] > 20
        assert len(seen) > 10
        assert max(reference.leads(seen)) < 1e-3


def test_a_prefix_from_host_memory_has_no_features_and_the_head_begins_behind_it(tmp_path: Path) -> None:
    head = heads.random_head(tmp_path / "head", "llama")
    reference = Reference(tiny.checkpoint("llama"), head)
    chance = random.Random(5)
    prompts = [[chance.randrange(tiny.VOCAB) for _ in range(38)] for _ in range(7)]
    more = SETTINGS | {"kv_blocks": 26, "max_sequences": 2, "host_kv_memory": "1MiB", "max_length": 60}
    with LLM(tiny.checkpoint("llama"), **more) as llm:
        plain = llm.generate(prompts, asked_of(prompts))
    with (
        always(NOBODY),
        patch.object(TransferRates, "copying_pays", lambda *_: True),
        patch.object(Arrivals, "is_late", lambda *_: False),
        watched() as seen,
        LLM(tiny.checkpoint("llama"), **more, speculate=str(head)) as llm,
    ):
        first = llm.generate(prompts, asked_of(prompts))
        again = [llm.generate([prompt], asked_of([prompt]))[0] for prompt in prompts]
    assert sum(one.cached_host for one in again) > 60
    assert [one.tokens for one in first] == [one.tokens for one in again] == [one.tokens for one in plain]
    late = [one for one in seen if one.base]
    assert len(late) > 5
    assert max(reference.leads(seen)) < 1e-3


def test_nor_where_weights_stream(tmp_path: Path) -> None:
    head = heads.random_head(tmp_path / "head", "llama_tied", embeds=False)
    reference = Reference(tiny.checkpoint("llama_tied"), head)
    asked, settings = wanted(BRIEF), {"speculate": str(head), "kv_blocks": 90, "cache": tmp_path}
    plain = plainly("llama_tied", BRIEF)
    with LLM(tiny.checkpoint("llama_tied"), **(SETTINGS | settings)) as llm:
        budget = llm.booted.budget
        largest = max(layout.size for layout in llm.booted.weights._layouts.values())
    least = budget.activations + budget.kv + budget.weights - 2 * largest
    prompts = [prompt for prompt, _ in asked]
    with (
        always(NOBODY),
        watched() as seen,
        LLM(tiny.checkpoint("llama_tied"), **(SETTINGS | settings), device_memory=least) as llm,
    ):
        assert not llm.booted.weights.placement.everything_resident
        found = llm.generate(prompts, [params for _, params in asked])
        seen.clear()
        for prompt in prompts[:6]:  # Alone: see `HeadDrafter` on pages that requests share.
            llm.generate([prompt], asked_of([prompt]))
    alike(found, plain, 1e-4)
    assert accepted(found)[0] > 100
    assert max(reference.leads(seen)) < 1e-3


# ---- what is refused


OTHERS: dict[str, tuple[dict[str, object], str]] = {
    "Medusa": ({"architectures": ["MedusaModel"], "medusa_num_heads": 4}, "another kind, Medusa,"),
    "MLP speculator": ({"model_type": "mlp_speculator"}, "another kind, an MLP speculator,"),
    "DFlash": ({"architectures": ["DFlashDraftModel"], "block_size": 16}, "another kind, DFlash,"),
    "EAGLE-1": ({"architectures": ["EagleLlamaForCausalLM"]}, "another kind, EAGLE-1 or EAGLE-2,"),
    "speculators": ({"speculators_model_type": "peagle"}, "another kind, P-EAGLE,"),
    "unheard of": ({"speculators_model_type": "falcon"}, "another kind, falcon,"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_heads_of_other_kinds_are_named(kind: str, tmp_path: Path) -> None:
    config, said = OTHERS[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{said} which does not run here; give an EAGLE-3 head"):
        LLM(tiny.checkpoint("llama"), **SETTINGS, speculate=str(tmp_path))


def test_a_head_of_the_first_eagle_is_known_by_its_weights(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    heads.write(tmp_path, config, {"fc.weight": torch.zeros(8, 16), "fc.bias": torch.zeros(8)})
    with pytest.raises(ConfigError, match="EAGLE-1 or EAGLE-2, which does not run here"):
        LLM(tiny.checkpoint("llama"), **SETTINGS, speculate=str(tmp_path))


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "hidden size": ({"target_hidden_size": 96}, "hidden states of 96, but the model's are 64"),
    "vocabulary": ({"vocab_size": 96}, "with 96 tokens, but the model has 97"),
    "a layer that is not there": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        "of layers 1, 2, 4, which a model of 3 layers does not have",
    ),
    "the usual layers of more": ({"eagle_aux_hidden_state_layer_ids": None}, "as usual, of layers 2, 1, 0"),
    "a layer twice": ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "must be different layers"),
    "layers": ({"num_hidden_layers": 2}, "key 'num_hidden_layers' is 2"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, "are both true"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic rope does not run"),
    "words for layers": ({"eagle_aux_hidden_state_layer_ids": ["low"]}, "it must be a list of layers"),
    "more tokens than there are": ({"draft_vocab_size": 98}, "key 'draft_vocab_size' is 98"),
    "a window": ({"sliding_window": 64}, "key 'sliding_window' is 64"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_head_for_another_model_is_refused_before_weights_are_loaded(fault: str, tmp_path: Path) -> None:
    config, said = REFUSED[fault]
    path = heads.random_head(tmp_path / "head", "llama")
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | config))
    with (
        patch("penstock.engine.boot.place", side_effect=AssertionError),
        pytest.raises((ConfigError, UnsupportedModelError), match=said),
    ):
        LLM(tiny.checkpoint("llama"), **SETTINGS, speculate=str(path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": None}, "lacks tensor d2t, which says which 41 of the model's 97 tokens"),
        ({"d2t": torch.zeros(40, dtype=torch.int64)}, r"calls for I64 \[41\]"),
        ({"d2t": torch.zeros(41)}, "tensor d2t is F32"),
        ({"d2t": torch.full((41,), 60)}, "leads to tokens that the model does not have"),
        ({"d2t": -torch.arange(41)}, "twice to one"),
        ({"fc.weight": torch.zeros(64, 128)}, r"tensor fc.weight has shape \[64, 128\]"),
        ({"norm.weight": None}, "lacks tensor norm.weight"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(16)}, "does not have"),
    ],
    ids=["no ids", "few ids", "broken ids", "ids beyond", "ids twice", "projection", "norm", "more"],
)
def test_a_damaged_head_is_refused(change: dict[str, torch.Tensor | None], said: str, tmp_path: Path) -> None:
    path = heads.random_head(tmp_path / "head", "llama")
    tensors = load_file(path / "model.safetensors") | change
    config = json.loads((path / "config.json").read_text())
    heads.write(path, config, {name: one for name, one in tensors.items() if one is not None})
    with pytest.raises(CheckpointError, match=said):
        LLM(tiny.checkpoint("llama"), **SETTINGS, speculate=str(path))


# ---- its memory


def test_a_boot_decides_what_was_planned(tmp_path: Path) -> None:
    """To the byte: what the head takes of the device, and what is left to the target."""
    target, head = tiny.checkpoint("llama"), heads.random_head(tmp_path / "head", "llama")
    more = {
        "kv_blocks": 3 * 128 // BLOCK_SIZE,
        "max_length": 128,
        "max_sequences": 3,
        "block_size": BLOCK_SIZE,
    }
    with LLM(target, **(SETTINGS | more), speculate=str(head)) as llm:
        runner = llm.booted.engine._ranks
        assert isinstance(runner, Runner)
        model, budget = runner.models[ModelRole.DRAFT], llm.booted.budget
        assert isinstance(model.weights, WeightStream)
        assert model.pool is not None
        taken = model.weights.bytes + model.pool.bytes.numel()
    with LLM(target, **(SETTINGS | more), speculate="suffix") as llm:
        plain = llm.booted.budget
    spec, found = open_model(str(target))[1], open_head(str(head))
    assert found is not None
    draft = DraftModel.of_head(found, "float32", BLOCK_SIZE)
    settings = Config(Path(), speculate="suffix")
    work = Work("float32", 3, 128, SETTINGS["max_step_tokens"], settings=settings, draft=draft)
    shown = forecast(spec, TensorNames(), Machine(budget.total, None, USUAL, 1e12), work)
    said = speculation(spec, TensorNames(), shown)
    assert said.weights + said.kv == taken
    assert replace(shown.budget, activations=budget.activations) == budget
    assert budget.weights - plain.weights == said.weights
    # Hidden states of all tokens of a step, beside each other, and features; twice on a heap.
    assert budget.activations - plain.activations >= 2 * SETTINGS["max_step_tokens"] * 7 * 64 * 4
    assert len(said.paces) == 5
    assert all(pace.drafting > 0 for pace in said.paces[1:])


def test_a_plan_names_the_head_and_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = heads.random_head(tmp_path / "head", "llama")
    asked = [str(tiny.checkpoint("llama")), "--machine", "desktop-24", "--speculate"]
    table, found = text_of(capsys, *asked, str(head)), json_of(capsys, *asked, str(head))
    assert "draft head (EAGLE-3, 1 layer, " in table
    assert found["speculation"]["draft"]["weights"] > 64 * 192 * 4
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["MedusaModel"], "medusa_num_heads": 4}))
    assert main(["plan", *asked, str(other)]) == 2
    assert "Medusa, which does not run here" in capsys.readouterr().err
    heads.random_head(tmp_path / "wide", "llama", target_hidden_size=96)
    assert main(["plan", *asked, str(tmp_path / "wide")]) == 2
    assert "hidden states of 96, but the model's are 64" in capsys.readouterr().err


def test_models_on_demand_refuse_a_head(tmp_path: Path) -> None:
    head = heads.random_head(tmp_path / "head", "llama")
    config = Config(tiny.checkpoint("llama"), device="cpu", speculate=str(head))
    host = Hosting({"one": config}, {}, OnDemandSettings())
    with pytest.raises(ConfigError, match="does not work with several models on demand"):
        host.prepare()


def test_the_embedding_of_a_pack_in_few_bits_is_the_heads_too(tmp_path: Path) -> None:
    with LLM(tiny.checkpoint("llama"), **SETTINGS, speculate="self", cache=tmp_path):
        pass
    [pack] = tmp_path.glob("llama-*")
    head = heads.random_head(tmp_path / "head", "llama", embeds=False)
    prompts = [prompt[:30] for prompt in tiny.prompts()]
    with LLM(pack, **SETTINGS) as llm:
        plain = llm.generate(prompts, asked_of(prompts))
    with always(NOBODY), watched() as seen, LLM(pack, **SETTINGS, speculate=str(head)) as llm:
        found = llm.generate(prompts, asked_of(prompts))
        runner = llm.booted.engine._ranks
        assert isinstance(runner, Runner)
        weights = runner.models[ModelRole.DRAFT].weights
        assert weights is not None
        (matrix,) = weights.take(GroupId(GroupKind.EMBEDDING)).matrices.values()
    assert matrix.dense is None
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert len(seen) > 20
