"""Names models of the Hugging Face Hub by what ollama calls them."""

import re

_MODELS = {
    "qwen3": ("Qwen/Qwen3-{size}", "8B"),
    "qwen2.5": ("Qwen/Qwen2.5-{size}-Instruct", "7B"),
    "qwen2.5-coder": ("Qwen/Qwen2.5-Coder-{size}-Instruct", "7B"),
    "qwen2": ("Qwen/Qwen2-{size}-Instruct", "7B"),
    "llama3.3": ("meta-llama/Llama-3.3-{size}-Instruct", "70B"),
    "llama3.2": ("meta-llama/Llama-3.2-{size}-Instruct", "3B"),
    "llama3.1": ("meta-llama/Llama-3.1-{size}-Instruct", "8B"),
    "llama3": ("meta-llama/Meta-Llama-3-{size}-Instruct", "8B"),
    "mistral": ("mistralai/Mistral-{size}-Instruct-v0.3", "7B"),
    "mixtral": ("mistralai/Mixtral-{size}-Instruct-v0.1", "8x7B"),
    "gpt-oss": ("openai/gpt-oss-{size}", "20b"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{size}-Instruct", "1.7B"),
}
"""Names on the Hugging Face Hub, and the size that is usual, by ollama's names without a tag."""
_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bm]", re.ASCII)
_LARGER = {("qwen3", "30b"): "30B-A3B", ("qwen3", "235b"): "235B-A22B"}
"""Sizes that the Hub's names say otherwise."""


def hub_name(model: str) -> str | None:
    """Return what the Hugging Face Hub calls a model of ollama's, such as qwen3:8b; None if it is none
    that we know."""
    family, _, tag = model.lower().partition(":")
    size = tag.partition("-")[0]
    known = _MODELS.get(family)
    if known is None or (tag not in ("", "latest") and not _SIZE.fullmatch(size)):
        return None
    name, usual = known
    size = size if _SIZE.fullmatch(size) else usual
    size = _LARGER.get((family, size), size if "-oss" in name else size.upper().replace("X", "x"))
    return name.format(size=size)
