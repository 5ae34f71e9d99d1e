"""gpt-oss with experts in MXFP4 and dense: against transformers, streamed, on ranks, as a pack, with KV
beyond the device, and what its sinks and biases do."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

import tiny
from members import pass_of
from parity import GREEDY, WITH_PROMPT, measure, prompt_error
from penstock.api.llm import LLM
from penstock.arch.layout import GroupKind, group_layouts
from penstock.arch.shards import Shard
from penstock.base.errors import CheckpointError
from penstock.step.params import SamplingParams
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.pack.writer import write_pack
from stacks import Tensors, in_mxfp4, rewritten

SETTINGS = {"device": "cpu", "dtype": "float32", "max_length": 128, "check": True}
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return in_mxfp4(tmp_path_factory.mktemp("gpt_oss"))


def answers(path: Path, **settings: object) -> list[object]:
    with LLM(path, **SETTINGS | settings) as llm:  # type: ignore[arg-type]
        assert settings.get("device_memory") is None or llm.booted.weights.stats().streams
        return [(one.tokens, one.logprobs) for one in llm.generate(tiny.prompts(), SHORT)]


def references(path: Path, prompts: list[list[int]], steps: int) -> list[tiny.Reference]:
    model = tiny.load(path)
    return [tiny.decode(model, prompt, steps) for prompt in prompts]


@cache
def reference(path: Path) -> list[tiny.Reference]:
    return references(path, tiny.prompts(), tiny.OUTPUT)


def begun(one: tiny.Reference, steps: int) -> tiny.Reference:
    return replace(one, tokens=one.tokens[:steps], logprobs=one.logprobs[: len(one.prompt) + steps - 1])


def test_mxfp4_is_what_transformers_computes(pair: tuple[Path, Path]) -> None:
    few, dense = pair
    wanted = reference(dense)
    fewer = [begun(one, 24) for one in wanted]
    for path in (few, dense):
        with LLM(path, **SETTINGS) as llm:  # type: ignore[arg-type]
            assert measure(llm.generate(tiny.prompts(), WITH_PROMPT), wanted).exact
        small = {"block_size": 4, "max_step_tokens": 7, "max_sequences": 5, "kv_blocks": 22}
        with LLM(path, **SETTINGS | small) as llm:  # type: ignore[arg-type]
            assert measure(llm.generate(tiny.prompts(), replace(GREEDY, max_tokens=24)), fewer).exact
            assert llm.stats().preemptions > 0


def test_transformers_reads_the_same_numbers(pair: tuple[Path, Path]) -> None:
    few, dense = pair
    whole = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        few, dtype=torch.float32, quantization_config=whole
    ).state_dict()
    for name, one in tiny.load(dense).state_dict().items():
        assert torch.equal(theirs[name].float(), one), name


@pytest.mark.parametrize("kernels", [False, True])
def test_streamed_experts_are_resident_ones(pair: tuple[Path, Path], kernels: bool, tmp_path: Path) -> None:
    """Bit for bit: from the checkpoint and from a pack."""
    few, dense = pair
    for path in (few, dense):
        resident = pass_of(path, 0, kernels=kernels)
        for part in (0.3, 0.6) if tiny.THOROUGH else (0.6 if kernels else 0.3,):
            assert all(map(torch.equal, resident, pass_of(path, 0, part=part, kernels=kernels)))
        with Checkpoint.open(path) as checkpoint:
            write_pack(checkpoint, tmp_path / path.name, "float32")
        assert answers(tmp_path / path.name, kernels=kernels) == answers(path, kernels=kernels)


def test_few_bits_are_their_numbers(pair: tuple[Path, Path]) -> None:
    few, dense = pair
    for ranks in (0, 2):
        exact = pass_of(dense, ranks, kernels=False)
        assert all(map(torch.equal, pass_of(few, ranks, kernels=False), exact))
        for mine, theirs in zip(pass_of(few, ranks), exact, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_window"])
def test_ranks_find_what_one_finds(name: str, ranks: int) -> None:
    """Heads and their sinks are divided, rows of experts too; one rank alone adds what biases add at the
    end."""
    alone = pass_of(tiny.checkpoint(name), 0)
    for mine, theirs in zip(pass_of(tiny.checkpoint(name), ranks, part=0.6), alone, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_what_ranks_hold() -> None:
    with Checkpoint.open(tiny.checkpoint("gpt_oss")) as checkpoint:
        found = [
            {
                field.name: (field.shape, [(one.rows, one.index) for one in field.sources])
                for layout in group_layouts(checkpoint.spec, checkpoint.names, "float32", Shard(rank, 2))
                if layout.id.layer == 1 and (layout.id.kind is GroupKind.ATTENTION or layout.id.expert == 4)
                for field in layout.fields
            }
            for rank in (0, 1)
        ]
    assert [set(one) - set(found[1]) for one in found] == [{"out_bias", "down_bias"}, set()]
    assert [one["sinks"] for one in found] == [
        ((2,), [(range(2), None)]),
        ((2,), [(range(2, 4), None)]),
    ]
    assert found[1]["gate_up_bias"] == (
        (80,),
        [(range(80, 160, 2), 4), (range(81, 161, 2), 4)],
    )


LONG = {"kv_blocks": 7, "max_step_tokens": 24, "kv_tile": 16, "host_kv_memory": "1MiB", "block_size": 8}


@pytest.mark.parametrize(("name", "ranks"), [("gpt_oss", 1), ("gpt_oss_window", 2)])
def test_contexts_longer_than_the_device(name: str, ranks: int) -> None:
    """Sinks weigh once, after the last tile."""
    path = tiny.checkpoint(name)
    long = [prompt * 3 for prompt in tiny.prompts()[3:]]
    wanted = references(path, long, 20)
    more = {"tensor_parallel": ranks} if ranks > 1 else {}
    with LLM(path, **SETTINGS | {"max_length": 160} | LONG | more) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=-1)
        assert measure(llm.generate(long, params), wanted).exact


SWITCHES: Mapping[str, Callable[[str], bool]] = {
    "sinks": lambda name: name.endswith(".sinks"),
    "router": lambda name: name.endswith("router.bias"),
    "attention": lambda name: name.endswith("_proj.bias"),
    "gate_up": lambda name: name.endswith("gate_up_proj_bias"),
    "down": lambda name: name.endswith("down_proj_bias"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_of_them_matters(switch: str, tmp_path: Path) -> None:
    """Without one, the reference says something else, and the engine says the same."""
    source, sunk = tiny.checkpoint("gpt_oss"), -1e9 if switch == "sinks" else 0.0

    def without(tensors: Tensors) -> Tensors:
        chosen = {name: torch.full_like(one, sunk) for name, one in tensors.items() if SWITCHES[switch](name)}
        assert len(chosen) >= 3
        return tensors | chosen

    path = rewritten(source, tmp_path / "model", without)
    wanted, known = (references(one, tiny.prompts()[2:4], 8) for one in (path, source))
    for one, other in zip(wanted, known, strict=True):
        length = len(one.prompt)
        assert tiny.distance(one.logprobs[:length], other.logprobs[:length]) > 0.01
    with LLM(path, **SETTINGS) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)
        assert measure(llm.generate(tiny.prompts()[2:4], params), wanted).exact


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, pair: tuple[Path, Path]) -> None:
    few, dense = pair
    wanted, half = reference(dense), tiny.load(dense, dtype=getattr(torch, dtype))
    theirs = prompt_error([tiny.decode(half, prompt, steps=1) for prompt in tiny.prompts()], wanted)
    for path in (few, dense) if tiny.THOROUGH or dtype == "bfloat16" else (few,):
        with LLM(path, **SETTINGS | {"dtype": dtype}) as llm:  # type: ignore[arg-type]
            assert measure(llm.generate(tiny.prompts(), WITH_PROMPT), wanted).typical < 1.3 * theirs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name, one: one[:5] if "gate_up_proj" in name else one, "calls for at least 6 of"),
        (
            lambda name, one: one.mT if name.endswith("down_proj") else one,
            r"calls for at least 6 of \[80, 64\]",
        ),
        (
            lambda name, one: one[:4] if ".experts." in name else one,
            "stacks of 4 experts; 6 in each of 3 layers",
        ),
        (lambda name, one: one[:2] if name.endswith("sinks") else one, r"sinks has shape \[2\]"),
    ],
)
def test_broken_files(change: Callable[[str, Tensor], Tensor], said: str, tmp_path: Path) -> None:
    path = rewritten(
        tiny.checkpoint("gpt_oss"),
        tmp_path / "model",
        lambda tensors: {name: change(name, one) for name, one in tensors.items()},
    )
    with pytest.raises(CheckpointError, match=said):
        answers(path)
