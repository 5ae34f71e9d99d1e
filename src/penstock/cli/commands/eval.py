"""`penstock eval`: hides things in long texts, asks a model for them, and shows by length and depth how often
it is right; and measures how well a model predicts a text."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.base.config import Config
from penstock.base.errors import ConfigError
from penstock.base.setting import MOST
from penstock.cli.command import CONTEXT, TOKENS, Command, TokenRange, debug_option, option
from penstock.cli.load import compute_with, loading_bar
from penstock.cli.models import download_option, expect_tokenizer, located, taken
from penstock.cli.options import (
    BLOCKS,
    DEVICE,
    MAX_STEP_TOKENS,
    OUTPUT,
    THREADS,
    beyond_trained,
    far_kv,
    names_of,
    settings_from,
    token_counts,
    with_options,
)
from penstock.cli.summaries import kv_summary
from penstock.cli.terminal import say

if TYPE_CHECKING:  # torch takes 1.2 s
    from penstock.api.llm import LLM

WORK = "Work"
TASKS = ("single", "keys", "variables", "words")
_COUNT = click.IntRange(min=1)
_FILE = click.Path(dir_okay=False, path_type=Path)
_NEEDLE = """
  penstock eval needle                           the small model that comes with penstock
  penstock eval needle ./my-model --lengths 4096,32768 --depths 5 --picture needle.png
  penstock eval needle ./my-model --text ./books --samples 4 --json
"""
_RULER = """
  penstock eval ruler ./my-model --picture ruler.png
  penstock eval ruler ./my-model --tasks variables,words --lengths 8192 --samples 16
"""
_PERPLEXITY = """
  penstock eval perplexity book.txt              the small model that comes with penstock
  penstock eval perplexity book.txt ./my-model-int4.pack --tokens 100000
"""

_TEXT = "Hide things in this text file, or a folder's .txt files. [generated text]"
_LINE = (
    option(OUTPUT, "--json", is_flag=True, help="Print nothing but one line of JSON."),
    option(OUTPUT, "--out", type=_FILE, metavar="FILE", help="Write the line of JSON to FILE, too."),
)
_FAR_KV = far_kv("what the lengths need")
_REST = (*BLOCKS, MAX_STEP_TOKENS, THREADS, download_option, debug_option)
_shared = with_options(
    option(
        WORK,
        "--lengths",
        callback=token_counts,
        metavar="N,N,...",
        help="Tokens of prompt and answer. [512 to 32768, as there is room]",
    ),
    option(
        WORK,
        "--depths",
        type=_COUNT,
        default=11,
        metavar="N",
        help="Depths in the text, evenly from its beginning to its end. [11]",
    ),
    option(
        WORK, "--samples", type=_COUNT, default=8, metavar="N", help="Prompts for each length and depth. [8]"
    ),
    option(WORK, "--text", type=click.Path(exists=True, path_type=Path), metavar="PATH", help=_TEXT),
    option(WORK, "--seed", type=int, default=1, metavar="N", help="Seed of texts and questions. [1]"),
    option(
        WORK,
        "--raw",
        is_flag=True,
        help="Leave the model's chat template out; the prompt ends in the beginning of the answer.",
    ),
    *_LINE,
    option(
        OUTPUT, "--picture", type=_FILE, metavar="FILE", help="Draw a heat map by depth and length, as a PNG."
    ),
    *DEVICE,
    *_FAR_KV,
    beyond_trained("--lengths"),
    *_REST,
)


@click.group(context_settings=CONTEXT)
@debug_option
def command() -> None:
    """Hide things in long texts, ask a model for them, and see by length and depth how often it is right; or
    measure how well a model predicts a text."""


@command.command(cls=Command, examples=_NEEDLE, short_help="One fact in a long text.")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@_shared
def needle(**asked: Any) -> None:
    """Hide one fact in a long text and ask for it. MODEL is a checkpoint directory; left out, it is the small
    model that comes with penstock. Answers are greedy."""
    _evaluate("needle", ("single",), asked)


@command.command(
    cls=Command,
    examples=_RULER,
    short_help="Four tasks: a fact, a fact among many, variables, frequent words.",
)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@option(
    WORK,
    "--tasks",
    callback=partial(names_of, "task", TASKS),
    default=",".join(TASKS),
    metavar="NAMES",
    help=f"Tasks to run, with commas between. [{','.join(TASKS)}]",
)
@_shared
def ruler(**asked: Any) -> None:
    """Run four tasks over a long text. single: find one fact; keys: find one fact among many of its kind;
    variables: name all that have one value, directly or through others; words: name the most frequent words
    of a list. MODEL is a checkpoint directory; left out, it is the small model that comes with penstock,
    which was trained for the first two. Answers are greedy."""
    _evaluate("ruler", asked["tasks"], asked)


@command.command(
    cls=Command, examples=_PERPLEXITY, short_help="How well a model predicts a text, in nats a token."
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("model", required=False, type=click.Path(path_type=Path))
@with_options(
    option(
        WORK,
        "--length",
        type=TokenRange(min=2),
        metavar="N",
        help="Tokens of a window. [2048, or what there is room for]",
    ),
    option(
        WORK,
        "--stride",
        type=TOKENS,
        metavar="N",
        help="Tokens from a window to the next; the rest of a window is read again. [the length less 1]",
    ),
    option(WORK, "--tokens", type=TOKENS, metavar="N", help="Most tokens of the text. [all]"),
    *_LINE,
    *DEVICE,
    *_FAR_KV,
    beyond_trained("a --length"),
    *_REST,
)
def perplexity(file: Path, length: int | None, stride: int | None, tokens: int | None, **asked: Any) -> None:
    """Measure the log-perplexity of FILE, a text or a folder's .txt files: the mean negative log-probability
    of a token, given those before it in its window. Of a long text the first 4 million letters are read. It
    tells what weights of few bits lose. MODEL is a checkpoint directory, a pack or a GGUF file; left out, it
    is the small model that comes with penstock."""
    if not file.exists():
        raise ConfigError(f"{file} does not exist; give a text file, or a folder with some")
    _expect_folder(asked["out"])
    config = _config(asked, (length + 1, f"--length {length} with the token behind it") if length else None)

    compute_with(config.threads)
    from penstock.bench.machine import machine
    from penstock.evals.perplexity import PerplexityWork
    from penstock.evals.perplexity import perplexity as measure
    from penstock.evals.prompts import text_of

    work = PerplexityWork(text_of(file), str(file), length, stride, tokens)
    tell = _teller(asked["json"])
    with _opened(config, asked["json"], bars=False) as llm:
        report = measure(llm, work, str(asked["model"] or "shipped"), tell)
    line = report.line(settings=config.changed(), machine=asdict(machine()))
    click.echo(line if asked["json"] else report)
    _write(asked["out"], line)


def _evaluate(name: str, tasks: tuple[str, ...], asked: Mapping[str, Any]) -> None:
    lengths, out, picture, json = (asked[flag] for flag in ("lengths", "out", "picture", "json"))
    _expect_folder(out, picture)
    config = _config(asked, (max(lengths), f"--lengths {max(lengths)}") if lengths else None)

    compute_with(config.threads)
    from penstock.bench.machine import machine
    from penstock.evals.prompts import text_of
    from penstock.evals.run import EvalWork, evaluate

    work = EvalWork(name, tasks, lengths, *(asked[flag] for flag in ("depths", "samples", "seed", "raw")))
    if asked["text"] is not None:
        work = replace(work, source=str(asked["text"]), text=text_of(asked["text"]))
    tell = _teller(json)
    with _opened(config, json) as llm:
        report = evaluate(llm, work, str(asked["model"] or "shipped"), tell)
        kv = llm.memory.kv
    if kv is not None and kv.streams:
        tell(kv_summary(kv, report.seconds))
    line = report.line(settings=config.changed(), kv=asdict(kv) if kv else None, machine=asdict(machine()))
    click.echo(line if json else report)
    _write(out, line)
    if picture is not None:
        from penstock.evals.picture import draw  # Pillow: 60 ms

        draw(report, picture)


def _config(asked: Mapping[str, Any], needed: tuple[int, str] | None) -> Config:
    """Return the settings of a model that is here, with room for what is needed: tokens, and what asks for
    them. Raises PenstockErrors."""
    most = needed and min(needed[0], MOST)
    config = settings_from(Config, asked, model=asked["model"], max_length=most)
    config, _ = located(config, **taken(asked, "json"))
    expect_tokenizer(config.model)
    if needed and not config.beyond_trained:
        from penstock.cli.shape import expect_trained  # 0.1 s, with what knows all families of models

        expect_trained(config.model, *needed)
    return config


def _opened(config: Config, json: bool, bars: bool = True) -> "LLM":
    """Return the model to ask, loaded. json: show nothing meanwhile. bars: show a bar while it answers, on a
    terminal."""
    from penstock.api.llm import LLM

    with loading_bar(json) as loading:
        return LLM.from_config(config, progress=None if bars and not json else False, loading=loading)


def _teller(json: bool) -> Callable[[str], None]:
    """Return what remarks are given to."""
    return (lambda _: None) if json else (lambda line: say(line, faint=True))


def _expect_folder(*files: Path | None) -> None:
    """Raise ConfigError for a file to write whose directory is not there."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(
                f"cannot write {file}: its directory does not exist; create it, or name another file"
            )


def _write(out: Path | None, line: str) -> None:
    """Write the line of JSON to a file, if one is named. Raises ConfigError."""
    if out is not None:
        try:
            out.write_text(line + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}; name another file") from error
