"""`penstock run`: one prompt in, its continuation or answer out, as it is made."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from penstock.base.errors import RequestError
from penstock.cli.answer import follow, json_line, logprob_entries, record, remark, warn_of_cut
from penstock.cli.answer_view import AnswerView, can_draw, columns
from penstock.cli.chat_options import chat_options, template_settings
from penstock.cli.command import Command, TokenRange, files, option
from penstock.cli.conversation import AnswerReader, Conversation
from penstock.cli.live import LiveLine
from penstock.cli.load import loaded
from penstock.cli.models import expect_tokenizer, located, taken
from penstock.cli.options import OUTPUT, PROMPT, SAMPLING, common_options, engine_config, sampling_params
from penstock.cli.prompt import SHIPPED_MODEL, model_and_prompt, model_path
from penstock.cli.terminal import Look, is_terminal, say, text_alone, write
from penstock.cli.wrapping import Wrapper
from penstock.step.params import SamplingParams
from penstock.step.request import FinishReason

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.api.outputs import Delta

USUAL_TOKENS = 256
_MANY = 10
"""Outputs from which -n is rather meant as their tokens, as llama.cpp has it."""
EXAMPLES = r"""
  penstock run "Once upon a time"                        a story from the model that comes with penstock
  penstock run ./my-model "The capital of France is" --temperature 0 --max-tokens 8
  penstock run Qwen/Qwen3-8B "The capital of France is"  from the Hugging Face Hub, once
  penstock run ./my-model "Who was Ada Lovelace?" --chat --system "Answer in one sentence."
  penstock run ./my-model --file notes.txt --max-tokens 500 > more.txt
  git diff | penstock run ./my-model --chat -            the prompt from a pipe
  penstock run "A list:" --stop $'\n' --seed 7 -n 3      three short outputs, the same each time
  penstock run "Hello" --json --logprobs 2 | jq .usage
  penstock run ./my-model "Hello" --device-memory 20GiB --trace trace.json    what moved when
"""


class Screen:
    """The outputs on stdout, one below the other, the first as it grows.

    Pieces of later outputs are held back until their turn.
    """

    def __init__(self, outputs: int, echo: str = "", put: Callable[..., None] = write) -> None:
        """echo: the prompt that the outputs continue, to be written before them. put: writes, as
        terminal.write does."""
        self._put = put
        self._held: list[list[str]] = [[] for _ in range(outputs)]
        self._ended = [False] * outputs
        self._turn = 0
        self._line_open = False
        self._write(echo, bold=True)
        self._head()

    def show(self, delta: "Delta") -> None:
        """Write a piece, or hold it back."""
        self._ended[delta.index] = delta.finish_reason is not None
        if delta.index != self._turn:
            self._held[delta.index].append(delta.text)
            return
        self._write(delta.text)
        while self._turn < len(self._held) and self._ended[self._turn]:
            self._turn += 1
            if self._turn < len(self._held):
                self._head()
                self._write("".join(self._held[self._turn]))

    def end(self) -> None:
        """End the last line."""
        if self._line_open:
            self._write("\n")

    def _head(self) -> None:
        if len(self._held) > 1:
            self.end()
            self._put(f"--- output {self._turn + 1} of {len(self._held)} ---\n")

    def _write(self, text: str, *, bold: bool = False) -> None:
        self._put(text, bold=bold)
        if text:
            self._line_open = not text.endswith("\n")


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("arguments", nargs=-1, metavar="[MODEL] PROMPT", shell_complete=files)
@option(
    PROMPT,
    "--file",
    "-f",
    metavar="PATH",
    help="Read the prompt from a UTF-8 file; one newline at its end is dropped.",
)
@option(
    PROMPT,
    "--chat/--raw",
    default=None,
    help="Answer the prompt, by the model's chat template, or continue it. [--raw]",
)
@option(PROMPT, "--system", metavar="TEXT", help="System message before the prompt; implies --chat.")
@option(
    SAMPLING,
    "--max-tokens",
    type=TokenRange(),
    metavar="N",
    help=f"Most tokens of output. [{USUAL_TOKENS}, or what the context has room for]",
)
@option(
    SAMPLING,
    "-n",
    "n",
    type=int,
    default=1,
    metavar="N",
    help="Independent outputs of the prompt; for their length see --max-tokens. [1]",
)
@chat_options
@option(OUTPUT, "--json", is_flag=True, help="Print one JSON object at the end, and nothing else, on stdout.")
@option(
    OUTPUT,
    "--echo/--no-echo",
    default=None,
    help="Write the prompt before its continuation. [if it is typed, on a terminal]",
)
@option(
    OUTPUT,
    "--prompt-logprobs",
    type=int,
    metavar="K",
    rare=True,
    help="With --json: log-probabilities of the prompt's tokens, like --logprobs.",
)
@common_options
@click.pass_context
def command(ctx: click.Context, /, **settings: object) -> None:
    """Continue PROMPT, or answer it with --chat.

    MODEL is a checkpoint directory, a GGUF file, or a model of the Hugging Face Hub, as owner/name; without
    it the small model that comes with penstock runs. A PROMPT of - is read from stdin, and so is one that is
    left out where something is piped in. Text goes to stdout as it is made, everything else to stderr.
    """
    asked = ctx.params
    if asked["system"] is not None and asked["chat"] is False:
        raise click.UsageError("--system needs the chat template, which --raw leaves out; give one of them")
    model, prompt = model_and_prompt(asked["arguments"], asked["file"])
    if model is SHIPPED_MODEL:
        model = model_path(ctx.lookup_default("model"))  # What settings name, if they do.
    params = sampling_params(ctx)
    chat = asked["chat"] or asked["system"] is not None
    asks = template_settings(ctx, template=chat)
    if params.n >= _MANY and asked["max_tokens"] is None and not asked["quiet"]:
        say(f"penstock: note: -n {params.n} makes {params.n} outputs; their length is --max-tokens")
    config, _ = located(engine_config(ctx, model, params.n), **taken(asked))
    expect_tokenizer(config.model)
    with loaded(config, quiet=asked["quiet"], trace=asked["trace"]) as llm:
        conversation = Conversation(llm, chat, asked["system"], **asks)
        if chat:
            conversation.check()
        for said in conversation.unheard():
            say(f"penstock: note: {said}")
        request, length = conversation.request(prompt.text)
        params, reader = conversation.marked(_limited(llm, params, length)), conversation.reader
        if asked["json"]:
            answer = follow(llm, request, params, lambda _: None, lora=asked["lora"])
            entries = record(llm, config, prompt.text, params, answer, reader.split)
            if (reported := answer.completion.prompt_logprobs) is not None:
                entries["prompt_logprobs"] = logprob_entries(llm, reported)
            write(json_line(entries))
        else:
            usual = prompt.typed and not chat and is_terminal(sys.stdout)
            echo = prompt.text if asked["echo"] or (asked["echo"] is None and usual) else ""
            with text_alone(), LiveLine.of(llm, quiet=asked["quiet"]) as live:
                show, end = _screen(live, reader, asked, params.n, echo, drawn=chat)
                live.compute(length)  # Behind what the screen begins with, which would end it.
                try:
                    answer = follow(llm, request, params, show, lora=asked["lora"])
                finally:  # A Ctrl-C ends the line, too.
                    end()
        cut = warn_of_cut(llm, params, answer.completion.outputs)
        if asked["verbose"] or (is_terminal(sys.stderr) and not asked["quiet"] and not asked["json"]):
            remark(answer)
            ended = (output.finish_reason for output in answer.completion.outputs)
            if asked["max_tokens"] is None and FinishReason.LENGTH in ended and not cut:
                say("cut at the usual length; allow more with --max-tokens", faint=True)
    if any(output.finish_reason is FinishReason.ERROR for output in answer.completion.outputs):
        why = (
            "it could not follow its schema or grammar any further, or the model's logits were not numbers "
            "(NaN)"
        )
        raise RequestError(
            "the answer ended early: "
            f"{next((output.error for output in answer.completion.outputs if output.error), why)}"
        )


def _screen(
    live: LiveLine, reader: AnswerReader, asked: Mapping[str, Any], outputs: int, echo: str, *, drawn: bool
) -> tuple[Callable[["Delta"], None], Callable[[], None]]:
    """Return what takes the pieces of outputs, and what ends them. drawn: they are answers, to be drawn on a
    terminal that can, unless there are several."""
    if drawn and outputs == 1 and not echo and can_draw():
        view = AnswerView(live, reader, markdown=asked["markdown"], think=asked["think"])
        return view.show, view.end
    screen = Screen(outputs, echo, _wrapped(live) if can_draw() else live.write)
    return lambda delta: screen.show(reader.shown(delta)), screen.end


def _wrapped(live: LiveLine) -> Callable[..., None]:
    """Return what writes text as `terminal.write` does, with rows that end at words. What is held is written
    with the end of its line."""
    wrapper = Wrapper(columns)

    def put(text: str, *, bold: bool = False) -> None:
        live.draw(wrapper.add(text, Look(bold=bold)))

    return put


def _limited(llm: "LLM", params: SamplingParams, length: int) -> SamplingParams:
    """Return the params with the usual number of tokens if none was asked for.

    There are fewer if a prompt of `length` tokens leaves less room.
    """
    room = llm.limits.max_model_len - length
    if (
        params.max_tokens is not None or room < 1
    ):  # what has no room is refused on submission, with the numbers
        return params
    return replace(params, max_tokens=min(max(USUAL_TOKENS, params.min_tokens), room))
