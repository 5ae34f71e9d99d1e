"""A desk whose calls replicas carry out: whatever is lost when, clients have the answer that one engine would
have given.

The replicas here are desks in this process, on one model, and what is lost is what comes of them.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest

from penstock import LLM, Completion, SamplingParams
from penstock.api.llm import SHIPPED_MODEL
from penstock.api.outputs import Delta
from penstock.base.errors import ConfigError, EngineClosedError, LengthError, RequestError
from penstock.cli.main import main
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.broker import RequestBroker
from penstock.server.broker.calls import BusyError, Call
from penstock.server.broker.metrics import Metrics
from penstock.server.fleet import backend as remote
from penstock.server.fleet.backend import RemoteBackend
from penstock.server.fleet.merge import summed
from penstock.server.fleet.requests import (
    Accepted,
    LostError,
    OutputChunk,
    RemoteReader,
    RemoteRequest,
    ReplicaInfo,
    ReplicaMessage,
    computed,
)
from penstock.server.fleet.routing import Affinity
from penstock.server.fleet.scale import bounds
from penstock.server.monitoring.counts import SpeculationState
from penstock.step.structure import Structure
from streams import LONG

SIZE, ROWS = 16, 4
STORY = (
    "Once upon a time there was a boat that could not swim. One day it asked the sea about it, and the sea "
    "said"
)
"""More than a block."""
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.5, seed=7, n=2, logprobs=2)
STOPPED = SamplingParams(temperature=0, max_tokens=30, stop=["."])
NUMBERED = SamplingParams(
    temperature=1.5, seed=3, max_tokens=10, structure=Structure.regex("[a-z]{4} [0-9]{20}")
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        device="cpu", dtype="float32", device_memory="400MiB", max_sequences=ROWS, block_size=SIZE
    ) as llm:
        yield llm


@dataclass(frozen=True)
class Loss:
    """What a replica is lost with: after so many messages, without a word if it is `silent`, and with all
    that it waits for if it `hangs`. Instead of the seeds that were decided it may have drawn with others."""

    after: int = 1 << 30
    silent: bool = False
    hangs: bool = False
    seed: int | None = None


class Crew:
    """Each errand goes to the next replica, and what is lost with it is said."""

    def __init__(self, llm: LLM, losses: Sequence[Loss]) -> None:
        self._llm, self._losses = llm, list(losses)
        self.broker: RequestBroker | None = None
        self.sent: list[Sequence[bytes]] = []
        self.open = 0
        """Answers that are waited for."""

    async def answer(self, keys: Sequence[bytes], request: RemoteRequest) -> AsyncGenerator[ReplicaMessage]:
        if self.broker is None:
            self.broker = RequestBroker(LocalBackend(self._llm), Metrics(), queue=1000)
        loss = self._losses[len(self.sent)] if len(self.sent) < len(self._losses) else Loss()
        self.sent.append(keys)
        if loss.seed is not None:
            samplings = self._llm.reader.read(
                request.prompt, replace(request.params or GREEDY, seed=loss.seed)
            ).samplings
            request = replace(request, decided=request.decided | {"samplings": samplings})
        self.open += 1
        try:
            count = 0
            async with aclosing(
                computed(self._llm.reader, self.broker, f"replica {len(self.sent) - 1}", request)
            ) as messages:
                async for message in messages:
                    for part in _parts(message):
                        if count == loss.after:
                            if loss.hangs:
                                await asyncio.Event().wait()
                            if loss.silent:
                                return
                            raise LostError("the replica is lost")
                        yield part
                        count += 1
        finally:
            self.open -= 1

    async def broadcast(self, what: str) -> Mapping[str, Any]:
        return {}

    def stop(self) -> None:
        pass


def _parts(message: ReplicaMessage) -> list[ReplicaMessage]:
    """Token by token, however many have come at a time."""
    return (
        [replace(message, deltas=(delta,)) for delta in message.deltas]
        if isinstance(message, OutputChunk)
        else [message]
    )


Work = Callable[[RemoteReader, RequestBroker, Crew], Awaitable[None]]


def with_a_fleet(
    llm: LLM, work: Work, *losses: Loss, affinity: Affinity | None = None, patience: float = 30.0
) -> Crew:
    """Nothing is left when it is closed."""
    crew = Crew(llm, losses)

    async def run() -> None:
        reader = RemoteReader(SHIPPED_MODEL, ReplicaInfo.of(llm), replicas=2)
        backend = RemoteBackend(reader, crew, affinity or Affinity(1, 100), patience=patience)
        broker = RequestBroker(backend, Metrics(), queue=8)
        try:
            await work(reader, broker, crew)
        finally:
            await broker.close(0)
            assert not broker.open
            if crew.broker is not None:
                crew.broker._mailbox.send(None)
                await asyncio.to_thread(crew.broker._thread.join)
        assert broker.outputs == 0
        assert crew.open == 0
        backend.close()

    asyncio.run(run())
    assert llm.stats().running == llm.stats().waiting == 0
    return crew


async def streamed(call: Call) -> list[Delta]:
    return [delta async for deltas in call.pieces() for delta in deltas]


def same(found: Completion, expected: Completion) -> None:
    """But for what was found of the prompt, which depends on who asked before, and the last digits of what is
    computed beside others."""

    def bare(completion: Completion) -> Completion:
        outputs = tuple(replace(output, logprobs=None) for output in completion.outputs)
        return replace(completion, outputs=outputs, cached_tokens=0, cached_host=0, cached_disk=0)

    def likely(completion: Completion) -> list[tuple[int, float]]:
        told = (entry for output in completion.outputs for entry in output.logprobs or ())
        return [pair for entry in told for pair in ((entry.token, entry.logprob), *entry.top)]

    assert bare(found) == bare(expected)
    assert [token for token, _ in likely(found)] == [token for token, _ in likely(expected)]
    assert [share for _, share in likely(found)] == pytest.approx(
        [share for _, share in likely(expected)], abs=1e-3
    )


@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, STOPPED, NUMBERED], ids=["greedy", "drawn", "stopped", "structured"]
)
def test_wherever_replicas_are_lost_a_stream_goes_on_with_what_is_next(
    llm: LLM, params: SamplingParams
) -> None:
    [expected] = llm.generate(STORY, params)
    for losses in ([0], [1], [2], [7], [3, 5], [5, 3, 1]):

        async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
            [call] = broker.submit([reader.read(STORY, params)])
            deltas = await streamed(call)
            for output in expected.outputs:
                own = [delta for delta in deltas if delta.index == output.index]
                assert [token for delta in own for token in delta.tokens] == list(output.tokens)
                assert "".join(delta.text for delta in own) == output.text
                assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + [
                    output.finish_reason
                ]
            same(call.so_far(), expected)
            assert call.counts[0] == sum(len(output.tokens) for output in expected.outputs)
            assert call.reasons == [output.finish_reason.value for output in expected.outputs]

        crew = with_a_fleet(llm, work, *(Loss(after, silent=after % 2 == 0) for after in losses))
        assert len(crew.sent) == len(losses) + 1, "it was lost"


def test_a_replica_says_what_a_call_has_before_it_there(llm: LLM) -> None:
    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        endless = reader.read(STORY, SamplingParams(max_tokens=5000, ignore_eos=True, n=ROWS))
        last = reader.read("The sea", GREEDY)
        calls = [*broker.submit([endless]), *broker.submit([endless])]
        for call in calls:
            assert await call.foretold(LONG) is not None
        [call] = broker.submit([last])
        assert call.forecast is None, "nobody has said anything yet"
        forecast = await call.foretold(LONG)
        assert forecast is not None
        assert forecast.place >= ROWS
        for one in (*calls, call):
            one.leave()
        gone = broker.submit([last])[0]
        gone.leave()
        assert await gone.foretold(LONG) is None, "it is not waited for in vain"

    llm.generate(STORY, GREEDY)
    with_a_fleet(llm, work)


def test_a_replica_says_at_once_that_it_has_a_request(llm: LLM) -> None:
    """Before it reads the prompt, which may take long: else nobody would know with whom it was lost."""

    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        own = RequestBroker(LocalBackend(llm), Metrics(), queue=1)
        messages = computed(llm.reader, own, "one", reader.read(STORY, GREEDY).request())
        assert await anext(messages) == Accepted("one")
        assert own.outputs == 0
        told = await anext(messages)
        assert isinstance(told, Accepted)
        assert told.forecast is not None
        await messages.aclose()
        await own.close(LONG)

    with_a_fleet(llm, work)


def test_embeddings_come_from_replicas_too(llm: LLM) -> None:
    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        [call] = broker.submit([reader.read_embedding(STORY)])
        completion = await call.completion()
        assert completion.embedding == pytest.approx(expected, abs=1e-5)
        assert len(completion.embedding) == llm.spec.hidden_size

    group = llm.driver.begin(llm.reader.read_embedding(STORY))
    while not group.done:
        llm.driver.step()
    expected = group.completion().embedding
    with_a_fleet(llm, work, Loss(1))


@pytest.fixture(scope="module")
def another(llm: LLM) -> int:
    """A seed with which the first output begins with other tokens."""

    def begins(seed: int) -> tuple[int, ...]:
        return llm.generate(STORY, replace(DRAWN, seed=seed))[0].outputs[0].tokens[:3]

    return next(seed for seed in range(8, 40) if begins(seed) != begins(DRAWN.seed or 0))


def test_a_whole_answer_begins_anew_if_another_replica_has_other_tokens(llm: LLM, another: int) -> None:
    [expected] = llm.generate(STORY, replace(DRAWN, seed=another))

    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        first, second = broker.submit([reader.read(STORY, DRAWN), reader.read("The sea", GREEDY)])
        # Of the first nobody has been given anything before the second is complete.
        await second.completion()
        same(await first.completion(), expected)

    with_a_fleet(llm, work, Loss(12), Loss(), Loss(seed=another))


def test_a_stream_ends_with_an_error_rather_than_with_other_tokens(llm: LLM, another: int) -> None:
    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        [call] = broker.submit([reader.read(STORY, DRAWN)])
        with pytest.raises(
            EngineClosedError, match="does not continue with the same tokens; send the request again"
        ):
            await streamed(call)
        assert call.reasons == ["error", "error"]

    with_a_fleet(llm, work, Loss(12), Loss(seed=another))


def test_what_was_taken_at_once_was_given_too(llm: LLM, another: int) -> None:
    told: list[Delta] = []

    def at_once(deltas: Sequence[Delta]) -> bool:
        told.extend(deltas)
        return True

    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        [call] = broker.submit([reader.read(STORY, DRAWN)])
        with pytest.raises(
            EngineClosedError, match="does not continue with the same tokens; send the request again"
        ):
            assert [deltas async for deltas in call.pieces(at_once)] == []
        assert told

    with_a_fleet(llm, work, Loss(12), Loss(seed=another))


def test_a_request_that_replicas_are_lost_with_again_and_again_is_given_up(llm: LLM) -> None:
    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        [call] = broker.submit([reader.read(STORY, GREEDY)])
        with pytest.raises(EngineClosedError, match="4 replicas were lost with this request"):
            await call.completion()

    assert len(with_a_fleet(llm, work, *[Loss(2)] * 9).sent) == 4


def test_what_no_replica_can_answer_is_not_asked_twice(llm: LLM) -> None:
    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        with pytest.raises(LengthError, match=f"a replica holds {llm.limits.max_model_len} in all"):
            reader.read(STORY, SamplingParams(max_tokens=1 << 20))
        with pytest.raises(
            LengthError, match=r"the request has at least \d+ tokens of prompt, but a replica holds"
        ):
            reader.read("word " * 500_000, GREEDY)
        with pytest.raises(RequestError, match="the prompt is empty"):
            reader.read([], GREEDY)
        ready = replace(reader.read([1, 2, 3], GREEDY), given=[1 << 40])
        [call] = broker.submit([ready])
        with pytest.raises(RequestError, match="is not in the vocabulary"):
            await call.completion()

    assert len(with_a_fleet(llm, work).sent) == 1


def test_an_answer_that_nothing_can_come_of_any_more_is_asked_of_another_replica(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine has stopped without a word: all that is known is that the replica is not there any more."""
    monkeypatch.setattr(remote, "_LOOK", 0.02)
    [expected] = llm.generate(STORY, GREEDY)
    affinity = Affinity(1, 100)
    affinity.keep(["replica 0", "replica 1"])

    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        [call] = broker.submit([reader.read(STORY, GREEDY)])
        pieces = call.pieces()
        begun = list(await anext(pieces))
        affinity.keep(["replica 1"])
        rest = [delta async for deltas in pieces for delta in deltas]
        assert [token for delta in (*begun, *rest) for token in delta.tokens] == list(expected.tokens)

    crew = with_a_fleet(llm, work, Loss(3, hangs=True), affinity=affinity, patience=0.0)
    assert len(crew.sent) == 2


def test_who_leaves_takes_its_errand_along_and_there_is_room_again(llm: LLM) -> None:
    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        endless = reader.read(STORY, SamplingParams(max_tokens=5000, ignore_eos=True, n=4))
        calls = broker.submit([endless] * 4)
        with pytest.raises(BusyError, match="16 outputs are running or waiting, and at most 16 may be"):
            broker.submit([reader.read("The sea", GREEDY)])
        await anext(calls[0].pieces())
        for call in calls:
            call.leave()
        assert broker.outputs == 0
        while crew.open:
            await asyncio.sleep(0.01)
        same(
            (await broker.submit([reader.read("The sea", GREEDY)])[0].completion()),
            llm.generate("The sea", GREEDY)[0],
        )

    with_a_fleet(llm, work)


def test_a_conversation_goes_on_where_its_answer_was_computed(llm: LLM) -> None:
    affinity = Affinity(1, 100)
    affinity.keep(["replica 0", "replica 1"])

    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        [call] = broker.submit([reader.read(STORY, replace(GREEDY, max_tokens=2 * SIZE))])
        found = await call.completion()
        behind = reader.read([*found.prompt_tokens, *found.tokens, 5], GREEDY)
        [then] = broker.submit([behind])
        await then.completion()
        said = crew.sent[1]
        assert len(said) == (len(found.prompt_tokens) + len(found.tokens)) // SIZE, "its full blocks"
        affinity.doubt("replica 1")
        affinity.trust("replica 1")
        held = affinity._replicas["replica 0"].held(said)
        # Of the last token there is no KV, so the block that it ends is not held.
        assert held == (len(found.prompt_tokens) + len(found.tokens) - 1) // SIZE > len(crew.sent[0])
        assert affinity.ranked(said) == ["replica 0", "replica 1"]

    with_a_fleet(llm, work, affinity=affinity)


def test_prompts_of_different_salts_share_nothing_wherever_they_go(llm: LLM) -> None:
    affinity = Affinity(1, 100)
    affinity.keep(["replica 0", "replica 1"])
    mine, theirs = b"mine" * 8, b"theirs" * 5

    async def work(reader: RemoteReader, broker: RequestBroker, crew: Crew) -> None:
        story = reader.read("Salt. " * 20 + STORY, replace(GREEDY, max_tokens=2 * SIZE))
        found = []
        for salt in (mine, theirs, mine):
            [call] = broker.submit([story.salted(salt)])
            found.append(await call.completion())
        assert [one.cached_tokens > 0 for one in found] == [False, False, True]
        assert found[0].tokens == found[1].tokens == found[2].tokens
        first, second, third = crew.sent
        assert len(first) == len(second) > 0
        assert not set(first) & set(second), "or where one's prompt went would tell of another's"
        assert first == third
        held = affinity._replicas["replica 0"].held
        behind = reader.read([*found[0].prompt_tokens, *found[0].tokens, 5], GREEDY)
        assert held(behind.salted(mine).keys) > len(first), "its answer is known by its salt too"
        assert held(behind.keys) == 0
        adapted = story.salted(mine).adapted("a")
        assert adapted.request().decided["lora"] == "a"
        assert not {*adapted.keys} & {*story.salted(mine).keys}, "an adapter has KV of its own"
        assert adapted.keys == story.adapted("a").salted(mine).keys != story.adapted("a").keys

    with_a_fleet(llm, work, affinity=affinity)


def test_without_ray_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("penstock.server.fleet.replicas")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--replicas", "1:2", "--port", "0", "--quiet"]) == 2
    assert (
        capsys.readouterr().err
        == "penstock: error: replicas need ray, which is not installed; pip install 'penstock[ray]'\n"
    )


def test_what_is_for_replicas_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--ray-address", "auto", "--port", "0", "--quiet"]) == 2
    assert "are only for replicas; add --replicas" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "2:1", "1:2:3", "-1", "", ":", "1:", "two", "1.5"])
def test_numbers_of_replicas_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither a number nor a least and a most; write 2, or 1:4"):
        bounds(text)


def test_numbers_of_replicas() -> None:
    assert [bounds("2"), bounds("1:4"), bounds("3:3")] == [(2, 2), (1, 4), (3, 3)]


def test_drafts_of_replicas_are_summed_and_tokens_a_pass_are_of_all() -> None:
    """One replica has decoded 90 tokens in 30 passes, the other 10 in 10: 100 in 40 are 2.5 each, not 2."""
    states = {
        name: {
            "speculation": asdict(
                SpeculationState.summed(drafted, accepted, tokens, tokens - accepted, "self")
            )
        }
        for name, drafted, accepted, tokens in (("a", 100, 60, 90), ("b", 7, 0, 10), ("c", 0, 0, 0))
    }
    expected = {"drafted": 107, "accepted": 60, "tokens": 100, "passes": 40, "tokens_a_pass": 2.5}
    assert summed(states)["speculation"] == expected | {"drafter": "self"}
    assert summed({"a": states["c"]})["speculation"]["tokens_a_pass"] == 0
    assert summed({"a": {"speculation": None}, "b": {"speculation": None}})["speculation"] is None


def test_experts_of_replicas_are_summed_and_their_map_is_that_of_one() -> None:
    counts = {"device": 5, "host": 1, "disk": 0, "rate": 2e9, "age": 0.5}
    states = {"a": {"experts": None}, "b": {"experts": counts}, "c": {"experts": counts | {"age": 0.25}}}
    found = summed(states)
    assert found["experts"] == {"device": 10, "host": 2, "disk": 0, "rate": 4e9, "age": 0.5}
    assert summed({"a": {"experts": None}})["experts"] is None

    class Pool:
        maps: Mapping[str, Any] = {"b": {"layers": [1]}, "a": {"layers": [2]}}

        async def broadcast(self, what: str) -> Mapping[str, Any]:
            assert what == "experts"
            return self.maps

    pool = Pool()
    backend = RemoteBackend(Mock(), pool, Mock(), patience=1.0)  # type: ignore[arg-type]  # All that is asked of it.
    assert asyncio.run(backend.experts()) == {"layers": [2]}
    pool.maps = {}
    with pytest.raises(EngineClosedError, match="no replica is ready"):
        asyncio.run(backend.experts())
