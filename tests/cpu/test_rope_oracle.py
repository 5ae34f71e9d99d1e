"""Rotary frequencies agree with those that transformers computes from the same config, of every kind and at
every length.

At positions beyond 2**24, which float32 cannot count, transformers is no oracle: there the angles are those
of exact arithmetic.
"""

import math
import random
from decimal import Decimal, localcontext

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.arch.families import read_spec
from penstock.arch.rope import attention_scale, inverse_frequencies
from penstock.arch.spec import RopeKind
from penstock.ops.rope import RotaryAngles

LONG = {"original_max_position_embeddings": 4096}
ROPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 5e5,
    }
    | LONG,
    "llama3 narrow": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 2.5,
        "rope_theta": 1e4,
    }
    | LONG,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6} | LONG,
    "yarn untruncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "rope_theta": 1e6} | LONG,
    "yarn betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 20.0,
        "beta_slow": 3.0,
        "rope_theta": 1e4,
    }
    | LONG,
    "yarn equal betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
        "truncate": False,
        "rope_theta": 1e4,
    }
    | LONG,
    "yarn attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "rope_theta": 1e4}
    | LONG,
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "rope_theta": 1e4,
    }
    | LONG,
    "yarn half mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "rope_theta": 1e4} | LONG,
    "yarn no original": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
    "yarn short": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
    },
}
SMALL = {
    "vocab_size": 32,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def both(
    rope: dict[str, object], head_dim: int, *, old: bool = False
) -> tuple[LlamaRotaryEmbedding, dict[str, object]]:
    """The oracle, and the config that it was made from in the newer or the older spelling."""
    shape = SMALL | {"head_dim": head_dim, "max_position_embeddings": 8192}
    oracle = LlamaRotaryEmbedding(transformers.LlamaConfig(**shape, rope_parameters=dict(rope)))
    if not old:
        return oracle, {"model_type": "llama", **shape, "rope_parameters": rope}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    return oracle, {
        "model_type": "llama",
        **shape,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling | {"type": rope["rope_type"]},
    }


def cosines(oracle: LlamaRotaryEmbedding, length: int) -> None:
    """Make the oracle see a sequence of `length`, as a forward pass does."""
    oracle(torch.zeros(1), torch.tensor([[length - 1]]))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_scale(name: str, head_dim: int, old: bool) -> None:
    oracle, config = both(ROPES[name], head_dim, old=old)
    rope = read_spec(config).rope
    assert inverse_frequencies(rope) == pytest.approx(oracle.inv_freq.tolist(), rel=2e-6)
    assert attention_scale(rope) == pytest.approx(oracle.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("length", [1, 8191, 8192, 8193, 10000, 100_000])
@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_frequencies_of_long_sequences(name: str, length: int) -> None:
    oracle, config = both(ROPES[name], 64)
    cosines(oracle, length)
    assert inverse_frequencies(read_spec(config).rope, length) == pytest.approx(
        oracle.inv_freq.tolist(), rel=5e-6
    )


def test_dynamic_differs_by_length_and_the_others_do_not() -> None:
    for name, rope in ROPES.items():
        spec = read_spec(both(rope, 64)[1]).rope
        assert (inverse_frequencies(spec, 100_000) != inverse_frequencies(spec, 8192)) == (name == "dynamic")


def test_kinds_differ() -> None:
    """Each set of settings gives frequencies or a scale of its own, so that no two tests above check the
    same."""
    found = set()
    for rope in ROPES.values():
        spec = read_spec(both(rope, 64)[1]).rope
        found.add((tuple(inverse_frequencies(spec, 9000)), attention_scale(spec)))
    assert len(found) == len(ROPES)


DEGENERATE: dict[str, dict[str, object]] = {
    "below one turn": {"factor": 4.0, "original_max_position_embeddings": 6},
    "between the betas": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 16.0},
    "tiny theta": {"factor": 4.0, "rope_theta": 1.01},
    "theta of two, untruncated": {"factor": 4.0, "rope_theta": 2.0, "truncate": False},
    "one position": {"factor": 16.0, "original_max_position_embeddings": 1, "truncate": False},
    "a sliver": {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 1.99999, "truncate": False},
    "no stretch": {"factor": 1.0},
    "a squeeze": {"factor": 0.5},
    "null truncate": {"factor": 4.0, "truncate": None},
    "null numbers": {
        "factor": 4.0,
        "beta_fast": None,
        "beta_slow": None,
        "mscale": None,
        "mscale_all_dim": None,
        "attention_factor": None,
    },
    "zero numbers": {"factor": 4.0, "beta_fast": 0, "beta_slow": 0.0, "mscale": 0.0, "mscale_all_dim": 0},
    "zero of one mscale": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.0},
    "whole numbers": {
        "factor": 4,
        "beta_fast": 20,
        "beta_slow": 3,
        "attention_factor": 2,
        "rope_theta": 10000,
    },
}
"""Settings of yarn at the edge of sense. What transformers computes from them is finite, so it is what they
mean."""


def assert_same(rope: dict[str, object], head_dim: int, length: int = 1, *, old: bool = False) -> None:
    oracle, config = both(rope, head_dim, old=old)
    cosines(oracle, length)
    spec = read_spec(config).rope
    assert inverse_frequencies(spec, length) == pytest.approx(
        oracle.inv_freq.tolist(), rel=2e-5, abs=1e-12
    ), rope
    assert attention_scale(spec) == pytest.approx(oracle.attention_scaling, rel=1e-12), rope


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_yarn(name: str, old: bool) -> None:
    for head_dim in (2, 6, 16, 64, 256):
        assert_same({"rope_type": "yarn", "rope_theta": 1e4} | LONG | DEGENERATE[name], head_dim, old=old)


def test_random_settings() -> None:
    """Settings in and beyond use, in any combination, in both spellings, at lengths up to and beyond the
    configured one."""
    rng = random.Random(1)
    choices: dict[str, list[object]] = {
        "beta_fast": [32, 4.0, 0, None, 64, 1000],
        "beta_slow": [1, 0, None, 0.1, 4.0, 3.9999999],
        "attention_factor": [1.0, 1.4, None],
        "mscale": [1.0, 0.707, 0, None],
        "mscale_all_dim": [1.0, 0.4, 0.0, None],
        "truncate": [True, False, None],
    }
    for _ in range(400):
        kind = rng.choice(["yarn", "yarn", "yarn", "linear", "dynamic", "llama3", "default"])
        rope: dict[str, object] = {
            "rope_type": kind,
            "rope_theta": rng.choice([1.0001, 1.5, 3, 10.0, 500, 1e4, 1e12]),
        }
        if kind != "default":
            rope["factor"] = rng.choice([1, 2.0, 8, 32.0, rng.uniform(1, 64)])
        if kind in ("yarn", "llama3"):
            rope["original_max_position_embeddings"] = rng.choice([1, 3, 6, 7, 31, 200, 201, 202, 4096])
        if kind == "yarn":
            rope |= {key: rng.choice(values) for key, values in choices.items() if rng.random() < 0.5}
        if kind == "llama3":
            rope |= {
                "low_freq_factor": rng.choice([0.1, 1, 2.0]),
                "high_freq_factor": rng.choice([2.1, 4, 64.0]),
            }
        assert_same(
            rope, rng.choice([4, 6, 16, 80, 128]), rng.choice([1, 8192, 8193, 50_000]), old=rng.random() < 0.5
        )


FAR = [at + step for at in (2**24, 2**25, 2**26 - 3) for step in range(-3, 4)]
TURN = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


@pytest.mark.parametrize("name", ROPES)
def test_angles_at_far_positions(name: str) -> None:
    """Whole turns are taken off in 50 digits. That the frequencies are right to their last bits is
    tests/plain/test_positions.py's."""
    rope = read_spec(both(ROPES[name], 64)[1]).rope
    scale = attention_scale(rope)
    lengths = [position + 1 for position in FAR]
    cos, sin = RotaryAngles(rope, torch.device("cpu")).tables(
        torch.tensor(FAR), lengths if rope.kind is RopeKind.DYNAMIC else None
    )
    want_cos, want_sin = [], []
    with localcontext(prec=50):
        for position in FAR:
            angles = [
                float(Decimal(frequency) * position % TURN)
                for frequency in inverse_frequencies(rope, position + 1)
            ]
            want_cos.append([scale * math.cos(angle) for angle in angles])
            want_sin.append([scale * math.sin(angle) for angle in angles])
    for got, want in ((cos, want_cos), (sin, want_sin)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            got.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1.5e-7 * scale
        )
    assert len(torch.unique(torch.cat((cos, sin), 1), dim=0)) == len(
        FAR
    )  # no position is rounded into its neighbour
    nearness = torch.cos(torch.tensor(inverse_frequencies(rope), dtype=torch.float64)).float() * scale**2
    if rope.kind is not RopeKind.DYNAMIC:  # From each position to the next every pair turns by its frequency.
        for at in range(0, len(FAR), 7):
            turned = cos[at : at + 6] * cos[at + 1 : at + 7] + sin[at : at + 6] * sin[at + 1 : at + 7]
            torch.testing.assert_close(turned, nearness.expand(6, -1), rtol=0, atol=1e-6 * scale**2)
