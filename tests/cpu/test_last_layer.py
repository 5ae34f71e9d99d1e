"""What the last layer makes of tokens that nobody reads is not computed; their KV is, and answers are the
same."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

import tiny
from penstock import LLM, SamplingParams
from penstock.arch.layout import group_layouts, kv_layout
from penstock.kv.movement.pool import KVPool
from penstock.models import decoder, mixers
from penstock.models.residual import Residual
from penstock.ops.attention.attend import Attended
from penstock.weights.checkpoint.shape import Shape
from penstock.weights.streaming.views import Blank
from penstock.worker.inputs import InputBuilder
from penstock.worker.loaded import LoadedModel
from penstock.worker.runner import Runner
from penstock.worker.sampler import Sampler
from penstock.worker.sizes import StepSizes
from penstock.worker.tables import BlockTables
from penstock.worker.warmup import kernel_steps, small_steps

NAMES = ["llama", "llama_tied", "mistral", "qwen2_windows", "qwen3"]
QUICK = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@dataclass
class Counted:
    """Tokens that went into each attention and each feed-forward, in the order of calls."""

    attention: list[int] = field(default_factory=list)
    feed_forward: list[int] = field(default_factory=list)


@pytest.fixture
def counted() -> Iterator[Counted]:
    found, attend, gated = Counted(), mixers.attend, decoder.gated

    def attending(q: Tensor, *rest: object, **more: object) -> Attended:
        found.attention.append(len(q))
        return attend(q, *rest, **more)  # type: ignore[arg-type]

    def gating(x: Tensor, *rest: object) -> Tensor:
        found.feed_forward.append(len(x))
        return gated(x, *rest)  # type: ignore[arg-type]

    with patch.object(mixers, "attend", attending), patch.object(decoder, "gated", gating):
        yield found


def engine(name: str, **more: object) -> LLM:
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "check": True,
        "max_step_tokens": 16,
        "block_size": 4,
    }
    return LLM(tiny.checkpoint(name), **settings | more)


def prompt_of(name: str, count: int) -> list[int]:
    """The first `count` tokens of a prompt that has them."""
    [prompt] = [one.prompt for one in tiny.references(name) if len(one.prompt) >= count][:1]
    return prompt[:count]


def test_a_prompt_ends_with_one_row(counted: Counted) -> None:
    prompt = prompt_of("llama", 37)
    with engine("llama", prefix_cache=False) as llm:
        layers = llm.spec.layers
        counted.attention.clear(), counted.feed_forward.clear()
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    below = layers - 1
    assert counted.feed_forward == [16] * below + [16] * below + [5] * below + [1]
    assert [count for count in counted.attention if count] == counted.feed_forward


def test_each_prompt_of_a_step_ends_with_one_row(counted: Counted) -> None:
    """And rows that decode are all read."""
    prompt = prompt_of("llama", 12)
    with engine("llama", prefix_cache=False) as llm:
        layers = llm.spec.layers
        first = llm.generate([prompt, prompt[:3], prompt[:2]], SamplingParams(temperature=0, max_tokens=1))
        counted.feed_forward.clear()
        llm.generate([prompt[:3], prompt[:2]], SamplingParams(temperature=0, max_tokens=2))
        assert counted.feed_forward == [5] * (layers - 1) + [2] + [2] * layers
        again = llm.generate([prompt, prompt[:3], prompt[:2]], SamplingParams(temperature=0, max_tokens=1))
    assert [one.tokens for one in again] == [one.tokens for one in first]


def test_log_probabilities_of_a_prompt_need_all_of_it(counted: Counted) -> None:
    prompt = prompt_of("llama", 12)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with engine("llama", prefix_cache=False) as llm:
        counted.feed_forward.clear()
        [told] = llm.generate(prompt, params)
        assert counted.feed_forward == [12] * llm.spec.layers
    assert told.prompt_logprobs is not None
    assert len(told.prompt_logprobs) == 12


def test_a_prompt_whose_log_probabilities_are_wanted_beside_one_whose_are_not(counted: Counted) -> None:
    """Few positions of the step are read, but not only the newest of each prompt."""
    references = tiny.references("llama")
    scored, long = prompt_of("llama", 5), max((one.prompt for one in references), key=len)[:32]
    params = [
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=1),
    ]
    with engine("llama", prefix_cache=False, max_step_tokens=64) as llm:
        alone = [llm.generate(prompt, one)[0] for prompt, one in zip((scored, long), params, strict=True)]
        counted.feed_forward.clear()
        beside = llm.generate([scored, long], params)
        assert counted.feed_forward == [37] * (llm.spec.layers - 1) + [6]
    assert [one.tokens for one in beside] == [one.tokens for one in alone]
    told = [[entry.logprob for entry in one.prompt_logprobs or () if entry] for one in (beside[0], alone[0])]
    assert told[0] == pytest.approx(told[1], abs=1e-4)
    assert len(told[0]) == 4


@pytest.mark.parametrize("name", NAMES)
def test_what_a_prompt_leaves_is_whole(name: str) -> None:
    """Later requests that begin alike find its KV: that of all tokens, in the last layer too."""
    references = tiny.references(name)
    with engine(name) as llm:
        for one in references:
            llm.generate(one.prompt, SamplingParams(temperature=0, max_tokens=1))
        found = 0
        for one in references:
            [told] = llm.generate(one.prompt, QUICK)
            assert list(told.tokens) == one.tokens[:16]
            found += told.cached_tokens
        assert found > 0


@pytest.mark.parametrize(
    ("tokens", "sequences", "length"), [(2048, 64, 4096), (16, 4, 60), (2, 1, 9), (1, 1, 1), (64, 64, 3)]
)
def test_steps_for_which_kernels_are_compiled(tokens: int, sequences: int, length: int) -> None:
    """They run in a pool of one block, within what steps may have."""
    shape = Shape.open(tiny.checkpoint("llama"))
    spec, device = shape.spec, torch.device("cpu")
    layouts = group_layouts(spec, shape.names, "float32")
    inputs = InputBuilder(spec, device, BlockTables(sequences, -(-length // 16), device), block_size=16)
    sampler = Sampler(spec.vocab_size, sequences, device)
    runner = Runner(LoadedModel(decoder.Decoder(spec), inputs, sampler), device)
    runner.attach(Blank(layouts, device), KVPool(kv_layout(spec, "float32", 16), 1, device))
    sizes = StepSizes(tokens, sequences, length, 16)
    for plan in (*small_steps(sizes), *kernel_steps(sizes)):
        assert sum(len(share.tokens) for share in plan.shares) <= tokens
        assert len(plan.shares) <= sequences
        assert all(share.stop <= length for share in plan.shares)
        assert len(runner.run(plan).results) == len(plan.shares)


def test_attention_does_not_hold_the_input_of_its_layer() -> None:
    """Which is as large as the hidden states, and would lie beside queries, keys and what they see."""
    inputs: list[ReferenceType[Tensor]] = []
    alive: list[bool] = []
    normed, attend = Residual.normed, mixers.attend

    def norming(self: Residual, weight: Tensor | None) -> Tensor:
        found = normed(self, weight)
        inputs.append(ref(found))
        return found

    def attending(*given: object, **more: object) -> Attended:
        alive.append(inputs[-1]() is not None)
        return attend(*given, **more)  # type: ignore[arg-type]

    with (
        patch.object(Residual, "normed", norming),
        patch.object(mixers, "attend", attending),
        engine("llama") as llm,
    ):
        alive.clear()
        llm.generate([[5, 6, 7, 8]], QUICK)
    assert len(alive) > 16
    assert not any(alive)
