"""`penstock chat`: a conversation in the terminal, or one message per line from a pipe."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from penstock.base.config import Config
from penstock.base.errors import RequestError
from penstock.cli.answer import TimedAnswer, follow, json_line, record, remark
from penstock.cli.command import Command, option
from penstock.cli.conversation import Conversation
from penstock.cli.live import LiveLine
from penstock.cli.load import loaded
from penstock.cli.options import OUTPUT, PROMPT, SAMPLING, common_options, engine_config, sampling_params
from penstock.cli.prompt import decode, model_path
from penstock.cli.terminal import Interrupt, is_terminal, one_line, say, write
from penstock.step.params import SamplingParams
from penstock.step.request import FinishReason

if TYPE_CHECKING:
    from penstock.api.llm import LLM

HELP = """\
/help          this list
/reset         forget the conversation, keep the system message
/system TEXT   set the system message; without TEXT, show it
/exit          leave, as Ctrl-D does
A line that begins with // is sent with one slash. Ctrl-C stops an answer; a second one leaves."""
EXAMPLES = r"""
  penstock chat                                    with the model that comes with penstock
  penstock chat ./my-model --system "You are terse."
  printf 'Hi!\nAnd in French?\n' | penstock chat ./my-model --quiet
  penstock chat ./my-model --json < questions.txt | jq -r .text
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", required=False, metavar="[MODEL]")
@option(PROMPT, "--system", metavar="TEXT", help="System message before the conversation.")
@option(
    PROMPT,
    "--chat/--raw",
    default=True,
    help="Use the model's chat template; --raw continues one plain text instead. [--chat]",
)
@option(
    SAMPLING,
    "--max-tokens",
    type=int,
    metavar="N",
    help="Most tokens of an answer. [what the context has room for]",
)
@option(OUTPUT, "--json", is_flag=True, help="Print one JSON object an answer, and nothing else, on stdout.")
@common_options
@click.pass_context
def command(ctx: click.Context, /, **settings: object) -> None:
    """Talk with a model.

    MODEL is a Hugging Face checkpoint directory or a GGUF file; without it the small model that comes with
    penstock answers. /help lists what can be typed besides messages. Where stdin is no terminal, each of its
    lines is a message. Answers go to stdout, everything else to stderr.
    """
    asked = ctx.params
    if asked["system"] is not None and not asked["chat"]:
        raise click.UsageError("--system needs the chat template, which --raw leaves out; give one of them")
    params = sampling_params(ctx)
    config = engine_config(ctx, model_path(asked["model"]), sequences=1)
    with loaded(config, quiet=asked["quiet"], trace=asked["trace"]) as llm:
        conversation = Conversation(llm, asked["chat"], asked["system"])
        conversation.check()
        if typed := is_terminal(sys.stdin):
            say("/help lists the commands, Ctrl-D leaves", faint=True)
        flags = {name: asked[name] for name in ("json", "quiet", "verbose")}
        ChatSession(llm, config, params, conversation, typed=typed, **flags).talk()


class Leave(Exception):
    """Raised when /exit was typed."""


@dataclass(slots=True)
class ChatSession:
    """Runs a chat: a line in, an answer out."""

    llm: "LLM"
    config: Config
    params: SamplingParams
    conversation: Conversation
    typed: bool
    """A person types the lines if this is set. Mistakes then end nothing; from a pipe they end the chat."""
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    leaving: bool = False
    """Ctrl-C was pressed, and nothing was said since: once more leaves."""

    def talk(self) -> None:
        """Answer lines until the user leaves, or stdin ends."""
        for line in self._typed_lines() if self.typed else _piped_lines():
            try:
                self._take(line)
            except Leave:
                return
            except RequestError as error:
                if not self.typed:
                    raise
                say(f"penstock: error: {one_line(str(error))}")

    def _typed_lines(self) -> Iterator[str]:
        with suppress(ImportError):  # then without history and cursor keys
            import readline  # noqa: F401  # 5 ms; that it is imported is all that input() needs
        while True:
            try:
                line = _ask()
            except EOFError:
                say("")
                return
            except UnicodeDecodeError:
                say(
                    "penstock: error: that line is not valid UTF-8 and was not sent; set the terminal to "
                    "UTF-8"
                )
                continue
            except KeyboardInterrupt:
                if self.leaving:
                    raise
                self.leaving = True
                say("\nCtrl-C again or Ctrl-D leaves", faint=True)
                continue
            self.leaving = False
            yield line

    def _take(self, line: str) -> None:
        """Answer a message, or obey a command."""
        if line.startswith("//"):
            self._answer(line[1:])
        elif line.startswith("/"):
            self._obey(*line.split(maxsplit=1))
        elif line.strip():
            self._answer(line)

    def _obey(self, command: str, text: str = "") -> None:
        match command:
            case "/help":
                say(HELP)
            case "/exit":
                raise Leave
            case "/reset":
                self.conversation.turns.clear()
                say("a new conversation begins", faint=True)
            case "/system" if not text:
                say(self.conversation.system or "there is no system message", faint=True)
            case "/system":
                if not self.conversation.template:
                    raise RequestError(
                        "a system message needs the chat template, which --raw leaves out; start penstock "
                        "chat without --raw"
                    )
                Conversation(self.llm, True, text).check()
                self.conversation.system = text
                say("the system message is set", faint=True)
            case _:
                raise RequestError(
                    f"{command} is no command of the chat; /help lists them, and // at the start of a line "
                    "sends one slash"
                )

    def _answer(self, line: str) -> None:
        request, length = self.conversation.request(line)
        longest = self.llm.limits.max_model_len
        room = longest - length
        if room < 1:
            hint = "/reset begins a new one" if self.conversation.turns else "shorten the message"
            raise RequestError(
                f"the conversation would have {length} tokens, but the context holds {longest} with an "
                f"answer; {hint}"
            )
        params = replace(self.params, max_tokens=min(self.params.max_tokens or room, room))
        params, reader = self.conversation.marked(params), self.conversation.reader
        with Interrupt() as interrupt, LiveLine.of(self.llm, quiet=self.quiet or self.json) as live:
            put = (lambda text: None) if self.json else live.write
            live.compute(length)
            answer = follow(
                self.llm,
                request,
                params,
                lambda delta: put(reader.shown(delta).text),
                lambda: interrupt.asked,
            )
            output = answer.completion.outputs[0]
            _, text = reader.split(output.text)
            if not text.endswith("\n"):
                put("\n")
        if self.json:
            write(json_line(record(self.llm, self.config, line, params, answer, reader.split)))
        stopped = output.finish_reason is FinishReason.ABORT
        self.leaving = stopped
        if stopped and not text.strip():
            say("stopped; the message and its answer are left out of the conversation", faint=True)
        else:
            self.conversation.turns.append((line, text))
        self._remark(answer, full=not stopped and answer.tokens >= room)

    def _remark(self, answer: TimedAnswer, *, full: bool) -> None:
        if self.verbose:
            remark(answer)
        if self.conversation.reader.unanswered(answer.completion):
            say("the answer was cut short in its reasoning; allow more with --max-tokens", faint=True)
        if full and answer.completion.finish_reason is FinishReason.LENGTH:
            held = len(answer.completion.prompt_tokens) + answer.tokens
            say(f"the context is full with {held} tokens; /reset begins a new conversation", faint=True)


def _ask() -> str:
    """Read a line from the terminal. Raises EOFError and KeyboardInterrupt."""
    if is_terminal(sys.stdout):
        return input("> ")
    click.echo("> ", nl=False, err=True)  # input() would write it among the answers
    return input()


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), start=1):
        yield decode(line, f"line {number} of stdin").rstrip("\r\n")
