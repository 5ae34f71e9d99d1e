"""`penstock cache`: what is kept on disk of the KV of earlier prompts, whether it is sound, and away with
it."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.base.config import CACHE
from penstock.base.units import counted, format_rate, format_size
from penstock.cli.command import Command, debug_option, option
from penstock.cli.terminal import is_terminal, one_line, say

if TYPE_CHECKING:
    from penstock.kv.store.cachedir import StoreInfo

CLEAR, VERIFY = "Clear", "Verify"
EXAMPLES = """
  penstock cache ls                    the stores in ~/.cache/penstock
  penstock cache stat /fast/kv         how much of the disk they take, and for what
  penstock cache verify /fast/kv       read every byte and compare it with the checksums
  penstock cache clear --yes /fast/kv
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("action", type=click.Choice(["ls", "stat", "verify", "clear"]))
@click.argument("directory", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@option(CLEAR, "--yes", is_flag=True, help="Remove without asking.")
@option(
    VERIFY,
    "--cache",
    type=click.Path(path_type=Path),
    default=CACHE,
    metavar="DIR",
    help=f"Directory of the key that seals records. [{CACHE}]",
)
@debug_option
def command(action: str, directory: Path | None, yes: bool, cache: Path) -> int:
    """Look after the KV of earlier prompts in DIR, a kv_directory or one store in it: a store for each model,
    dtype and layout of the KV.

    ls names the stores; stat adds up what they take of the disk; verify reads everything, and puts what is
    damaged aside so that it is never used, which ends in exit code 1; clear removes the stores, unless one is
    in use.
    """
    if yes and action != "clear":
        raise click.UsageError("--yes goes only with `penstock cache clear`; leave it out")
    from penstock.kv.store.cachedir import store_paths, survey  # numpy: 0.1 s

    where = directory or CACHE.expanduser()
    paths = store_paths(where) if directory or where.is_dir() else []
    if not paths:
        click.echo(f"{where}: no KV is kept there")
        return 0
    if action == "clear":
        return _clear(where, paths, yes)
    if action == "verify":
        from penstock.kv.store.seal import secret_in

        secret = secret_in(cache.expanduser())
        wrong = [_verify(path, secret) for path in paths]
        return int(any(wrong))
    (_ls if action == "ls" else _stat)([survey(path) for path in paths])
    return 0


def _ls(stores: list["StoreInfo"]) -> None:
    rows = [("STORE", "MODEL", "DTYPE", "BLOCK", "RECORDS", "SIZE", "LAST USED")]
    for found in stores:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.last_used))
        facts = _fact(found, "model"), _fact(found, "dtype"), _fact(found, "block_size")
        rows.append(
            (found.identity.hex()[:12], *facts, f"{found.records:,}", format_size(found.real_bytes), used)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _stat(stores: list["StoreInfo"]) -> None:
    for one in stores:
        garbage = max(one.real_bytes - one.live_bytes, 0)
        kept = f"{counted(one.records, 'record')}, {format_size(one.live_bytes)}"
        spent = (
            f"{format_size(one.real_bytes)} of the disk in {counted(one.segments, 'segment')}, "
            f"{format_size(garbage)} of it garbage and overhead"
        )
        lost = "" if one.sound else "; its journal is lost, and this is from its segments"
        click.echo(f"{one.path}: {_fact(one, 'model')}, {kept}; {spent}; {one.quarantined} quarantined{lost}")
    total = format_size(sum(one.real_bytes for one in stores))
    records = counted(sum(one.records for one in stores), "record")
    click.echo(f"{counted(len(stores), 'store')}, {records}, {total} of the disk")


def _verify(path: Path, secret: bytes) -> bool:
    """Check a store, print what is wrong, and return whether anything is."""
    from penstock.kv.store.cachedir import survey, verify

    read, began = list[int](), time.perf_counter()
    bad = survey(path).quarantined
    found = verify(path, secret, read.append)
    rate = format_rate(sum(read) / max(time.perf_counter() - began, 1e-9))
    click.echo(
        f"{path}: {found.records - found.damaged - found.unreadable:,} of {found.records:,} records are as "
        f"they were written ({rate})"
    )
    if found.damaged:
        why = (
            "another process writes there; it"
            if found.busy
            else "the journal is lost; the model that the store belongs to"
        )
        what = "put aside, and will not be used" if found.marked else f"left, as {why} will not use them"
        click.echo(f"{path}: {found.damaged:,} are damaged: {what}")
    if found.unreadable:
        click.echo(f"{path}: {found.unreadable:,} cannot be read now")
    if bad:
        click.echo(f"{path}: {bad:,} were put aside earlier")
    return bool(found.damaged or found.unreadable)


def _clear(where: Path, paths: list[Path], yes: bool) -> int:
    from penstock.kv.store.cachedir import clear

    what = f"{len(paths)} {'store' if len(paths) == 1 else 'stores'} of KV in {where}"
    if not yes:
        if not is_terminal(sys.stdin):
            raise click.UsageError(
                f"cannot ask whether to remove {what}, since stdin is no terminal; add --yes to remove it"
            )
        if not click.confirm(f"Remove {what}?", err=True):
            say("nothing was removed")
            return 0
    clear(paths)
    click.echo(f"{what}: removed")
    return 0


def _fact(found: "StoreInfo", name: str) -> str:
    value = found.about.get(name)
    return one_line(str(value))[:60] if isinstance(value, str | int) else "?"
