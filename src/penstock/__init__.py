"""penstock: an inference engine for language models larger than the GPU and contexts longer than its
memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.api.async_llm import AsyncLLM as AsyncLLM
    from penstock.api.llm import LLM as LLM
    from penstock.api.outputs import Completion as Completion
    from penstock.api.outputs import Delta as Delta
    from penstock.api.outputs import Embedding as Embedding
    from penstock.api.outputs import Output as Output
    from penstock.api.outputs import Score as Score
    from penstock.base.errors import PenstockError as PenstockError
    from penstock.step.params import SamplingParams as SamplingParams
    from penstock.step.structure import Structure as Structure

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Delta",
    "Embedding",
    "Output",
    "PenstockError",
    "SamplingParams",
    "Score",
    "Structure",
    "__version__",
]

_HOMES = {
    "LLM": "penstock.api.llm",
    "AsyncLLM": "penstock.api.async_llm",
    "Completion": "penstock.api.outputs",
    "Delta": "penstock.api.outputs",
    "Embedding": "penstock.api.outputs",
    "Output": "penstock.api.outputs",
    "Score": "penstock.api.outputs",
    "PenstockError": "penstock.base.errors",
    "SamplingParams": "penstock.step.params",
    "Structure": "penstock.step.structure",
}


def __getattr__(name: str) -> object:
    """Names are imported when they are used: LLM needs torch, which takes seconds that `penstock --help` does
    not have."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Names that have not been used yet are offered, too."""
    return list(__all__)
