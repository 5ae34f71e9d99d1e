"""Counters for Prometheus never fall: whatever becomes of requests, whoever sleeps, and whenever they are
read."""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("transformers")

from penstock import LLM, SamplingParams
from penstock.api.snapshots import MemoryUse
from penstock.base.meter import ExpertCounts, WeightStats
from penstock.kv.store.diskpool import LostKV
from penstock.server.broker.backend import LocalBackend
from penstock.server.broker.growing import Growing
from penstock.server.broker.metrics import Metrics, _EngineCollector, _of_weights
from talks import Place, Tally, converse, delayed, interrupted, opened, rest, some_talks, warm, words

Counts = dict[tuple[str, ...], float]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FOUND = "prefix_tokens_found"


def growing(families: Iterable[Metric]) -> Counts:
    """All counters and counts of histograms."""
    return {
        (one.name.removeprefix("penstock:"), *one.labels.values()): one.value
        for family in families
        if family.type in ("counter", "histogram")
        for one in family.samples
        if not one.name.endswith("_created")
    }


def fallen(before: Counts, after: Counts) -> Counts:
    return {name: after.get(name, 0) - most for name, most in before.items() if after.get(name, 0) < most}


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("store", ["eager", "off"])
def test_no_count_of_an_engine_falls_whatever_becomes_of_requests(tmp_path: Path, store: str) -> None:
    """They are preempted, interrupted, left and started anew, and what is kept of them comes, is late and is
    given up. Each count is looked at after each step, as the engine has it."""
    warm("llama")
    rng, tally = random.Random(5), Tally()

    def enough() -> object:
        beyond = store == "off" or tally.found["host"] + tally.found["disk"]
        return tally.preemptions and tally.interrupts and tally.left and tally.found["pages"] and beyond

    with delayed(rng), opened("llama", Place(pages=16, records=24, store=store), tmp_path) as llm:
        backend, step, last = LocalBackend(llm), llm.driver.step, Counts()
        collector = _EngineCollector(backend, lambda: 0)

        def looked() -> None:
            nonlocal last
            try:
                step()
            finally:
                backend.stats, memory = llm.stats(), MemoryUse.of(llm.booted)
                now = growing(collector._now(backend.stats, memory))
                found = memory.prefixes
                now |= {
                    (FOUND, "prompts"): found.prompt_tokens,
                    (FOUND, "device"): found.device,
                    (FOUND, "host"): found.host,
                    (FOUND, "disk"): found.disk,
                }
                assert not fallen(last, now)
                last = now

        with patch.object(llm.driver, "step", looked):
            for _ in range(8):  # What moves depends on what is late: two are almost always enough.
                with interrupted(llm, rng, 30):
                    converse(llm, "llama", some_talks(rng, 5), rng, tally, leaves=0.05, clears=0.004)
                # Together they have more tokens than pages hold.
                prompts = [words(rng, 20) for _ in range(4)]
                llm.generate(prompts, GREEDY)
                llm.generate(prompts, replace(GREEDY, max_tokens=50))
                tally.take(llm)
                # KV on disk is lost, and all begin anew.
                lost = patch.object(llm.booted.engine._ranks, "begin", side_effect=LostKV("lost"))
                with lost, llm.stream([1, 2, 3], GREEDY):
                    looked()
                if enough():
                    break
            rest(llm)
    assert enough(), tally
    assert last[FOUND, "device"]
    assert store == "off" or last[FOUND, "host"] + last[FOUND, "disk"]
    assert last["num_preemptions_total",]


def test_no_counter_falls_though_a_model_sleeps_and_goes_on_from_where_it_was(tmp_path: Path) -> None:
    """With another engine, which counts from 0."""
    last = Counts()
    with LLM(device="cpu", dtype="float32", max_length=128, cache=tmp_path) as llm:
        backend, metrics = LocalBackend(llm), Metrics()
        metrics.watch(backend, lambda: 0)

        def looked() -> Counts:
            nonlocal last
            families = text_string_to_metric_families(metrics.text().decode())
            now = growing(family for family in families if not family.name.startswith("process_"))
            assert not fallen(last, now)
            last = now
            return now

        engines = set[int]()
        for turn in range(1, 4):
            llm.generate("Once upon a time", GREEDY)
            looked()  # Before the server's thread has looked.
            backend.stats = llm.stats()
            engines.add(backend.stats.engine)
            assert looked()["generation_tokens_total",] == 8 * turn
            llm.sleep(level=2)
            looked()
            backend.stats = llm.stats()
            looked()
            llm.wake_up()
            assert looked()["generation_tokens_total",] == 8 * turn
            backend.stats = llm.stats()
            assert looked()["generation_tokens_total",] == 8 * turn
        assert len(engines) == 3


def test_what_is_corrected_later_makes_no_counter_fall() -> None:
    """Which link was late is known later, and counts of which one is the difference of others are read while
    a step changes these."""
    first = WeightStats(0, 0, 0, 0, 0, 3, 0, 0, 4.0, 1.0, 0.0, 0.0, 0.0, "", ExpertCounts(9, 8, 0))
    later = replace(first, stalled_link=0.5, stalled_disk=5.0, experts=ExpertCounts(9, 4, 1))
    shown, last = Growing(), Counts()
    for stats, link, disk, hit in ((first, 4.0, 1.0, 8), (later, 4.0, 5.0, 8)):
        raw = growing(_of_weights(stats))
        now = growing(shown.of(_of_weights(stats), 1))
        assert raw["weights_stalled_seconds_total", "disk"] == disk
        assert now["weights_stalled_seconds_total", "link"] == link
        assert now["weights_stalled_seconds_total", "disk"] == disk
        assert now["experts_asked_total", "hit"] == hit
        assert not fallen(last, now)
        last = now
    again = growing(shown.of(_of_weights(replace(later, stalled_disk=2.0)), 2))
    assert again["weights_stalled_seconds_total", "disk"] == 7.0
