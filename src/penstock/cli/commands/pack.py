"""`penstock pack`: lay a model's weights out for the disk tier, once, and check what was laid out."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from penstock.base.config import CACHE
from penstock.base.errors import CheckpointError
from penstock.base.units import format_rate, format_size
from penstock.cli.command import Command, debug_option, option
from penstock.cli.progress import progress_bar
from penstock.cli.terminal import is_terminal, say

PACK = "Pack"
EXAMPLES = """
  penstock pack ./my-model                       into ./my-model.pack
  penstock pack ./my-model --out /fast/my-model --dtype bfloat16
  penstock pack --verify ./my-model.pack         read every byte and compare it with the checksums
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", type=click.Path(path_type=Path))
@option(
    PACK, "--out", type=click.Path(path_type=Path), metavar="DIR", help="Directory of the pack. [MODEL.pack]"
)
@option(
    PACK,
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Data type to store weights in. [the model's]",
)
@option(
    PACK,
    "--store",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File or block device for the weights. [DIR/weights.bin]",
)
@option(PACK, "--verify", is_flag=True, help="Check every byte of MODEL, a pack.")
@debug_option
def command(model: Path, out: Path | None, dtype: str | None, store: Path | None, verify: bool) -> None:
    """Write the weights of MODEL, a checkpoint directory or GGUF file, as one run of bytes for each
    group, in the order of their use.

    Models larger than device and host memory stream from packs. `penstock run` makes one by itself where it
    is needed, in its cache directory (~/.cache/penstock), or takes the directory of one as MODEL. Killed or
    interrupted, the same command goes on where it stopped.
    """
    if verify:
        if out or dtype or store:
            raise click.UsageError("--verify takes only the directory of a pack; leave the other options out")
        _verify(model)
        return
    if os.path.exists(model / "manifest.json"):
        raise CheckpointError(
            f"{model} is a pack already; give the model that it was made from, or --verify to check it"
        )

    from penstock.arch.layout import group_layouts
    from penstock.weights.checkpoint.reader import Checkpoint  # torch: 1.2 s on two cores
    from penstock.weights.pack.manifest import place
    from penstock.weights.pack.reader import Pack
    from penstock.weights.pack.writer import write_pack

    began = time.perf_counter()
    with Checkpoint.open(model, CACHE.expanduser()) as checkpoint:
        out = out or model.resolve().with_name(f"{model.resolve().name}.pack")
        dtype = dtype or checkpoint.spec.dtype
        total = place(group_layouts(checkpoint.spec, checkpoint.names, dtype))[-1].end
        try:
            with _progress("packing", total) as progress:
                written = write_pack(checkpoint, out, dtype, store, progress)
        except KeyboardInterrupt:
            say(f"{out} is not finished; the same command goes on where it stopped", faint=True)
            raise
    with Pack.open(out) as pack:
        what = f"{len(pack.layouts)} groups, {format_size(pack.manifest.size)} in {pack.dtype}"
    seconds = time.perf_counter() - began
    click.echo(
        f"{out}: {what}, written in {seconds:.1f} s"
        if written
        else f"{out} is packed already: {what}; nothing to do"
    )


def _verify(path: Path) -> None:
    from penstock.weights.pack.reader import Pack  # torch: 1.2 s on two cores

    began = time.perf_counter()
    with Pack.open(path) as pack, _progress("checking", pack.manifest.size) as progress:
        pack.verify(progress)
    rate = format_rate(pack.manifest.size / (time.perf_counter() - began))
    click.echo(
        f"{path}: {len(pack.layouts)} groups and {len(pack.manifest.files)} files are as they were packed "
        f"({rate})"
    )


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar of `total` bytes on a terminal. Yields what is called with bytes as they are done."""
    if not is_terminal(sys.stderr):
        yield None
        return
    with progress_bar(what, total) as bar:
        [task] = bar.task_ids
        yield lambda done: bar.advance(task, done)
