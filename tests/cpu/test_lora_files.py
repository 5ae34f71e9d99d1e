"""Files of LoRA adapters: what is more than products of matrices is refused, and what does not suit the
model, in one line that says why."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import adapters
import tiny
from penstock.arch.lora import LoraRoom
from penstock.arch.spec import ModelSpec
from penstock.base.config import Config
from penstock.base.errors import CheckpointError, UnsupportedModelError
from penstock.engine.settling import lora_room
from penstock.weights.checkpoint.lora import Adapter
from penstock.weights.checkpoint.reader import Checkpoint


@pytest.fixture(scope="module")
def base() -> Path:
    return tiny.checkpoint("llama")


@pytest.fixture(scope="module")
def spec(base: Path) -> ModelSpec:
    with Checkpoint.open(base) as opened:
        return opened.spec


@pytest.fixture
def path(base: Path, tmp_path: Path) -> Path:
    return adapters.write(tmp_path / "a", base, 1, ["q_proj", "down_proj"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"use_dora": True},
            "key 'use_dora' is 'True', which is not supported; train the adapter without it",
        ),
        ({"bias": "all"}, "key 'bias' is 'all'; supported: none"),
        ({"modules_to_save": ["lm_head"]}, "key 'modules_to_save' is"),
        ({"target_parameters": ["experts.gate_up"]}, "key 'target_parameters' is"),
        ({"peft_type": "IA3"}, "key 'peft_type' is 'IA3'; supported: LORA"),
        ({"init_lora_weights": "pissa_niter_16"}, "which changes the base model too"),
        ({"rank_pattern": {".*_proj": 4}}, "a regular expression; supported: names of modules"),
    ],
)
def test_what_is_more_than_products_is_refused(
    spec: ModelSpec, path: Path, config: dict[str, object], message: str
) -> None:
    adapters.change(path, **config)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        Adapter.read(path, spec, "float32")
    assert "\n" not in str(refused.value)


def at(module: str, side: str) -> str:
    return f"{adapters.PREFIX}model.layers.{module}.lora_{side}.weight"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({at("0.self_attn.q_proj", "B"): None}, CheckpointError, "has no tensor .*q_proj.lora_B.weight"),
        (
            {at("0.self_attn.q_proj", "A"): torch.zeros(2, 64)},
            CheckpointError,
            r"is \[2, 64\] of F32, but the model and the rank 1 of adapter_config.json need \[1, 64\]",
        ),
        (
            {at("1.mlp.down_proj", "B"): torch.full((64, 1), torch.nan)},
            UnsupportedModelError,
            "'model.layers.1.mlp.down_proj' has numbers that are none, or too large for float32",
        ),
        (
            {at("3.self_attn.q_proj", "A"): torch.zeros(1, 64)},
            UnsupportedModelError,
            "module 'model.layers.3.self_attn.q_proj' is changed, which is not supported",
        ),
        (
            {at("0.self_attn.q_proj", "magnitude"): torch.zeros(64)},
            UnsupportedModelError,
            "is no matrix of LoRA; supported are lora_A.weight and lora_B.weight of modules",
        ),
        (
            {"base_model.model.lm_head.weight": torch.zeros(97, 64)},
            UnsupportedModelError,
            "no matrix of LoRA",
        ),
        (
            {"base_model.model.lm_head.lora_A.weight": torch.zeros(1, 64)},
            UnsupportedModelError,
            "module 'lm_head' is changed, which is not supported or not in this model",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(1, 97)},
            UnsupportedModelError,
            "'base_model.model.model.embed_tokens.lora_embedding_A' is no matrix of LoRA",
        ),
        (
            {at("0.self_attn.q_proj", "A"): torch.zeros(1, 64, dtype=torch.float8_e4m3fn)},
            CheckpointError,
            "of F8_E4M3, but the model and the rank 1",
        ),
    ],
)
def test_what_does_not_suit_the_model_is_refused(
    spec: ModelSpec,
    path: Path,
    tensors: dict[str, Tensor | None],
    error: type[Exception],
    message: str,
) -> None:
    adapters.change(path, tensors)
    with pytest.raises(error, match=message):
        Adapter.read(path, spec, "float32")


def test_files_that_are_missing_or_damaged(spec: ModelSpec, path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no LoRA adapter: it has no adapter_config\.json; give a"):
        Adapter.read(tmp_path, spec, "float32")
    for nowhere in ("~nobody-is-here/a", "a\0b"):
        with pytest.raises(CheckpointError, match="is no LoRA adapter"):
            Adapter.read(Path(nowhere), spec, "float32")
    with pytest.raises(CheckpointError, match=r"cannot open .*: File name too long"):
        Adapter.read(Path("a" * 300), spec, "float32")
    whole = (path / adapters.TENSORS).read_bytes()
    for damaged in (whole[:7], whole[:100], whole[:-1], whole + b"a"):
        (path / adapters.TENSORS).write_bytes(damaged)
        with pytest.raises(CheckpointError):
            Adapter.read(path, spec, "float32")
    (path / adapters.CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 0, "lora_alpha": 1}))
    with pytest.raises(CheckpointError, match="key 'r' is '0'; a rank is a whole number above 0"):
        Adapter.read(path, spec, "float32")


def test_of_another_base_model(path: Path) -> None:
    """Of other sizes; and experts have no adapters, though the attention beside them may."""
    with Checkpoint.open(tiny.checkpoint("qwen3")) as other, pytest.raises(CheckpointError) as refused:
        Adapter.read(path, other.spec, "float32")
    assert "give an adapter of this base model" in str(refused.value)
    with Checkpoint.open(tiny.checkpoint("qwen3_moe")) as mixture:
        for module in ("experts.0.down_proj", "gate", "down_proj"):
            tensors = {at(f"0.mlp.{module}", "A"): torch.zeros(1, 40)}
            adapters.change(path, tensors)
            with pytest.raises(UnsupportedModelError, match="but not within experts"):
                Adapter.read(path, mixture.spec, "float32")
            adapters.change(path, dict.fromkeys(tensors))


def test_too_large_for_the_dtype(path: Path, spec: ModelSpec) -> None:
    adapters.change(path, {at("0.self_attn.q_proj", "B"): torch.full((64, 1), 3e4)})
    assert Adapter.read(path, spec, "bfloat16").rank == 1
    with pytest.raises(UnsupportedModelError, match="too large for float16; try bfloat16 or float32"):
        Adapter.read(path, spec, "float16")


def test_what_is_none_is_said_before_weights_are_loaded(path: Path) -> None:
    """Also where nothing is asked of it but that it is there."""
    for more in ({}, {"max_lora_rank": 8}, {"max_loras": 2, "max_lora_rank": 8}):
        config = Config(Path(), lora_modules={"a": path, "b": path / "nowhere"}, **more)
        with pytest.raises(CheckpointError, match="nowhere is no LoRA adapter"):
            lora_room(config)
    assert lora_room(Config(Path(), lora_modules={"a": path})) == LoraRoom(1, 16)
    adapters.change(path, r=24, rank_pattern={"q_proj": 40})
    assert lora_room(Config(Path(), lora_modules={"a": path}, max_loras=3)) == LoraRoom(3, 40)
    assert lora_room(Config(Path())) is None
