"""Makes prompts of requests, as the engine takes them, and what writes the answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.api.reader import Prompt, PromptReader
from penstock.api.sequences import PreparedPrompt
from penstock.api.structures import CrowdedError
from penstock.api.text.detokenize import Detokenizer
from penstock.base.errors import StructureError
from penstock.server.answers.completions import AnswerWriter, ChatWriter, Details
from penstock.server.answers.texts import TextWriter
from penstock.server.broker.calls import BusyError
from penstock.server.parsing.dialects import Dialect, dialect_of
from penstock.server.parsing.forms import behind_reasoning, in_channels, may_be_behind
from penstock.server.parsing.harmony import ANSWERING, MARKS, MESSAGE, HarmonyParser, answer_after, begun
from penstock.server.parsing.output_parser import LIST, OutputParser
from penstock.server.parsing.tools import Tools, template_messages, tools_of
from penstock.server.parsing.turns import EFFORTS, channel_tools
from penstock.server.wire.decoding import FieldError
from penstock.server.wire.requests import ChatRequest, CompletionRequest, TokenizeRequest
from penstock.step.params import SamplingParams
from penstock.step.structure import Structure, StructureKind

MOST_VALUES, MOST_SIZE = 100_000, 1 << 20
"""Values, and characters of their texts and names, of the template variables that a request may have, and of
its tools."""
_HERE = "[the answer goes on here]"
"""Stands behind the text that an answer continues while a template writes it."""
_LONGEST_TOKEN = 64
"""Characters of a token, about: what is further from the end of a text is no part of its last tokens."""
_CROWDED = 10.0
"""Seconds after which there may be time for a structure again."""


def read(
    reader: PromptReader, asked: ChatRequest | CompletionRequest, dialect: Dialect | None = None
) -> tuple[list[PreparedPrompt], AnswerWriter]:
    """Return a checked request's prompts as token ids, and what writes the answer: this takes long for long
    prompts. May be called from any thread.

    dialect: how the model writes; None is what its templates say.

    Raise FieldError and RequestError for what cannot be served.
    """
    if isinstance(asked, ChatRequest):
        one, speech = read_chat(reader, asked, dialect)
        return [one], ChatWriter(
            asked.model, reader.tokenizer, speech, _details(asked, [one]), reasons=asked.include_reasoning
        )
    params, prompts = _shown(reader, asked), asked.prompts

    def prompt_of(given: str | list[int]) -> Prompt:
        most = _most_tokens(reader, asked)
        if isinstance(given, list):
            return given if most is None else given[-most:]
        special = asked.add_special_tokens
        return given if special and most is None else _encoded(reader, given, most, special=special)

    ready = [_read(reader, prompt_of(one), params, asked) for one in prompts]
    echoes = None
    if asked.echo:  # What was cut off was not read, and has no tokens in the answer.
        told = prompts if asked.truncate_prompt_tokens is None else [list(one.tokens) for one in ready]
        echoes = [one if isinstance(one, str) else reader.decode(one) for one in told]
    texts = [
        partial(reader.tokenizer.detokenizer, continues=bool(one.prompt), kept=params.shown_tokens)
        for one in (ready if reader.has_tokenizer and asked.logprobs is not None else ())
    ]
    details = _details(asked, ready, texts)
    tokenizer = reader.tokenizer if reader.has_tokenizer else None
    return ready, TextWriter(asked.model, tokenizer, echoes, params.n, details)


def _details(
    asked: ChatRequest | CompletionRequest,
    ready: Sequence[PreparedPrompt],
    texts: Sequence[Callable[[], Detokenizer]] = (),
) -> Details:
    """Return what an answer tells beside its text. texts: as of `Details`."""
    return Details(
        prompts=[one.tokens for one in ready] if asked.return_token_ids else None,
        prompt_logprobs=asked.prompt_logprobs,
        echoed_logprobs=asked.logprobs if isinstance(asked, CompletionRequest) and asked.echo else None,
        only_echoes=isinstance(asked, CompletionRequest) and asked.only_echoes,
        texts=texts,
    )


def _shown(reader: PromptReader, asked: ChatRequest | CompletionRequest) -> SamplingParams:
    """Return the settings of outputs, whose text may have special tokens."""
    params = asked.params
    if asked.skip_special_tokens or not reader.has_tokenizer:
        return params
    return replace(params, shown_tokens=sorted(reader.tokenizer.special_tokens))


def _most_tokens(reader: PromptReader, asked: ChatRequest | CompletionRequest) -> int | None:
    """Return the most tokens of a prompt, of which the last are kept; None if none are left out. Raise
    FieldError."""
    if asked.truncate_prompt_tokens == 0:
        raise FieldError(
            "truncate_prompt_tokens 0 leaves nothing of the prompt; give a number, or -1 for as many as "
            "there is room for",
            "truncate_prompt_tokens",
        )
    if asked.truncate_prompt_tokens != -1:
        return asked.truncate_prompt_tokens
    return max(reader.limits.max_model_len - (asked.most_tokens or 1), 1)


def _encoded(reader: PromptReader, text: str, most: int | None, *, special: bool) -> list[int]:
    """Return the token ids of a text: the last ones, if there may be no more than `most`."""
    if most is None:
        return reader.encode(text, special=special)
    return reader.tokenizer.encode(text[-most * _LONGEST_TOKEN :], special=special)[-most:]


def read_chat(
    reader: PromptReader, asked: ChatRequest, dialect: Dialect | None = None, *, clamps: bool = False
) -> tuple[PreparedPrompt, Callable[[], OutputParser]]:
    """Return a conversation's prompt, and what makes parsers of its answers.

    clamps: whether the answer may have fewer tokens than were asked for, where there is no room for these.

    Raises FieldError and RequestError.
    """
    dialect = dialect or dialect_of(reader.tokenizer.templates)
    tools = tools_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    text, params = _chat_text(reader, asked, dialect, tools), _shown(reader, asked)
    if dialect.channels:
        text, params, speech = _in_channels(reader, params, text, tools, calls=dialect.channel_calls)
        marks: Sequence[str] = MARKS
    else:
        quiet = asked.reasoning_effort == "none" or not (asked.chat_template_kwargs or {}).get(
            "enable_thinking", True
        )
        params, marks, speech = _in_marks(reader, params, text, tools, dialect, quiet=quiet)
    shown = [token for mark in marks if (token := reader.tokenizer.token_to_id(mark)) is not None]
    begins = reader.tokenizer.token_to_id(MESSAGE) if dialect.channels else None
    params = replace(params, shown_tokens=[*params.shown_tokens, *shown], text_token=begins)
    tokens = _encoded(reader, text, _most_tokens(reader, asked), special=False)
    if clamps and len(tokens) + (params.max_tokens or 0) > reader.limits.max_model_len:
        params = replace(params, max_tokens=None)
    ready = _read(reader, tokens, params, asked)
    return ready, speech


def _in_marks(
    reader: PromptReader,
    params: SamplingParams,
    text: str,
    tools: Tools,
    dialect: Dialect,
    *,
    quiet: bool,
) -> tuple[SamplingParams, Sequence[str], Callable[[], OutputParser]]:
    """Return the settings of an output whose reasoning and calls stand within marks, these marks, and what
    makes parsers of it.

    text: the prompt.
    quiet: whether no reasoning was asked for: an answer with a form then begins with that.

    Raise FieldError and RequestError.
    """
    if tools.forced:
        params = _held(params, tools)
    elif tools and _form(params) is not None:
        raise FieldError(
            "response_format does not work with tools; set tool_choice to none, or leave response_format out",
            "response_format",
        )
    format = LIST if tools.forced else dialect.calls if tools else None
    thought, end = dialect.thought, text.rstrip()
    thinking = thought is not None and end.endswith(thought.begin)
    if thought is not None and (form := _form(params)) is not None:
        if not may_be_behind(form) or (quiet and not thinking):
            thought, thinking = None, False
        elif not end.endswith(thought.end):
            params = replace(
                params, structure=behind_reasoning(form, thought, reader.tokenizer, opened=thinking)
            )
    marks = [
        *(format.markers + format.others if format else ()),
        *((thought.begin, thought.end) if thought else ()),
    ]
    speech = partial(
        OutputParser, format, tools.schemas, several=tools.several, thought=thought, thinking=thinking
    )
    return params, marks, speech


def _in_channels(
    reader: PromptReader, params: SamplingParams, text: str, tools: Tools, *, calls: bool
) -> tuple[str, SamplingParams, Callable[[], OutputParser]]:
    """Return the prompt and the settings of an output in channels, and what makes parsers of it.

    text: the prompt. The answer is begun in it where its form can be no part of a larger one.
    calls: whether messages to functions are calls.

    Raise FieldError and RequestError.
    """
    header, form = begun(text), None if tools.forced else _form(params)
    functions = tools.schemas if calls or tools.forced else {}
    if form is not None and not functions and header != ANSWERING and not may_be_behind(form):
        text += answer_after(header)
        header = begun(text)
    elif tools.forced or (form is not None and header != ANSWERING):
        called = {name: _arguments(tools, name) for name in tools.forced or functions}
        if form is not None and not may_be_behind(form):
            raise _no_part("what response_format asks for has", "response_format")
        try:
            structure = in_channels(form, called, reader.tokenizer, header=header)
        except StructureError as error:
            raise FieldError(str(error), "tools" if called else "response_format") from error
        params = replace(params, structure=structure)
    return text, params, partial(HarmonyParser, functions, several=tools.several, header=header)


def _no_part(what: str, param: str) -> FieldError:
    return FieldError(
        f"{what} multipleOf, a control character or a comment in an expression, and where a model that "
        "writes in channels may call tools, it cannot be held to those; leave them out, or change "
        "tool_choice",
        param,
    )


def _form(params: SamplingParams) -> Structure | None:
    """Return the structure of an answer. There is none where a grammar says what all of the output is."""
    grammar = params.structure is not None and params.structure.kind is StructureKind.LARK
    return None if grammar else params.structure


def _arguments(tools: Tools, name: str) -> Structure:
    """Return the structure of a function's arguments: any object where it cannot be kept to and need not be.
    Raise FieldError."""
    try:
        structure = Structure.json_schema(tools.arguments(name))
    except StructureError as error:
        raise FieldError(f"the tools cannot be used: {error}", "tools") from error
    if may_be_behind(structure):
        return structure
    if not tools.forced:
        return Structure.json_object()
    raise _no_part(f"the parameters of {name!r} have", "tools")


def _read(
    reader: PromptReader, prompt: Prompt, params: SamplingParams, asked: ChatRequest | CompletionRequest
) -> PreparedPrompt:
    """Return a prompt as the engine takes it. Raise FieldError, RequestError and BusyError."""
    try:
        ready = reader.read(prompt, params)
        return replace(ready, priority=asked.priority) if asked.priority else ready
    except CrowdedError as error:
        raise BusyError(str(error), _CROWDED) from error
    except StructureError as error:
        raise FieldError(str(error), asked.structured_by) from error


def _held(params: SamplingParams, tools: Tools) -> SamplingParams:
    """Return the settings with outputs held to one of the calls that are asked for. Raise FieldError and
    RequestError."""
    try:
        return replace(params, structure=Structure.json_schema(tools.schema()))
    except StructureError as error:
        raise FieldError(f"the tools cannot be used: {error}", "tools") from error


def chat_tokens(
    reader: PromptReader, asked: ChatRequest | TokenizeRequest, dialect: Dialect | None = None
) -> list[int]:
    """Return a conversation as token ids, by the model's own template. Raises FieldError and RequestError."""
    tools = tools_of(asked.tools, asked.tool_choice if isinstance(asked, ChatRequest) else None, None)
    return reader.encode(
        _chat_text(reader, asked, dialect or dialect_of(reader.tokenizer.templates), tools), special=False
    )


def _chat_text(
    reader: PromptReader, asked: ChatRequest | TokenizeRequest, dialect: Dialect, tools: Tools
) -> str:
    reads = reader.tokenizer.template_variables(tools=bool(tools))
    if tools and "tools" not in reads:
        raise FieldError(
            "tools were sent, but the model's chat template takes none; leave them out, or serve a model "
            "that does",
            "tools",
        )
    for name, given in (("chat_template_kwargs", asked.chat_template_kwargs), ("tools", asked.tools)):
        _expect_few(name, given)
    for number, message in enumerate(asked.messages or ()):
        if message.role == "user" and message.content is None:
            raise FieldError(
                "a message of the user has no content; give it a text", f"messages[{number}].content"
            )
    variables = _asked_for(asked, reads) | (asked.chat_template_kwargs or {})
    messages = template_messages(asked.messages or (), dialect)
    described = tools.described if tools else None
    if dialect.channels:
        if (effort := variables.get("reasoning_effort", EFFORTS[0])) not in EFFORTS:
            raise FieldError(
                f"reasoning_effort {str(effort)[:40]!r} is not one that the model knows; ask for one of "
                f"{', '.join(EFFORTS)}",
                "reasoning_effort",
            )
        described = channel_tools(described) if described else None
    begins = asked.add_generation_prompt and not asked.continue_final_message
    if asked.continue_final_message:
        messages[-1] |= {"content": f"{messages[-1]['content']}{_HERE}"}
    text = reader.tokenizer.render_chat(messages, add_generation_prompt=begins, tools=described, **variables)
    if not asked.continue_final_message:
        return text
    if (end := text.rfind(_HERE)) < 0:
        raise FieldError(
            "the model's chat template does not write the last message, so it cannot be continued; leave "
            "continue_final_message out",
            "continue_final_message",
        )
    return text[:end]


def _expect_few(name: str, given: object) -> None:
    """Raise FieldError for more than a template's process is to be sent, without going through all of it."""
    left, values, size = [given], 0, 0
    while left:
        one = left.pop()
        values += 1
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, int):
            size += one.bit_length() // 3
        elif isinstance(one, dict):
            size += sum(map(len, one))
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
        if values + len(left) > MOST_VALUES or size > MOST_SIZE:
            raise FieldError(
                f"{name} may have {MOST_VALUES:,} values, and {MOST_SIZE:,} characters in their texts and "
                "names; send fewer, or put them into a message",
                name,
            )


def _asked_for(asked: ChatRequest | TokenizeRequest, reads: frozenset[str]) -> dict[str, object]:
    """Return how much to reason and to say, as far as the template can tell the model."""
    if not isinstance(asked, ChatRequest):
        return {}
    variables: dict[str, object] = {"reasoning_effort": asked.reasoning_effort, "verbosity": asked.verbosity}
    if asked.reasoning_effort == "none" and "reasoning_effort" not in reads:
        variables["enable_thinking"] = False
    return {name: wish for name, wish in variables.items() if wish is not None and name in reads}
