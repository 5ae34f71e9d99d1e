"""Answer what is typed in a chat besides messages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.config import Config
from penstock.base.errors import RequestError
from penstock.base.units import counted, parse_tokens
from penstock.cli.conversation import Conversation
from penstock.cli.editor import Editor
from penstock.cli.options import check_temperature
from penstock.cli.terminal import one_line, say
from penstock.cli.thinking import Think
from penstock.cli.transcript import load, read_text, save
from penstock.step.params import SamplingParams

if TYPE_CHECKING:
    from penstock.api.llm import LLM


class Leave(Exception):
    """Raised when /exit was typed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A message is to be answered. again: it takes the place of the last one, and of its answer."""

    text: str
    again: bool = False


@dataclass(slots=True)
class Chat:
    """Holds what the commands of a chat change."""

    llm: "LLM"
    config: Config
    params: SamplingParams
    conversation: Conversation
    editor: Editor | None = None
    """Reads what is typed. There is none where messages come from a pipe: then nothing can be asked."""
    quiet: bool = False
    verbose: bool = False
    wrap: bool = True
    markdown: bool = True
    lora: str | None = None
    """Name of the LoRA adapter that answers."""
    files: list[str] = field(default_factory=list)
    """Texts that go with the next message."""
    last: str = ""
    """The last message that was sent."""

    def composed(self, text: str) -> str:
        """Return a message with the files that go with it."""
        return "\n\n".join([*self.files, text])

    def note(self, text: str) -> None:
        """Say something about the chat."""
        say(text, faint=True)


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """Describes a command: its names, what stands behind them, what it is for, and what it does."""

    names: tuple[str, ...]
    takes: str
    purpose: str
    do: Callable[[Chat, str], Asked | None]


def obey(chat: Chat, line: str) -> Asked | None:
    """Do what a line that begins with a slash says. Return a message if one is to be answered. Raises Leave
    and RequestError."""
    name, _, text = line.partition(" ")
    name, first, rest = name.partition("\n")
    command = NAMES.get(name)
    if command is None:
        close = get_close_matches(name, NAMES, 1, 0.6)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RequestError(
            f"{one_line(name)[:40]} is no command of the chat; {hint}/help lists them, and // at the start "
            "of a line sends one slash"
        )
    return command.do(chat, (f"{rest} {text}" if first else text).strip())


def help_text() -> str:
    """Return the list of commands."""
    rows = [
        (", ".join(command.names) + (f" {command.takes}" if command.takes else ""), command.purpose)
        for command in COMMANDS
    ]
    width = max(len(row[0]) for row in rows)
    return "\n".join([*(f"{typed:{width}}  {purpose}" for typed, purpose in rows), *_HINTS])


_HINTS = (
    'Several lines: Alt-Enter, a pasted text, a backslash at the end, or """ around.',
    "A line that begins with // is sent with one slash.",
    "Ctrl-C stops an answer; a second one leaves.",
)


def _help(chat: Chat, text: str) -> None:
    say(help_text())


def _exit(chat: Chat, text: str) -> None:
    raise Leave


def _clear(chat: Chat, text: str) -> None:
    chat.conversation.turns.clear()
    chat.files.clear()
    chat.last = ""
    chat.note("a new conversation begins")


def _system(chat: Chat, text: str) -> None:
    if not text:
        chat.note(chat.conversation.system or "there is no system message")
        return
    if not chat.conversation.template:
        raise RequestError(
            "a system message needs the chat template, which --raw leaves out; start penstock chat without "
            "--raw"
        )
    Conversation(chat.llm, True, text).check()
    chat.conversation.system = text
    chat.note("the system message is set")


# -- settings

_NUMBERS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}
_OTHER_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Other names that people know settings by."""
_SWITCHES = {
    "wordwrap": ("wrap", True),
    "nowordwrap": ("wrap", False),
    "markdown": ("markdown", True),
    "nomarkdown": ("markdown", False),
    "verbose": ("verbose", True),
    "quiet": ("verbose", False),
}


def _set(chat: Chat, text: str) -> None:
    words = text.replace("=", " ", 1).split() if not text.startswith("system") else text.split(maxsplit=1)
    match words:
        case []:
            chat.note(_settings(chat))
        case ["system", said]:
            _system(chat, said)
        case ["think", wish]:
            _think(chat, wish)
        case ["think"]:
            _think(chat, "on")
        case ["nothink"]:
            _think(chat, "off")
        case ["history" | "nohistory" as wish]:
            _keep(chat, wish == "history")
        case [switch] if switch in _SWITCHES:
            name, on = _SWITCHES[switch]
            setattr(chat, name, on)
            chat.note(f"{switch} is set")
        case [name, value] | ["parameter", name, value]:
            _number(chat, name.replace("-", "_"), value)
        case _:
            raise RequestError(f"/set takes a name and a value; names are {', '.join(_names())}")


def _names() -> list[str]:
    return [*_NUMBERS, "think", "system", *_SWITCHES, "history", "nohistory"]


def _number(chat: Chat, name: str, value: str) -> None:
    name = _OTHER_NAMES.get(name, name)
    if name in (*_SWITCHES, "nothink", "history", "nohistory"):
        raise RequestError(f"{name} takes no value; type /set {name}")
    if name not in _NUMBERS:
        raise RequestError(f"{name!r} is no setting of the chat; names are {', '.join(_names())}")
    kind = _NUMBERS[name]
    try:
        tokens = parse_tokens(value) if name == "max_tokens" else None
        number = None if value == "default" else kind(value) if tokens is None else tokens
    except ValueError as error:
        raise RequestError(
            f"{name} {value!r} is no {'whole number' if kind is int else 'number'}; give one, or default"
        ) from error
    if name == "temperature" and number is not None:
        check_temperature(number)
    changed: dict[str, Any] = {name: number}
    chat.params = replace(chat.params, **changed)
    chat.note(f"{name} is {'the default' if number is None else f'{number:g}' if kind is float else number}")


def _think(chat: Chat, text: str) -> None:
    if text and text not in list(Think):
        raise RequestError(f"think {text!r} is not known; give on, off or hide")
    if not chat.conversation.template:
        raise RequestError("thinking needs the chat template, which --raw leaves out")
    if text:
        chat.conversation.think = Think(text)
    said = chat.conversation.unheard()
    chat.note(said[-1] if said else f"think is {chat.conversation.think or 'as the model usually does'}")


def _keep(chat: Chat, keep: bool) -> None:
    if chat.editor is not None:
        chat.editor.keeps = keep
    chat.note("messages are kept for later chats" if keep else "messages are not kept for later chats")


def _settings(chat: Chat) -> str:
    """Return the settings and their values, the model's own where none was given."""
    defaults = chat.llm.reader.defaults
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    lines = []
    for name in _NUMBERS:
        given = getattr(chat.params, name)
        value, mark = given, ""
        if given is None:
            own = getattr(defaults, name, None)
            value, mark = (own, "  (the model's)") if own is not None else (usual.get(name, "default"), "")
        lines.append(f"{name:20}{value}{mark}")
    thinks = chat.conversation.think or "default"
    lines += [f"{'think':20}{thinks}", f"{'system':20}{one_line(chat.conversation.system or 'none')[:60]}"]
    return "\n".join(lines)


def _show(chat: Chat, text: str) -> None:
    if text == "system":
        return _system(chat, "")
    if text in ("parameters", "settings"):
        return chat.note(_settings(chat))
    spec, limits = chat.llm.spec, chat.llm.limits
    turns = len(chat.conversation.turns)
    chat.note(
        "\n".join(
            (
                f"{'model':20}{chat.config.model}",
                f"{'family':20}{spec.family}, {counted(spec.layers, 'layer')}, {chat.llm.dtype} on "
                f"{chat.llm.device}",
                f"{'context':20}{limits.max_model_len:,} tokens",
                f"{'conversation':20}{counted(turns, 'message')}, {counted(_length(chat), 'token')}",
                _settings(chat),
            )
        )
    )


def _length(chat: Chat) -> int:
    """Return the tokens of the conversation so far."""
    return chat.conversation.request("")[1] if chat.conversation.turns else 0


# -- the conversation


def _undo(chat: Chat, text: str) -> None:
    if not chat.conversation.turns:
        raise RequestError("there is no message to take back; the conversation is empty")
    said, _ = chat.conversation.turns.pop()
    chat.last = ""
    shown = one_line(said)
    chat.note(f"taken back: {shown if len(shown) <= 60 else f'{shown[:60]}…'}")


def _retry(chat: Chat, text: str) -> Asked:
    turns = chat.conversation.turns
    if not chat.last and not turns:
        raise RequestError("there is no message to answer again; type one first")
    if chat.params.temperature == 0:
        chat.note("at temperature 0 the answer will be the same; /set temperature 0.7 varies it")
    return Asked(
        chat.last or turns[-1][0], again=not chat.last or (bool(turns) and turns[-1][0] == chat.last)
    )


def _path(text: str) -> Path:
    """Return the file that a command names. Raises RequestError."""
    path = Path(text.strip("\"'"))
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise RequestError(f"{path} begins with the home of a user who is not there; name a file") from error


def _file(chat: Chat, text: str) -> None:
    if not text:
        raise RequestError("/file needs the name of a text file; it goes with the next message")
    path = _path(text)
    content = read_text(path)
    tokens = len(chat.llm.reader.encode(content, special=False))
    fence = "```"
    while fence in content:
        fence += "`"
    whole = f"{path.name}:\n{fence}\n{content.removesuffix(chr(10))}\n{fence}"
    length = chat.conversation.request("\n\n".join([*chat.files, whole]))[1]
    if length >= (longest := chat.llm.limits.max_model_len):
        raise RequestError(
            f"{path} has {tokens:,} tokens, and the conversation would have {length:,} with it, but the "
            f"context holds {longest:,} with an answer; give a shorter file, or a larger --max-length"
        )
    chat.files.append(whole)
    chat.note(f"{path.name} goes with the next message: {counted(tokens, 'token')}")


def _save(chat: Chat, text: str) -> None:
    if not text:
        raise RequestError("/save needs the name of a file; it is written as JSON")
    path = _path(text)

    def may_replace() -> bool:
        if chat.editor is None:
            return False
        try:
            said = chat.editor.ask(f"{one_line(path.name)} exists; replace it? [y/N] ")
        except (EOFError, KeyboardInterrupt):
            return False
        return said.strip().lower() in ("y", "yes")

    if not save(path, str(chat.config.model), chat.conversation.messages, may_replace):
        raise RequestError(f"{path} exists, and was not replaced; name another file")
    turns = len(chat.conversation.turns)
    chat.note(f"saved to {path}: {_turns(turns)}")


def _load(chat: Chat, text: str) -> None:
    if not text:
        raise RequestError("/load needs the name of a file that /save wrote")
    path = _path(text)
    now = chat.conversation
    system, turns = load(path)
    if system is not None and not now.template:
        raise RequestError(f"{path} has a system message, which needs the chat template; start without --raw")
    read = Conversation(chat.llm, now.template, system, turns, now.variables, now.think)
    _, length = read.request("?")
    if length >= (longest := chat.llm.limits.max_model_len):
        raise RequestError(
            f"the conversation in {path} has {length:,} tokens, but the context holds {longest:,} with an "
            "answer; a larger --max-length may hold it"
        )
    chat.conversation, chat.last = read, ""
    chat.note(f"loaded {path}: {_turns(len(turns))}")


def _turns(count: int) -> str:
    return counted(count, "message and its answer", "messages and answers")


COMMANDS = (
    ChatCommand(("/help", "/?"), "", "this list", _help),
    ChatCommand(("/system",), "[TEXT]", "set or show the system message", _system),
    ChatCommand(("/set", "/settings"), "[NAME VALUE]", "change a setting, or show all", _set),
    ChatCommand(("/think",), "on|off|hide", "think first, or not, or unseen", _think),
    ChatCommand(("/show",), "", "model, conversation and settings", _show),
    ChatCommand(("/file",), "PATH", "put a text file into the next message", _file),
    ChatCommand(("/retry",), "", "answer again, with another seed", _retry),
    ChatCommand(("/undo",), "", "take message and answer back", _undo),
    ChatCommand(("/clear", "/reset", "/new"), "", "forget all but the system message", _clear),
    ChatCommand(("/save",), "FILE", "write the conversation, as JSON", _save),
    ChatCommand(("/load",), "FILE", "go on with a saved conversation", _load),
    ChatCommand(("/exit", "/bye", "/quit"), "", "leave, as Ctrl-D does", _exit),
)
NAMES = {name: command for command in COMMANDS for name in command.names}
TAKE_FILES = ("/file", "/save", "/load")
