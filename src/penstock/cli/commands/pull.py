"""`penstock pull`: fetch models of the Hugging Face Hub, or their newest revisions."""

import click

from penstock.cli.command import Command, debug_option, option
from penstock.cli.models import Fetching
from penstock.cli.options import OUTPUT
from penstock.cli.terminal import say
from penstock.hub.names import ModelName

EXAMPLES = """
  penstock pull Qwen/Qwen3-8B
  penstock pull Qwen/Qwen3-8B@main              a branch, tag or commit
  penstock pull Qwen/Qwen3-8B-GGUF:Q4_K_M       a GGUF file, by its quant or its name
  HF_HOME=/big/disk penstock pull Qwen/Qwen3-8B
"""


@click.command(cls=Command, examples=EXAMPLES, configurable=False)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@option(OUTPUT, "--quiet", "-q", is_flag=True, help="Print nothing but where the models are.")
@debug_option
def command(names: tuple[str, ...], quiet: bool) -> None:
    """Fetch models into the Hugging Face cache, without a question, and print where they are.

    A model that is there is brought to what its revision is now. Only files that the engine reads are
    fetched: weights in safetensors or GGUF, config, tokenizer and chat template; never code. What was
    interrupted goes on where it stopped. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are obeyed; `hf
    auth login` keeps a token.
    """
    models = [named(text) for text in names]
    from penstock.hub.cache import CachedRepository
    from penstock.hub.models import locate

    for name in models:
        repository = CachedRepository.of(name.repository)
        before = repository.commit_of(name.revision)
        with Fetching(True, quiet=quiet) as telling:
            found = locate(f"hf.co/{name}", telling, refresh=True)
        after = repository.commit_of(name.revision)
        if not quiet and not telling.seconds:
            say(f"{name} is whole, and what {name.sort} is now", faint=True)
        if not quiet and before and after != before:
            say(
                f"{name.repository} was {before[:7]} before, which is kept; penstock rm "
                f"{name.repository}@{before[:7]} removes it",
                faint=True,
            )
        click.echo(found.path)


def named(text: str) -> ModelName:
    """Return the name that a text is. Raises click.UsageError if it is none."""
    name = ModelName.parse(text)
    if name is None:
        raise click.UsageError(
            f"{text!r} is no model of the Hugging Face Hub; write owner/name, owner/name@revision or "
            "owner/name:Q4_K_M"
        )
    return name
