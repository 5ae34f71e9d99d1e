"""Embeddings, against transformers: however prompts are batched, cut, shared, streamed and kept."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

import tiny
from penstock import LLM, AsyncLLM, PenstockError, SamplingParams
from penstock.api.embeddings import Embedder
from penstock.api.outputs import Completion, Output
from penstock.base.errors import CheckpointError, EngineClosedError, RequestError, UnsupportedModelError
from penstock.step.request import FinishReason
from penstock.weights.checkpoint.pooling import Pooling

PROMPTS = [[5], list(range(3, 40)), [7, 8, 9], [*range(3, 40), 1, 2], list(range(60, 2, -1))]
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
SETTINGS = {"device": "cpu", "dtype": "float32", "device_memory": "200MiB", "max_length": 128}


def checkpoint(folder: Path, case: str, modules: object = MODULES, pooling: object = LAST) -> Path:
    """A decoder that was saved alone, as embedding checkpoints are: no first word, no head."""
    whole = tiny.checkpoint(case)
    shutil.copytree(whole, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): one for name, one in tensors.items() if name != "lm_head.weight"}
    safetensors.torch.save_file(bare, folder / "model.safetensors", {"format": "pt"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def expected(case: str, *, normalised: bool = True, dimensions: int | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(tiny.checkpoint(case), dtype=torch.float32).eval().model
    with torch.inference_mode():
        found = torch.stack([model(torch.tensor([one])).last_hidden_state[0, -1] for one in PROMPTS])
    found = found[:, :dimensions]
    return torch.nn.functional.normalize(found, dim=-1) if normalised else found


def close(found: list[tuple[float, ...]], true: torch.Tensor) -> bool:
    assert len(found) == len(true)
    return bool((torch.tensor(found) - true).abs().max() < 1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("embedding") / "model", "qwen3")


@pytest.mark.parametrize("case", ["qwen3", "llama", "mistral", "qwen3_moe"])
def test_families_agree_with_transformers(tmp_path: Path, case: str) -> None:
    with LLM(checkpoint(tmp_path / "model", case), **SETTINGS) as llm:  # type: ignore[arg-type]
        found = llm.embed(PROMPTS)
        assert close([one.embedding for one in found], expected(case))
        assert [list(one.prompt_tokens) for one in found] == PROMPTS


@pytest.mark.parametrize(
    "settings",
    [
        {"max_step_tokens": 7},
        {"max_sequences": 1},
        {"block_size": 16, "kv_blocks": 8},
        {"kernels": False},
        {"tensor_parallel": 2},
    ],
    ids=str,
)
def test_ways_to_compute_agree(model: Path, settings: dict[str, object]) -> None:
    with LLM(model, **SETTINGS | settings) as llm:  # type: ignore[arg-type]
        assert close([one.embedding for one in llm.embed(PROMPTS)], expected("qwen3"))


def test_weights_that_stream(model: Path) -> None:
    settings = SETTINGS | {"max_step_tokens": 16, "max_sequences": 4, "kv_blocks": 8, "block_size": 16}
    with LLM(model, **settings | {"device_memory": "14000KiB"}) as llm:  # type: ignore[arg-type]
        assert llm.memory.read_per_pass > 0
        assert close([one.embedding for one in llm.embed(PROMPTS)], expected("qwen3"))


def test_prompts_share_prefixes_and_steps_with_generation(model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(model, **SETTINGS, block_size=16) as llm:  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
            alone = await llm.generate(PROMPTS[1], params)
            both = await asyncio.gather(llm.generate(PROMPTS[1], params), llm.embed(PROMPTS))
            assert both[0][0].tokens == alone[0].tokens
            assert close([one.embedding for one in both[1]], expected("qwen3"))
            assert both[1][1].cached_tokens == 32
            again = await llm.embed(PROMPTS[1], dimensions=8)
            assert close([again[0].embedding], expected("qwen3", dimensions=8)[1:2])
            assert again[0].cached_tokens == 32

    asyncio.run(main())


def test_a_pack_of_it_and_one_of_few_bits(model: Path, tmp_path: Path) -> None:
    from penstock.cli.main import main

    assert main(["pack", str(model), "--out", str(tmp_path / "pack"), "--dtype", "float32"]) == 0
    with LLM(tmp_path / "pack", **SETTINGS) as llm:  # type: ignore[arg-type]
        assert close([one.embedding for one in llm.embed(PROMPTS)], expected("qwen3"))
    assert main(["pack", str(model), "--out", str(tmp_path / "few"), "--to", "fp8"]) == 0
    with LLM(tmp_path / "few", **SETTINGS) as llm:  # type: ignore[arg-type]
        found = torch.tensor([one.embedding for one in llm.embed(PROMPTS)])
        assert bool(((found * expected("qwen3")).sum(-1) > 0.95).all())


def test_without_a_normalisation(tmp_path: Path) -> None:
    with LLM(checkpoint(tmp_path / "model", "llama", MODULES[:2]), **SETTINGS) as llm:  # type: ignore[arg-type]
        assert close([one.embedding for one in llm.embed(PROMPTS)], expected("llama", normalised=False))


@pytest.mark.parametrize("dimensions", [0, -1, 65, 1.5, True, "8"])
def test_dimensions_that_cannot_be(model: Path, dimensions: object) -> None:
    with LLM(model, **SETTINGS) as llm:  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="from 1 to 64"):
            llm.embed("A", dimensions=dimensions)  # type: ignore[arg-type]
        assert not llm.stats().steps


@pytest.mark.parametrize(
    ("modules", "pooling", "error", "said"),
    [
        (None, LAST, UnsupportedModelError, "has no modules.json"),
        (MODULES, LAST | {"pooling_mode_lasttoken": False}, UnsupportedModelError, "of nothing"),
        (
            MODULES,
            LAST | {"pooling_mode_mean_tokens": True},
            UnsupportedModelError,
            "mean_tokens and lasttoken",
        ),
        (MODULES, {"pooling_mode": "mean"}, UnsupportedModelError, "pooling mean; supported"),
        (MODULES, [], CheckpointError, "not a JSON object"),
        (MODULES[:1], LAST, UnsupportedModelError, "lists Transformer"),
        ([*MODULES, {"type": "x.Dense", "path": "3"}], LAST, UnsupportedModelError, "asks for 'x.Dense'"),
        (MODULES[::-1], LAST, UnsupportedModelError, "in this order"),
        ([MODULES[0], MODULES[1] | {"path": "../x"}], LAST, CheckpointError, "names the folder"),
        ([MODULES[0], MODULES[1] | {"path": 3}], LAST, CheckpointError, "names the folder"),
        ([MODULES[0], MODULES[1] | {"path": "none"}], LAST, CheckpointError, "none/config.json"),
        ({}, LAST, CheckpointError, "not a JSON array"),
        ([1], LAST, CheckpointError, "not a JSON array"),
    ],
)
def test_what_does_not_say_how_is_refused(
    tmp_path: Path, modules: object, pooling: object, error: type[PenstockError], said: str
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(error, match=said):
        Pooling.of(tmp_path)


def test_a_model_for_texts_makes_no_embeddings() -> None:
    with LLM(device="cpu", device_memory="300MiB", max_length=256) as llm:
        with pytest.raises(UnsupportedModelError, match="made for embeddings"):
            llm.embed("A")
        assert llm.generate("A", SamplingParams(max_tokens=1))[0].embedding == ()


def test_newer_files_name_their_pooling(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    assert Pooling.of(tmp_path) == Pooling(normalised=True)


def test_an_embedding_that_was_not_completed_says_why() -> None:
    embedder = Embedder(Path("none"), 64)

    def ended(reason: FinishReason, error: str = "") -> Completion:
        return Completion(None, (5,), (Output(0, "", (), reason, error=error),))

    with pytest.raises(EngineClosedError, match="was closed before this embedding"):
        embedder.embedding(ended(FinishReason.ABORT), None)
    with pytest.raises(RequestError, match="does not fit even alone"):
        embedder.embedding(ended(FinishReason.ERROR, "it does not fit even alone"), None)
    with pytest.raises(RequestError, match="not finite"):
        embedder.embedding(ended(FinishReason.ERROR), None)
