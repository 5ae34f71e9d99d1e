"""`penstock chat`: a conversation in the terminal, or one message per line from a pipe."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import click

from penstock.base.errors import ConfigError, RequestError
from penstock.base.units import counted
from penstock.cli.answer import TimedAnswer, expect, follow, json_line, record, remark, warn_of_cut
from penstock.cli.answer_view import AnswerView
from penstock.cli.chat_commands import NAMES, TAKE_FILES, Asked, Chat, Leave, obey
from penstock.cli.chat_options import chat_options, template_settings
from penstock.cli.command import Command, TokenRange, files, option
from penstock.cli.conversation import AnswerReader, Conversation
from penstock.cli.editor import Editor, editor
from penstock.cli.live import LiveLine
from penstock.cli.load import loaded
from penstock.cli.models import expect_tokenizer, located, taken
from penstock.cli.options import (
    OUTPUT,
    PROMPT,
    SAMPLING,
    as_flags,
    common_options,
    engine_config,
    sampling_params,
)
from penstock.cli.prompt import decode, model_path
from penstock.cli.terminal import Interrupt, is_terminal, one_line, say, text_alone, without_echo, write
from penstock.step.request import FinishReason

EXAMPLES = r"""
  penstock chat                                    with the model that comes with penstock
  penstock chat ./my-model --system "You are terse."
  printf 'Hi!\nAnd in French?\n' | penstock chat ./my-model --quiet
  penstock chat ./my-model --json < questions.txt | jq -r .text
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("model", required=False, metavar="[MODEL]", shell_complete=files)
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
    type=TokenRange(),
    metavar="N",
    help="Most tokens of an answer. [what the context has room for]",
)
@chat_options
@option(OUTPUT, "--json", is_flag=True, help="Print one JSON object an answer, and nothing else, on stdout.")
@option(
    OUTPUT,
    "--history/--no-history",
    default=True,
    help="Keep what is typed in a terminal for later chats. [--history]",
)
@common_options
@click.pass_context
def command(ctx: click.Context, /, **settings: object) -> None:
    """Talk with a model.

    MODEL is a checkpoint directory, a GGUF file, or a model of the Hugging Face Hub, as owner/name;
    without it the small model that comes with penstock answers. /help lists what can be typed besides
    messages. Where stdin is no terminal, each of its lines is a message. Answers go to stdout, everything
    else to stderr.
    """
    asked = ctx.params
    if asked["system"] is not None and not asked["chat"]:
        raise click.UsageError("--system needs the chat template, which --raw leaves out; give one of them")
    params = sampling_params(ctx)
    asks = template_settings(ctx, template=asked["chat"])
    config, _ = located(
        engine_config(
            ctx, model_path(asked["model"], hint="; what you say comes once chat has begun"), sequences=1
        ),
        **taken(asked),
    )
    expect_tokenizer(config.model)
    with loaded(config, quiet=asked["quiet"], trace=asked["trace"]) as llm:
        conversation = Conversation(llm, asked["chat"], asked["system"], **asks)
        conversation.check()
        for said in conversation.unheard():
            say(f"penstock: note: {said}")
        typing = None
        if is_terminal(sys.stdin):
            typing = editor(NAMES, TAKE_FILES, keep=asked["history"])
            say("/help lists the commands, Ctrl-D leaves", faint=True)
        flags = {name: asked[name] for name in ("quiet", "verbose", "markdown", "lora")}
        chat = Chat(llm, config, params, conversation, typing, **flags)
        with without_echo():  # All the time: an editor shows what is typed by itself.
            ChatSession(chat, asked["json"]).talk()


@dataclass(slots=True)
class ChatSession:
    """Runs a chat: a message in, an answer out. From a pipe, the first mistake ends it."""

    chat: Chat
    json: bool = False
    leaving: bool = False
    """Ctrl-C was pressed, and nothing was said since: once more leaves."""
    retries: int = 0
    """Answers to the last message, but for the first."""

    def talk(self) -> None:
        """Answer messages until the user leaves, or stdin ends."""
        editor = self.chat.editor
        for text in _piped_lines() if editor is None else self._typed(editor):
            try:
                self._take(text)
            except Leave:
                return
            except (RequestError, ConfigError) as error:
                if editor is None:
                    raise
                say(f"penstock: error: {as_flags(one_line(str(error)))}")

    def _typed(self, editor: Editor) -> Iterator[str]:
        while True:
            try:
                text = editor.read()
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
                say("Ctrl-C again or Ctrl-D leaves", faint=True)
                continue
            self.leaving = False
            yield text

    def _take(self, text: str) -> None:
        """Answer a message, or obey a command."""
        message: Asked | None = None
        if text.startswith("//"):
            message = Asked(text[1:])
        elif text.startswith("/"):
            message = obey(self.chat, text)
        elif text.strip():
            message = Asked(text)
        if message is not None and message.again:
            self._answer_again(message.text)
        elif message is not None:
            self._answer(self.chat.composed(message.text))

    def _answer_again(self, text: str) -> None:
        """Answer the last message again. The answer that was there is back where no other comes."""
        turns = self.chat.conversation.turns
        before, count = turns.pop(), len(turns)
        try:
            self._answer(text, again=True)
        finally:
            if len(turns) == count:
                turns.append(before)

    def _answer(self, text: str, *, again: bool = False) -> None:
        chat = self.chat
        conversation = chat.conversation
        request, length = conversation.request(text)
        longest = chat.llm.limits.max_model_len
        room = longest - length
        if room < 1:
            hint = "/reset begins a new one" if conversation.turns else "shorten the message"
            raise RequestError(
                f"the conversation would have {length:,} tokens, but the context holds {longest:,} with an "
                f"answer; {hint}"
            )
        self.retries = self.retries + 1 if again else 0
        seed = chat.params.seed
        params = replace(
            chat.params,
            max_tokens=min(chat.params.max_tokens or room, room),
            seed=None if seed is None else seed + self.retries,
        )
        params = conversation.marked(params)
        reader = conversation.reader
        if chat.verbose:
            expect(chat.llm, request, params)
        live_line = LiveLine.of(chat.llm, quiet=chat.quiet or self.json)
        with Interrupt() as interrupt, text_alone(), live_line as live:
            view = self._view(live, reader)
            live.compute(length)
            if not again:  # Files that came since go with the next message.
                chat.files.clear()
            chat.last = text
            answer = follow(
                chat.llm,
                request,
                params,
                view.show if view is not None else lambda _: None,
                lambda: interrupt.asked,
                lora=chat.lora,
            )
            if view is not None:
                view.end()
        warn_of_cut(chat.llm, params, answer.completion.outputs)
        output = answer.completion.outputs[0]
        _, said = reader.split(output.text)
        if self.json:
            write(json_line(record(chat.llm, chat.config, text, params, answer, reader.split)))
        stopped = output.finish_reason is FinishReason.ABORT
        self.leaving = stopped
        if stopped and not said.strip():
            say("stopped; the message and its answer are left out of the conversation", faint=True)
        else:
            conversation.turns.append((text, said))
        self._remark(answer, full=not stopped and answer.tokens >= room)

    def _view(self, live: LiveLine, reader: AnswerReader) -> AnswerView | None:
        """Return what writes the answer; None where it is written as JSON."""
        if self.json:
            return None
        chat = self.chat
        conversation = chat.conversation
        markdown = chat.markdown and conversation.template
        return AnswerView(live, reader, markdown=markdown, wrap=chat.wrap, think=conversation.think)

    def _remark(self, answer: TimedAnswer, *, full: bool) -> None:
        chat = self.chat
        if chat.verbose:
            remark(answer)
        elif chat.editor is not None and is_terminal(sys.stderr) and not chat.quiet and not self.json:
            say(answer.brief(), faint=True)
        if chat.conversation.reader.unanswered(answer.completion):
            say("the answer was cut short in its reasoning; allow more with --max-tokens", faint=True)
        if full and answer.completion.finish_reason is FinishReason.LENGTH:
            held = len(answer.completion.prompt_tokens) + answer.tokens
            say(
                f"the context is full with {counted(held, 'token')}; /reset begins a new conversation",
                faint=True,
            )


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), start=1):
        yield decode(line, f"line {number} of stdin").rstrip("\r\n")
