"""Defines what clients may send to /v1/messages, in Anthropic's words: a request for a chat, and it is read
as one."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.server.wire.conversation import Message
from penstock.server.wire.decoding import FieldError, converted
from penstock.server.wire.requests import ChatRequest, TokenRequest

RENAMED = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "max_completion_tokens": "max_tokens",
}
"""Fields of a chat's request, as they are called here."""
APART = "\n\n"
"""Stands between blocks of text, which are one text to templates."""
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that templates do not know, as the most that they do."""
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of instructions that is about the client, and differs with each request: no prefix would be
found behind it."""
_KINDS = {
    "user": "text and tool_result",
    "assistant": "text, thinking, redacted_thinking and tool_use",
    "system": "text",
}
"""Types of blocks that a turn may have, by its role."""
_SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "priority", "timeout",
)  # fmt: skip


class _SaidText(Struct):
    """Reads a block. Blocks have more fields than these, such as `cache_control`: what was computed is kept
    anyway."""

    text: str


class _Thought(Struct):
    thinking: str


class _ToolUse(Struct):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None


class _CustomTool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class _ToolSelection(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Turn(Struct, forbid_unknown_fields=True):
    """Holds a turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Thinking(Struct):
    """Sets whether the model reasons, and whether that is told. `budget_tokens` has no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    """Gives the schema that an answer keeps to."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """Sets the form of an answer, and how much to reason for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(TokenRequest, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: list[str] | None = None
    mcp_servers: list[Any] | None = None
    # Labels, and what suits whatever is answered:
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    container: Any = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    betas: list[str] | None = None

    @property
    def outputs(self) -> int:
        """Count the outputs."""
        return 1

    @property
    def reasons(self) -> bool:
        """Tell whether reasoning is asked for."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def tells_reasoning(self) -> bool:
        """Tell whether reasoning is part of the answer."""
        return self.reasons and self.thinking is not None and self.thinking.display != "omitted"

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of the answer; None where none is made."""
        return None

    @property
    def ignored(self) -> list[str]:
        """Name the fields that were sent and have no effect."""
        names = [name for name in _NO_EFFECT if getattr(self, name) is not None]
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            names.append("thinking.budget_tokens")
        return names

    def check(self) -> None:
        """Raise FieldError for what this server cannot honour at all."""
        if self.mcp_servers:
            raise FieldError(
                "mcp_servers is not supported, since the server calls no others; let the client call them, "
                "and send their tools",
                "mcp_servers",
            )

    def chat(self) -> ChatRequest:
        """Return the same as a request for a chat. Raise FieldError."""
        messages = [*_instructions(self.system), *_conversation(self.messages)]
        fields: dict[str, object] = {name: getattr(self, name) for name in _SAME}
        fields |= {
            "stop": self.stop_sequences,
            "max_completion_tokens": self.most_tokens,
            "include_reasoning": self.tells_reasoning,
            # Templates know one of these names, or none.
            "chat_template_kwargs": {"enable_thinking": self.reasons, "thinking": self.reasons},
        }
        if self.tools:
            fields["tools"] = [_tool(at, tool) for at, tool in enumerate(self.tools)]
        fields |= _choice(self.tool_choice)
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            fields["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
        if (form := config.format or self.output_format) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema}}
        if messages[-1].role == "assistant":  # The answer goes on with it.
            if messages[-1].tool_calls:
                raise FieldError(
                    "messages end with a tool_use; send its tool_result in a turn of the user", "messages"
                )
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        chat = converted({"messages": [{"role": "user"}], **fields}, ChatRequest, "the request", "messages")
        chat.structured_outputs = self.structured_outputs
        chat.messages = messages
        return chat


_NO_EFFECT = (
    "metadata", "service_tier", "context_management", "container", "diagnostics", "inference_geo", "speed",
)  # fmt: skip


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """Holds the body of POST /v1/messages."""

    max_tokens: int

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of the answer."""
        return self.max_tokens


def _instructions(system: str | Sequence[Mapping[str, Any]] | None) -> list[Message]:
    if isinstance(system, str):
        return [Message(role="system", content=system)] if system else []
    texts = [_text(block, f"system[{at}]", "system", "system") for at, block in enumerate(system or ())]
    said = [text for text in texts if not text.startswith(_BILLING)]
    return [Message(role="system", content=APART.join(said))] if said else []


def _conversation(turns: Sequence[Turn]) -> list[Message]:
    """Return turns as messages. Turns of one role that follow each other are one message."""
    messages: list[Message] = []
    for at, turn in enumerate(turns):
        if isinstance(turn.content, str):
            _say(messages, turn.role, turn.content)
            continue
        for number, block in enumerate(turn.content):
            _add(messages, turn.role, block, f"messages[{at}].content[{number}]")
        if not turn.content:
            _say(messages, turn.role, "")
    return messages


def _add(messages: list[Message], role: str, block: Mapping[str, Any], where: str) -> None:
    """Add a block of a turn to the messages."""
    match role, block.get("type"):
        case "assistant", "thinking":
            thought = converted(block, _Thought, where, "messages").thinking
            turn = _turn(messages, role)
            turn.reasoning_content = f"{turn.reasoning_content or ''}{thought}"
        case "assistant", "redacted_thinking":
            pass
        case "assistant", "tool_use":
            use = converted(block, _ToolUse, where, "messages")
            turn = _turn(messages, role)
            function = {"name": use.name, "arguments": use.input}
            turn.tool_calls = [
                *(turn.tool_calls or []),
                {"id": use.id, "type": "function", "function": function},
            ]
        case "user", "tool_result":
            result = converted(block, _ToolResult, where, "messages")
            parts = result.content or []
            text = (
                parts
                if isinstance(parts, str)
                else APART.join(
                    _text(part, f"{where}.content[{at}]", "system", "messages")
                    for at, part in enumerate(parts)
                )
            )
            messages.append(Message(role="tool", tool_call_id=result.tool_use_id, content=text))
        case _:
            _say(messages, role, _text(block, where, role, "messages"))


def _turn(messages: list[Message], role: str) -> Message:
    """Return the last message if it has this role, else a new one."""
    if not messages or messages[-1].role != role:
        messages.append(Message(role=role))
    return messages[-1]


def _say(messages: list[Message], role: str, text: str) -> None:
    turn = _turn(messages, role)
    turn.content = f"{turn.content}{APART}{text}" if turn.content else text


def _text(block: Mapping[str, Any], where: str, role: str, param: str) -> str:
    """Return the text of a block. role: whose blocks may stand there."""
    if (kind := block.get("type")) != "text":
        raise FieldError(
            f"{where} is of type {str(kind)[:80]!r}, but the model reads {_KINDS[role]} there; leave it out",
            param,
        )
    return converted(block, _SaidText, where, param).text


def _tool(at: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type")) not in (None, "custom"):
        raise FieldError(
            f"tools[{at}] is of type {str(kind)[:80]!r}; only tools of type custom are supported, which the "
            "client runs itself",
            "tools",
        )
    own = converted(tool, _CustomTool, f"tools[{at}]", "tools")
    function = {"name": own.name, "description": own.description, "parameters": own.input_schema}
    return {"type": "function", "function": function}


def _choice(given: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the fields of a chat's request that say which tools to call."""
    if given is None:
        return {}
    choice = converted(given, _ToolSelection, "tool_choice", "tool_choice")
    if (choice.type == "tool") != (choice.name is not None):
        raise FieldError(
            "tool_choice of type tool must have the name of a tool, and other types must not; correct it",
            "tool_choice",
        )
    chosen: object = {"any": "required"}.get(choice.type, choice.type)
    if choice.name is not None:
        chosen = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}
