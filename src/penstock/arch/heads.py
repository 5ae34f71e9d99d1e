"""Reads the config.json of a draft head: one layer that drafts from a target's hidden states.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) is read in two forms: that of its authors, and that of the library
`speculators`, which nests the layer's config. Heads of other kinds are refused by their names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.arch.families import TensorNames
from penstock.arch.formats.dense import DENSE
from penstock.arch.layout import Field, GroupLayout, group_layouts
from penstock.arch.mixers.attention import Attention
from penstock.arch.mixers.head import HeadAttention, TapNorms
from penstock.arch.reading import ConfigReader, spec_of
from penstock.arch.spec import Mlp, ModelSpec, RopeKind
from penstock.base.errors import ConfigError, UnsupportedModelError

_LAYER, _KIND, _TAPS = (
    "transformer_layer_config",
    "speculators_model_type",
    "eagle_aux_hidden_state_layer_ids",
)
_INSTEAD = (
    "give an EAGLE-3 head that was made for the model, a smaller model with the same tokenizer, or speculate "
    "suffix or self"
)
_KEYS = {"medusa_num_heads": "Medusa", "hydra_num_heads": "Hydra", "dflash_config": "DFlash"}
"""Keys of config.json that only heads of another kind have."""
_WORDS = {
    "medusa": "Medusa",
    "hydra": "Hydra",
    "mlp_speculator": "an MLP speculator",
    "mlpspeculator": "an MLP speculator",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "peagle": "P-EAGLE",
    "mtp": "MTP",
    "nextn": "MTP",
    "eagle": "EAGLE-1 or EAGLE-2",
}
"""Words in the names of a config that say which other kind a head is, the longer ones first."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A HeadSpec is one draft head: every number and switch of it that config.json says.

    spec: of its layer, with the target's vocabulary. draft_vocab: how many tokens of that it can draft.
    taps: before which of the target's layers hidden states are taken, counted from 0; empty for the usual
    ones. residual_normed: whether the layer adds to normalised features. output_normed: whether the next
    token's features are the output behind the last norm. place: of a layer that predicts a further token
    (MTP), which one of the target's checkpoint it is; None of a head of its own.
    """

    spec: ModelSpec
    draft_vocab: int
    taps: tuple[int, ...] = ()
    residual_normed: bool = False
    output_normed: bool = False
    place: int | None = None

    @property
    def mixer(self) -> HeadAttention:
        """Return the mixer of its layer."""
        mixer = self.spec.stack[0].mixer
        assert isinstance(mixer, HeadAttention), "a head whose layer is none"
        return mixer

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """Return before which layers of a target with so many its hidden states are taken."""
        return self.taps or (2, layers // 2, layers - 3)


def other_kind(config: Mapping[str, object]) -> str:
    """Return which kind of draft head a config.json is of that does not run here; empty for EAGLE-3, and for
    what is no head."""
    if is_head(config):
        return ""
    for key, kind in _KEYS.items():
        if config.get(key) is not None:
            return kind
    named = " ".join(_names(config))
    for word, kind in _WORDS.items():
        if word in named:
            return kind
    return str(config[_KIND]) if config.get(_KIND) is not None else ""


def is_head(config: Mapping[str, object]) -> bool:
    """Tell whether a config.json is of an EAGLE-3 head."""
    if config.get(_KIND) is not None:
        return config[_KIND] == "eagle3"
    if any("eagle3" in name for name in _names(config)):
        return True
    return config.get("draft_vocab_size") is not None and _names(config)[:1] == ["llamaforcausallm"]


def check_kind(config: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for a draft head of a kind that does not run here."""
    if kind := other_kind(config):
        raise ConfigError(
            f"{where} is of a draft head of another kind, {kind}, which does not run here; {_INSTEAD}"
        )


def refuse_older(where: str) -> None:
    """Raise ConfigError for weights with a projection of one hidden state beside embeddings."""
    raise ConfigError(
        f"{where} holds a draft head of another kind, EAGLE-1 or EAGLE-2, which does not run here; {_INSTEAD}"
    )


def _names(config: Mapping[str, object]) -> list[str]:
    names = config.get("architectures")
    names = [*names] if isinstance(names, list) else []
    names += [config.get("model_type"), config.get(_KIND)]
    return [name.lower() for name in names if isinstance(name, str)]


def flat_config(config: Mapping[str, object], where: str) -> dict[str, object]:
    """Return a head's config.json with all keys of its layer beside the others, as if it were a Llama's.

    Raises UnsupportedModelError for a layer of another kind.
    """
    layer, nested = config.get(_LAYER, {}), config.get("eagle_config") or {}
    if not isinstance(layer, Mapping) or not isinstance(nested, Mapping):
        raise UnsupportedModelError(
            f"{where}: keys '{_LAYER}' and 'eagle_config' must be objects; correct config.json, or fetch it "
            "again"
        )
    flat = {**config, **layer}
    for key in ("dtype", "torch_dtype"):
        flat[key] = layer.get(key) or config.get(key)
    kind = flat.get("model_type")
    if kind not in ("llama", "qwen3", None) and _LAYER in config:
        raise UnsupportedModelError(
            f"{where}: key 'model_type' of {_LAYER} is {kind!r}; supported: llama, qwen3; {_INSTEAD}"
        )
    flat["tie_word_embeddings"] = False  # A head's own rows of the vocabulary are others, whatever it says.
    flat["model_type"] = "qwen3" if kind == "qwen3" else "llama"
    for key in ("norm_before_fc", "norm_before_residual", "norm_output", "fc_norm"):
        flat[key] = nested.get(key, config.get(key))
    ids = nested.get(_TAPS)
    # Numbers there name layers whose outputs are taken, the others name layers whose inputs are.
    flat[_TAPS] = [one + 1 for one in _whole(ids, where)] if ids is not None else config.get(_TAPS)
    return flat


def read_head(config: Mapping[str, object], where: str = "config.json") -> HeadSpec:
    """Return the draft head that a parsed config.json describes. Raises UnsupportedModelError, which names
    the key, for what this engine does not run."""
    reader = ConfigReader(flat_config(config, where), where)
    reader.only("num_hidden_layers", 1)
    if reader.get("sliding_window") is not None and reader.flag("use_sliding_window", True):
        raise UnsupportedModelError(
            f"{where}: key 'sliding_window' is {reader.get('sliding_window')!r}; a draft head with a window "
            f"does not run here; {_INSTEAD}"
        )
    bias = reader.flag("attention_bias", False)
    spec = spec_of(
        reader,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=reader.get("model_type") == "qwen3",
    )
    if spec.format != DENSE or spec.rope.kind is RopeKind.DYNAMIC:
        what = "quantised weights" if spec.format != DENSE else "dynamic rope"
        raise UnsupportedModelError(f"{where}: a draft head with {what} does not run here; {_INSTEAD}")
    taps = tuple(_whole(reader.get(_TAPS) or (), where))
    if len(set(taps)) < len(taps) or any(tap < 1 for tap in taps):
        raise UnsupportedModelError(
            f"{where}: key '{_TAPS}' is {reader.get(_TAPS)!r}; it must be different layers from 1 on; "
            "correct config.json, or fetch it again"
        )
    together, each = reader.flag("norm_before_fc", False), reader.flag("fc_norm", False)
    if together and each:
        raise UnsupportedModelError(
            f"{where}: keys 'norm_before_fc' and 'fc_norm' are both true; one of them at most may be; "
            "correct config.json, or fetch it again"
        )
    layer = spec.stack[0]
    found, feed_forward = layer.mixer, layer.feed_forward
    assert isinstance(found, Attention)
    assert isinstance(feed_forward, Mlp)
    mixer = HeadAttention(
        found.heads,
        found.kv_heads,
        found.head_dim,
        None,
        found.qkv_bias,
        found.out_bias,
        found.qk_norm,
        hidden=spec.hidden_size,
        target_hidden=reader.whole("target_hidden_size", spec.hidden_size),
        taps=len(taps) or 3,
        tap_norms=TapNorms.TOGETHER if together else TapNorms.EACH if each else TapNorms.NONE,
    )
    return HeadSpec(
        replace(spec, family="EAGLE-3", stack=(replace(layer, mixer=mixer),)),
        reader.whole("draft_vocab_size", spec.vocab_size, high=spec.vocab_size),
        tuple(sorted(taps)),
        reader.flag("norm_before_residual", False),
        reader.flag("norm_output", False),
    )


def check_head(head: HeadSpec, target: ModelSpec, where: str) -> None:
    """Raise ConfigError if a draft head was made for another target, as far as their configs tell."""
    made = f"the draft head {where} was made for a model with"
    instead = "give the head that was made for this one"
    if head.mixer.target_hidden != target.hidden_size:
        raise ConfigError(
            f"{made} hidden states of {head.mixer.target_hidden:,}, but the model's are "
            f"{target.hidden_size:,}; {instead}"
        )
    if head.spec.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{made} {head.spec.vocab_size:,} tokens, but the model has {target.vocab_size:,}; {instead}"
        )
    taps = head.taps_of(target.layers)
    if max(taps) > target.layers or min(taps) < 1 or len(set(taps)) < len(taps):
        named = "takes hidden states" if head.taps else "takes hidden states, as usual,"
        raise ConfigError(
            f"the draft head {where} {named} of layers {', '.join(map(str, taps))}, which a model of "
            f"{target.layers} layers does not have or has but once; {instead}"
        )


def head_layouts(head: HeadSpec, dtype: str, embedding: GroupLayout | None = None) -> tuple[GroupLayout, ...]:
    """Return the layouts of a head's groups. embedding: the target's, where the head has none of its own."""
    if head.place is not None:
        return _mtp_layouts(head, head.place, dtype)
    names = TensorNames()
    _, *rest = group_layouts(replace(head.spec, vocab_size=head.draft_vocab), names, dtype)
    return embedding or group_layouts(head.spec, names, dtype)[0], *rest


def _mtp_layouts(head: HeadSpec, place: int, dtype: str) -> tuple[GroupLayout, ...]:
    """Return the layouts of an MTP layer's groups, from its tensors of the target's checkpoint: of embedding
    and head from its own if there are any, else from the target's, which they are equal to."""
    whole, at = replace(head.spec, stack=head.spec.stack * (place + 1)), f"model.layers.{place}"
    embedding, *layer, last = group_layouts(whole, TensorNames(), dtype, first=place)
    return (
        _renamed(embedding, {"model.embed_tokens.weight": f"{at}.embed_tokens.weight"}),
        *(replace(one, id=replace(one.id, layer=0)) for one in layer),
        _renamed(
            last,
            {
                "model.norm.weight": f"{at}.shared_head.norm.weight",
                "lm_head.weight": f"{at}.shared_head.head.weight",
            },
        ),
    )


def _renamed(layout: GroupLayout, names: Mapping[str, str]) -> GroupLayout:
    """Return a group that is made of tensors of other names. Matrices may have the first one still, and have
    it if they are of few bits."""
    kept = {field for one in layout.matrices if one.format != DENSE for _, field in one.parts}
    made = dict[Field, Field]()
    for field in layout.fields:
        sources = [
            replace(one, tensor=names[one.tensor], also=(one.tensor,) if len(one.shape) == 2 else ())
            for one in field.sources
            if field not in kept
        ]
        made[field] = replace(field, sources=tuple(sources)) if sources else field
    matrices = [
        replace(one, parts=tuple((name, made[field]) for name, field in one.parts)) for one in layout.matrices
    ]
    return replace(layout, fields=tuple(made.values()), matrices=tuple(matrices))


def _whole(numbers: object, where: str) -> Sequence[int]:
    if not isinstance(numbers, list | tuple) or not all(type(one) is int for one in numbers):
        raise UnsupportedModelError(
            f"{where}: key '{_TAPS}' is {numbers!r}; it must be a list of layers; correct config.json, or "
            "fetch it again"
        )
    return numbers
