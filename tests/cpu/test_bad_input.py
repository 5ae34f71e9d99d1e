"""Whatever is wrong with a model, a setting or a prompt is said in one line, as an error of its kind, and
nothing else suffers."""

import array
import asyncio
import copy
import inspect
import json
import logging
import math
import pickle
import pydoc
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import forks
import penstock
import tiny
from penstock import LLM, AsyncLLM, Completion, Output, PenstockError, SamplingParams, Structure
from penstock.api.arguments import LLMArguments
from penstock.api.driver import EngineDriver
from penstock.api.llm import SHIPPED_MODEL
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
from penstock.base.setting import settings_of
from penstock.cli.main import main
from penstock.worker.runner import Runner

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


# -- models
# ------------------------------------------------------------------------------------------------------------


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
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
        ("quantization_config", {"quant_method": "bitsandbytes"}, ""),
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
    for key, value in (
        ("intermediate_size", 96),
        ("num_hidden_layers", 4),
        ("num_hidden_layers", 2),
        ("attention_bias", True),
    ):
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


# -- settings
# ------------------------------------------------------------------------------------------------------------


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
    refused(
        ConfigError, str(next(iter(settings.values()))), call=open_model(tiny.checkpoint("llama"), **settings)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, 10**20)
            for name in (
                "max_length",
                "max_step_tokens",
                "max_sequences",
                "block_size",
                "kv_blocks",
                "kv_tile",
            )
        ),
        *((name, value) for name in ("attention_policy", "prefill_policy") for value in (3, None)),
        *(
            (name, value)
            for name in ("attention_policy", "prefill_policy")
            for value in ("topk", "topk:3000000000", "window:1,²")
        ),
        ("missed_limit", "a"),
        ("kv_directory", None),
        ("kv_directory", "a\0b"),
        ("cache", "a\0b"),
    ],
)
def test_settings_that_are_none(name: str, value: object) -> None:
    word = value if name.endswith("policy") and isinstance(value, str) else name
    for settings in ({}, {"host_kv_memory": "64MiB", "beyond_trained": True}):
        refused(ConfigError, word, call=open_model(tiny.checkpoint("llama"), **settings, **{name: value}))


def test_what_is_known_of_a_huge_disk_fits_into_memory(tmp_path: Path) -> None:
    large = {"disk_kv_memory": "9999TiB", "host_kv_memory": "1MiB", "kv_directory": tmp_path}
    with open_model(tiny.checkpoint("llama"), **large)() as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))


def test_policies_for_what_has_none() -> None:
    """Whether a context is beyond the device or none can be."""
    refused(
        ConfigError,
        "which has sliding windows",
        call=open_model(tiny.checkpoint("mistral"), attention_policy="topk:3"),
    )


@pytest.mark.parametrize("settings", [{"device_memory": "20KB"}, {"host_memory": "20KB"}], ids=str)
def test_a_budget_too_small_for_a_layer(settings: dict[str, object]) -> None:
    refused(BudgetError, "one group of weights", call=open_model(tiny.checkpoint("llama"), **settings))


def test_budgets_too_small(tmp_path: Path) -> None:
    model = tiny.checkpoint("llama")
    refused(BudgetError, "kv_blocks", call=open_model(model, kv_blocks=10**9))
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


# -- requests
# ------------------------------------------------------------------------------------------------------------


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
        (torch.tensor([[1, 2]]), "1 x 2"),
    ],
    ids=repr,
)
def test_prompts(llm: LLM, prompt: object, word: str) -> None:
    """One bad prompt refuses the whole call before anything runs, and the engine goes on as if nothing had
    been."""
    steps = llm.stats().steps
    kind = LengthError if word in ("128", "500") else RequestError
    refused(kind, word, call=lambda: llm.generate(prompt, SamplingParams(max_tokens=1)))  # type: ignore[arg-type]
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.steps, stats.kv_blocks_free) == (0, 0, steps, stats.kv_blocks)
    [completion] = llm.generate(tiny.prompts()[2], GREEDY)
    assert list(completion.tokens) == tiny.references("llama")[2].tokens[:20]


def test_none_begins_before_all_are_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of another thread would compute it."""
    begun = list[object]()
    monkeypatch.setattr(EngineDriver, "begin", lambda _, ready, **how: begun.append(ready))
    refused(RequestError, "[2]", call=lambda: llm.generate([[3], [1, [2]]]))  # type: ignore[list-item]
    assert not begun


def test_no_prompts_are_no_error(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_requests_that_do_not_fit(llm: LLM) -> None:
    refused(LengthError, "128", call=lambda: llm.generate([3] * 100, SamplingParams(max_tokens=29)))
    [full] = llm.generate([3] * 100, SamplingParams(max_tokens=28, ignore_eos=True))
    assert len(full.tokens) == 28
    with LLM(
        tiny.checkpoint("llama"), device="cpu", dtype="float32", max_length=128, kv_blocks=3, block_size=4
    ) as small:
        refused(LengthError, "KV blocks", call=lambda: small.generate([3] * 13))
        refused(LengthError, "13", call=lambda: small.generate([3] * 10, SamplingParams(max_tokens=4)))
        assert len(small.generate([3] * 10, SamplingParams(max_tokens=3, ignore_eos=True))[0].tokens) == 3


def test_params_that_do_not_fit(llm: LLM) -> None:
    prompts = tiny.prompts()[:2]
    refused(RequestError, "3 SamplingParams for 2 prompts", call=lambda: llm.generate(prompts, [GREEDY] * 3))
    refused(RequestError, "97", call=lambda: llm.generate(prompts, SamplingParams(logit_bias={97: 1.0})))
    refused(
        RequestError,
        "stop_token_ids",
        call=lambda: llm.generate(prompts, SamplingParams(stop_token_ids=[1000])),
    )
    refused(
        RequestError,
        "stop",
        call=lambda: llm.generate(prompts, [GREEDY, SamplingParams(stop="no tokenizer")]),
    )
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


@pytest.mark.parametrize(
    "ids",
    [
        np.array([3, 4, 5]),
        np.array([3, 4, 5], dtype=np.uint8),
        [np.int64(3), 4, np.int32(5)],
        torch.tensor([3, 4, 5]),
        [*torch.tensor([3, 4, 5])],
        array.array("i", [3, 4, 5]),
    ],
)
def test_token_ids_may_be_an_array(llm: LLM, ids: Any) -> None:
    expected = llm.generate([3, 4, 5], GREEDY)[0]
    one, [first, second] = llm.generate(ids, GREEDY)[0], llm.generate([ids, [3, 4, 5]], GREEDY)
    for found in (one, first, second):
        assert (found.prompt_tokens, found.tokens) == (expected.prompt_tokens, expected.tokens)
        assert {type(token) for token in found.prompt_tokens} == {int}
    assert list(llm.stream(ids, GREEDY))[-1].finish_reason == expected.finish_reason


def test_arrays_that_are_no_prompt(llm: LLM) -> None:
    for rows in (np.array([[3, 4], [5, 0]]), torch.tensor([[3, 4], [5, 0]])):
        for ask in (llm.generate, llm.stream, lambda prompt: llm.generate([prompt, [3]])):
            with pytest.raises(
                RequestError, match=r"an array of 2 x 2, but .*; give one row, such as ids\[0\]"
            ):
                ask(rows)  # type: ignore[operator]
    for ids in (np.array([3.0]), torch.tensor([True]), np.array([-1]), [np.float32(3)], [3, np.bool_(True)]):
        refused(RequestError, call=lambda ids=ids: llm.generate(ids, GREEDY))
        refused(RequestError, call=lambda ids=ids: llm.stream(ids, GREEDY))


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


def test_names_that_were_not_used_yet_are_offered() -> None:
    said = forks.run([sys.executable, "-c", "import penstock; print(*dir(penstock))"], text=True).stdout
    assert said.split() == sorted(penstock.__all__)


def test_no_stop_string_may_be_said_as_none() -> None:
    assert SamplingParams(stop=None).stop_strings == ()


def test_several_texts_are_no_prompt(llm: LLM) -> None:
    for ask in (lambda: llm.stream(["a", "b"]), lambda: llm.generate([["a"]])):  # type: ignore[list-item, arg-type]
        with pytest.raises(RequestError, match="begins with the text 'a'; a prompt is one text"):
            ask()


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from penstock import LLM, PenstockError, SamplingParams
greedy = SamplingParams(temperature=0, max_tokens=4)
with LLM(sys.argv[1], device="cpu", dtype="float32", max_length=64, tensor_parallel=int(sys.argv[2])) as llm:
    before = llm.generate([[3, 4]], greedy)[0].tokens
    stream = llm.stream([3, 4], greedy)
    child = os.fork()
    if not child:
        for ask in (lambda: llm.generate([[3, 4]], greedy), lambda: next(stream)):
            try:
                ask()
            except PenstockError as error:
                print(type(error).__name__, "forked" in str(error), flush=True)
        llm.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert llm.generate([[3, 4]], greedy)[0].tokens == before
    print("the same")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_that_was_forked_has_no_engine(ranks: int) -> None:
    """Nor does it take that of the other away."""
    arguments = [sys.executable, "-c", FORKED, str(tiny.checkpoint("llama")), str(ranks)]
    result = forks.run(arguments, forks.LoadedPopen, text=True)
    assert (result.stdout, result.stderr) == ("EngineClosedError True\n" * 2 + "the same\n", "")


THREADS = """
import os, sys
from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
def opened(threads):
    with LLM(sys.argv[1], device="cpu", dtype="float32", max_length=64, threads=threads) as llm:
        return llm.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=4))[0].tokens
before = opened(2)
child = os.fork()
if not child:
    try:
        opened(2)
    except ConfigError as error:
        print("spawn" in str(error))
    print(opened(1) == before, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_process_that_was_forked_from_one_with_several_threads_does_not_wait_for_them() -> None:
    arguments = [sys.executable, "-c", THREADS, str(tiny.checkpoint("llama"))]
    result = forks.run(arguments, forks.LoadedPopen, text=True)
    assert (result.stdout, result.stderr) == ("True\nTrue\n", "")


# -- logits that are not numbers
# -----------------------------------------------------------------------------------------------

BAD = 75
"""A token whose embedding is not a number. Half of the prompts have it, and it is in the middle of a greedy
answer to another."""


@pytest.fixture
def spelt(damaged: Path) -> Path:
    """A sound checkpoint with a tokenizer: three special tokens, then characters."""
    vocabulary = {
        word: token
        for token, word in enumerate(["<pad>", "<s>", "</s>", "\u0120", *map(chr, range(33, 126))])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(damaged / "tokenizer.json"))
    return damaged


def wishes() -> list[SamplingParams]:
    found = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=20),
        SamplingParams(temperature=1.1, top_k=5, min_p=0.01, seed=4, max_tokens=20, n=2),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        SamplingParams(
            temperature=0.8, seed=5, max_tokens=20, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=0
        ),
        SamplingParams(
            temperature=0, max_tokens=20, min_tokens=15, presence_penalty=0.5, logit_bias={BAD: 1.5}
        ),
    ]
    if find_spec("llguidance") is not None:
        through = f"one{chr(33 + BAD - 4)}[a-f]{{4,9}}"
        found += [
            SamplingParams(temperature=0, max_tokens=20, structure=Structure.regex(through)),
            SamplingParams(
                temperature=0.7, seed=6, max_tokens=20, structure=Structure.regex("[a-f]{4,9}|[0-9]{4,9}")
            ),
        ]
    return found


def answers(
    model: Path, asked: list[tuple[list[int], SamplingParams]], **settings: object
) -> list[Completion]:
    """Of an engine that holds nothing afterwards, and goes on."""
    more = {"max_length": 128, "block_size": 4, "max_sequences": 12, "max_step_tokens": 48, "check": True}
    with open_model(model, **more | settings)() as llm:
        found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_free) == (0, 0, stats.kv_blocks)
        assert stats.preemptions or "kv_blocks" not in settings
        [completion] = llm.generate(tiny.prompts()[2], GREEDY)
        assert list(completion.tokens) == tiny.references("llama")[2].tokens[:20]
    return found


def ended_early(prompt: list[int], right: Output, found: Output) -> bool:
    """Whether the answer had to. Then it is right as far as it goes, and of the last token nothing is known;
    else it is right."""
    bad = BAD in prompt or BAD in right.tokens[:-1]
    if bad:
        known = 0 if BAD in prompt else right.tokens.index(BAD) + 1
        assert (found.finish_reason, len(found.tokens)) == ("error", known + 1)
        assert found.tokens[:known] == right.tokens[:known]
        assert found.text == right.text[: len(found.text)]
    else:
        assert (found.tokens, found.text, found.finish_reason) == (
            right.tokens,
            right.text,
            right.finish_reason,
        )
    if found.logprobs is not None:
        assert [entry.token for entry in found.logprobs] == list(found.tokens)
        assert [math.isnan(entry.logprob) for entry in found.logprobs] == [False] * (
            len(found.tokens) - bad
        ) + [True] * bad
    return bad


@pytest.mark.parametrize(("ahead", "settings"), [(False, {}), (True, {"kv_blocks": 40})])
def test_logits_that_are_not_numbers(
    spelt: Path, ahead: bool, settings: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """An answer ends where the model has come to such, and the log says why; all others are what they are
    without it."""
    asked = [(prompt, wish) for wish in wishes() for prompt in tiny.prompts()]
    sound = answers(spelt, asked, **settings)
    weights = load_file(spelt / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = math.nan
    save_file(weights, spelt / "model.safetensors", metadata={"format": "pt"})
    with patch.object(Runner, "ahead", ahead), caplog.at_level(logging.ERROR, "penstock"):
        found = answers(spelt, asked, **settings)
    early = [
        ended_early(prompt, *outputs)
        for (prompt, _), right, one in zip(asked, sound, found, strict=True)
        for outputs in zip(right.outputs, one.outputs, strict=True)
    ]
    amid = [
        wish
        for (_, wish), one in zip(asked, found, strict=True)
        if one.finish_reason == "error" and len(one.tokens) > 1
    ]
    assert any(wish.structure for wish in amid) == any(wish.structure for wish in wishes())
    assert any(wish.structure is None for wish in amid)
    for one in found:
        for place, entry in enumerate(one.prompt_logprobs or ()):
            assert (entry is None) == (place == 0)
            if entry is not None and (BAD not in one.prompt_tokens or BAD in one.prompt_tokens[:place]):
                assert math.isnan(entry.logprob) == (BAD in one.prompt_tokens)
    named = 0
    for record in caplog.records:
        assert record.levelname == "ERROR"
        assert "logits are not numbers (NaN)" in record.getMessage()
        assert isinstance(record.args, tuple)
        assert isinstance(record.args[0], int)
        named += record.args[0]
    assert named == sum(early)


def test_a_model_of_which_nothing_is_a_number(spelt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no speed, and whoever asks it for a text is told by the exit code too."""
    weights = {
        name: torch.full_like(tensor, math.nan)
        for name, tensor in load_file(spelt / "model.safetensors").items()
    }
    save_file(weights, spelt / "model.safetensors", metadata={"format": "pt"})
    small = [str(spelt), "--device", "cpu", "--repeat", "1"]
    for asked in (
        ["decode", *small, "--context", "8", "--output", "2"],
        ["prefill", *small, "--context", "8"],
        ["context", *small, "--lengths", "16", "--output", "2"],
        ["serve-offline", *small, "--requests", "2", "--input", "4,6", "--output", "2,3"],
    ):
        assert main(["bench", *asked]) == 2, asked[0]
        streams = capsys.readouterr()
        assert (
            "the model's logits are not numbers (NaN), so nothing is measured" in streams.err.splitlines()[-1]
        )
        assert streams.out == ""
    for form in ([], ["--json"]):
        assert main(["run", str(spelt), "a b", "--device", "cpu", *form]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("penstock: error: the answer ended early")


@pytest.mark.parametrize("chunk", [48, 8])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_what_others_would_find_of_such_a_prompt_is_taken_back(
    damaged: Path, tmp_path: Path, store: str, chunk: int
) -> None:
    """In a pass what is no number spreads, also to the tokens before it, which others may share: from no tier
    do they get that."""
    bad = [*range(5, 20), BAD, 30]
    shared = [*bad[:15], 40, 41]
    settings: dict[str, object] = {
        "max_length": 128,
        "block_size": 4,
        "max_step_tokens": chunk,
        "check": True,
    }
    with open_model(damaged, **settings)() as llm:
        right = llm.generate([shared], GREEDY)[0].tokens
    weights = load_file(damaged / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = math.nan
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    kept = {
        "host_kv_memory": "1MiB",
        "disk_kv_memory": "4MiB",
        "kv_directory": tmp_path / "kv",
        "kv_store": store,
        "kv_blocks": 40,
    }
    for _ in range(2):  # Then with what the disk has kept.
        with open_model(damaged, **settings, **kept)() as llm:
            for _ in range(2):
                assert llm.generate([bad], GREEDY)[0].finish_reason == "error"
                [found] = llm.generate([shared], GREEDY)
                assert (found.finish_reason, found.tokens) == ("length", right)


def test_a_token_that_the_tokenizer_alone_has_ends_one_prompt_and_not_the_engine(tmp_path: Path) -> None:
    """Somebody added it to tokenizer.json and not to the embedding, which has no row for it."""
    model = tmp_path / "model"
    shutil.copytree(SHIPPED_MODEL, model)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    for number, name in ((vocab, "<|first|>"), (vocab + 1, "<|mytool|>")):
        tokenizer["added_tokens"].append(like | {"id": number, "content": name})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LLM(model, device="cpu", dtype="float32", max_length=256) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4)
        before = llm.generate("Once upon a time", greedy)[0].tokens
        refused(
            RequestError,
            "'<|mytool|>'",
            f"token {vocab + 1} ",
            f"0 to {vocab - 1}",
            call=lambda: llm.generate("A <|mytool|> fox", greedy),
        )
        chat = [{"role": "user", "content": "A <|first|> fox"}]
        refused(RequestError, "'<|first|>'", f"token {vocab} ", call=lambda: llm.chat(chat, greedy))
        assert llm.generate("Once upon a time", greedy)[0].tokens == before


@pytest.mark.parametrize(
    ("made", "name", "said"),
    [
        (LLM, "gpu_memory_utilization", "here it is device_memory, such as 90%"),
        (LLM, "tensor_parallel_size", "here it is tensor_parallel"),
        (LLM, "max_model_len", "here it is max_length"),
        (LLM, "swap_space", "here it is host_kv_memory"),
        (LLM, "enable_prefix_caching", "here it is prefix_cache, which is on by default"),
        (LLM, "quantization", "a checkpoint's config.json says how it is quantised; leave it out"),
        (LLM, "trust_remote_code", "no code of a checkpoint is ever run; leave it out"),
        (LLM, "enforce_eager", "here it is graphs=False"),
        (LLM, "device_memry", "did you mean device_memory?"),
        (LLM, "foo", "help() names those that there are"),
        (LLM, "temperature", "requests have it: SamplingParams(temperature=...)"),
        (LLM, "stream", "LLM.stream gives out pieces as they come, of a conversation too"),
        (LLM, "tokenizer", "a checkpoint's own tokenizer is used; leave it out"),
        (
            LLM,
            "kv_cache_dtype",
            "KV on the device has the model's dtype; host_kv_dtype is that of KV in host memory",
        ),
        (SamplingParams, "max_token", "did you mean max_tokens?"),
        (SamplingParams, "max_new_tokens", "here it is max_tokens"),
        (SamplingParams, "enforce_eager", "help() names those that there are"),
        (SamplingParams, "best_of", "outputs are not ranked; n and logprobs give several to choose from"),
        (LLM, "best_of", "outputs are not ranked; leave it out"),
        (
            SamplingParams,
            "length_penalty",
            "there is no beam search, which weighs outputs by it; min_tokens and max_tokens bound an "
            "output's length",
        ),
        (SamplingParams, "diversity_penalty", "there is no beam search; n is for independent outputs"),
        (
            SamplingParams,
            "allowed_token_ids",
            "no list of tokens is allowed alone; structure gives an output its form",
        ),
        (SamplingParams, "exponential_penalty", "help() names those that there are"),
        (LLM, "data_parallel_size", "an engine is one replica; penstock serve --replicas starts several"),
    ],
)
def test_an_argument_that_is_not_known_is_answered_with_what_was_meant(
    made: Any, name: str, said: str
) -> None:
    with pytest.raises(TypeError) as refused:
        made(**{name: 1})
    assert str(refused.value) == f"{made.__name__}() got an unexpected keyword argument {name!r}; {said}"


METHODS = (
    (LLM.generate, "sampling_params", "here it is params"),
    (LLM.generate, "max_tokens", "it is a setting: give params=SamplingParams(max_tokens=...)"),
    (LLM.generate, "max_new_tokens", "it is a setting: give params=SamplingParams(max_tokens=...)"),
    (LLM.generate, "prompt_token_ids", "here it is prompts, which may be lists of token ids"),
    (LLM.generate, "prompt", "did you mean prompts?"),
    (LLM.generate, "use_tqdm", "LLM(progress=...) shows or hides the bar"),
    (LLM.generate, "lora_request", "here it is lora, the name of an adapter"),
    (LLM.generate, "foo", "help() names those that there are"),
    (LLM.chat, "stream", "LLM.stream gives out pieces as they come, of a conversation too"),
    (LLM.chat, "sampling_params", "here it is params"),
    (LLM.chat, "temperature", "it is a setting: give params=SamplingParams(temperature=...)"),
    (LLM.chat, "guided_decoding", "it is a setting: give params=SamplingParams(structure=...)"),
    (LLM.generate, "guided_json", "it is a setting: give params=SamplingParams(structure=...)"),
    (LLM.chat, "tool_choice", "the model chooses; a server's /v1/chat/completions has tool_choice"),
    (LLM.chat, "message", "did you mean messages?"),
    (LLM.stream, "sampling_params", "here it is params"),
    (LLM.stream, "max_length", "it is a setting: give params=SamplingParams(max_tokens=...)"),
    (LLM.embed, "max_tokens", "help() names those that there are"),
    (LLM.score, "document", "did you mean documents?"),
)


@pytest.mark.parametrize(("method", "name", "said"), METHODS)
def test_a_keyword_that_a_method_does_not_know_is_answered_with_what_was_meant(
    method: Any, name: str, said: str
) -> None:
    with pytest.raises(TypeError) as refused:
        method(None, "Hello", **{name: 1})
    assert str(refused.value) == (
        f"{method.__qualname__}() got an unexpected keyword argument {name!r}; {said}"
    )

    async def beside() -> None:
        made = getattr(AsyncLLM, method.__name__)(None, "Hello", **{name: 1})
        await made

    with pytest.raises(TypeError, match=re.escape(said)):
        asyncio.run(beside())


def test_signatures_of_methods_are_readable() -> None:
    for kind in (LLM, AsyncLLM):
        shown = inspect.signature(kind.stream)
        assert "lambda" not in str(shown)
        assert shown.parameters["params"].default is None
        assert "0x" not in pydoc.plaintext.document(kind)
        assert [*inspect.signature(kind.chat).parameters][:3] == ["self", "messages", "params"]
    assert inspect.signature(LLM.stream).parameters["until"].default is None
    assert inspect.iscoroutinefunction(AsyncLLM.generate)


def test_settings_that_are_changed_say_that_they_cannot_be() -> None:
    params = SamplingParams(temperature=0.5)
    for name, said in (("temperature", ""), ("temperatur", "; did you mean temperature?")):
        with pytest.raises(FrozenInstanceError) as refused:
            setattr(params, name, 1.0)
        assert str(refused.value) == f"SamplingParams cannot be changed; make another one{said}"
    assert replace(params, temperature=0.0).temperature == 0.0
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_help_shows_no_places_of_this_machine_and_lines_of_a_usual_length() -> None:
    for signature in (inspect.signature(LLM), inspect.signature(AsyncLLM), inspect.signature(LLM.__init__)):
        lines = str(signature).splitlines()
        assert max(map(len, lines)) <= 80
        assert "Path(" not in "".join(lines)
    said = pydoc.plaintext.document(LLM)
    for line in (
        "model: str | Path | None = None,",
        "device_memory: str | int | None = None,",
        "kv_directory: str | Path = '~/.cache/penstock',",
        "lora_modules: str | Sequence[str] | Mapping[str, str | Path] = (),",
        "loading: Callable[[str, int, int], None] | None = None,",
    ):
        # The class, and its constructor.
        assert said.count(f"\n |      {line}\n") == 2, line


def test_the_signature_has_each_setting_with_its_type_and_default() -> None:
    """Editors that run the program show it, and what reads annotations finds the same."""
    types = {one.name: one.type for one in fields(LLMArguments) if "help" in one.metadata}
    types["lora_modules"] = str | Sequence[str] | Mapping[str, str | Path]
    for made in (LLM, AsyncLLM):
        shown = inspect.signature(made).parameters
        assert {name: one.annotation for name, one in shown.items()} == types
        assert get_type_hints(made.__init__) == types | {"return": type(None)}
        for one in settings_of(LLMArguments):
            given = shown[one.name].default
            assert one.checked(given) == one.default, one.name
        first, *others = shown.values()
        assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert {one.kind for one in others} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_directory_for_kv_that_cannot_be_is_told_alike_by_one_rank_and_by_two(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.touch()
    asked = {"device": "cpu", "host_kv_memory": "4MiB", "disk_kv_memory": "4MiB", "kv_store": "off"}
    said = []
    for ranks in (1, 2):
        with pytest.raises(DeviceError) as refused:
            LLM(SHIPPED_MODEL, tensor_parallel=ranks, kv_directory=nowhere / "kv", **asked)  # type: ignore[arg-type]
        said.append(str(refused.value).partition(" for KV ")[2])
    assert said[0] == said[1]
    assert said[0].startswith(f"cannot be reserved in {nowhere}/kv: Not a directory")
