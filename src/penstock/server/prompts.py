"""From a request to what the engine is to be told, and to who writes the answer."""

from collections.abc import Sequence
from typing import Protocol

from penstock.api.jobs import Ready
from penstock.api.llm import LLM, Prompt
from penstock.api.outputs import Completion, Delta
from penstock.server.answers import Answer, Chat, Texts
from penstock.server.wire import ChatRequest, CompletionRequest, Message, TokenizeRequest


class Telling(Protocol):
    """How answers of a kind are written."""

    def whole(self, completions: Sequence[Completion]) -> Answer: ...

    def pieces(self, prompt: int, deltas: Sequence[Delta]) -> list[Answer]: ...

    def last(self, completions: Sequence[Completion]) -> Answer: ...


def read(llm: LLM, asked: ChatRequest | CompletionRequest) -> tuple[list[Ready], Telling]:
    """All of a request's prompts, tokens made and lengths checked: what takes long for long ones. From any thread.

    Raises FieldError and RequestError for what cannot be served.
    """
    asked.check()
    params = asked.params()
    if isinstance(asked, ChatRequest):
        return [llm.read(chat_tokens(llm, asked.messages, asked), params)], Chat(asked.model, llm.tokenizer)
    prompts = asked.prompts

    def prompt_of(given: str | list[int]) -> Prompt:
        return given if isinstance(given, list) or asked.add_special_tokens else llm.tokenizer.encode(given, special=False)

    ready = [llm.read(prompt_of(one), params) for one in prompts]
    echoes = [one if isinstance(one, str) else llm.decode(one) for one in prompts] if asked.echo else None
    return ready, Texts(asked.model, llm.tokenizer if llm.has_tokenizer else None, echoes, params.n)


def chat_tokens(llm: LLM, messages: Sequence[Message], asked: ChatRequest | TokenizeRequest) -> list[int]:
    """A conversation by the model's own template."""
    plain = [message.plain() for message in messages]
    return llm.tokenizer.encode_chat(plain, add_generation_prompt=asked.add_generation_prompt, **(asked.chat_template_kwargs or {}))
