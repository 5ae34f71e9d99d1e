"""One answer of a model: followed while it is made, timed, and written down as JSON or as a line of
statistics."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.base.config import Config
from penstock.base.meter import KVStats, MissedStats, TierStats, WeightStats
from penstock.cli.summaries import kv_summary, missed_summary, summary, tier_summary
from penstock.cli.terminal import say
from penstock.step.params import SamplingParams
from penstock.step.plan import TokenLogprob
from penstock.step.request import FinishReason

if TYPE_CHECKING:  # torch takes 1.2 s
    from penstock.api.llm import LLM
    from penstock.api.outputs import Delta
    from penstock.api.reader import Prompt


@dataclass(slots=True)
class TimedOutput:
    """Holds one continuation of a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason = FinishReason.ABORT
    """ABORT stands here until the output ends by itself."""
    error: str = ""
    """The reason for which it ended early, where that is known."""


@dataclass(slots=True)
class TimedAnswer:
    """Holds all continuations of a prompt, and when they came, in seconds after the request.

    weights: where they rest, and what was streamed of them for the answer.
    kv: the same of the KV of long contexts; None where there is no room for any.
    """

    prompt_tokens: int
    outputs: list[TimedOutput]
    weights: WeightStats
    kv: KVStats | None = None
    tiers: TierStats | None = None
    """The tiers of prefixes, since the engine started."""
    missed: MissedStats = field(default_factory=MissedStats)
    """The attention that policies missed, for this answer."""
    cached_tokens: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    """Prompt tokens whose KV was found; those of them that came from host memory, and from disk."""
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    first: float = 0.0
    end: float = 0.0

    @property
    def tokens(self) -> int:
        """Return the tokens of all outputs."""
        return sum(len(output.tokens) for output in self.outputs)

    @property
    def prefill_rate(self) -> float | None:
        """Return the prompt tokens computed in a second, up to the first token."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.first if self.first > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Return tokens a second after the first of each output; None if there were no more."""
        more = self.tokens - len(self.outputs)
        return more / (self.end - self.first) if more > 0 and self.end > self.first else None

    def statistics(self) -> str:
        """Return the statistics in one line."""
        prefill, decode = (
            f", {rate:,.0f} tokens/s" if rate else "" for rate in (self.prefill_rate, self.decode_rate)
        )
        first = f"first token after {self.first:.3f} s" if self.tokens else f"no token in {self.end:.3f} s"
        ways = ((self.cached_host, "host memory"), (self.cached_disk, "disk"))
        came = "".join(f", {tokens:,} from {tier}" for tokens, tier in ways if tokens)
        return (
            f"prompt {self.prompt_tokens:,} tokens ({self.cached_tokens:,} cached{came}){prefill}; {first}; "
            f"output {self.tokens:,} tokens{decode}; ended by "
            f"{'/'.join(dict.fromkeys(output.finish for output in self.outputs))}"
        )


def follow(
    llm: "LLM",
    prompt: "Prompt",
    params: SamplingParams,
    show: Callable[["Delta"], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> TimedAnswer:
    """Return the answer to `prompt`, followed while it is made.

    show: is called with each piece at once. interrupted: once it is true, the answer ends with the step
    under way.
    """
    before, missed_before, begin = llm.memory, llm.stats().missed, perf_counter()
    with llm.stream(prompt, params, until=interrupted) as stream:
        answer = TimedAnswer(
            len(stream.prompt_tokens), [TimedOutput() for _ in range(params.n)], before.weights
        )
        for delta in stream:
            answer.end = perf_counter() - begin
            answer.first = answer.first or answer.end
            output = answer.outputs[delta.index]
            output.text += delta.text
            output.tokens.extend(delta.tokens)
            output.logprobs.extend(delta.logprobs)
            output.finish = delta.finish_reason or output.finish
            show(delta)
        answer.end = answer.end or perf_counter() - begin
    completion = stream.completion
    for output, ended in zip(answer.outputs, completion.outputs, strict=True):
        output.error = ended.error
    memory, stats = llm.memory, llm.stats()
    answer.weights = memory.weights.since(before.weights)
    answer.kv = memory.kv.since(before.kv) if memory.kv and before.kv else None
    answer.cached_tokens, answer.prompt_logprobs = completion.cached_tokens, completion.prompt_logprobs
    answer.cached_host, answer.cached_disk = completion.cached_host, completion.cached_disk
    answer.tiers, answer.missed = stats.tiers, stats.missed.since(missed_before)
    return answer


def remark(answer: TimedAnswer) -> None:
    """Print statistics on stderr: of the answer, and of weights and KV if they stream."""
    say(answer.statistics(), faint=True)
    if answer.weights.streams:
        say(summary(answer.weights, answer.end), faint=True)
    if answer.kv is not None and answer.kv.streams:
        say(kv_summary(answer.kv, answer.end), faint=True)
    if answer.missed.choices:
        say(missed_summary(answer.missed), faint=True)
    if answer.tiers is not None and answer.tiers.moved:
        say(tier_summary(answer.tiers), faint=True)


def record(
    llm: "LLM", config: Config, prompt: str, params: SamplingParams, answer: TimedAnswer
) -> dict[str, object]:
    """Return what --json writes of an answer to `prompt`, which is as the user gave it."""
    budget, outputs = llm.memory.budget, [_output(llm, output, params) for output in answer.outputs]
    return {
        "model": str(config.model),
        "prompt": prompt,
        **outputs[0],
        **({"outputs": outputs} if params.n > 1 else {}),
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "cached_host_tokens": answer.cached_host,
            "cached_disk_tokens": answer.cached_disk,
            "output_tokens": answer.tokens,
        },
        "timings": {
            "boot_s": llm.boot_seconds,
            "first_token_s": answer.first or None,
            "total_s": answer.end,
            "prefill_tokens_per_s": answer.prefill_rate,
            "decode_tokens_per_s": answer.decode_rate,
        },
        "device": llm.device,
        "dtype": llm.dtype,
        "budget": asdict(budget) | {"kv": budget.kv, "kv_tokens": budget.kv_tokens},
        "weights": asdict(answer.weights) | {"streams": True} if answer.weights.streams else None,
        "kv": asdict(answer.kv) if answer.kv is not None else None,
        "missed": _missed(answer.missed),
        "tiers": asdict(answer.tiers) if answer.tiers is not None else None,
    }


def _missed(missed: MissedStats) -> dict[str, object]:
    """Return what policies have left out; all 0 where everything is read."""
    return {
        "choices": missed.choices,
        "fallbacks": missed.fallbacks,
        "blocks": missed.blocks,
        "blocks_read": missed.blocks_read,
        "share_max": missed.most,
        "share_worst_head": missed.worst,
        "share_mean": missed.mean,
    }


def json_line(entries: dict[str, object]) -> str:
    """Return entries as a line of JSON."""
    return json.dumps(entries, allow_nan=False) + "\n"


def _output(llm: "LLM", output: TimedOutput, params: SamplingParams) -> dict[str, object]:
    entries: dict[str, object] = {
        "text": output.text,
        "tokens": output.tokens,
        "finish_reason": str(output.finish),
    }
    if params.logprobs is not None:
        entries["logprobs"] = logprob_entries(llm, output.logprobs)
    return entries


def logprob_entries(llm: "LLM", logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, object] | None]:
    """Return log-probabilities for JSON, which has no infinity: a probability of 0 becomes null."""
    text = llm.tokenizer.token_text

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": token, "text": text(token), "logprob": logprob if math.isfinite(logprob) else None}

    return [
        None
        if one is None
        else {
            **entry(one.token, one.logprob),
            "rank": one.rank,
            "top": [entry(token, logprob) for token, logprob in one.top],
        }
        for one in logprobs
    ]
