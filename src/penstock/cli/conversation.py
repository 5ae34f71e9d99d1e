"""Keep what was said so far, and make the prompt of it: by the model's chat template, or as one text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.base.errors import RequestError
from penstock.cli.thinking import Think, thinking_variables
from penstock.server.parsing.dialects import Dialect, dialect_of
from penstock.server.parsing.forms import behind_reasoning, in_channels, may_be_behind
from penstock.server.parsing.harmony import MARKS, MESSAGE, HarmonyParser, begun
from penstock.server.parsing.output_parser import OutputParser, whole
from penstock.server.parsing.reading import Content, Reasoning
from penstock.step.params import SamplingParams
from penstock.step.request import FinishReason
from penstock.step.structure import StructureKind

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.api.outputs import Completion, Delta

Said = Reasoning | Content


class AnswerReader:
    """Tells answers from reasoning in the outputs of a model that marks its reasoning. Of other models all is
    answer."""

    def __init__(self, parser: Callable[[], OutputParser] | None = None) -> None:
        """parser: makes what reads an output; None for other models."""
        self._parser = parser
        self._parsers: dict[int, OutputParser] = {}
        """By output."""

    def parts(self, delta: "Delta") -> list[Said]:
        """Return what a piece of an output adds to reasoning and answer."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._parser()
        parser = self._parsers[delta.index]
        parts = parser.push(delta.text) + (parser.finish() if delta.finish_reason is not None else [])
        return [part for part in parts if isinstance(part, Reasoning | Content)]

    def shown(self, delta: "Delta") -> "Delta":
        """Return a piece of an output with the text of its answer alone."""
        return replace(
            delta, text="".join(part.text for part in self.parts(delta) if isinstance(part, Content))
        )

    def unanswered(self, completion: "Completion") -> bool:
        """Tell whether the first output has run into its length before its answer began."""
        length = completion.finish_reason is FinishReason.LENGTH
        return self._parser is not None and length and not self.split(completion.text)[1]

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning in an output's text, and the answer."""
        if self._parser is None:
            return "", text
        parts = whole(self._parser(), text)
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        return reasoning, "".join(part.text for part in parts if isinstance(part, Content))


@dataclass(slots=True)
class Conversation:
    """A conversation: the turns of user and model.

    Without `template` they are one text that both write, each turn of the user's on a new line.
    """

    llm: "LLM"
    template: bool
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    """The user's messages, each with the model's answer."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """More that the template reads, as it was given; this counts before `think`."""
    think: Think | None = None
    reader: AnswerReader = field(default_factory=AnswerReader)
    """Reads the outputs of the latest request."""
    prompt: str = ""
    """The text of the latest request, by the template."""

    def request(self, line: str) -> tuple[str | list[int], int]:
        """Return the prompt after which the engine goes on, and its length in tokens.

        line: the user's next. Raises RequestError.
        """
        if not self.template:
            text = "\n".join([*(said + answer for said, answer in self.turns), line])
            return text, len(self.llm.encode(text))
        tokenizer, dialect = self.llm.tokenizer, self.dialect
        text = tokenizer.render_chat(
            [*self.messages, {"role": "user", "content": line}], **dict[str, Any](self._variables()[0])
        )
        tokens = self.llm.reader.encode(text, special=False)
        parser: Callable[[], OutputParser] | None = None
        self.prompt = text
        if dialect.channels:
            parser = partial(HarmonyParser, header=begun(text))
        elif dialect.thought is not None:
            thinking = text.rstrip().endswith(dialect.thought.begin)
            parser = partial(OutputParser, thought=dialect.thought, thinking=thinking)
        self.reader = AnswerReader(parser)
        return tokens, len(tokens)

    @property
    def messages(self) -> list[dict[str, object]]:
        """Return what was said so far, in OpenAI's form."""
        messages: list[dict[str, object]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for said, answer in self.turns:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return messages

    @property
    def dialect(self) -> Dialect:
        """Return how the model writes."""
        return dialect_of(self.llm.tokenizer.templates)

    def unheard(self) -> list[str]:
        """Return a sentence for each wish that the model's template does not pass on."""
        if not self.template:
            return []
        reads = self.llm.tokenizer.template_variables()
        said = [
            f"the model's chat template does not read {name}, so it changes nothing"
            for name in self.variables
            if name not in reads
        ]
        return [*said, *filter(None, [self._variables()[1]])]

    def _variables(self) -> tuple[dict[str, object], str]:
        dialect = self.dialect
        reads = self.llm.tokenizer.template_variables()
        wished, said = thinking_variables(
            self.think, reads, marked=dialect.channels or dialect.thought is not None
        )
        return {**wished, **self.variables}, said

    def marked(self, params: SamplingParams) -> SamplingParams:
        """Return settings with which outputs of the latest request have the marks that tell answers from
        reasoning, and with which answers alone keep to a structure. Raise StructureError."""
        dialect = self.dialect if self.template else Dialect()
        if dialect.channels:
            return self._in_channels(params)
        thought, structure = dialect.thought, params.structure
        if thought is None:
            return params
        tokenizer, end = self.llm.tokenizer, self.prompt.rstrip()
        if structure is not None and not end.endswith(thought.end):
            opened = end.endswith(thought.begin)
            if may_be_behind(structure):
                structure = behind_reasoning(structure, thought, tokenizer, opened=opened)
            elif structure.kind is not StructureKind.LARK:  # A grammar may have reasoning; others have none.
                self.reader = AnswerReader()
        shown = [
            mark for mark in map(tokenizer.token_to_id, (thought.begin, thought.end)) if mark is not None
        ]
        return replace(params, structure=structure, shown_tokens=shown)

    def _in_channels(self, params: SamplingParams) -> SamplingParams:
        structure, tokenizer, header = params.structure, self.llm.tokenizer, begun(self.prompt)
        if structure is not None and may_be_behind(structure) and not header.endswith(MESSAGE):
            structure = in_channels(structure, {}, tokenizer, header=header)
        shown = [mark for mark in map(tokenizer.token_to_id, MARKS) if mark is not None]
        begins = tokenizer.token_to_id(MESSAGE)
        return replace(params, structure=structure, shown_tokens=shown, text_token=begins)

    def check(self) -> None:
        """Raise RequestError if the model has no template, or one that refuses the system message."""
        try:
            self.request("?")
        except RequestError as error:
            raise RequestError(
                f"{error}{', as --raw does' if self.template and self.system is None else ''}"
            ) from error
