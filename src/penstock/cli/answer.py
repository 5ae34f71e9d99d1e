"""One answer of a model: followed while it is made, timed, and written down as JSON or as a line of
statistics."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from penstock.base.config import Config
from penstock.base.meter import KVStats, MissedStats, TierStats, WeightStats
from penstock.base.units import counted
from penstock.cli.summaries import expert_summary, kv_summary, missed_summary, summary, tier_summary
from penstock.cli.terminal import say
from penstock.step.params import SamplingParams
from penstock.step.plan import TokenLogprob
from penstock.step.request import FinishReason

if TYPE_CHECKING:  # torch takes 1.2 s
    from penstock.api.llm import LLM
    from penstock.api.outputs import Completion, Delta, Output
    from penstock.api.reader import Prompt


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Holds all continuations of a prompt, and when they came, in seconds after the request.

    first, end: when the first token came, and the last.
    expected: when the first was to come, by forecast; None where nothing had been measured.
    weights: where they rest, and what was streamed of them for the answer.
    kv: the same of the KV of long contexts; None where there is no room for any.
    tiers: the tiers of prefixes, since the engine started.
    missed: the attention that policies missed, for this answer.
    """

    completion: "Completion"
    first: float
    end: float
    weights: WeightStats
    kv: KVStats | None
    tiers: TierStats | None
    missed: MissedStats
    expected: float | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of all outputs."""
        return sum(len(output.tokens) for output in self.completion.outputs)

    @property
    def prefill_rate(self) -> float | None:
        """Return the prompt tokens computed in a second, up to the first token."""
        computed = len(self.completion.prompt_tokens) - self.completion.cached_tokens
        return computed / self.first if self.first > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Return tokens a second after the first of each output; None if there were no more."""
        more = self.tokens - len(self.completion.outputs)
        return more / (self.end - self.first) if more > 0 and self.end > self.first else None

    def brief(self) -> str:
        """Return what a person at a terminal wants to know of an answer."""
        if not self.tokens:
            return f"no token in {self.end:.2f} s"
        rate = f", {self.decode_rate:,.1f} tokens/s" if self.decode_rate else ""
        return f"{counted(self.tokens, 'token')}{rate}, first token after {self.first:.2f} s"

    def statistics(self) -> str:
        """Return the statistics in one line."""
        prefill, decode = (
            f", {rate:,.0f} tokens/s" if rate else "" for rate in (self.prefill_rate, self.decode_rate)
        )
        first = f"first token after {self.first:.3f} s" if self.tokens else f"no token in {self.end:.3f} s"
        first += f" ({self.expected:.3f} expected)" if self.tokens and self.expected is not None else ""
        made, prompt = self.completion, f"prompt {counted(len(self.completion.prompt_tokens), 'token')}"
        ways = ((made.cached_host, "host memory"), (made.cached_disk, "disk"))
        came = "".join(f", {tokens:,} from {tier}" for tokens, tier in ways if tokens)
        return (
            f"{prompt} ({made.cached_tokens:,} cached{came}){prefill}; {first}; "
            f"output {counted(self.tokens, 'token')}{decode}{self._drafts()}; ended by "
            f"{'/'.join(dict.fromkeys(output.finish_reason for output in made.outputs))}"
        )

    def _drafts(self) -> str:
        """Return how many drafted tokens were accepted; empty where none were drafted."""
        made = self.completion
        if not made.drafted_tokens:
            return ""
        return f", {made.accepted_tokens:,} of {made.drafted_tokens:,} drafted tokens accepted"


def follow(
    llm: "LLM",
    prompt: "Prompt",
    params: SamplingParams,
    show: Callable[["Delta"], None],
    interrupted: Callable[[], bool] = lambda: False,
    *,
    lora: str | None = None,
) -> TimedAnswer:
    """Return the answer to `prompt`, followed while it is made.

    show: is called with each piece at once. interrupted: once it is true, the answer ends with the step
    under way. lora: name of the LoRA adapter that answers.
    """
    before, missed_before, begin = llm.memory, llm.stats().missed, perf_counter()
    first = end = 0.0
    with llm.stream(prompt, params, lora=lora, until=interrupted) as stream:
        for delta in stream:
            end = perf_counter() - begin
            first = first or end
            show(delta)
        end = end or perf_counter() - begin
    memory, stats = llm.memory, llm.stats()
    return TimedAnswer(
        stream.completion,
        first,
        end,
        memory.weights.since(before.weights),
        memory.kv.since(before.kv) if memory.kv and before.kv else None,
        stats.tiers,
        stats.missed.since(missed_before),
        stream.forecast.seconds,
    )


def expect(llm: "LLM", prompt: "Prompt", params: SamplingParams) -> None:
    """Print on stderr when the first token of an answer is expected, if steps like its own were measured."""
    if (seconds := llm.forecast(prompt, params).seconds) is not None:
        say(f"first token expected after {seconds:.2f} s", faint=True)


def remark(answer: TimedAnswer) -> None:
    """Print statistics on stderr: of the answer, and of weights and KV if they stream."""
    say(answer.statistics(), faint=True)
    if answer.weights.streams:
        say(summary(answer.weights, answer.end), faint=True)
    if answer.weights.experts.asked:
        say(expert_summary(answer.weights), faint=True)
    if answer.kv is not None and answer.kv.streams:
        say(kv_summary(answer.kv, answer.end), faint=True)
    if answer.missed.choices:
        say(missed_summary(answer.missed), faint=True)
    if answer.tiers is not None and answer.tiers.moved:
        say(tier_summary(answer.tiers), faint=True)


def warn_of_cut(llm: "LLM", params: SamplingParams, outputs: Sequence["Output"]) -> bool:
    """Say on stderr if outputs were cut before they were whole by their structure. Return whether any was."""
    structure, most = params.structure, params.max_tokens
    if structure is None:
        return False
    cut = [
        output
        for output in outputs
        if output.finish_reason is FinishReason.LENGTH and not llm.reader.is_whole(structure, output.tokens)
    ]
    if cut:
        which = "the output is" if len(outputs) == 1 else f"{len(cut)} of {len(outputs)} outputs are"
        after = f" after {counted(most, 'token')}" if most else ""
        say(
            f"penstock: note: {which} cut{after}, and not complete by the "
            f"{structure.kind.value}; allow more with --max-tokens"
        )
    return bool(cut)


def record(
    llm: "LLM",
    config: Config,
    prompt: str,
    params: SamplingParams,
    answer: TimedAnswer,
    split: Callable[[str], tuple[str, str]],
) -> dict[str, object]:
    """Return what --json writes of an answer to `prompt`, which is as the user gave it. split: returns the
    reasoning in an output's text, and the answer."""
    budget, made = llm.memory.budget, answer.completion
    outputs = [_output(llm, output, params, *split(output.text)) for output in made.outputs]
    return {
        "model": str(config.model),
        "prompt": prompt,
        **outputs[0],
        **({"outputs": outputs} if params.n > 1 else {}),
        "usage": {
            "prompt_tokens": len(made.prompt_tokens),
            "cached_tokens": made.cached_tokens,
            "cached_host_tokens": made.cached_host,
            "cached_disk_tokens": made.cached_disk,
            "output_tokens": answer.tokens,
            "drafted_tokens": made.drafted_tokens,
            "accepted_tokens": made.accepted_tokens,
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


def _output(
    llm: "LLM", output: "Output", params: SamplingParams, reasoning: str, text: str
) -> dict[str, object]:
    entries: dict[str, object] = {
        "text": text,
        **({"reasoning": reasoning} if reasoning else {}),
        "tokens": output.tokens,
        "finish_reason": str(output.finish_reason),
    }
    if params.logprobs is not None:
        entries["logprobs"] = logprob_entries(llm, output.logprobs or ())
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
