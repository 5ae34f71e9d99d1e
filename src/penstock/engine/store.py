"""Keeps KV beyond the process: its key, the block store on disk, and rates for the next process."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress

from penstock.base.config import Config
from penstock.base.units import format_size
from penstock.engine.placing import Model, Say
from penstock.engine.settling import Settled
from penstock.engine.team import Place
from penstock.kv.ledger.disk import DiskLedger
from penstock.kv.ledger.keys import root_key
from penstock.kv.store.blocks import BlockStore
from penstock.kv.store.directory import StoreIdentity
from penstock.kv.store.seal import secret_in
from penstock.kv.store.segments import StoreLocked
from penstock.sched.rates import TransferRates
from penstock.weights.checkpoint.reader import Checkpoint


def open_store(model: Model, settled: Settled, root: bytes, say: Say) -> BlockStore | None:
    """Open the block store that outlives the process, if there is room for one.

    It is read-only if another process writes to it.
    """
    config, far = settled.settings, settled.far
    if far is None or not far.store_bytes:
        return None
    directory = config.kv_directory.expanduser()
    about = {
        "model": str(getattr(model, "path", settled.spec.family)),
        "family": settled.spec.family,
        "dtype": far.layout.dtype,
        "block_size": config.block_size,
        "layers": settled.spec.layers,
        "kv_heads": settled.spec.kv_heads,
        "head_dim": settled.spec.head_dim,
        "part": str(settled.shard),
        "digest_of": "every byte of the weights, architecture and rope, dtype, layout of KV, attention "
        "policies, rank",
    }
    secret = secret_in(config.cache.expanduser())
    identity = StoreIdentity(root, far.layout.block_bytes, secret, about)
    try:
        store = BlockStore.open(directory, identity, far.store_bytes)
    except StoreLocked:
        say(
            f"another process writes to {directory}: its KV is read, and nothing is added; give each "
            "process its own kv_directory to keep the KV of both"
        )
        return BlockStore.open(directory, identity, far.store_bytes, read_only=True)
    free = shutil.disk_usage(directory).free
    if store.stats.real_bytes + free < far.store_bytes:
        say(
            f"{directory} has {format_size(free)} free, less than disk_kv_memory allows: KV beyond that is "
            "not kept; free some space, or lower disk_kv_memory"
        )
    return store


def ledger_of(store: BlockStore, where: Place, block_size: int) -> DiskLedger:
    """Return the books of the blocks on disk, which are those that every rank's store has. To be called on
    all ranks at once.

    A process that was killed may have written a block on some ranks alone. Nobody knows of such a record, so
    it is forgotten. Where one rank's store is only read, none is written.
    """
    keys = store.keys()
    common = where.common(keys)
    capacity = where.least(0 if store.read_only else store.capacity)
    if capacity and len(common) < len(keys):
        store.forget(set(keys).difference(common))
    return DiskLedger(capacity, common, block_size)


def carry_rates(
    rates: TransferRates, store: BlockStore | None, computed_by: str
) -> Callable[[], None] | None:
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
    """Return the key that all KV keys begin with: a digest of all that the meaning of KV depends on but
    tokens, and of the rank whose part of the KV it is. The weights are part of it only where KV outlives the
    process, since to know them every byte of a checkpoint is hashed. Raises CheckpointError.

    blocks: KV blocks of the device. Under a policy KV also depends on what is there, and not on the host, and
    on how it is cut."""
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
    kinds = settled.dtype, config.host_kv_dtype
    return root_key(fingerprint, settled.spec, *kinds, config.block_size, policies, settled.shard)
