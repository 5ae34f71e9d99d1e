"""`penstock pack`: lay a model's weights out for the disk tier, once, and check what was laid out."""

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.arch.formats.recipe import GROUP, GROUPS, QUANTISED_TO, Recipe
from penstock.base.config import CACHE, Config, check_device
from penstock.base.errors import CheckpointError
from penstock.base.units import counted, format_rate, format_size
from penstock.cli.command import Command, debug_option, option
from penstock.cli.load import loading_bar
from penstock.cli.models import download_option, located
from penstock.cli.progress import byte_progress
from penstock.cli.terminal import say

if TYPE_CHECKING:  # torch takes 1.2 s
    from penstock.weights.checkpoint.reader import Checkpoint
    from penstock.weights.pack.quantising import QuantisedCheckpoint

PACK, QUANTISE = "Pack", "Quantise"
EXAMPLES = """
  penstock pack ./my-model                       into ./my-model.pack
  penstock pack ./my-model --out /fast/my-model --dtype bfloat16
  penstock pack ./my-model --to int4             four bits a weight, into ./my-model-int4.pack
  penstock pack ./my-model --to int4 --int8 none     four bits in all layers, whatever that costs
  penstock pack --verify ./my-model.pack         read every byte and compare it with the checksums
"""


def _names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return () if value == "none" else tuple(filter(None, value.split(",")))


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", type=click.Path(path_type=Path))
@option(
    PACK,
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory of the pack. [MODEL.pack; for one of the Hub, here]",
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
@option(
    QUANTISE,
    "--to",
    "format",
    type=click.Choice(QUANTISED_TO),
    help="Format to quantise matrices to; without it weights are kept as they are.",
)
@option(
    QUANTISE,
    "--group",
    type=click.IntRange(GROUPS[0], GROUPS[-1]),
    metavar="N",
    help=f"Columns that share a scale, for int4 and int8. [{GROUP}]",
)
@option(
    QUANTISE,
    "--int8",
    callback=_names,
    metavar="NAME,...",
    help="With --to int4, modules to keep in eight bits, by parts of names; none: no module. [as it needs]",
)
@option(QUANTISE, "--device", default="auto", help="Device that computes: auto, cpu, cuda or cuda:N. [auto]")
@option(PACK, "--verify", is_flag=True, help="Check every byte of MODEL, a pack.")
@download_option
@debug_option
def command(
    model: Path, out: Path | None, dtype: str | None, store: Path | None, verify: bool, **asked: Any
) -> None:
    """Write the weights of MODEL, a checkpoint directory, a GGUF file or a model of the Hugging Face Hub, as
    one run of bytes for each group, in the order of their use.

    Models larger than device and host memory stream from packs. `penstock run` makes one by itself where it
    is needed, in its cache directory (~/.cache/penstock), or takes the directory of one as MODEL. Killed or
    interrupted, the same command goes on where it stopped.

    With --to the matrices of layers are rounded to few bits, without data; embedding, head, norms and routers
    are kept. That costs some quality, which `penstock eval perplexity` measures on a text. With --to int4 the
    model first writes a short text itself. Modules are kept in eight bits, and groups made smaller, until it
    finds that text about as likely as before; --int8 none leaves that out.
    """
    if verify:
        if out or dtype or store or asked["format"]:
            raise click.UsageError("--verify takes only the directory of a pack; leave the other options out")
        _verify(model)
        return
    format, group, int8 = (asked[name] for name in ("format", "group", "int8"))
    if (group or int8 is not None) and format is None:
        raise click.UsageError("--group and --int8 say how to quantise; give --to int4, too")
    if os.path.exists(model / "manifest.json"):
        raise CheckpointError(
            f"{model} is a pack already; give the model that it was made from, or --verify to check it"
        )
    recipe = Recipe.of(format, group, int8 or ()) if format else None

    from penstock.arch.layout import group_layouts
    from penstock.weights.checkpoint.reader import Checkpoint  # torch: 1.2 s on two cores
    from penstock.weights.pack.manifest import place
    from penstock.weights.pack.reader import Pack
    from penstock.weights.pack.writer import write_pack

    began = time.perf_counter()
    found, named = located(Config(model), download=asked["download"])
    suffix = f"-{format}.pack" if format else ".pack"
    if out is None:  # The cache is no place for packs.
        beside = model.resolve() if found.model == model else Path(named.rpartition("/")[2].replace(":", "-"))
        out = beside.with_name(f"{beside.name}{suffix}")
    with Checkpoint.open(found.model, CACHE.expanduser()) as checkpoint:
        dtype = dtype or checkpoint.spec.dtype
        there = os.path.lexists(out / "manifest.json")
        quantised: QuantisedCheckpoint | None
        try:
            if unknown := checkpoint.identify():
                with byte_progress("hashing", unknown) as progress:
                    checkpoint.digests(progress)
            if format == "int4" and int8 is None:
                quantised = _mixed(checkpoint, group, out, dtype, store, asked["device"])
            else:
                quantised = _quantised(checkpoint, recipe, dtype, asked["device"]) if recipe else None
                source = quantised or checkpoint
                total = place(group_layouts(source.spec, source.names, dtype))[-1].end
                with byte_progress("quantising" if recipe else "packing", total) as progress:
                    write_pack(source, out, dtype, store, progress)
        except KeyboardInterrupt:
            say(f"{out} is not finished; the same command goes on where it stopped", faint=True)
            raise
    with Pack.open(out) as pack:
        what = f"{counted(len(pack.layouts), 'group')}, {format_size(pack.manifest.size)} in "
        what += f"{format or pack.dtype}"
    seconds = time.perf_counter() - began
    if quantised:
        what += f", of {format_size(quantised.dense_bytes)}: {quantised.recipe}, "
        what += f"{quantised.bits:.2f} bits a weight"
        what += f", mean relative error {quantised.error:.2%}" if quantised.error else ""
    click.echo(
        f"{out} is packed already: {what}; nothing to do"
        if there
        else f"{out}: {what}, written in {seconds:.1f} s"
    )
    if quantised:
        click.echo(
            f"what that costs: penstock eval perplexity TEXT {out}, beside "
            f"penstock eval perplexity TEXT {model}"
        )


def _quantised(checkpoint: "Checkpoint", recipe: Recipe, dtype: str, device: str) -> "QuantisedCheckpoint":
    from penstock.memory.device import choose_device
    from penstock.weights.pack.quantising import QuantisedCheckpoint

    check_device(device)
    return QuantisedCheckpoint(checkpoint, recipe, dtype, choose_device(device))


def _mixed(
    checkpoint: "Checkpoint", group: int | None, out: Path, dtype: str, store: Path | None, device: str
) -> "QuantisedCheckpoint":
    """Pack in four bits, and in eight where the model needs them."""
    from penstock.evals.mix import MixProgress, write_mix

    check_device(device)
    with loading_bar(False) as loading:
        tell = partial(say, faint=True)
        telling = MixProgress(tell, tell, byte_progress, loading)
        return write_mix(checkpoint, group, out, dtype, store, device, telling)


def _verify(path: Path) -> None:
    from penstock.weights.pack.reader import Pack  # torch: 1.2 s on two cores

    began = time.perf_counter()
    with Pack.open(path) as pack, byte_progress("checking", pack.manifest.size) as progress:
        pack.verify(progress)
    rate = format_rate(pack.manifest.size / (time.perf_counter() - began))
    click.echo(
        f"{path}: {counted(len(pack.layouts), 'group')} and {counted(len(pack.manifest.files), 'file')} are "
        f"as they were packed ({rate})"
    )
