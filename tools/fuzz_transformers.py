"""Random small models under random schedules, against transformers: greedy tokens and log-probabilities of
the whole vocabulary.

    python tools/fuzz_transformers.py --seconds 3600      cases in a row, until the time is up or one fails
    python tools/fuzz_transformers.py --seed 17           one case, whose settings are printed

A seed decides everything: family, sizes, switches, rope, weights, the engine's settings, prompts, and when
each comes and leaves. The reference is one forward pass of transformers over the prompt and the engine's own
output, so a wrong token does not hide what follows it.
"""

import argparse
import gc
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import tiny
from penstock import LLM, Completion, SamplingParams
from penstock.arch.families import read_spec
from penstock.arch.layout import kv_layout
from penstock.base.errors import BudgetError, ConfigError, UnsupportedModelError
from penstock.kv.movement.sizes import record_bytes
from penstock.sched import arrivals
from penstock.sched.rates import TransferRates

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
MIXTURES = ("qwen2_moe", "glm4_moe", "minimax_m2")
"""Families that seeds from MIXED on stand for as well."""
LATER = ("gpt_oss",)
"""Families that seeds from 2 * MIXED on stand for as well, so that earlier seeds keep their cases."""
MIXED = 10_000
LONGEST = 200
"""Tokens of a prompt and its output."""
LIMIT = tiny.LIMIT
"""Largest difference of log-probabilities, over the largest log-probability's size, that rounding in float32
may make."""
CLOSE = LIMIT
"""A token or an expert chosen by less than this, over the size of the logits, may be chosen otherwise."""


@dataclass(frozen=True)
class Ask:
    """A request that comes before step `at`. One with `after` goes on from the whole of an earlier request of
    the round before. One that leaves is abandoned so many steps later."""

    prompt: tuple[int, ...]
    tokens: int
    at: int = 0
    after: int | None = None
    leave: int | None = None
    scored: bool = False
    """Whether log-probabilities of the prompt are asked for, too."""


@dataclass(frozen=True)
class Run:
    """One engine: its settings, and rounds of requests. `sizes`: blocks in host memory and on disk, where
    such tiers are wanted."""

    settings: Mapping[str, object]
    sizes: tuple[int, int]
    rounds: tuple[tuple[Ask, ...], ...]
    sibling: bool = False
    """Whether the weights of one tensor are changed before, so that KV which the run before has left on disk
    must not be found."""


@dataclass(frozen=True)
class Case:
    seed: int
    kind: tiny.Case
    runs: tuple[Run, ...]

    def __str__(self) -> str:
        told = [f"seed {self.seed}: {self.kind.model_type} {dict(self.kind.config)}"]
        told += [f"file in {self.kind.dtype}{', rope in the older spelling' if self.kind.old_style else ''}"]
        for run in self.runs:
            told += [
                f"  {'changed weights; ' if run.sibling else ''}{dict(run.settings)}, blocks in host and on "
                f"disk {run.sizes}"
            ]
            told += [f"    round {index}: {ask}" for index, asks in enumerate(run.rounds) for ask in asks]
        return "\n".join(told)


class Mismatch(Exception):
    """The engine says something else than transformers."""


@dataclass
class Tally:
    """What the cases have covered."""

    models: int = 0
    tokens: int = 0
    """Output tokens compared."""
    positions: int = 0
    """Distributions compared, those of prompts included."""
    unclear: int = 0
    """Distributions left out, because experts before them were chosen by a hair."""
    worst: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
        return (
            f"{self.models:,} models, {self.tokens:,} tokens, {self.positions:,} distributions "
            f"({self.unclear:,} left out), "
            f"worst difference {self.worst:.1e}; {counts}"
        )


# ---- what a seed stands for


def draw(seed: int, ranks: bool = False) -> Case:
    """The case of a seed. `ranks`: whether some engines are divided among two processes, which takes seconds
    each."""
    rng = random.Random(seed)
    config = _config(rng, family_of(seed))
    kind = tiny.Case(
        family_of(seed),
        config,
        dtype=rng.choice(["float32", "float32", "bfloat16", "float16"]),
        shard=rng.choice(["1GB", "20KB"]),
        seed=seed,
        old_style=rng.random() < 0.4,
    )
    return Case(seed, kind, tuple(_runs(rng, int(str(config["vocab_size"])), ranks)))


def family_of(seed: int) -> str:
    """The family of a seed's model."""
    every = FAMILIES + (MIXTURES if seed >= MIXED else ()) + (LATER if seed >= 2 * MIXED else ())
    return every[seed % len(every)]


def _config(rng: random.Random, family: str) -> dict[str, object]:
    heads = rng.choice([1, 2, 3, 4, 6, 8])
    hidden = heads * rng.choice([size for size in (4, 8, 12, 16, 20, 32) if heads * size <= 96])
    layers = rng.randint(1, 4)
    head_dim = rng.choice([2, 4, 6, 8, 16, 20, 32, 64]) if family == "qwen3" or rng.random() < 0.6 else None
    config: dict[str, object] = {
        "vocab_size": rng.randint(30, 150),
        "hidden_size": hidden,
        "intermediate_size": rng.choice([8, 24, 33, 56, 80]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([kv for kv in range(1, heads + 1) if heads % kv == 0]),
        "max_position_embeddings": rng.choice([16, 32, 100, 256, 4096]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3, 1e-2, 0.1]),
        "tie_word_embeddings": rng.random() < 0.4,
    }
    config["rope_parameters"] = rope = _rope(rng, head_dim or hidden // heads)
    if head_dim is None and family == "mixtral" and rope["rope_type"] in ("dynamic", "yarn"):
        head_dim = hidden // heads  # without it these kinds end transformers' Mixtral in a TypeError
    if head_dim is not None:
        config["head_dim"] = head_dim
    window = rng.choice([1, 2, 3, 5, 8, 13, 16, 17, 40])
    if (
        rope["rope_type"] == "dynamic"
    ):  # There the reference needs transformers' cache, which in a window of one token keeps all of them.
        window = max(window, 2)
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = rng.choice([None, window, window])
    elif family == "gpt_oss":
        config["sliding_window"] = window
        config["layer_types"] = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    elif family not in ("llama", "glm4_moe", "minimax_m2") and rng.random() < 0.6:
        config |= {"use_sliding_window": True, "sliding_window": window}
        if family == "qwen3_moe":
            pass
        elif rng.random() < 0.5:
            config["max_window_layers"] = rng.randint(0, layers)
        else:
            config["layer_types"] = [
                rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)
            ]
    if family in ("llama", "qwen3", "qwen3_moe", "gpt_oss"):
        config["attention_bias"] = rng.random() < 0.5
    if family == "llama":
        config["mlp_bias"] = rng.random() < 0.5
    if family == "gpt_oss":
        config |= {"swiglu_limit": rng.choice([0.3, 1.0, 7.0]), "swiglu_alpha": rng.choice([1.702, 0.5, 3.0])}
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        experts = rng.randint(1, 9)
        config["num_experts" if family == "qwen3_moe" else "num_local_experts"] = experts
        config["num_experts_per_tok"] = rng.randint(1, experts)
    if family == "qwen3_moe":
        config |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "norm_topk_prob": rng.random() < 0.5}
        config |= {
            "decoder_sparse_step": rng.choice([1, 1, 2]),
            "mlp_only_layers": rng.choice([[], [], [0], [layers - 1]]),
        }
    return config | _mixture(rng, family, layers, head_dim or hidden // heads, rope)


def _mixture(
    rng: random.Random, family: str, layers: int, head_dim: int, rope: dict[str, object]
) -> dict[str, object]:
    """What sets a family of MIXTURES apart; nothing for others."""
    if family not in MIXTURES:
        return {}
    experts = rng.randint(2, 9)
    turned = 2 * rng.randint(2 if rope["rope_type"] == "dynamic" else 1, head_dim // 2)
    config: dict[str, object] = {"num_experts_per_tok": rng.randint(1, experts), "head_dim": head_dim}
    if family == "minimax_m2":
        return config | {"num_local_experts": experts, "rotary_dim": turned}
    config |= {"moe_intermediate_size": rng.choice([8, 24, 40]), "norm_topk_prob": rng.random() < 0.5}
    if family == "qwen2_moe":
        return config | {
            "num_experts": experts,
            "shared_expert_intermediate_size": rng.choice([8, 33, 48]),
            "qkv_bias": rng.random() < 0.5,
            "decoder_sparse_step": rng.choice([1, 1, 2]),
            "mlp_only_layers": rng.choice([[], [], [0], [layers - 1]]),
        }
    groups = rng.choice([1, 1, 2, 3])
    each = rng.randint(2, 4) if groups > 1 else experts
    top_groups = rng.randint(1, groups)
    rope["partial_rotary_factor"] = turned / head_dim
    return config | {
        "n_routed_experts": groups * each,
        "num_experts_per_tok": rng.randint(1, top_groups * each),
        "n_group": groups,
        "topk_group": top_groups,
        "n_shared_experts": rng.randint(1, 3),
        "first_k_dense_replace": rng.randint(0, layers),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "attention_bias": rng.random() < 0.5,
        "use_qk_norm": rng.random() < 0.5,
    }


def _rope(rng: random.Random, dim: int) -> dict[str, object]:
    """Any kind, half of them with numbers that are in use and half with whatever is accepted."""
    kind = rng.choice(["default", "linear", "dynamic", "llama3", "yarn", "yarn"])
    if kind == "dynamic" and dim < 4:
        kind = "default"
    usual = rng.random() < 0.5
    rope: dict[str, object] = {
        "rope_type": kind,
        "rope_theta": rng.choice([1e4, 5e5, 10000, 1e6] if usual else [1.01, 2.0, 7.5, 100, 1e9]),
    }
    if kind != "default":
        rope["factor"] = rng.choice([2.0, 4, 8.0] if usual else [1.0, 1, 1.37, 32.0, 40])
    if kind in ("yarn", "llama3") and rng.random() < 0.8:
        rope["original_max_position_embeddings"] = rng.choice(
            [32, 64, 128] if usual else [1, 3, 6, 7, 30, 201, 4096]
        )
    if kind == "llama3":
        low = rng.choice([1.0, 0.5, 2])
        rope |= {"low_freq_factor": low, "high_freq_factor": low * rng.choice([4, 1.5, 20.0])}
    if kind == "yarn":
        choices: dict[str, list[object]] = {
            "beta_fast": [32, 64.0, 4] if usual else [1000, 4.0, 0, None],
            "beta_slow": [1, 2.0] if usual else [0.01, 4.0, 3.99, 0, None],
            "attention_factor": [1.2, None],
            "mscale": [1.0, 0.707] if usual else [0, 2.5, None],
            "mscale_all_dim": [1.0, 0.4] if usual else [0.0, 3, None],
            "truncate": [True, False] if usual else [False, None],
        }
        rope |= {key: rng.choice(values) for key, values in choices.items() if rng.random() < 0.4}
    return rope


def _runs(rng: random.Random, vocab: int, ranks: bool) -> Iterator[Run]:
    block = rng.choice([1, 2, 4, 4, 8, 16, 32])
    step = rng.choice([None, *(size for size in (2, 5, 7, 16, 33, 64, 128) if size >= block)])
    settings: dict[str, object] = {
        "block_size": block,
        "max_step_tokens": step,
        "max_sequences": rng.randint(1, min(step or 8, 8)),
        "prefix_cache": rng.random() < 0.8,
    }
    most = -(-LONGEST // block)
    tiers = rng.choice(["none", "none", "scarce", "host", "host", "disk", "disk"])
    sizes = (0, 0)
    if tiers == "scarce":
        settings |= {"kv_blocks": most + rng.randint(0, 2), "max_sequences": min(step or 8, 6)}
    elif tiers != "none":
        settings |= {
            "kv_blocks": max(most // rng.choice([1, 2, 4]), 4) + rng.randint(0, 3),
            "kv_store": rng.choice(["eager", "lazy", "off"]),
        }
        settings["kv_tile"] = rng.choice([None, 1, block, 3 * block, rng.randint(1, 100)])
        sizes = (2 * most + rng.randint(0, 3 * most), rng.randint(1, 2 * most) if tiers == "disk" else 0)
    if (
        ranks and rng.random() < 0.05 and not sizes[0]
    ):  # KV beyond the device goes with a single device so far
        settings["tensor_parallel"] = 2
    some = [_words(rng, vocab, LONGEST) for _ in range(2)]
    yield Run(
        settings,
        sizes,
        tuple(_round(rng, vocab, some, index == 0, tiers == "scarce") for index in range(rng.randint(1, 3))),
    )
    if sizes[1] and settings["kv_store"] != "off" and settings["prefix_cache"]:
        for sibling in (False, True):
            yield Run(settings, sizes, (_round(rng, vocab, some, True, False),), sibling)


def _round(
    rng: random.Random, vocab: int, some: list[tuple[int, ...]], first: bool, crowded: bool
) -> tuple[Ask, ...]:
    """Requests of all lengths, most of which begin as others do. Where blocks are scarce they come as a crowd
    that is too large."""
    asks = []
    for _ in range(6 if crowded else rng.randint(2, 6)):
        tokens = rng.randint(30, 60) if crowded else rng.randint(1, rng.choice([6, 40]))
        length = rng.randint(10, 60) if crowded else rng.randint(1, rng.choice([10, 80, 150]))
        text = rng.choice(some)
        alike = rng.choice(
            [0, rng.randint(0, length)] if crowded else [0, length, length, length, rng.randint(0, length)]
        )
        leave = rng.randint(1, 20) if rng.random() < 0.15 else None
        asks.append(
            Ask(
                prompt=(*text[:alike], *_words(rng, vocab, length - alike)),
                tokens=tokens,
                at=rng.choice([0, 0, rng.randint(0, 5 if crowded else 25)]),
                after=None if first or crowded or rng.random() < 0.6 else rng.randrange(5),
                leave=leave,
                scored=rng.random() < 0.3,
            )
        )
    return tuple(asks)


def _words(rng: random.Random, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab) for _ in range(count))


# ---- what the engine says


def check(case: Case, tally: Tally) -> None:
    """Run a case. Raises Mismatch, which names the first difference, and whatever the engine raises."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        path = tiny.write(case.kind, Path(folder) / "model")
        try:
            read_spec(json.loads((path / "config.json").read_text()))
        except UnsupportedModelError as refused:
            tally.counts["refused: " + str(refused).partition("key ")[2][:40]] += 1
            return
        tally.models += 1
        for run in case.runs:
            if run.sibling:
                path = _sibling(path, Path(folder) / "sibling", case.seed)
            _check(case, run, path, Path(folder), tally)


def _sibling(path: Path, other: Path, seed: int) -> Path:
    """The same checkpoint, but for the sign of one row of one tensor."""
    other.mkdir()
    files = sorted(path.iterdir())
    changed = random.Random(seed).choice([file for file in files if file.suffix == ".safetensors"])
    for file in files:
        if file != changed:
            shutil.copy(file, other / file.name)
    tensors = load_file(changed)
    name = random.Random(seed).choice(sorted(tensors))
    tensors[name][-1] *= -1
    save_file(tensors, other / changed.name, {"format": "pt"})
    return other


def _check(case: Case, run: Run, path: Path, folder: Path, tally: Tally) -> None:
    model = Reference(path)
    settings = dict(run.settings)
    if run.sizes[0]:
        layout = kv_layout(
            read_spec(json.loads((path / "config.json").read_text())),
            "float32",
            int(str(settings["block_size"])),
        )
        settings["host_kv_memory"] = run.sizes[0] * layout.block_bytes
        if run.sizes[1]:
            # What outlives the engine, and room for what long contexts put there.
            kept = 65536 + run.sizes[1] * 2 * (layout.block_bytes + 4096)
            swapped = 3 * -(-LONGEST // layout.block_size) * layout.layers * record_bytes(layout)
            settings |= {"disk_kv_memory": kept + swapped, "kv_directory": folder / "kv"}
    common = {
        "device": "cpu",
        "dtype": "float32",
        "max_length": LONGEST,
        "beyond_trained": True,
        "check": True,
        "progress": False,
    }
    try:
        llm = LLM(path, **common, **settings)  # type: ignore[arg-type]
    except (BudgetError, ConfigError) as refused:
        tally.counts["no room: " + str(refused)[:60]] += 1
        return
    with llm, _eager_to_load(case.seed):
        before: list[Completion] = []
        for index, asks in enumerate(run.rounds):
            prompts = [_prompt(ask, before) for ask in asks]
            before = _answers(llm, asks, prompts)
            for ask, prompt, found in zip(asks, prompts, before, strict=True):
                where = f"run {case.runs.index(run)}, round {index}, prompt {list(prompt)}"
                _compare(model, ask, prompt, found, where, tally)
        stats = llm.stats()
        tally.counts["preemptions"] += stats.preemptions
        tally.counts["bytes streamed for attention"] += stats.kv.copied if stats.kv else 0


@contextmanager
def _eager_to_load(seed: int) -> Iterator[None]:
    """What rests on lower tiers is mostly loaded: computed anew, as it would be where models are this small,
    it would never be tried."""
    rng = random.Random(seed)
    with (
        patch.object(TransferRates, "loading_pays", lambda *_: rng.random() < 0.9),
        patch.object(arrivals, "_LEAST_PATIENCE", 10.0),
    ):
        yield


def _prompt(ask: Ask, before: list[Completion]) -> tuple[int, ...]:
    if ask.after is None or not before:
        return ask.prompt
    earlier = before[ask.after % len(before)]
    return (*earlier.prompt_tokens, *earlier.tokens, *ask.prompt)[: LONGEST - ask.tokens]


def _answers(llm: LLM, asks: tuple[Ask, ...], prompts: list[tuple[int, ...]]) -> list[Completion]:
    """What each is answered, in steps in which others come and leave."""
    streams = {}
    step = 0
    while len(streams) < len(asks) or llm.stats().running or llm.stats().waiting:
        for index, (ask, prompt) in enumerate(zip(asks, prompts, strict=True)):
            if ask.at == step:
                params = SamplingParams(
                    temperature=0,
                    max_tokens=ask.tokens,
                    ignore_eos=True,
                    logprobs=-1,
                    prompt_logprobs=-1 if ask.scored else None,
                )
                streams[index] = llm.stream(list(prompt), params)
            if ask.leave is not None and ask.at + ask.leave == step:
                streams[index].close()
        llm.driver.advance()
        step += 1
    return [streams[index].completion for index in range(len(asks))]


# ---- what transformers says


class Reference:
    """A checkpoint as transformers runs it. Notes at which positions its routers choose experts by a hair."""

    def __init__(self, path: Path) -> None:
        self.model = tiny.load(path)
        self.model.set_experts_implementation("eager")  # the usual one wants sizes in multiples of 16 bytes
        config = self.model.config
        self.dynamic = config.rope_parameters["rope_type"] == "dynamic"
        self.leads: dict[str, list[Tensor]] = {}
        for name, module in self.model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._noting(name))

    def _noting(self, name: str) -> "object":
        def note(module: torch.nn.Module, given: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            scores, k = output[0].double(), int(module.top_k)  # type: ignore[arg-type]
            bias = given[1] if len(given) > 1 else getattr(module, "e_score_correction_bias", None)
            size, lead = scores.abs().max(-1).values.clamp(min=1e-3), torch.full((len(scores),), math.inf)
            if bias is not None:  # What moves a logit moves its sigmoid by a quarter of that at most.
                size, scores = size / 4, scores.sigmoid() + bias.double()
            if getattr(module, "num_group", 1) > 1:
                by_group = scores.unflatten(-1, (module.num_group, -1))  # type: ignore[arg-type]
                sums = by_group.topk(2).values.sum(-1)
                lead = _lead(sums, int(module.topk_group))  # type: ignore[arg-type]
                others = sums < sums.topk(int(module.topk_group)).values[:, -1:]  # type: ignore[arg-type]
                scores = by_group.masked_fill(others.unsqueeze(-1), -math.inf).flatten(1)
            self.leads.setdefault(name, []).append(torch.minimum(lead, _lead(scores, k)) / size)

        return note

    @torch.inference_mode()
    def logprobs(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[Tensor, int]:
        """`[positions, vocab]` in float64 after each of prompt and tokens but the last, and how many of them
        are clear."""
        if self.dynamic:
            # Frequencies depend on the length beyond the trained one, and what is in the cache keeps those
            # it had.
            together = max(len(prompt), self.model.config.max_position_embeddings)
            self.model(torch.tensor([[1]]))  # forgets a longer sequence
            self.leads.clear()
            output = self.model(torch.tensor([(*prompt, *tokens[:-1])[:together]]), use_cache=True)
            logits = [output.logits[0]]
            for token in tokens[:-1][together - len(prompt) :]:
                output = self.model(
                    torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True
                )
                logits.append(output.logits[0])
            found = torch.cat(logits)
        else:
            self.leads.clear()
            found = self.model(torch.tensor([(*prompt, *tokens[:-1])]), use_cache=False).logits[0]
        clear = len(found)
        if self.leads:
            hair = torch.stack([torch.cat(some) for some in self.leads.values()]).min(0).values < CLOSE
            clear = int(hair.nonzero()[0]) if hair.any() else clear
        return found.double().log_softmax(-1), clear


def _lead(scores: Tensor, count: int) -> Tensor:
    """By how much the last that is chosen is ahead of the first that is not, `[tokens]`."""
    ranked = scores.sort(-1, descending=True).values
    if count == scores.shape[1]:
        return torch.full((len(scores),), math.inf, dtype=scores.dtype)
    return ranked[:, count - 1] - ranked[:, count]


def _compare(
    model: Reference, ask: Ask, prompt: tuple[int, ...], found: Completion, where: str, tally: Tally
) -> None:
    tokens, entries = found.tokens, found.logprobs or ()
    tally.counts["cached tokens"] += found.cached_tokens
    tally.counts["cached from host"] += found.cached_host
    tally.counts["cached from disk"] += found.cached_disk
    if ask.leave is None and len(tokens) != ask.tokens:
        raise Mismatch(f"{where}: {len(tokens)} tokens instead of {ask.tokens}")
    if found.prompt_tokens != prompt or len(entries) != len(tokens):
        raise Mismatch(
            f"{where}: prompt {found.prompt_tokens}, {len(entries)} log-probabilities of {len(tokens)} tokens"
        )
    if not tokens:
        return
    expected, clear = model.logprobs(prompt, tokens)
    size = float(expected.abs().max())
    vocab = expected.shape[1]
    scored = [*enumerate((found.prompt_logprobs or ())[1:])]
    for position, entry in (*scored, *enumerate(entries, len(prompt) - 1)):
        if position >= clear:
            tally.unclear += 1
            continue
        assert entry is not None
        apart = float((tiny.dense(entry, vocab) - expected[position]).abs().max()) / size
        tally.worst = max(tally.worst, apart)
        tally.positions += 1
        if not apart < LIMIT:
            raise Mismatch(
                f"{where}: after position {position} of {len(prompt)} + {len(tokens)}, log-probabilities "
                f"differ by {apart:.1e}"
            )
        if position >= len(prompt) - 1:
            tally.tokens += 1
            lead = float(expected[position].max() - expected[position][entry.token]) / size
            if lead > CLOSE:
                raise Mismatch(
                    f"{where}: after position {position}, token {entry.token} instead of "
                    f"{int(expected[position].argmax())}"
                )


# ---- the command


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600, help="how long to go on [3600]")
    parser.add_argument("--first", type=int, help="the first seed; the time of day if left out")
    parser.add_argument("--seed", type=int, help="run this case alone")
    parser.add_argument("--ranks", action="store_true", help="divide some engines among two processes")
    given = parser.parse_args()
    begin, tally = time.monotonic(), Tally()
    again = f"python tools/fuzz_transformers.py{' --ranks' if given.ranks else ''} --seed"
    seed = (
        given.seed
        if given.seed is not None
        else given.first
        if given.first is not None
        else int(time.time()) * 1000
    )
    shown = begin
    gc.collect()
    # Every engine collects garbage as it opens and closes, and going through all of transformers takes 0.4 s
    # each time.
    gc.freeze()
    with one_thread():
        while True:
            case = draw(seed, given.ranks)
            if given.seed is not None:
                print(case, flush=True)
            try:
                check(case, tally)
            except BaseException as error:
                print(
                    f"{tally}\nseed {seed} after {time.monotonic() - begin:.0f} s: {type(error).__name__}: "
                    f"{error}\nagain: {again} {seed}"
                )
                if isinstance(error, Mismatch):
                    sys.exit(1)
                raise
            seed += 1
            now = time.monotonic()
            if given.seed is not None or now - begin >= given.seconds:
                print(f"{tally}; no difference in {now - begin:.0f} s")
                return
            if now - shown >= 60:
                print(f"{now - begin:.0f} s: {tally}", flush=True)
                shown = now


if __name__ == "__main__":
    main()
