"""Keep what was said so far, and make the prompt of it: by the model's chat template, or as one text."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.base.errors import RequestError

if TYPE_CHECKING:
    from penstock.api.llm import LLM


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
        tokens = self.llm.tokenizer.encode_chat([*messages, {"role": "user", "content": line}])
        return tokens, len(tokens)

    def check(self) -> None:
        """Raise RequestError if the model has no template, or one that refuses the system message."""
        try:
            self.request("?")
        except RequestError as error:
            raise RequestError(
                f"{error}{', as --raw does' if self.template and self.system is None else ''}"
            ) from error
