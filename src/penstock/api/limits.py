"""Hold the limits of a loaded model: its largest requests and steps."""

from dataclasses import dataclass
from typing import Self

from penstock.sched.rules import SchedulerLimits
from penstock.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The largest requests and steps that a model takes. Nothing here changes after the model is loaded.

    max_model_len: tokens of one request, prompt and output together; the context, or less where the KV cache
        has no room for it.
    max_sequences: outputs that one step computes (vLLM: max_num_seqs).
    max_step_tokens: tokens that one step computes (vLLM: max_num_batched_tokens).
    block_size: tokens of a KV block.
    kv_blocks: KV blocks on the device and in host memory.
    prefix_cache: whether prompts share the KV of equal prefixes.
    """

    max_model_len: int
    max_sequences: int
    max_step_tokens: int
    block_size: int
    kv_blocks: int
    prefix_cache: bool

    @classmethod
    def of(cls, limits: SchedulerLimits, scheduler: Scheduler, blocks: int) -> Self:
        """Return the limits of an engine. blocks: KV blocks on the device."""
        return cls(
            max_model_len=scheduler.longest,
            max_sequences=limits.max_sequences,
            max_step_tokens=limits.max_step_tokens,
            block_size=limits.block_size,
            kv_blocks=blocks + scheduler.host.near,
            prefix_cache=scheduler.prefixes.share,
        )
