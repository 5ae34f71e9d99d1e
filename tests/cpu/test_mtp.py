"""Drafts of the MTP layer in a model's own checkpoint: they are those of the published arithmetic, and change
no token."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import mtps
import tiny
from cpu.test_draft_heads import NOBODY, Seen, accepted, asked_of, watched
from cpu.test_plan import json_of, text_of
from cpu.test_run_ahead import alike
from cpu.test_speculation import BRIEF, SETTINGS, always, formed, wanted
from penstock import LLM, Completion, SamplingParams
from penstock.base.config import SHIPPED_MODEL, Config
from penstock.base.errors import BudgetError, CheckpointError, ConfigError
from penstock.cli.main import main
from penstock.cli.shape import open_model, open_mtp
from penstock.engine.acceptance import speculation
from penstock.engine.boot import boot
from penstock.engine.draft import DraftModel
from penstock.engine.forecast import forecast
from penstock.engine.machines import BLOCK_SIZE, Machine, Work
from penstock.engine.plan import USUAL
from penstock.ops.sampling import draw, pack_sampling
from penstock.server.hosting import Hosting
from penstock.server.settings import OnDemandSettings
from penstock.step.params import Sampling
from penstock.step.plan import Admission, ModelRole
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.pack.writer import write_pack
from penstock.weights.streaming.stream import WeightStream
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler
from quantised import SCHEMES, checkpoints


class Reference:
    """What plain torch makes of a target and its MTP layer."""

    def __init__(self, path: Path) -> None:
        self.plain = mtps.PlainMtp(path)

    def logits(self, seen: Seen) -> Iterator[torch.Tensor]:
        """Logits of each token of a draft."""
        hidden = self.plain.hidden(seen.tokens[:-1])[seen.base :]
        behind = [*seen.tokens, *seen.draft[:-1]][seen.base + 1 :]
        return map(self.plain.logits, self.plain.outputs(hidden, behind))

    def leads(self, seen: Sequence[Seen]) -> list[float]:
        """The lead of each; the longest come first, as one pass of the target serves all that begin it."""
        return [self.lead(one) for one in sorted(seen, key=lambda one: -len(one.tokens))]

    def lead(self, seen: Seen) -> float:
        """By how much a token of a draft is less likely than the likeliest there: nothing, but for
        rounding."""
        pairs = zip(self.logits(seen), seen.draft, strict=True)
        return max(float(logits.max() - logits[token]) for logits, token in pairs)

    def drawn(self, seen: Seen, sampling: Sampling) -> list[int]:
        """What is drawn of the layer's logits with the noise of the target, behind each token of a draft."""
        found = list[int]()
        for level, own in enumerate(self.logits(seen)):
            logits = own[None].clone()
            chosen = logits.argmax(-1)
            asked = pack_sampling([0], [sampling], [len(seen.tokens) + level])
            draw(logits, torch.from_numpy(asked), chosen)
            found.append(int(chosen))
        return found


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtps.checkpoint(tmp_path_factory.mktemp("glm"))


def answers(
    path: Path, asked: Sequence[tuple[Sequence[int], SamplingParams]], **more: object
) -> list[Completion]:
    with LLM(path, **(SETTINGS | more)) as llm:
        return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])


VARIANTS = [("glm4_moe", False), ("glm4_moe_groups", True), ("glm4_moe_yarn", False)]


@pytest.mark.parametrize(("name", "shares"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_drafts_are_those_of_the_published_arithmetic(name: str, shares: bool, tmp_path: Path) -> None:
    """Of prompts in chunks and of found ones, and where some of a draft did not hold; tokens are those of
    plain decoding."""
    path = mtps.checkpoint(tmp_path, name, shares=shares)
    reference, prompts = Reference(path), [prompt[:40] for prompt in tiny.prompts()][:4]
    settings = SETTINGS | {"max_step_tokens": 24, "max_sequences": 3}
    with LLM(path, **settings) as llm:
        plain = llm.generate(prompts, asked_of(prompts))
    with always(NOBODY), watched() as seen, LLM(path, **settings, speculate="mtp") as llm:
        assert llm.drafter == "mtp"
        found = llm.generate(prompts, asked_of(prompts))
        again = llm.generate([prompt[:37] for prompt in prompts], asked_of(prompts, 6))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert sum(one.cached_tokens for one in again) > 30
    assert sum(len(one.draft) for one in seen) > 60
    assert any(len(one.draft) > 3 for one in seen)
    assert max(reference.leads(seen)) < 1e-3


def test_drafts_are_drawn_with_the_noise_of_the_target(glm: Path) -> None:
    reference, prompt = Reference(glm), tiny.prompts()[0][:20]
    wish = SamplingParams(temperature=1.0, top_k=30, seed=5, max_tokens=40, ignore_eos=True)
    admitted = list[Sampling]()
    admit = Sampler.admit

    def noted(self: Sampler, admission: Admission) -> None:
        admitted.append(admission.sampling)
        admit(self, admission)

    with always(NOBODY), watched() as seen, patch.object(Sampler, "admit", noted):
        answers(glm, [(prompt, wish)], speculate="mtp")
    sampling = next(one for one in admitted if one.seed == 5)
    alike_ones = [one.draft == tuple(reference.drawn(one, sampling)) for one in seen]
    assert len(alike_ones) > 20
    assert all(alike_ones)


@pytest.fixture(scope="module")
def plain(glm: Path) -> list[Completion]:
    return answers(glm, wanted())


@pytest.fixture(scope="module")
def plain_and_brief(glm: Path) -> list[Completion]:
    return answers(glm, wanted(BRIEF))


@pytest.mark.parametrize(("ahead", "restless"), [(False, None), (True, None), (True, 1)])
def test_it_changes_no_token(
    ahead: bool, restless: int | None, glm: Path, plain: Sequence[Completion]
) -> None:
    """A random one, whose drafts hardly ever hold; at every temperature, with every wish."""
    with patch.object(Runner, "ahead", ahead), always(NOBODY, restless):
        found = answers(glm, wanted(), speculate="mtp")
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
def test_nor_where_room_is_short(
    more: dict[str, object], glm: Path, plain_and_brief: Sequence[Completion]
) -> None:
    """What is drafted is still what the published arithmetic drafts."""
    asked, reference = wanted(BRIEF), Reference(glm)
    greedy = [(prompt, params) for (prompt, _), params in zip(asked[:6], asked_of(asked[:6], 8), strict=True)]
    with patch.object(Runner, "ahead", True), always(NOBODY):
        found = answers(glm, asked, speculate="mtp", **more)
        with watched() as seen:
            answers(glm, greedy, speculate="mtp", prefix_cache=False, **more)
    alike(found, plain_and_brief, 1e-4)
    assert accepted(found)[0] > 20
    assert len(seen) > 10
    assert max(reference.leads(seen)) < 1e-3


def test_nor_where_experts_stream(glm: Path, plain_and_brief: Sequence[Completion], tmp_path: Path) -> None:
    asked, more = wanted(BRIEF), {"speculate": "mtp", "kv_blocks": 90, "cache": tmp_path}
    with LLM(glm, **(SETTINGS | more)) as llm:
        budget = llm.booted.budget
        experts = sum(one.size for one in llm.booted.weights._layouts.values() if one.id.expert >= 0)
    room = budget.activations + budget.kv + budget.weights - experts // 2
    with (
        always(NOBODY),
        watched() as seen,
        LLM(glm, **(SETTINGS | more), device_memory=room) as llm,
    ):
        assert llm.memory.weights.read
        found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        seen.clear()
        for prompt, _ in asked[:4]:  # Alone: see `HeadDrafter` on pages that requests share.
            llm.generate([prompt], asked_of([prompt]))
    alike(found, plain_and_brief, 1e-4)
    assert accepted(found)[0] > 100
    assert max(Reference(glm).leads(seen)) < 1e-3


def test_drafts_that_hold_are_kept(glm: Path, tmp_path: Path) -> None:
    """An MTP layer that says what its target says: it gives each token's embedding to the target's head, and
    that target's own layers add next to nothing."""
    config = json.loads((glm / "config.json").read_text())
    tensors, hidden = load_file(glm / "model.safetensors"), config["hidden_size"]
    for name, one in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = one * 1e-3
        elif name.startswith(mtps.AT) and name.endswith(("norm.weight", "enorm.weight")):
            tensors[name] = torch.ones_like(one)
    whole = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    tensors |= {
        f"{mtps.AT}.eh_proj.weight": whole,
        f"{mtps.AT}.shared_head.norm.weight": tensors["model.norm.weight"],
        f"{mtps.AT}.shared_head.head.weight": tensors["lm_head.weight"],
        f"{mtps.AT}.embed_tokens.weight": tensors["model.embed_tokens.weight"],
    }
    path, asked = mtps.write(tmp_path, config, tensors), wanted()
    plain = answers(path, asked)
    with always(NOBODY):
        found = answers(path, asked, speculate="mtp")
    alike(found, plain, 1e-4)
    drafted, held = accepted(found)
    assert held > 0.8 * drafted > 100


def test_a_structure_is_kept_along_its_drafts(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    path, (prompts, params) = mtps.checkpoint(tmp_path, vocab=4096), formed()
    for file in SHIPPED_MODEL.glob("tokenizer*"):
        shutil.copy(file, path)
    settings = {"device": "cpu", "dtype": "float32", "check": True, "max_length": 256}
    with LLM(path, **settings) as llm:
        plain = llm.generate(prompts, params)
    with always(NOBODY), LLM(path, **settings, speculate="mtp") as llm:
        found = llm.generate(prompts, params)
    alike(found, plain, 1e-4)
    assert accepted(found)[0] > 100


# ---- weights of few bits


@pytest.mark.parametrize("scheme", ["fp8", "packed", "gptq"])
def test_an_mtp_layer_of_few_bits(scheme: str, glm: Path, tmp_path: Path) -> None:
    """It drafts what that of the same numbers in float32 drafts; embedding and head have all their bits, and
    in FP8 the projection of pairs has, too, as released checkpoints list it."""
    its, dense_ones = SCHEMES[scheme], {"embed_tokens": None, "shared_head": None}
    if scheme == "fp8":
        listed = ["lm_head", "mlp.gate", f"{mtps.AT}.eh_proj"]
        its = replace(its, config=its.config | {"modules_to_not_convert": listed})
        dense_ones["eh_proj"] = None
    few, dense = checkpoints(glm, tmp_path, its, dense_ones)
    prompts, drafts = [prompt[:30] for prompt in tiny.prompts()][:4], list[list[Seen]]()
    for path in (few, dense):
        with always(NOBODY), watched() as seen, LLM(path, **SETTINGS, speculate="mtp", kernels=False) as llm:
            llm.generate(prompts, asked_of(prompts))
        drafts.append(seen)
    assert len(drafts[0]) > 20
    assert drafts[0] == drafts[1]


# ---- what is refused


def refused(path: Path, said: str, **more: object) -> None:
    with (
        patch("penstock.engine.boot.place", side_effect=AssertionError),
        pytest.raises(ConfigError, match=said),
    ):
        LLM(path, **SETTINGS, speculate="mtp", **more)


CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "none": ({"num_nextn_predict_layers": None}, "speaks of none: key 'num_nextn_predict_layers' is None"),
    "zero": ({"num_nextn_predict_layers": 0}, "speaks of none"),
    "two": ({"num_nextn_predict_layers": 2}, "is 2, and one layer is what runs here"),
    "words": ({"num_nextn_predict_layers": True}, "is True, and one layer"),
    "dynamic rope": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "asks for dynamic rope",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_without_such_a_layer_is_refused(fault: str, tmp_path: Path) -> None:
    config, said = CONFIGS[fault]
    refused(mtps.checkpoint(tmp_path, **config), said)


def test_other_models_are_refused(glm: Path, tmp_path: Path) -> None:
    refused(tiny.checkpoint("llama"), "by the MTP layer of the model itself, but .* is of llama, .*; give ")
    refused(tiny.checkpoint("minimax_m2"), "is of minimax_m2, and such layers run here of glm4_moe alone")
    with Checkpoint.open(glm) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    refused(tmp_path / "pack", "is a pack, which has none; name the checkpoint")


def test_a_shape_has_none(glm: Path) -> None:
    with pytest.raises(ConfigError, match="by the MTP layer of the model itself, but a benchmark opens none"):
        boot(Config(glm, device="cpu", dtype="float32", speculate="mtp", max_length=64), Shape.open(glm))


@pytest.mark.parametrize(
    ("lacking", "error", "said"),
    [
        ("", ConfigError, "lack it: no tensor is called model.layers.3.eh_proj.weight"),
        ("hnorm.weight", CheckpointError, "lacks tensor model.layers.3.hnorm.weight"),
        ("shared_head.norm.weight", CheckpointError, "lacks tensor model.layers.3.shared_head.norm.weight"),
        ("mlp.experts.4.up_proj.weight", CheckpointError, "lacks tensor model.layers.3.mlp.experts.4.up"),
    ],
    ids=["all", "a norm", "the last norm", "an expert"],
)
def test_weights_without_it_are_refused(
    lacking: str, error: type[Exception], said: str, glm: Path, tmp_path: Path
) -> None:
    tensors = load_file(glm / "model.safetensors")
    config = json.loads((glm / "config.json").read_text())
    tensors = {name: one for name, one in tensors.items() if not name.startswith(f"{mtps.AT}.{lacking}")}
    path = mtps.write(tmp_path / "less", config, tensors)
    with patch("penstock.engine.boot.place", side_effect=AssertionError), pytest.raises(error, match=said):
        LLM(path, **SETTINGS, speculate="mtp")


def test_models_on_demand_refuse_it(glm: Path) -> None:
    host = Hosting({"one": Config(glm, device="cpu", speculate="mtp")}, {}, OnDemandSettings())
    with pytest.raises(ConfigError, match="mtp does not work with several models on demand"):
        host.prepare()


# ---- its memory


def test_a_boot_decides_what_was_planned(glm: Path) -> None:
    """To the byte: what the layer takes of the device, its experts too, and what is left to the target."""
    more = {
        "kv_blocks": 3 * 128 // BLOCK_SIZE,
        "max_length": 128,
        "max_sequences": 3,
        "block_size": BLOCK_SIZE,
    }
    with LLM(glm, **(SETTINGS | more), speculate="mtp") as llm:
        runner = llm.booted.engine._ranks
        assert isinstance(runner, Runner)
        model, budget = runner.models[ModelRole.DRAFT], llm.booted.budget
        assert isinstance(model.weights, WeightStream)
        assert model.pool is not None
        taken = model.weights.bytes + model.pool.bytes.numel()
    with LLM(glm, **(SETTINGS | more), speculate="suffix") as llm:
        left = llm.booted.budget
    spec, names = open_model(str(glm))[1:]
    draft = DraftModel.of_head(open_mtp(str(glm), spec), "float32", BLOCK_SIZE)
    settings = Config(Path(), speculate="suffix")
    work = Work("float32", 3, 128, SETTINGS["max_step_tokens"], settings=settings, draft=draft)
    shown = forecast(spec, names, Machine(budget.total, None, USUAL, 1e12), work)
    said = speculation(spec, names, shown)
    assert said.weights + said.kv == taken
    assert replace(shown.budget, activations=budget.activations) == budget
    assert budget.weights - left.weights == said.weights
    sizes = [
        tensor.numel() for name, tensor in load_file(glm / "model.safetensors").items() if mtps.AT in name
    ]
    assert said.weights > 4 * sum(sizes)
    assert all(pace.drafting > 0 for pace in said.paces[1:])


def test_where_it_does_not_fit_it_is_refused(glm: Path) -> None:
    with LLM(glm, **SETTINGS, kv_blocks=90) as llm:
        room = llm.booted.budget
    total = room.activations + room.kv + room.weights
    with pytest.raises(BudgetError, match="draft model"):
        LLM(glm, **SETTINGS, kv_blocks=90, speculate="mtp", device_memory=total // 2)
    with pytest.raises(BudgetError, match="draft_memory"):
        LLM(glm, **SETTINGS, kv_blocks=90, speculate="mtp", draft_memory="64KiB")


def test_a_plan_names_the_layer_and_what_it_takes(
    glm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--machine", "desktop-24", "--speculate", "mtp"]
    table, found = text_of(capsys, str(glm), *asked), json_of(capsys, str(glm / "config.json"), *asked)
    assert "The draft head (MTP, 1 layer, " in table
    assert found["speculation"]["draft"]["weights"] > 4 * 64 * 128
    with Checkpoint.open(glm) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", "float32")
    for model, said in (
        (str(tiny.checkpoint("llama")), "is of llama, and such layers run here"),
        ("8B", "is of llama"),
        (str(tmp_path / "pack"), "is a pack, which has none"),
    ):
        assert main(["plan", model, *asked]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", str(glm), *asked, "--format", "int4"]) == 2
    assert "in a pack, which has none" in capsys.readouterr().err
