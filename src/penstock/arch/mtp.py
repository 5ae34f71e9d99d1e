"""Reads from a model's config.json the layer behind its last one, which predicts one token further (MTP).

GLM-4.5, 4.6 and 4.7 have such a layer in their checkpoints (DeepSeek-V3, arXiv 2412.19437). It drafts as a
draft head does. Its features are the target's hidden states behind the last norm. Behind the newest token it
goes on with its own output, behind its own last norm, as often as tokens are drafted.
"""

from collections.abc import Mapping
from dataclasses import replace

from penstock.arch.heads import HeadSpec
from penstock.arch.mixers.attention import Attention
from penstock.arch.mixers.head import MtpAttention, TapNorms
from penstock.arch.spec import ModelSpec, RopeKind
from penstock.base.errors import ConfigError

COUNT = "num_nextn_predict_layers"
_FAMILY = "glm4_moe"
_INSTEAD = "give speculate suffix or self, or name a draft model or an EAGLE-3 head"


def read_mtp(config: Mapping[str, object], spec: ModelSpec, where: str) -> HeadSpec:
    """Return the MTP layer of the model with this config.json and spec. Raises ConfigError for a model
    without one that runs here."""
    if spec.family != _FAMILY:
        raise no_mtp(f"{where} is of {spec.family}, and such layers run here of {_FAMILY} alone")
    count, place = config.get(COUNT), spec.layers
    if count in (None, 0):
        raise no_mtp(f"{where} speaks of none: key {COUNT!r} is {count!r}")
    if type(count) is not int or count != 1:
        raise no_mtp(f"key {COUNT!r} of {where} is {count!r}, and one layer is what runs here")
    if spec.rope.kind is RopeKind.DYNAMIC:
        raise no_mtp(f"{where} asks for dynamic rope, with which none runs here")
    layer = spec.stack[-1]
    found = layer.mixer
    assert isinstance(found, Attention)
    mixer = MtpAttention(
        found.heads,
        found.kv_heads,
        found.head_dim,
        found.window,
        found.qkv_bias,
        found.out_bias,
        found.qk_norm,
        hidden=spec.hidden_size,
        target_hidden=spec.hidden_size,
        taps=1,
        tap_norms=TapNorms.TOGETHER,
    )
    return HeadSpec(
        replace(spec, family="MTP", stack=(replace(layer, mixer=mixer),)),
        spec.vocab_size,
        (place,),
        output_normed=True,
        place=place,
    )


def no_mtp(why: str) -> ConfigError:
    """Return the error for a model without an MTP layer that is to draft by it."""
    return ConfigError(f"speculate mtp drafts by the MTP layer of the model itself, but {why}; {_INSTEAD}")
