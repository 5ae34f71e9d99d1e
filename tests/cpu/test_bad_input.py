"""Whatever is wrong with a model, a setting or a prompt is said in one line, as an error of its kind, and nothing else suffers."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tiny
from penstock import LLM, PenstockError, SamplingParams
from penstock.base.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineClosedError,
    LengthError,
    RequestError,
    UnsupportedModelError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def refused(kind: type[PenstockError], *words: str, call: Callable[[], object]) -> None:
    """The call raises exactly this kind, in one line that has all these words."""
    with pytest.raises(PenstockError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert message
    assert "\n" not in message
    assert len(message) < 500
    for word in words:
        assert word in message


def open_model(path: str | Path, **settings: object) -> Callable[[], LLM]:
    return lambda: LLM(path, **{"device": "cpu", "dtype": "float32"} | settings)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny.checkpoint("llama"), device="cpu", dtype="float32", max_length=128, check=True) as llm:
        yield llm


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A sound checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny.checkpoint("llama"), tmp_path / "model"))


# -- models ------------------------------------------------------------------------------------------------------------------


def test_no_model(tmp_path: Path) -> None:
    refused(CheckpointError, "nowhere", call=open_model(tmp_path / "nowhere"))
    refused(CheckpointError, "config.json", call=open_model(tmp_path))
    file = tmp_path / "model.safetensors"
    file.touch()
    refused(CheckpointError, "model.safetensors", call=open_model(file))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": "llama"', "\xff"])
def test_config_that_is_none(damaged: Path, text: str) -> None:
    (damaged / "config.json").write_bytes(text.encode("latin-1"))
    refused(CheckpointError, "config.json", call=open_model(damaged))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_type", "gpt2", ""),
        ("model_type", None, ""),
        ("hidden_act", "gelu", ""),
        ("num_attention_heads", 3, ""),
        ("num_hidden_layers", "three", ""),
        ("num_hidden_layers", -1, ""),
        ("vocab_size", 1.5, ""),
        ("rope_parameters", {"rope_type": "longrope", "factor": 2.0}, "rope_type"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("quantization_config", {"quant_method": "fp8"}, ""),
        ("dtype", "float8_e4m3fn", ""),
    ],
)
def test_config_of_something_else(damaged: Path, key: str, value: object, named: str) -> None:
    file = damaged / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    refused(UnsupportedModelError, f"key '{named or key}'", call=open_model(damaged))


def test_config_that_the_tensors_do_not_fit(damaged: Path) -> None:
    file = damaged / "config.json"
    sound = json.loads(file.read_text())
    for key, value in (("intermediate_size", 96), ("num_hidden_layers", 4), ("num_hidden_layers", 2), ("attention_bias", True)):
        file.write_text(json.dumps(sound | {key: value}))
        if value == 2:  # layers that nobody asks for are nobody's fault
            open_model(damaged)().close()
        else:
            refused(CheckpointError, "model.layers.", call=open_model(damaged))


def test_weights_that_are_missing_or_cut_short(damaged: Path) -> None:
    file = damaged / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(CheckpointError, "model.safetensors", call=open_model(damaged))
    file.unlink()
    refused(CheckpointError, "safetensors", call=open_model(damaged))


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny.checkpoint("llama_sharded"), tmp_path / "model"))
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    refused(CheckpointError, shards[1].name, call=open_model(path))


def test_a_damaged_tokenizer(damaged: Path) -> None:
    (damaged / "tokenizer.json").write_text("{}")
    refused(CheckpointError, "tokenizer.json", call=open_model(damaged))


# -- settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "tpu"},
        {"device": "cpu:0"},
        {"dtype": "int8"},
        {"device_memory": "12 parsecs"},
        {"device_memory": "0"},
        {"device_memory": "-1GiB"},
        {"device_memory": "150%"},
        {"host_memory": "much"},
        {"device_memory": 1.5},
        {"max_length": 0},
        {"max_length": 513},
        {"max_length": "long"},
        {"block_size": 3},
        {"block_size": 1024},
        {"kv_blocks": 0},
        {"kv_blocks": True},
        {"max_step_tokens": 0},
        {"max_sequences": -1},
        {"max_sequences": 9, "max_step_tokens": 8},
    ],
    ids=str,
)
def test_settings(settings: dict[str, object]) -> None:
    refused(ConfigError, str(next(iter(settings.values()))), call=open_model(tiny.checkpoint("llama"), **settings))


@pytest.mark.parametrize("settings", [{"device_memory": "20KB"}, {"host_memory": "20KB"}], ids=str)
def test_a_budget_too_small_for_a_layer(settings: dict[str, object]) -> None:
    refused(BudgetError, "one group of weights", call=open_model(tiny.checkpoint("llama"), **settings))


def test_budgets_too_small(tmp_path: Path) -> None:
    model = tiny.checkpoint("llama")
    refused(BudgetError, "KV blocks", call=open_model(model, kv_blocks=10**9))
    refused(BudgetError, "free", call=open_model(model, device_memory="900TiB"))
    wide = tiny.write(tiny.CASES["llama"], tmp_path / "wide", hidden_size=256, intermediate_size=1024)
    refused(BudgetError, "group", call=open_model(wide, device_memory="1MB"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there(device: str) -> None:
    refused(DeviceError, device, call=open_model(tiny.checkpoint("llama"), device=device))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 1.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": 1000},
        {"frequency_penalty": math.inf},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"n": 0},
        {"seed": "x"},
        {"stop": [""]},
        {"stop": [5]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 1e300}},
        {"logit_bias": {1: 10**400}},
        {"logprobs": -2},
        {"prompt_logprobs": True},
    ],
    ids=str,
)
def test_sampling_settings(settings: dict[str, object]) -> None:
    refused(RequestError, next(iter(settings)), call=lambda: SamplingParams(**settings))  # type: ignore[arg-type]


# -- requests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        (5, "int"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
        ({"role": "user", "content": "hello"}, "dict"),
        ([[]], "empty"),
        ([[1], []], "empty"),
        ([97], "97"),
        ([-1], "-1"),
        ([2**70], "vocabulary"),
        ([1, 2.0], "2.0"),
        ([1, None], "None"),
        ([True, 1], "True"),
        ([1.5, 1], "float"),
        ([[1, 2], 3], "int"),
        ([[1, 2], None], "NoneType"),
        ([[1, 2], b"ab"], "bytes"),
        ([3] * 128, "128"),
        ([[3], [3] * 500], "500"),
        ([[1, [2]]], "[2]"),
        (torch.tensor([1, 2]), "Tensor"),
    ],
    ids=repr,
)
def test_prompts(llm: LLM, prompt: object, word: str) -> None:
    """One bad prompt refuses the whole call before anything runs, and the engine goes on as if nothing had been."""
    steps = llm.stats().steps
    kind = LengthError if word in ("128", "500") else RequestError
    refused(kind, word, call=lambda: llm.generate(prompt, SamplingParams(max_tokens=1)))  # type: ignore[arg-type]
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.steps, stats.kv_blocks_free) == (0, 0, steps, stats.kv_blocks)
    [completion] = llm.generate(tiny.prompts()[2], GREEDY)
    assert list(completion.tokens) == tiny.references("llama")[2].tokens[:20]


def test_no_prompts_are_no_error(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_requests_that_do_not_fit(llm: LLM) -> None:
    refused(LengthError, "128", call=lambda: llm.generate([3] * 100, SamplingParams(max_tokens=29)))
    [full] = llm.generate([3] * 100, SamplingParams(max_tokens=28, ignore_eos=True))
    assert len(full.tokens) == 28
    with LLM(tiny.checkpoint("llama"), device="cpu", dtype="float32", max_length=128, kv_blocks=3, block_size=4) as small:
        refused(LengthError, "KV blocks", call=lambda: small.generate([3] * 13))
        refused(LengthError, "13", call=lambda: small.generate([3] * 10, SamplingParams(max_tokens=4)))
        assert len(small.generate([3] * 10, SamplingParams(max_tokens=3, ignore_eos=True))[0].tokens) == 3


def test_params_that_do_not_fit(llm: LLM) -> None:
    prompts = tiny.prompts()[:2]
    refused(RequestError, "2 prompts", "3 params", call=lambda: llm.generate(prompts, [GREEDY] * 3))
    refused(RequestError, "97", call=lambda: llm.generate(prompts, SamplingParams(logit_bias={97: 1.0})))
    refused(RequestError, "stop_token_ids", call=lambda: llm.generate(prompts, SamplingParams(stop_token_ids=[1000])))
    refused(RequestError, "stop", call=lambda: llm.generate(prompts, [GREEDY, SamplingParams(stop="no tokenizer")]))
    refused(LengthError, "prompt", call=lambda: llm.stream([3] * 200))
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_text_without_a_tokenizer(llm: LLM) -> None:
    """A checkpoint without tokenizer.json serves token ids only."""
    refused(CheckpointError, "tokenizer.json", call=lambda: llm.generate("hello"))
    refused(CheckpointError, "tokenizer.json", call=lambda: llm.chat([{"role": "user", "content": "hello"}]))
    refused(CheckpointError, "tokenizer.json", call=lambda: llm.encode("hello"))
    refused(CheckpointError, "tokenizer.json", call=lambda: llm.decode([5]))
    refused(CheckpointError, "tokenizer.json", call=lambda: llm.generate([[5], "hello"]))
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_a_closed_engine() -> None:
    llm = LLM(tiny.checkpoint("llama"), device="cpu", dtype="float32", max_length=128)
    started = llm.stream([3, 4], GREEDY)
    next(started)
    llm.close()
    llm.close()
    refused(EngineClosedError, "closed", call=lambda: llm.generate([3, 4]))
    refused(EngineClosedError, "closed", call=lambda: llm.stream([3, 4]))
    assert [delta.finish_reason for delta in started] == ["abort"]
    with LLM(tiny.checkpoint("llama"), device="cpu", dtype="float32", max_length=128) as inside:
        pass
    refused(EngineClosedError, "closed", call=lambda: inside.generate([3, 4]))
