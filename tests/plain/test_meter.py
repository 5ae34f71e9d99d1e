"""What two counts of streamed weights, or of KV, say about the time between them."""

from dataclasses import replace

import pytest

from penstock.base.meter import ExpertCounts, Flow, KVStats, WeightStats

BEFORE = WeightStats(
    device=100,
    host=200,
    disk=300,
    device_ring=10,
    host_ring=20,
    passes=3,
    copied=1000,
    read=600,
    stalled_link=1.0,
    stalled_disk=2.0,
    link_rate=50.0,
    disk_rate=20.0,
    predicted=7.5,
    binding="disk",
)


def test_what_came_since_is_counted_and_the_rest_is_as_it_is_now() -> None:
    after = replace(BEFORE, device=90, passes=4, copied=1100, read=660, stalled_link=1.5, stalled_disk=3.0)
    assert after.since(BEFORE) == replace(
        BEFORE, device=90, passes=1, copied=100, read=60, stalled_link=0.5, stalled_disk=1.0
    )


def test_a_flow_is_rates_and_shares_of_an_interval() -> None:
    assert BEFORE.flow(40.0) == Flow(25.0, 15.0, 0.5, 0.75, 0.025, 0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_nothing_flows_in_no_time(seconds: float) -> None:
    assert BEFORE.flow(seconds) == Flow(0, 0, 0, 0, 0, 0)


def test_a_ceiling_may_be_surpassed_but_not_the_time_there_was() -> None:
    after = replace(
        BEFORE, copied=1110, stalled_disk=3.5, stalled_link=0.5
    )  # waits told late, and one told of the wrong link before
    flow = after.since(BEFORE).flow(1.0)
    assert flow.copied_share == pytest.approx(2.2)
    assert (flow.waited_disk, flow.waited_link) == (1.0, 0.0)


def test_a_link_that_is_not_used_has_no_share() -> None:
    flow = replace(BEFORE, disk_rate=0.0, link_rate=0.0).flow(1.0)
    assert (flow.copied_share, flow.read_share) == (0.0, 0.0)


def test_without_a_ring_nothing_streams() -> None:
    assert BEFORE.streams
    assert not replace(BEFORE, device_ring=0).streams


def test_of_kv_what_moved_is_counted_and_what_rests_is_as_it_is_now() -> None:
    before, after = (
        KVStats(host=10, disk=0, room=50, copied=100, sent=20),
        KVStats(host=50, disk=5, room=50, copied=190, sent=65),
    )
    assert after.since(before) == KVStats(host=50, disk=5, room=50, copied=90, sent=45)
    assert not KVStats(0, 0, 50, 0, 0).streams
    assert all(
        KVStats(**{"host": 0, "disk": 0, "room": 50, "copied": 0, "sent": 0, name: 1}).streams
        for name in ("host", "disk", "copied", "sent")
    )


def test_the_cpu_s_share_is_of_what_the_device_lacks() -> None:
    counts = ExpertCounts(asked=100, hit=60, computed=10)
    assert counts.cpu_share == 0.25
    assert ExpertCounts().cpu_share == 0.0
    assert counts.since(ExpertCounts(asked=50, hit=30, computed=4)).computed == 6
