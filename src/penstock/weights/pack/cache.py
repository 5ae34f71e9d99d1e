"""Keeps packs that were made because a model had to be streamed, or drafts for itself: one for each model and
dtype, and one in few bits, in a directory of the user's, made once.

Why this is safe. Whoever finds no finished pack locks its directory first, waiting for another who has it,
and looks again: so one process writes it and the others open what it finished, or go on with it if it was
killed. A pack without its manifest is never opened.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.arch.layout import group_layouts
from penstock.arch.shards import WHOLE, Shard
from penstock.base.errors import CheckpointError
from penstock.base.units import format_size
from penstock.weights.checkpoint.reader import Checkpoint
from penstock.weights.checkpoint.shards import INDEX, SINGLE
from penstock.weights.pack.directory import PackError, locked
from penstock.weights.pack.manifest import place
from penstock.weights.pack.quantising import QuantisedCheckpoint, recipe_in
from penstock.weights.pack.reader import Pack
from penstock.weights.pack.writer import Progress, write_locked
from penstock.weights.pieces import JOURNAL, MANIFEST

_SLOW = 4 << 30
"""Bytes of a checkpoint to be hashed from which on it takes long enough to be said."""
_UNFIT = re.compile(r"[^\w.-]", re.ASCII)


def cached_pack(
    checkpoint: Checkpoint | QuantisedCheckpoint,
    dtype: str,
    directory: Path,
    progress: Progress | None,
    say: Callable[[str], None],
    shard: Shard = WHOLE,
    *,
    why: str = "do not fit into device and host memory",
) -> Pack:
    """Return the pack of a checkpoint's weights, or a shard's, as `dtype` under `directory`; it is written
    first if it is not there, or not all of it.

    checkpoint: to be packed as it is, or in few bits.
    why: says in the line on writing what it is for.

    `say` gets a line on what takes so long, before it is begun: writing, or waiting for another process that
    does. `progress` gets bytes as from write_pack. The pack is found by the checkpoint's fingerprint, over
    every byte of its weights. What is not weights, on which that does not depend, is the checkpoint's own in
    the pack that is returned.

    Raises CheckpointError for a damaged checkpoint or pack, which is left as it is, PackError where it cannot
    be written.
    """
    if (unknown := checkpoint.identify()) >= _SLOW:
        say(f"reading {format_size(unknown)} of weights, once, to find the pack that belongs to them")
    fingerprint = checkpoint.fingerprint()
    path = directory / f"{_UNFIT.sub('_', checkpoint.path.resolve().name)[:80]}-{fingerprint.hex()}-{dtype}"
    if shard.ranks > 1:
        path = path.with_name(f"{path.name}-{shard.rank}-of-{shard.ranks}")
    if not os.path.lexists(path / MANIFEST):
        waits = f"another process is packing this model into {path}; waiting for it"
        with _cache_named(), locked(path, lambda: say(waits), mode=0o700):
            if not os.path.lexists(path / MANIFEST):
                size = format_size(
                    place(group_layouts(checkpoint.spec, checkpoint.names, dtype, shard))[-1].end
                )
                packing = (
                    "going on with packing them" if os.path.lexists(path / JOURNAL) else "packing them once"
                )
                say(f"weights of {size} in {dtype} {why}; {packing} into {path}")
                write_locked(checkpoint, path, dtype, progress=progress, shard=shard)
                _tell_older(path, fingerprint.hex(), say)
    try:
        pack = Pack.open(path, shard)
    except CheckpointError as error:
        raise made_here(error, path) from error
    if (pack.manifest.fingerprint, pack.dtype) != (fingerprint.hex(), dtype):
        pack.close()
        raise CheckpointError(
            f"{path} holds a pack of another model or dtype than its name says; remove it, and the next run "
            "makes it again"
        )
    pack.config, pack.generation = checkpoint.config, checkpoint.generation
    return pack


def made_here(error: CheckpointError, path: Path) -> CheckpointError:
    """Return an error of a pack in the cache, which says that nobody needs to keep it."""
    return CheckpointError(
        f"{error}; penstock made this pack by itself: remove {path}, and the next run makes it again"
    )


def _tell_older(path: Path, fingerprint: str, say: Callable[[str], None]) -> None:
    """Say which packs of the same name, dtype and format are beside a new one: of the model before it was
    changed, or of another that is called so."""
    before, _, behind = path.name.partition(fingerprint)
    alike = re.compile(f"{re.escape(before)}[0-9a-f]{{{len(fingerprint)}}}{re.escape(behind)}")
    older = [
        one
        for one in sorted(path.parent.iterdir())
        if one != path
        and alike.fullmatch(one.name)
        and os.path.lexists(one / MANIFEST)
        and recipe_in(one) == recipe_in(path)
    ]
    if older:
        size = sum(file.stat().st_size for one in older for file in one.iterdir() if file.is_file())
        say(
            f"{format_size(size)} are taken by packs of what this model was before, or of others of its "
            f"name, which may be removed if no run needs them: {', '.join(map(str, older))}"
        )


@contextmanager
def _cache_named() -> Iterator[None]:
    """Let a PackError name the setting that says where the cache is, instead of those of `penstock pack`."""
    try:
        yield
    except PackError as error:
        text = str(error)
        for flags in ("give another --out or --store", "name a new directory with --out"):
            text = text.replace(flags, "name another directory as cache")
        raise PackError(text) from error


def is_pack(path: Path) -> bool:
    """Tell whether a model directory is to be opened as a Pack, finished or not, rather than as a
    Checkpoint."""
    if any(os.path.lexists(path / name) for name in (SINGLE, INDEX)):
        return False
    return any(os.path.lexists(path / name) for name in (MANIFEST, JOURNAL))
