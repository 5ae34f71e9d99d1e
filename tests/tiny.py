"""Tiny random checkpoints of every family, written by transformers itself, and what transformers computes
with them.

Weights, biases and norms are drawn so that attention is far from uniform, every switch of a config changes
the logits, and the likeliest token leads by more than rounding can turn. Everything is made once per process,
on first use.
"""

import atexit
import functools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor

from penstock.step.plan import TokenLogprob

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 97
OUTPUT = 64
"""Greedy tokens that every reference holds."""
LIMIT = 1e-4
"""Of the largest log-probability's size: how far two computations in float32 may lie apart."""
CLOSE = 3e-5
"""A choice by less than this, over the size of the logits, may turn out otherwise."""


@dataclass(frozen=True)
class Case:
    """One kind of checkpoint. `without` takes away what sets it apart; the logits must notice."""

    model_type: str
    config: Mapping[str, object] = field(default_factory=dict)
    without: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "float32"
    shard: str = "1GB"
    seed: int = 0
    """Chosen so that no greedy choice is a close call; see `leads`."""
    old_style: bool = False
    """Spell rope as configs did before `rope_parameters`."""

    @property
    def dynamic(self) -> bool:
        """Whether positions are turned differently in longer sequences."""
        rope = self.config.get("rope_parameters")
        return isinstance(rope, Mapping) and rope["rope_type"] == "dynamic"


def _rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


PLAIN_ROPE = _rope("default")
_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)
_YARN_FULL = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=4.0,
    beta_slow=0.5,
    truncate=False,
    mscale=1.3,
    mscale_all_dim=0.6,
)
_YARN_OPEN = _rope(
    "yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0, truncate=False
)
_SHORT = {"max_position_embeddings": 32}
_MIX = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
_SHARED = _MOE | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}
_GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 32,
}

CASES: dict[str, Case] = {
    "llama": Case("llama", seed=2),
    "llama_biases": Case(
        "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, seed=1
    ),
    "llama_llama3": Case("llama", _LLAMA3, PLAIN_ROPE, seed=1),
    "llama_linear": Case("llama", _rope("linear", factor=2.5), PLAIN_ROPE, old_style=True),
    "llama_dynamic": Case("llama", _rope("dynamic", factor=3.0) | _SHORT, PLAIN_ROPE, seed=1),
    "llama_yarn": Case("llama", _YARN, PLAIN_ROPE),
    "llama_yarn_full": Case("llama", _YARN_FULL, _YARN, seed=1),
    "llama_yarn_old_style": Case(
        "llama",
        _rope("yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=1.4),
        _YARN,
        old_style=True,
        seed=2,
    ),
    "llama_tied": Case("llama", {"tie_word_embeddings": True}),
    "llama_sharded": Case(
        "llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}, {"rms_norm_eps": 1e-6}, shard="40KB"
    ),
    "llama_bfloat16_file": Case(
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        PLAIN_ROPE,
        dtype="bfloat16",
    ),
    "llama_float16_file": Case("llama", {"head_dim": 24}, dtype="float16"),
    "mistral": Case("mistral", {"sliding_window": 8, "head_dim": 32}, {"sliding_window": None}, seed=2),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": _MIX},
        {"layer_types": _MIX[::-1][1:] + _MIX[1:2]},
    ),
    "qwen3": Case("qwen3", {"head_dim": 32}, seed=1),
    "qwen3_windows": Case(
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
        {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "mixtral": Case(
        "mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}, {"num_experts_per_tok": 3}
    ),
    "mixtral_window": Case(
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 8},
        {"sliding_window": None},
        seed=1,
    ),
    "qwen3_moe": Case(
        "qwen3_moe", _MOE | {"norm_topk_prob": False, "head_dim": 16}, {"norm_topk_prob": True}, seed=1
    ),
    "qwen3_moe_normalised": Case(
        "qwen3_moe", _MOE | {"norm_topk_prob": True, "head_dim": 32}, {"norm_topk_prob": False}, seed=1
    ),
    "qwen3_moe_dense_layer": Case(
        "qwen3_moe", _MOE | {"norm_topk_prob": True, "mlp_only_layers": [0], "head_dim": 16}
    ),
    "qwen3_moe_every_second": Case(
        "qwen3_moe", _MOE | {"decoder_sparse_step": 2, "attention_bias": True, "head_dim": 16}
    ),
    "qwen3_moe_window": Case(
        "qwen3_moe",
        _MOE | {"use_sliding_window": True, "sliding_window": 8, "head_dim": 16},
        {"use_sliding_window": False, "sliding_window": None},
    ),
    "qwen2_moe": Case("qwen2_moe", _SHARED, {"norm_topk_prob": True}),
    "qwen2_moe_window": Case(
        "qwen2_moe",
        _SHARED
        | {
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
        {"layer_types": _MIX[::-1][1:] + _MIX[1:2]},
        seed=1,
    ),
    "glm4_moe": Case(
        "glm4_moe",
        _GLM | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
        {"routed_scaling_factor": 1.0},
    ),
    "glm4_moe_groups": Case(
        "glm4_moe",
        _GLM
        | {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
        },
        {"topk_group": 4},
    ),
    "glm4_moe_yarn": Case(
        "glm4_moe",
        _GLM
        | {
            "first_k_dense_replace": 0,
            "rope_parameters": _YARN["rope_parameters"] | {"partial_rotary_factor": 0.25},
        },
        {"rope_parameters": _YARN["rope_parameters"] | {"partial_rotary_factor": 1.0}},
    ),
    "minimax_m2": Case(
        "minimax_m2",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
        {"num_experts_per_tok": 3},
    ),
    "minimax_m2_whole": Case(
        "minimax_m2", {"num_local_experts": 5, "num_experts_per_tok": 4, "head_dim": 16}, PLAIN_ROPE, seed=1
    ),
    "gpt_oss": Case("gpt_oss", _GPT_OSS | _YARN_OPEN | {"swiglu_limit": 0.8}, {"swiglu_limit": 7.0}),
    "gpt_oss_window": Case(
        "gpt_oss",
        _GPT_OSS
        | {"num_experts_per_tok": 3, "attention_bias": False, "num_key_value_heads": 1}
        | {"layer_types": _MIX[1:] + _MIX[1:2]},
        {"layer_types": ["full_attention"] * 3},
    ),
    "gpt_oss_bfloat16_file": Case(
        "gpt_oss", _GPT_OSS | {"swiglu_alpha": 3.0}, {"swiglu_alpha": 1.702}, dtype="bfloat16"
    ),
}
THOROUGH = bool(os.environ.get("PENSTOCK_THOROUGH"))
"""Whether everything is tested that might be, and not a part that leaves no kind out."""
SOME = [
    name
    for name, case in CASES.items()
    if THOROUGH or name == case.model_type or case.dynamic or "window" in name
]
"""One of each family, those with windows, and the one whose frequencies depend on a prompt's length."""
_WIDE = {"hidden_size": 256, "intermediate_size": 320, "max_position_embeddings": 16384}
_FAR_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
WIDE: dict[str, Case] = {
    "llama_64": Case("llama", _WIDE | _FAR_ROPE | {"head_dim": 64}),
    "llama_128": Case("llama", _WIDE | _FAR_ROPE | {"head_dim": 128, "num_key_value_heads": 1}),
    "mistral_window_64": Case("mistral", _WIDE | {"head_dim": 64, "sliding_window": 300}),
    "qwen2_window_128": Case(
        "qwen2",
        _WIDE
        | {"num_attention_heads": 2, "use_sliding_window": True, "sliding_window": 1100, "layer_types": _MIX},
    ),
    "qwen3_128": Case("qwen3", _WIDE | {"head_dim": 128}),
    "qwen3_moe_128": Case(
        "qwen3_moe", _WIDE | _MOE | {"head_dim": 128, "norm_topk_prob": True, "moe_intermediate_size": 96}
    ),
}
"""Heads as large as real models', for prompts of thousands of tokens: what fast kernels on a GPU are made
for."""

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@functools.cache
def folder() -> Path:
    """Where this process keeps its checkpoints; gone when it ends."""
    path = Path(tempfile.mkdtemp(prefix="penstock-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def checkpoint(name: str) -> Path:
    """The directory of the case `name`."""
    return write(CASES[name], folder() / name)


def write(case: Case, path: Path, **more: object) -> Path:
    """Let transformers write a random checkpoint of this kind; `more` changes its config further."""
    config = transformers.AutoConfig.for_model(case.model_type, **{**_SMALL, **case.config, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, case.seed, embedding=0.35 if config.tie_word_embeddings else 1.0)
    model.to(getattr(torch, case.dtype)).save_pretrained(path, max_shard_size=case.shard)
    if case.old_style:
        file = path / "config.json"
        written = json.loads(file.read_text())
        rope = written.pop("rope_parameters")
        written |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": written.pop("dtype")}
        written["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        file.write_text(json.dumps(written))
    return path


def randomise(model: torch.nn.Module, seed: int, embedding: float) -> None:
    """`embedding`: its standard deviation; where the head shares it, small, or every token would only repeat
    itself."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            kind = ".".join(name.split(".")[-2:])
            noise = torch.randn(weight.shape, generator=rng)
            if kind.endswith(
                "norm.weight"
            ):  # around 1; those of queries and keys around 1.5, for sharper attention
                noise = torch.rand(weight.shape, generator=rng) + (
                    1.0 if kind in ("q_norm.weight", "k_norm.weight") else 0.5
                )
            elif kind.endswith((".bias", "_bias")):
                noise *= 0.3
            elif kind.endswith(".sinks"):
                pass
            elif kind == "embed_tokens.weight":
                noise *= embedding
            else:
                gain = 3.0 if kind == "lm_head.weight" else 2.0 if kind == "gate.weight" else 1.5
                noise *= gain / math.sqrt(weight.shape[-1])
            weight.copy_(noise)
        for name, bias in model.named_buffers():
            if name.endswith(".e_score_correction_bias"):
                bias.copy_(torch.randn(bias.shape, generator=rng) * 0.3)


def load(
    path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32, **changed: object
) -> transformers.PreTrainedModel:
    """The checkpoint as transformers runs it, with the plainest attention it has."""
    config = transformers.AutoConfig.from_pretrained(path)
    for key, value in changed.items():
        setattr(config, key, value)
    if getattr(config, "rotary_dim", None):  # Some versions rotate whole heads then.
        config.rope_parameters.setdefault("partial_rotary_factor", config.rotary_dim / config.head_dim)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation="eager"
    )
    for module in model.modules():  # Some versions compute with the usual values, whatever a config says.
        if type(module).__name__ == "GptOssExperts":
            module.alpha = getattr(config, "swiglu_alpha", module.alpha)
            module.limit = getattr(config, "swiglu_limit", module.limit)
    return model.to(device).eval()


def turn_exactly(model: transformers.PreTrainedModel) -> None:
    """Compute default rope's angles in double. In float32, as transformers has it, they are off by 5e-4 at
    position 9,000, which shows in logits as 1e-4 of their size; short prompts have no such error, and are
    compared with transformers as it is."""
    theta, dim = model.config.rope_parameters["rope_theta"], 2 * len(model.model.rotary_emb.inv_freq)
    turns = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=model.device) / dim)

    def angles(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = (position_ids[..., None].double() * turns).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    model.model.rotary_emb.forward = angles


def long_prompts() -> list[list[int]]:
    """1 to 9,300 tokens; the last two begin alike."""
    text = _text(12000)
    return [
        text[:1],
        text[5:69],
        text[100:800],
        text[800:1824],
        text[2000:4048],
        text[2000:4048] + text[5000:5300],
        text[2000:11300],
    ]


def _text(length: int) -> list[int]:
    tokens: list[int] = torch.randint(
        3, VOCAB, (length,), generator=torch.Generator().manual_seed(7)
    ).tolist()
    return tokens


def prompts() -> list[list[int]]:
    """1 to 41 tokens; the last three begin alike."""
    text = _text(200)
    long = text[50:82]
    return [text[0:1], text[1:6], text[6:19], long, [*long, text[90]], [*long, *text[91:100]]]


@dataclass(frozen=True)
class Reference:
    """Greedy decoding of one prompt. `logprobs[p]` is the distribution after position p, `[prompt + OUTPUT -
    1, VOCAB]` in float64."""

    prompt: list[int]
    tokens: list[int]
    logprobs: Tensor

    @property
    def after_prompt(self) -> Tensor:
        """`[OUTPUT, VOCAB]`: what each output token was chosen from."""
        return self.logprobs[len(self.prompt) - 1 :]


@functools.cache
def references(name: str) -> list[Reference]:
    model = load(checkpoint(name))
    if (
        CASES[name].dynamic
    ):  # Whose earlier keys stay as they were turned, which one forward over all of them would not give.
        return [decode(model, prompt) for prompt in prompts()]
    drafts = _drafts(model, prompts())
    return [
        _proved(model, prompt, draft) or decode(model, prompt)
        for prompt, draft in zip(prompts(), drafts, strict=True)
    ]


@torch.inference_mode()
def _drafts(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What greedy decoding probably gives, OUTPUT tokens of each: all prompts at once, padded on the left,
    which is much faster."""
    width = max(map(len, prompts))
    inputs = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache, found = None, list[Tensor]()
    while len(found) < OUTPUT:
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        output = model(
            inputs, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
        )
        cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        found.append(inputs)
        mask = torch.cat([mask, torch.ones_like(inputs)], 1)
    drafts: list[list[int]] = torch.cat(found, 1).tolist()
    return drafts


@torch.inference_mode()
def _proved(model: transformers.PreTrainedModel, prompt: list[int], draft: list[int]) -> Reference | None:
    """None unless the draft is what greedy decoding gives: in one forward over all of it, each token is the
    likeliest after the others."""
    logits = model(torch.tensor([prompt + draft[:-1]])).logits[0]
    if logits[len(prompt) - 1 :].argmax(-1).tolist() != draft:
        return None
    return Reference(prompt, draft, logits.double().log_softmax(-1))


@torch.inference_mode()
def decode(model: transformers.PreTrainedModel, prompt: list[int], steps: int = OUTPUT) -> Reference:
    """One forward over the prompt, then one per token over the cache: nothing but transformers' own
    arithmetic."""
    model(
        torch.tensor([[1]], device=model.device)
    )  # a short input makes dynamic rope forget the longer one before it
    output = model(torch.tensor([prompt], device=model.device), use_cache=True)
    logits = [output.logits[0]]
    tokens = [int(logits[-1][-1].argmax())]
    while len(tokens) < steps:
        output = model(
            torch.tensor([tokens[-1:]], device=model.device),
            past_key_values=output.past_key_values,
            use_cache=True,
        )
        logits.append(output.logits[0])
        tokens.append(int(logits[-1][-1].argmax()))
    return Reference(prompt, tokens, torch.cat(logits).double().log_softmax(-1).cpu())


def dense(entry: TokenLogprob, vocab: int = VOCAB) -> Tensor:
    """`[vocab]` from an entry that was asked for in full."""
    assert len(entry.top) == vocab
    row = torch.full((vocab,), math.nan, dtype=torch.float64)
    row[[token for token, _ in entry.top]] = torch.tensor(
        [logprob for _, logprob in entry.top], dtype=torch.float64
    )
    return row


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference over largest size. NaN counts as infinitely far."""
    far = float((got - expected).abs().max() / expected.abs().max())
    return math.inf if math.isnan(far) else far


def leads(reference: Reference) -> Tensor:
    """`[OUTPUT]`: by how much each output token is likelier than the next best, over the size of the
    logits."""
    best = reference.after_prompt.topk(2).values
    return (best[:, 0] - best[:, 1]) / reference.logprobs.abs().max()
