"""Say what a plan has to know of a draft model, and which models may be one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.arch.families import TensorNames
from penstock.arch.heads import HeadSpec, head_layouts
from penstock.arch.layout import GroupLayout, KVLayout, group_layouts, kv_layout
from penstock.arch.shards import WHOLE, Shard
from penstock.arch.spec import DTYPE_BYTES, ModelSpec, RopeKind
from penstock.base.errors import ConfigError
from penstock.weights.checkpoint.scoring import yields_no_text
from penstock.weights.streaming.residency import padded


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Holds what a plan needs to know of a draft model: a smaller one in the same engine, with the same
    vocabulary.

    All of its weights rest on the device: a draft that streams would cost what it is to save. A KV block has
    the same number in its pool as in the target's, so the budget counts one block of both as one. Its KV
    never leaves the device. A copy of the target itself may use the target's KV, and needs no pool.

    spec: of the whole model. layouts, kv: of this rank's part. shares_kv: its KV is the target's. head: what
    it is beside a model of one layer, if it is a draft head. ids: the target's token of each that a head can
    draft; none where only its config was read.
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
        """Return what is to be known of a draft head, which no other rank has a part of. dtype: the target's.
        embedding: the target's, where the head has none of its own, and a copy of that is made."""
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
    if length <= draft.max_length or draft.rope.kind is RopeKind.DYNAMIC:
        return ""
    return (
        f"warning: the draft model was trained for {draft.max_length:,} positions, and requests may have "
        f"{length:,}: few of its drafts beyond will be right; lower max_length, or give another draft model"
    )


def check_undivided(ranks: int) -> None:
    """Raise ConfigError if a copy of a model in few bits is to draft for several ranks."""
    if ranks > 1:
        raise ConfigError(
            "speculate self does not work with tensor_parallel: a pack of few bits cannot be divided; give "
            "speculate suffix, or name a draft model"
        )


def check_one_rank(head: str, ranks: int) -> None:
    """Raise ConfigError if a draft head is to draft for several ranks."""
    if ranks > 1:
        raise ConfigError(
            f"the draft head {head} does not work with tensor_parallel: it is not divided, and each rank has "
            "but a part of what it reads; give speculate suffix, or a smaller model with the same tokenizer"
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
