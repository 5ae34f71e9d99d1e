"""Reads what a LoRA adapter says of itself, in the form that PEFT writes, and finds its places in a model.

LoRA (Hu et al. 2021, arXiv 2106.09685): the product with a matrix W gets `scaling * B @ A @ x` added, with A
`[rank, in]` and B `[out, rank]`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

from penstock.arch.formats.format import TensorSlice, matrix
from penstock.arch.layout import GroupId, GroupKind
from penstock.arch.parts import held
from penstock.arch.shards import Shard
from penstock.arch.spec import DTYPE_BYTES, Mlp, ModelSpec
from penstock.base.errors import CheckpointError, UnsupportedModelError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules of a layer that an adapter may change."""
LEAST_RANK = 16
"""Rank of adapters that there is room for where none was asked for."""
MOST_RANK = 1 << 16
_NEEDS_NOTHING = ("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication")
_PLAIN = ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens")
_OTHERS = ("arrow_config", "kasa_config", "velora_config", "monteclora_config")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin a training by which the base model's weights are changed, too."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Holds an adapter's config: the rank and the scaling of each module.

    ranks, alphas: of modules that have others, by the ends of their names.
    rslora: whether the scaling is divided by the root of the rank (Kalajdzievski 2023, arXiv 2312.03732).
    """

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @property
    def most(self) -> int:
        """Return the largest rank that a module may have."""
        return max([self.rank, *self.ranks.values()])

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return int(_named(self.ranks, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Return the factor of a module's product."""
        rank, alpha = self.rank_of(module), _named(self.alphas, module, self.alpha)
        return alpha / (sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class LoraPlace:
    """Says where a module's product is in a model.

    group, matrix: the group and the matrix of it that has the module's weight.
    part: its index among the weights that are fused there.
    source: the weight, and what of it the rank has.
    """

    group: GroupId
    matrix: str
    part: int
    source: TensorSlice


@dataclass(frozen=True, slots=True)
class LoraRoom:
    """A LoraRoom says how many adapters an engine holds at a time, and up to which rank."""

    slots: int
    rank: int

    def bytes(self, spec: ModelSpec, shard: Shard, dtype: str) -> int:
        """Return the bytes that all slots take on a rank's device."""
        sides = (place.source.taken for place in lora_places(spec, shard).values())
        return self.slots * self.rank * sum(map(sum, sides)) * DTYPE_BYTES[dtype]


def lora_places(spec: ModelSpec, shard: Shard) -> dict[str, LoraPlace]:
    """Return the place of each module that an adapter may change, by the module's name in checkpoints.

    Modules of one matrix come one after another. Raises ConfigError for too many ranks.
    """
    inner, hidden = held(spec, shard).inner, spec.hidden_size
    found: dict[str, LoraPlace] = {}

    def add(group: GroupId, name: str, *sources: TensorSlice) -> None:
        for part, source in enumerate(sources):
            found[source.tensor.removesuffix(".weight")] = LoraPlace(group, name, part, source)

    for layer, kind in enumerate(spec.stack):
        at, group = f"model.layers.{layer}", GroupId(GroupKind.ATTENTION, layer)
        weights = kind.mixer.weights(at, hidden, shard)
        if all(source.tensor.endswith(_ENDS) for name in ("qkv", "out") for source in weights.get(name, ())):
            for name in ("qkv", "out"):
                add(group, name, *weights.get(name, ()))
        if isinstance(kind.feed_forward, Mlp):
            group, size = GroupId(GroupKind.FFN, layer), kind.feed_forward.intermediate_size
            gate, up = (
                matrix(f"{at}.mlp.{one}_proj.weight", size, hidden, rows=inner) for one in ("gate", "up")
            )
            add(group, "gate_up", gate, up)
            add(group, "down", matrix(f"{at}.mlp.down_proj.weight", hidden, size, columns=inner))
    return found


_ENDS = tuple(f".{name}.weight" for name in TARGETS)


def read_lora_config(config: Mapping[str, object], where: str) -> LoraConfig:
    """Return the config that a parsed adapter_config.json is. `where` opens every message.

    Raises UnsupportedModelError for what changes more than the products of some matrices, and CheckpointError
    for values that cannot be.
    """
    if (kind := config.get("peft_type")) != "LORA":
        raise UnsupportedModelError(f"{where}: key 'peft_type' is {str(kind)[:40]!r}; supported: LORA")
    for key in (*_NEEDS_NOTHING, *_PLAIN, *_OTHERS):
        if value := config.get(key):
            raise UnsupportedModelError(
                f"{where}: key {key!r} is {str(value)[:80]!r}, which is not supported; train the adapter "
                "without it, or merge it into its base model"
            )
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModelError(
            f"{where}: key 'bias' is {str(bias)[:40]!r}; supported: none; train the adapter without biases, "
            "or merge it into its base model"
        )
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"{where}: key 'init_lora_weights' is {began[:40]!r}, which changes the base model too; convert "
            "the adapter to plain LoRA, or merge it into its base model"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    return LoraConfig(
        _whole(rank, "r", where),
        _number(alpha, "lora_alpha", where),
        bool(config.get("use_rslora")),
        {
            name: _whole(value, "rank_pattern", where)
            for name, value in _pattern(config, "rank_pattern", where)
        },
        {
            name: _number(value, "alpha_pattern", where)
            for name, value in _pattern(config, "alpha_pattern", where)
        },
    )


def _pattern(config: Mapping[str, object], key: str, where: str) -> Iterator[tuple[str, object]]:
    """Yield the names of a pattern, which end those of modules, and their values."""
    pattern = config.get(key) or {}
    if not isinstance(pattern, Mapping):
        raise CheckpointError(f"{where}: key {key!r} is {str(pattern)[:80]!r}; it must be an object")
    for name, value in pattern.items():
        if not all(one.isalnum() or one in "._" for one in name):
            raise UnsupportedModelError(
                f"{where}: key {key!r} has {name[:80]!r}, a regular expression; supported: names of modules"
            )
        yield name, value


def _named(pattern: Mapping[str, float], module: str, usual: float) -> float:
    """Return the value of the first name that a module's ends with."""
    return next((value for name, value in pattern.items() if f".{module}".endswith(f".{name}")), usual)


def _whole(value: object, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_RANK:
        raise CheckpointError(
            f"{where}: key {key!r} is {str(value)[:40]!r}; a rank is a whole number above 0"
        )
    return value


def _number(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise CheckpointError(f"{where}: key {key!r} is {str(value)[:40]!r}; it must be a number")
    return float(value)
