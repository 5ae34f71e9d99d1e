"""Say what a plan has to know of a draft model, and which models may be one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from penstock.arch.families import TensorNames
from penstock.arch.formats.dense import DENSE
from penstock.arch.formats.format import WeightFormat
from penstock.arch.formats.integers import Integers
from penstock.arch.formats.joined import Joined
from penstock.arch.formats.recipe import COPY_GROUPS, Recipe, copy_recipe
from penstock.arch.heads import HeadSpec, head_layouts
from penstock.arch.layout import GroupLayout, KVLayout, group_layouts, kv_layout
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import DTYPE_BYTES, ModelSpec
from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.units import parse_size
from penstock.weights.checkpoint.scoring import yields_no_text
from penstock.weights.streaming.residency import padded


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Holds what a plan needs to know of a draft model: a smaller one in the same engine, with the same
    vocabulary.

    All of its weights rest on the device: a draft that streams would cost what it is to save. A KV block has
    the same number in its pool as in the target's, so the budget counts one block of both as one. Its KV
    never leaves the device. A copy of the target itself may use the target's KV, and needs no pool.

    spec: of the whole model. layouts, kv: of what a rank has of it. shares_kv: its KV is the target's. head:
    what it is beside a model of one layer, if it is a draft head. ids: the target's token of each that a head
    can draft; none where only its config was read.
    """

    spec: ModelSpec
    dtype: str
    layouts: Sequence[GroupLayout]
    kv: KVLayout
    shares_kv: bool = False
    head: HeadSpec | None = None
    ids: tuple[int, ...] = ()

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a KV block in its pool."""
        return 0 if self.shares_kv else self.kv.block_bytes

    @classmethod
    def of(
        cls, spec: ModelSpec, names: TensorNames, dtype: str, block_size: int, shard: Shard = WHOLE
    ) -> Self:
        """Return what is to be known of a model, of which this rank has a part."""
        layouts = group_layouts(spec, names, dtype, shard)
        return cls(spec, dtype, layouts, kv_layout(spec, dtype, block_size, shard))

    @classmethod
    def of_head(
        cls,
        head: HeadSpec,
        dtype: str,
        block_size: int,
        ids: tuple[int, ...] = (),
        embedding: GroupLayout | None = None,
    ) -> Self:
        """Return what is to be known of a draft head. dtype: the target's. embedding: the target's, where the
        head has none of its own, and a copy of that is made.

        Every rank has all of it and computes it alone, without sums over ranks: it is one layer, and what it
        goes on from, the target's hidden states and its own last output, is whole on each of them. So its
        memory, that of an MTP layer's experts too, is taken on each.
        """
        layouts, kv = head_layouts(head, dtype, embedding), kv_layout(head.spec, dtype, block_size)
        return cls(head.spec, dtype, layouts, kv, head=head, ids=ids)

    @property
    def weights(self) -> int:
        """Return the bytes that its weights take on the device, and a head's block that is nobody's."""
        return sum(map(padded, self.layouts)) + (self.kv.block_bytes if self.head else 0)

    @property
    def tapped(self) -> int:
        """Return the bytes of each token of the target's steps that a head takes there; 0 for a model."""
        if self.head is None:
            return 0
        mixer = self.head.mixer
        return (2 * mixer.taps * mixer.target_hidden + mixer.hidden) * DTYPE_BYTES[self.dtype]


def beyond_trained(draft: ModelSpec, length: int) -> str:
    """Return a warning where requests of `length` tokens go beyond the positions of a draft model's training;
    empty where they do not.

    Outputs stay right, since the target verifies every draft.
    """
    if draft.reaches(length):
        return ""
    return (
        f"warning: the draft model was trained for {draft.max_length:,} positions, and requests may have "
        f"{length:,}: few of its drafts beyond will be right; lower max_length, or give another draft model"
    )


def recipe_of_copy(spec: ModelSpec, names: TensorNames, dtype: str, ranks: int, whose: str) -> Recipe:
    """Return the recipe of the copy of a model that drafts for it: with the largest groups that divide the
    rows of every matrix, and of each rank's part of it. whose: begins the message of ConfigError, which is
    raised where the model has few bits already, or no groups divide them."""
    for group in COPY_GROUPS:
        recipe = copy_recipe(spec.format, whose, group)
        of_copy = replace(spec, format=recipe.weight_format())
        parts = [group_layouts(of_copy, names, dtype, Shard(rank, ranks)) for rank in range(ranks)]
        matrices = [matrix for layouts in parts for layout in layouts for matrix in layout.matrices]
        if not any(matrix.shape[1] % group for matrix in matrices if _has_groups(matrix.format)):
            return recipe
    raise ConfigError(
        f"speculate self drafts with a copy in four bits, but {whose} matrices whose columns are no multiple "
        f"of {COPY_GROUPS[-1]}{' on each rank' * (ranks > 1)}; give speculate suffix, or name a draft model"
    )


def no_copy_of_pack(path: Path) -> ConfigError:
    """Return the error for a pack that is to draft for itself."""
    return ConfigError(
        f"speculate self drafts with a copy of a checkpoint in four bits, but {path} is a pack; name the "
        "checkpoint it was made of, or a draft model"
    )


def copy_or_why(
    spec: ModelSpec, names: TensorNames, dtype: str, block_size: int, shard: Shard = WHOLE
) -> DraftModel | str:
    """Return what is to be known of the copy of a model in few bits that drafts for it, or why there is
    none."""
    if spec.format != DENSE:
        return "the model has weights of few bits already"
    try:
        recipe = recipe_of_copy(spec, names, dtype, shard.ranks, "the model has")
    except ConfigError:
        return f"columns of its matrices are no multiple of {COPY_GROUPS[-1]}"
    of_copy = replace(spec, format=recipe.weight_format())
    return replace(DraftModel.of(of_copy, names, dtype, block_size, shard), shares_kv=True)


def _has_groups(format: WeightFormat) -> bool:
    formats = format.formats if isinstance(format, Joined) else (format,)
    return any(isinstance(one, Integers) for one in formats)


def draft_limit(config: Config, whole: int) -> int | None:
    """Return the most bytes of the device that a draft model or a copy may take, with its KV; None without a
    limit. whole: what a share is taken of."""
    return None if config.draft_memory is None else parse_size(config.draft_memory, whole=whole)


def check_state(config: Config, spec: ModelSpec) -> None:
    """Raise ConfigError if drafts were asked for, and layers keep state, which they would change for good."""
    if config.speculate not in ("off", "auto") and spec.has_state:
        raise ConfigError(
            f"speculate {config.speculate} does not work with {spec.family}, whose layers keep state of a "
            "sequence: what is rejected of a draft could not be taken back; leave speculate out"
        )


def check_continues(path: Path) -> None:
    """Raise ConfigError if a draft model does not continue text, as far as the files at `path` are there to
    tell, and CheckpointError for files that are damaged."""
    if path.exists() and (instead := yields_no_text(path)):
        raise ConfigError(
            f"the draft model {path} {instead}, and does not continue text; give a smaller model with the "
            "same tokenizer, or speculate suffix"
        )


def check_draft(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise ConfigError if the tokens of a draft model are not the target's, or if one of both keeps state:
    what a rejected token has done to it cannot be undone."""
    if target.has_state or draft.has_state:
        raise ConfigError(
            "a draft model was asked for, but a layer with state cannot forget the tokens that are rejected; "
            "run without a draft"
        )
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"a draft model with {draft.vocab_size:,} tokens was asked for, but the model has "
            f"{target.vocab_size:,}, and drafts are made of its tokens; give one with the same vocabulary"
        )
