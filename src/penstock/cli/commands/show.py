"""`penstock show`: what a model is, here or on the Hugging Face Hub, before it is fetched."""

from dataclasses import dataclass

import click

from penstock.base.report import JsonLine
from penstock.base.units import counted, format_size
from penstock.cli.command import Command, debug_option, option
from penstock.cli.options import OUTPUT
from penstock.cli.prompt import model_path
from penstock.cli.terminal import one_line

EXAMPLES = """
  penstock show Qwen/Qwen3-8B                   no more than its config is fetched
  penstock show Qwen/Qwen3-8B-GGUF:Q4_K_M
  penstock show ./my-model --json
"""


@dataclass(frozen=True, slots=True)
class Shown(JsonLine):
    """Holds what is printed. size: bytes of the model's files. licence: empty if nobody says. here: whole,
    partial, no, or the reason why it does not run."""

    name: str
    family: str
    layers: int
    parameters: int
    context: int
    format: str
    size: int
    licence: str
    chat_template: bool
    revision: str
    here: str
    path: str

    def __str__(self) -> str:
        from penstock.cli.figures import format_count

        rows = {
            "family": f"{self.family}, {counted(self.layers, 'layer')}",
            "parameters": format_count(self.parameters),
            "context": f"{self.context:,} tokens",
            "format": self.format,
            "size": format_size(self.size),
            "licence": one_line(self.licence) or "not known",
            "chat template": "yes" if self.chat_template else "no",
            "revision": self.revision,
            "here": f"{self.here}, {self.path}" if self.path else self.here,
        }
        width = max(map(len, rows)) + 2
        lines = [f"  {key.ljust(width)}{value}" for key, value in rows.items() if value]
        return "\n".join([self.name, *lines])


@click.command(cls=Command, examples=EXAMPLES, configurable=False)
@click.argument("model")
@option(OUTPUT, "--json", is_flag=True, help="Print one line of JSON instead.")
@debug_option
def command(model: str, json: bool) -> None:
    """Say what MODEL is: family, parameters, context, format of weights, size, licence, and whether it has a
    chat template. MODEL is a name on the Hugging Face Hub, a checkpoint directory or a GGUF file. Of a model
    that is not here, only its config or header is fetched.
    """
    from penstock.hub.details import details

    model_path(model, hint="")
    found = details(model)
    about = found.about
    shown = Shown(
        name=found.name,
        family=about.family,
        layers=about.layers,
        parameters=about.parameters,
        context=about.context,
        format=about.format,
        size=found.size,
        licence=found.licence,
        chat_template=about.template,
        revision=found.revision,
        here=found.state,
        path=str(found.path or ""),
    )
    click.echo(shown.line() if json else shown)
