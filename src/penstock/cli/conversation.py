"""Keep what was said so far, and make the prompt of it: by the model's chat template, or as one text."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.base.errors import RequestError
from penstock.server.parsing.dialects import dialect_of
from penstock.server.parsing.forms import in_channels, may_be_behind
from penstock.server.parsing.harmony import MARKS, MESSAGE, HarmonyParser, begun
from penstock.server.parsing.output_parser import whole
from penstock.server.parsing.reading import Content, Reasoning
from penstock.step.params import SamplingParams
from penstock.step.request import FinishReason

if TYPE_CHECKING:
    from penstock.api.llm import LLM
    from penstock.api.outputs import Completion, Delta


class AnswerReader:
    """Tells answers from reasoning in the outputs of a model that writes in channels. Of other models all is
    answer."""

    def __init__(self, header: str | None = None) -> None:
        """header: what harmony's `begun` returns for the prompt; None for other models."""
        self.header = header
        self._parsers: dict[int, HarmonyParser] = {}
        """By output."""

    def shown(self, delta: "Delta") -> "Delta":
        """Return a piece of an output with the text of its answer alone."""
        if self.header is None:
            return delta
        parser = self._parsers.setdefault(delta.index, HarmonyParser(header=self.header))
        parts = parser.push(delta.text) + (parser.finish() if delta.finish_reason is not None else [])
        return replace(delta, text="".join(part.text for part in parts if isinstance(part, Content)))

    def unanswered(self, completion: "Completion") -> bool:
        """Tell whether the first output has run into its length before its answer began."""
        length = completion.finish_reason is FinishReason.LENGTH
        return self.header is not None and length and not self.split(completion.text)[1]

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning in an output's text, and the answer."""
        if self.header is None:
            return "", text
        parts = whole(HarmonyParser(header=self.header), text)
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
    reader: AnswerReader = field(default_factory=AnswerReader)
    """Reads the outputs of the latest request."""

    def request(self, line: str) -> tuple[str | list[int], int]:
        """Return the prompt after which the engine goes on, and its length in tokens.

        line: the user's next. Raises RequestError.
        """
        if not self.template:
            text = "\n".join([*(said + answer for said, answer in self.turns), line])
            return text, len(self.llm.encode(text))
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, answer in self.turns:
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        tokenizer = self.llm.tokenizer
        text = tokenizer.render_chat([*messages, {"role": "user", "content": line}])
        tokens = tokenizer.encode(text, special=False)
        self.reader = AnswerReader(begun(text) if dialect_of(tokenizer.templates).channels else None)
        return tokens, len(tokens)

    def marked(self, params: SamplingParams) -> SamplingParams:
        """Return settings with which outputs of the latest request have the marks that tell answers from
        reasoning, and with which answers alone keep to a structure. Raise StructureError."""
        header, structure = self.reader.header, params.structure
        if header is None:
            return params
        tokenizer = self.llm.tokenizer
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
