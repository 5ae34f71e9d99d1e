"""Keeps KV beyond the process: its key, the block store on disk, and rates for the next process."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress

from penstock.base.config import Config
from penstock.base.units import format_size
from penstock.engine.placing import Model, Say
from penstock.engine.settling import Settled
from penstock.kv.ledger.keys import root_key
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.seal import secret_in
from penstock.kv.store.segments import StoreLocked
from penstock.sched.rates import Rates
from penstock.weights.checkpoint.reader import Checkpoint


def open_store(model: Model, settled: Settled, root: bytes, say: Say) -> BlockStore | None:
    """Open the block store that outlives the process, if there is room for one.

    It is read-only if another process writes to it.
    """
    config, far = settled.settings, settled.far
    if far is None or not far.store_bytes:
        return None
    directory, size = config.kv_directory.expanduser(), far.layout.block_bytes
    about = {
        "model": str(getattr(model, "path", settled.spec.family)),
        "family": settled.spec.family,
        "dtype": settled.dtype,
        "block_size": config.block_size,
        "layers": settled.spec.layers,
        "kv_heads": settled.spec.kv_heads,
        "head_dim": settled.spec.head_dim,
        "digest_of": "every byte of the weights, architecture and rope, dtype, layout of KV, attention "
        "policies",
    }
    secret = secret_in(config.cache.expanduser())
    try:
        store = BlockStore.open(directory, root, size, far.store_bytes, secret=secret, about=about)
    except StoreLocked:
        say(f"another process keeps KV in {directory}: what it has is read, and nothing is added")
        return BlockStore.open(directory, root, size, far.store_bytes, secret=secret, read_only=True)
    free = shutil.disk_usage(directory).free
    if store.stats.real_bytes + free < far.store_bytes:
        say(
            f"{directory} has {format_size(free)} free, less than blocks may take there: what does not fit "
            "is not kept"
        )
    return store


def carry_rates(rates: Rates, store: BlockStore | None, computed_by: str) -> Callable[[], None] | None:
    """Load the rates of the previous process from the store. Return a function that saves them at the end.

    computed_by: the devices and which weights they hold. Times of steps hold only where that is equal.
    """
    if store is None:
        return None
    with suppress(ValueError, RecursionError, ArithmeticError):
        told = json.loads(store.noted())
        if isinstance(told, dict):
            rates.recall(told.get("rates"), steps=told.get("computed_by") == computed_by)
    return lambda: store.note(json.dumps({"computed_by": computed_by, "rates": rates.told()}).encode())


def outlives(settled: Settled) -> bool:
    """Tell whether KV outlives the process, so that its keys must distinguish the model from every other."""
    return settled.far is not None and settled.far.store_bytes > 0


def root_of(
    config: Config, model: Model, settled: Settled, say: Say = lambda _: None, *, blocks: int = 0
) -> bytes:
    """Return the root of all KV keys: a digest of everything but tokens that KV depends on.

    The weights are included only if KV outlives the process, since every byte of a checkpoint is hashed for
    that.

    blocks: KV blocks of the device. Under an attention policy KV depends on what is on the device, and on how
        it is cut.

    Raises CheckpointError.
    """
    fingerprint = b""
    if outlives(settled):
        fingerprint = model.fingerprint()
        if isinstance(model, Checkpoint):
            found = model.digests()
            if found.hashed_bytes:
                lasting = f"; not remembered, since {found.forgettable}" if found.forgettable else ""
                say(
                    f"identity of the weights: {format_size(found.hashed_bytes)} hashed in "
                    f"{found.seconds:.2f} s{lasting}"
                )
            model.expect_unchanged()
    policies: tuple[object, ...] = config.attention_policy, config.prefill_policy, config.missed_limit
    far = settled.far
    if far is not None and far.policies is not None:
        policies += (
            config.sketch_bits,
            blocks,
            far.tile_tokens,
            far.chunk_tokens,
            settled.limits.max_step_tokens,
        )
    return root_key(
        fingerprint, settled.spec, settled.dtype, config.block_size, config.host_kv_dtype, policies
    )
