"""Where weights stay and how they stream: small worlds by hand, properties over many, and a model of 70B."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arch.layout import GroupId, GroupKind
from penstock.base.errors import BudgetError
from penstock.base.tiers import Tier
from penstock.weights.streaming.residency import ExpertRoom, Placement, Use, WeightLimits, spread
from penstock.weights.streaming.ring import Link, RingLayout, StreamRates, Wait, lay_pieces, lay_ring
from penstock.weights.streaming.solver import predict, solve, solve_mixture

UNIT = 256
GIB = 1 << 30
PIECE = 4 * UNIT
RATES = StreamRates(host_to_device=20 * UNIT, disk_to_host=2 * UNIT, device_read=1000 * UNIT)


def world(*sizes: int) -> list[Use]:
    """Groups of so many units, each used once."""
    return [Use(GroupId(GroupKind.FFN, layer), size * UNIT) for layer, size in enumerate(sizes)]


def solved(
    uses: Sequence[Use], device: int, host: int = 10_000, seconds: Sequence[float] | None = None, **more: int
) -> Placement:
    """The placement for budgets in units."""
    limits = WeightLimits(device * UNIT, host * UNIT, **{name: size * UNIT for name, size in more.items()})
    return solve(uses, limits, RATES, seconds, PIECE)


def llama_70b() -> list[Use]:
    attention, ffn, vocabulary = 302_006_272, 1_409_302_528, 2_101_346_304
    layers = [
        Use(GroupId(kind, layer), size)
        for layer in range(80)
        for kind, size in ((GroupKind.ATTENTION, attention), (GroupKind.FFN, ffn))
    ]
    return [
        Use(GroupId(GroupKind.EMBEDDING), vocabulary),
        *layers,
        Use(GroupId(GroupKind.HEAD), vocabulary + 16384),
    ]


MEASURED = StreamRates(host_to_device=54e9, disk_to_host=2.5e9, device_read=4.2e12)


@st.composite
def worlds(draw: st.DrawFn) -> list[Use]:
    """A few groups of few different sizes, some used again later in the pass."""
    uses = world(
        *draw(st.lists(st.sampled_from([1, 3, 8, 15]) | st.integers(1, 20), min_size=1, max_size=12))
    )
    return uses + draw(st.lists(st.sampled_from(uses), max_size=2))


def largest_of(uses: Sequence[Use]) -> int:
    return max(use.size for use in uses) // UNIT


def whole(uses: Sequence[Use]) -> int:
    return sum({use.id: use.size for use in uses}.values()) // UNIT


# ---- homes


def test_what_fits_stays_and_nothing_streams() -> None:
    placement = solved(world(5, 1, 5, 1), device=12, host=0, disk=0)
    assert placement.everything_resident
    assert set(placement.homes.values()) == {Tier.DEVICE}
    assert placement.device_ring == placement.host_ring == RingLayout()
    assert placement.prediction.seconds == pytest.approx(12 / 1000)
    assert placement.prediction.binding is Link.COMPUTE
    assert "nothing streams" in str(placement)


@given(worlds(), st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_every_byte_has_one_home_and_no_budget_is_exceeded(
    uses: list[Use], extra: int, host: int, disk: bool
) -> None:
    device = largest_of(uses) + extra
    try:
        placement = solved(uses, device, host, **({} if disk else {"disk": 0}))
    except BudgetError:
        assert whole(uses) > device
        # Each way to need no more than what is there has been refused with reason.
        assert host < 4 if disk else whole(uses) - device + 3 * largest_of(uses) > host
        return
    sizes = {use.id: use.size for use in uses}
    assert placement.homes.keys() == sizes.keys()
    assert sum(placement.resting(tier) for tier in Tier) == sum(sizes.values())
    assert placement.resting(Tier.DEVICE) + placement.device_ring.size <= device * UNIT
    assert placement.resting(Tier.HOST) + placement.host_ring.size <= host * UNIT
    streamed = [index for index, use in enumerate(uses) if placement.homes[use.id] is not Tier.DEVICE]
    read = [index for index in streamed if placement.homes[uses[index].id] is Tier.DISK]
    assert [run.use for run in placement.device_ring.runs] == streamed
    assert placement.streamed == sum(uses[index].size for index in streamed)
    assert placement.read == sum(uses[index].size for index in read)
    assert disk or not read
    for ring in (placement.device_ring, placement.host_ring):
        assert all(
            run.offset >= 0 and run.offset + run.size <= ring.size and run.offset % UNIT == 0
            for run in ring.runs
        )
    pieces = {index: [run for run in placement.host_ring.runs if run.use == index] for index in read}
    for index, runs in pieces.items():
        assert [run.start for run in runs] == list(range(0, uses[index].size, PIECE))
        assert sum(run.size for run in runs) == uses[index].size
    assert predict(placement, RATES, piece=PIECE) == placement.prediction
    assert sum(placement.prediction.busy.values()) >= placement.prediction.seconds * (1 - 1e-9)
    assert all(
        busy <= placement.prediction.seconds * (1 + 1e-6) for busy in placement.prediction.busy.values()
    )


def test_room_for_50_of_80_layers_streams_31_where_a_window_streams_80() -> None:
    uses = world(*[10] * 80)
    fixed = solved(uses, 500, device_ring=10)
    assert fixed.streamed == 31 * 10 * UNIT
    assert solved(uses, 500).streamed <= 32 * 10 * UNIT
    window = solved(uses, 500, resident=0, device_ring=500)
    assert window.streamed == 80 * 10 * UNIT
    assert window.device_ring.size == 500 * UNIT
    assert window.prediction.seconds / fixed.prediction.seconds == pytest.approx(80 / 31, rel=0.02)


def test_a_window_on_both_tiers_reads_everything_again() -> None:
    uses = world(*[10] * 80)
    window = solved(uses, 100, 500, resident=0, kept=0)
    fixed = solved(uses, 100, 500)
    assert window.read == whole(uses) * UNIT
    assert window.prediction.seconds == pytest.approx(800 / 2, rel=0.01)
    assert fixed.prediction.seconds < window.prediction.seconds * 0.36


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.data())
def test_any_stretch_holds_its_share_give_or_take_a_group(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    share = data.draw(st.integers(0, total))
    taken = spread(sizes, share, total)
    first = data.draw(st.integers(0, len(sizes)))
    last = data.draw(st.integers(first, len(sizes)))
    stretch = range(first, last)
    held = sum(sizes[index] for index in stretch if taken[index])
    assert abs(held - share / total * sum(sizes[index] for index in stretch)) <= max(sizes)
    assert spread(sizes, 0, total) == [False] * len(sizes)
    assert spread(sizes, total, total) == [True] * len(sizes)


@pytest.mark.parametrize("room", [11, 20, 31, 41, 50, 63, 79])
def test_the_longest_stretch_without_a_resident_is_as_short_as_can_be(room: int) -> None:
    placement = solved(world(*[10] * 80), room * 10, device_ring=10)
    resident = [placement.homes[use.id] is Tier.DEVICE for use in placement.uses]
    assert sum(resident) == room - 1
    around = "".join("R" if stays else "s" for stays in resident) * 2
    assert max(map(len, around.split("R"))) <= -(-(81 - room) // (room - 1)) + 1
    assert max(map(len, around.split("s"))) <= -(-(room - 1) // (81 - room)) + 1


def test_disk_groups_lie_evenly_among_host_ones() -> None:
    placement = solved(world(*[8] * 60), 160, 200)
    homes = [placement.homes[use.id] for use in placement.uses]
    around = "".join({Tier.HOST: "h", Tier.DISK: "d", Tier.DEVICE: ""}[home] for home in homes) * 2
    host, disk = around.count("h"), around.count("d")
    assert min(host, disk) > 20
    assert max(map(len, around.split("d"))) <= -(-host // disk) + 1
    assert max(map(len, around.split("h"))) <= -(-disk // host) + 1


def test_a_group_used_twice_stays_before_others_and_streams_twice_if_it_cannot() -> None:
    tied = Use(GroupId(GroupKind.EMBEDDING), 10 * UNIT)
    uses = [tied, *world(*[10] * 8), tied]
    assert solved(uses, 40).homes[tied.id] is Tier.DEVICE
    placement = solved(uses, 20, resident=0)
    assert placement.streamed == 100 * UNIT
    assert [run.use for run in placement.device_ring.runs] == list(range(10))


def test_a_group_that_would_widen_the_ring_for_itself_alone_stays() -> None:
    placement = solved(world(20, *[10] * 20, 20), 100)
    assert (
        placement.homes[GroupId(GroupKind.FFN, 0)]
        is placement.homes[GroupId(GroupKind.FFN, 21)]
        is Tier.DEVICE
    )


def test_the_same_question_has_the_same_answer() -> None:
    assert solve(llama_70b(), WeightLimits(16 * GIB, 100 * GIB), MEASURED) == solve(
        llama_70b(), WeightLimits(16 * GIB, 100 * GIB), MEASURED
    )


# ---- rings


def laziest(ring: RingLayout, passes: int = 4) -> Iterator[tuple[int, int]]:
    """Bytes written over while in use, as (run that writes, run still in use), when arithmetic is as late as
    the waits let it be.

    Copies go byte by byte in order; arithmetic, in order too, has finished exactly what some wait so far has
    asked for.
    """
    count, finished = len(ring.runs), -1
    written_by = [-1] * ring.size
    for visit in range(passes * count):
        run = ring.runs[visit % count]
        waits = {
            wait.at: (visit - visit % count) + wait.run - (0 if wait.run < visit % count else count)
            for wait in run.waits
        }
        for byte in range(run.size):
            finished = max(finished, waits.get(byte, -1))
            assert finished < visit, "a copy that waits for itself or a later one never starts"
            if written_by[run.offset + byte] > finished:
                yield visit % count, written_by[run.offset + byte] % count
            written_by[run.offset + byte] = visit


def without(ring: RingLayout, index: int, wait: Wait) -> RingLayout:
    run = ring.runs[index]
    shorter = replace(run, waits=tuple(other for other in run.waits if other != wait))
    return replace(ring, runs=(*ring.runs[:index], shorter, *ring.runs[index + 1 :]))


def check_waits(ring: RingLayout) -> None:
    """The waits keep every byte until it is done with, and none of them could be left out."""
    assert not list(laziest(ring))
    for index, run in enumerate(ring.runs):
        for wait in run.waits:
            assert (index, wait.run) in set(laziest(without(ring, index, wait)))


@settings(max_examples=300)
@given(st.lists(st.sampled_from([1, 2, 9]) | st.integers(1, 12), min_size=1, max_size=14), st.integers(0, 40))
def test_no_byte_is_written_over_too_early_and_every_wait_is_needed(sizes: list[int], extra: int) -> None:
    ring = lay_ring([(index, 0, size) for index, size in enumerate(sizes)], max(sizes) + extra)
    assert ring.size <= max(sizes) + extra
    assert [run.size for run in ring.runs] == sizes
    check_waits(ring)


@given(st.lists(st.integers(1, 17), min_size=1, max_size=6), st.integers(1, 9))
def test_slots_of_the_host_ring_are_not_read_into_too_early_and_every_wait_is_needed(
    sizes: list[int], slots: int
) -> None:
    ring = lay_pieces(list(enumerate(sizes)), slots * 4, 4)
    assert all(run.offset % 4 == 0 for run in ring.runs)
    check_waits(replace(ring, runs=tuple(replace(run, size=4) for run in ring.runs)))


def test_groups_of_two_sizes_go_round_and_wait_byte_by_byte() -> None:
    ring = lay_ring([(0, 0, 2), (1, 0, 10), (2, 0, 2), (3, 0, 10)], 14)
    assert [run.offset for run in ring.runs] == [0, 2, 12, 0]
    assert ring.size == 14
    assert [run.waits for run in ring.runs] == [
        (Wait(3, 0),),  # The last group of the pass before lies here and under the first 8 bytes of the next;
        (),  # when it is done, so are the others of its pass.
        (),
        (Wait(0, 0), Wait(1, 2)),
    ]


def test_a_ring_of_one_group_waits_for_each_before_the_next() -> None:
    ring = lay_ring([(0, 0, 5), (1, 0, 5), (2, 0, 5)], 5)
    assert [run.waits for run in ring.runs] == [(Wait(2, 0),), (Wait(0, 0),), (Wait(1, 0),)]
    assert lay_ring([(0, 0, 5)], 5).runs[0].waits == (Wait(0, 0),)


# ---- prediction


def reference(
    placement: Placement, rates: StreamRates, seconds: Sequence[float], piece: int, passes: int = 10
) -> float:
    """Seconds of a late pass, from events: three workers, each with its own list of jobs, and the addresses
    and waits of the placement."""
    host_runs, device_runs = placement.host_ring.runs, placement.device_ring.runs
    queues: dict[str, list[tuple[tuple[int, ...], float, list[tuple[int, ...]]]]] = {
        "disk": [],
        "link": [],
        "compute": [],
    }

    def before(number: int, lap: int, index: int) -> int:
        return lap if number < index else lap - 1

    position = {run.use: index for index, run in enumerate(device_runs)}
    use_of = [run.use for run in device_runs]
    read_as = {(run.use, run.start): index for index, run in enumerate(host_runs)}
    for lap in range(passes):
        for index, run in enumerate(host_runs):
            needs = [
                (1, before(wait.run, lap, index), host_runs[wait.run].use, host_runs[wait.run].start)
                for wait in run.waits
            ]
            queues["disk"].append(((0, lap, run.use, run.start), run.size / rates.disk_to_host, list(needs)))
        for index, run in enumerate(device_runs):
            for start in range(0, run.size, piece):
                size = min(piece, run.size - start)
                needs = [
                    (2, before(wait.run, lap, index), use_of[wait.run])
                    for wait in run.waits
                    if wait.at < start + size
                ]
                needs += [(0, lap, run.use, start)] if (run.use, start) in read_as else []
                queues["link"].append(((1, lap, run.use, start), size / rates.host_to_device, needs))
        for use, work in enumerate(seconds):
            last = [(1, lap, use, (placement.uses[use].size - 1) // piece * piece)] if use in position else []
            queues["compute"].append(((2, lap, use), work, list(last)))
    finished: set[tuple[int, ...]] = set()
    at, busy, events, ends = dict.fromkeys(queues, 0), set[str](), list[tuple[float, str]](), list[float]()
    now = 0.0
    while True:
        for name, jobs in queues.items():
            if (
                name not in busy
                and at[name] < len(jobs)
                and all(need[1] < 0 or need in finished for need in jobs[at[name]][2])
            ):
                busy.add(name)
                heapq.heappush(events, (now + jobs[at[name]][1], name))
        if not events:
            break
        now, name = heapq.heappop(events)
        job = queues[name][at[name]][0]
        finished.add(job)
        if job[0] == 2 and job[2] == len(seconds) - 1:
            ends.append(now)
        busy.remove(name)
        at[name] += 1
    assert len(ends) == passes, "the passes came to a standstill"
    return (ends[-1] - ends[passes // 2]) / (passes - 1 - passes // 2)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([24, 40, 120]), min_size=2, max_size=12),
    st.integers(0, 300),
    st.integers(16, 400),
    st.sampled_from([0.001, 0.05, 0.3, 1.0, 4.0]),
    st.sampled_from([2, 8, 30]),
)
def test_prediction_agrees_with_events_at_the_addresses_of_the_placement(
    sizes: list[int], extra: int, host: int, work: float, disk: int
) -> None:
    uses = world(*sizes)
    rates = StreamRates(20 * UNIT, disk * UNIT, 1)
    seconds = [work * size / 20 for size in sizes]
    placement = solve(uses, WeightLimits((max(sizes) + extra) * UNIT, host * UNIT), rates, seconds, UNIT)
    measured = reference(placement, rates, seconds, UNIT)
    assert placement.prediction.seconds == pytest.approx(measured, rel=0.02)


def test_bound_by_disk() -> None:
    placement = solved(world(*[40] * 30), 200, 400)
    assert placement.prediction.seconds == pytest.approx(placement.read / RATES.disk_to_host, rel=0.01)
    assert placement.prediction.binding is Link.DISK
    assert placement.prediction.stalled[Link.DISK] < 0.01 * placement.prediction.seconds
    assert placement.prediction.stalled[Link.LINK] > 0


def test_bound_by_link() -> None:
    placement = solved(world(*[40] * 30), 200, 2000, device_ring=80)
    assert placement.prediction.seconds == pytest.approx(placement.streamed / RATES.host_to_device, rel=0.01)
    assert placement.prediction.binding is Link.LINK
    assert placement.read == 0


def test_bound_by_compute() -> None:
    placement = solved(world(*[40] * 30), 200, 2000, seconds=[3.0] * 30)
    assert placement.prediction.seconds == pytest.approx(90)
    assert placement.prediction.binding is Link.COMPUTE


def test_without_overlap_copies_and_arithmetic_add_up() -> None:
    placement = solved(world(*[40] * 30), 40, 2000, seconds=[3.0] * 30)
    assert placement.device_ring.size == 40 * UNIT
    assert placement.prediction.seconds == pytest.approx(30 * (40 / 20 + 3.0))


@pytest.mark.parametrize(
    ("skew", "ring", "seconds"), [(0.0, 40, 48.024), (0.05, 40, 49.224), (0.2, 80, 50.201)]
)
def test_where_ranks_are_apart_a_wider_ring_may_be_worth_a_group(
    skew: float, ring: int, seconds: float
) -> None:
    """In a ring of one group each copy waits for the arithmetic of all ranks; in one of two it begins
    before."""
    uses, limits = world(*[40] * 30), WeightLimits(280 * UNIT, 2000 * UNIT)
    placement = solve(uses, limits, replace(RATES, skew=skew), [0.001] * 30, PIECE)
    assert placement.device_ring.size == ring * UNIT
    assert placement.prediction.seconds == pytest.approx(seconds)


def test_copies_wrap_around_the_end_of_a_pass() -> None:
    """Copies take 6 seconds and arithmetic 7.2: it never waits only if what a pass begins with comes while
    the pass before still runs."""
    placement = solved(world(*[40] * 8), 319, 2000, seconds=[0.9] * 8, device_ring=80)
    assert placement.streamed == 120 * UNIT
    assert placement.prediction.seconds == pytest.approx(7.2)


@settings(max_examples=60)
@given(worlds(), st.integers(0, 200), st.sampled_from([0, 1]), st.sampled_from([0.0001, 0.02, 0.2, 2.0]))
def test_more_device_memory_is_never_slower(uses: list[Use], host: int, disk: int, work: float) -> None:
    seconds = [work * use.size / UNIT for use in uses]
    before = float("inf")
    for device in range(largest_of(uses), whole(uses) + 2, max(whole(uses) // 8, 1)):
        try:
            placement = solved(uses, device, host, seconds, **({} if disk else {"disk": 0}))
        except BudgetError:
            assert before == float("inf")
            continue
        assert placement.prediction.seconds <= before * (1 + 1e-6)
        before = placement.prediction.seconds


# ---- refusals


def test_a_budget_below_the_largest_group_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"2\.25 KiB of device memory.*ffn\.1 of 2\.50 KiB"):
        solved(world(5, 10, 5), device=9)


@pytest.mark.parametrize("ring", [9, 16])
def test_a_ring_that_cannot_be_is_refused(ring: int) -> None:
    with pytest.raises(BudgetError, match=r"ring of .* must hold .*ffn\.1 of 2\.50 KiB.*fit into 3\.75 KiB"):
        solved(world(5, 10, 5), device=15, device_ring=ring)


def test_no_disk_and_too_little_host_memory_is_refused() -> None:
    with pytest.raises(
        BudgetError, match=r"do not fit into 3\.00 KiB .* 7\.50 KiB on the host, and there is no disk"
    ):
        solved(world(*[10] * 6), device=12, host=30, disk=0)


def test_too_small_a_disk_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"5\.00 KiB on disk"):
        solved(world(*[10] * 6), device=12, host=20, disk=20)


def test_host_memory_below_one_piece_is_refused_only_where_a_disk_is_needed() -> None:
    uses = world(*[10] * 6)
    with pytest.raises(
        BudgetError, match=r"768 B of host memory is too small for a ring of one piece of 1\.00 KiB"
    ):
        solved(uses, device=30, host=3)
    assert solved(uses, device=30, host=4).host_ring.size == PIECE
    assert solved(uses, device=60, host=0).everything_resident


def test_without_a_disk_its_rate_does_not_matter() -> None:
    rates = replace(RATES, disk_to_host=0.0)
    assert solve(world(*[10] * 6), WeightLimits(12 * UNIT, 60 * UNIT, disk=0), rates, piece=PIECE).read == 0
    with pytest.raises(BudgetError, match="there is no disk"):
        solve(world(*[10] * 6), WeightLimits(12 * UNIT, 30 * UNIT, disk=0), rates, piece=PIECE)


# ---- experts


def mixture(
    uses: Sequence[Use], size: int, count: int, device: int, host: int, **more: int
) -> tuple[Placement, ExpertRoom]:
    """For budgets and sizes of experts in units; pieces hold any group."""
    limits = WeightLimits(device * UNIT, host * UNIT, **more)
    return solve_mixture(uses, size * UNIT, count, limits, RATES, piece=max(size, largest_of(uses)) * UNIT)


def test_experts_that_fit_stay_on_the_device() -> None:
    placement, room = mixture(world(5, 1), 2, 8, device=22, host=0)
    assert placement.everything_resident
    assert room == ExpertRoom(2 * UNIT, 8, 8, 0)
    assert (room.device, room.host, room.on_disk) == (16 * UNIT, 0, 0)


def test_experts_take_what_the_others_leave() -> None:
    """Of 30 units 6 are for what every pass needs, 16 for the ring of experts, and 8 for those that stay; the
    host takes ten."""
    placement, room = mixture(world(5, 1), 2, 24, device=30, host=20)
    assert placement.everything_resident
    assert (room.on_device, room.device_ring) == (4, 8)
    assert (room.on_host, room.host_ring, room.on_disk) == (2, 8, 18)
    # Without experts on disk no slots are needed for their reads.
    _, room = mixture(world(5, 1), 2, 14, device=30, host=20, disk=0)
    assert (room.on_device, room.on_host, room.host_ring, room.on_disk) == (4, 10, 0, 0)


def test_a_device_too_small_for_all_that_every_pass_needs_streams_that_too() -> None:
    placement, room = mixture(world(5, 5, 5), 2, 6, device=10, host=100)
    assert not placement.everything_resident
    assert (room.device_ring, room.on_host, room.on_disk) == (2, 6 - room.on_device, 0)


@given(
    worlds(),
    st.sampled_from([1, 2, 7]),
    st.integers(1, 20),
    st.integers(1, 200),
    st.integers(0, 100),
    st.sampled_from([{}, {"disk": 0}]),
)
def test_experts_have_one_home_each_and_no_budget_is_exceeded(
    uses: list[Use], size: int, count: int, device: int, host: int, disk: dict[str, int]
) -> None:
    try:
        placement, room = mixture(uses, size, count, device, host, **disk)
    except BudgetError:
        assert whole(uses) + count * size > device
        return
    assert (room.size, room.experts) == (size * UNIT, count)
    assert min(room.on_device, room.on_host, room.on_disk) >= 0
    assert placement.resting(Tier.DEVICE) + placement.device_ring.size + room.device <= device * UNIT
    assert placement.resting(Tier.HOST) + placement.host_ring.size + room.host <= host * UNIT
    assert (room.device_ring > 0) == (room.on_device < count)
    assert (room.host_ring > 0) == (room.on_disk > 0)
    assert not disk or room.on_disk == placement.read == 0


def test_a_place_for_what_comes_ahead_is_there_only_where_the_host_has_all() -> None:
    """Of 24 units 6 are for what every pass needs: nine experts of 2 fit beside, one of which may stay."""
    _, room = mixture(world(5, 1), 2, 14, device=24, host=28, copies=True)
    assert (room.copies, room.device_ring, room.slots) == (True, 9, 0)
    for disk in ({}, {"disk": 0}):
        _, room = mixture(world(5, 1), 2, 14, device=24, host=26, copies=True, **disk)
        assert (room.copies, room.device_ring) == (False, 8)
    assert (room.on_device, room.on_host) == (1, 13)


@pytest.mark.parametrize(("asked", "ring"), [(0, 9), (8, 9), (36, 10), (64, 17), (128, 32)])
def test_what_many_ask_for_comes_in_few_parts(asked: int, ring: int) -> None:
    """Of 2,000 units 6 are for what every pass needs; of the other 997 places at most 31 are for what comes,
    and one for what comes ahead."""
    _, room = mixture(world(5, 1), 2, 2000, device=2000, host=4000, copies=True, asked=asked)
    assert (room.device_ring, room.slots) == (ring, 997 - ring)


def test_no_more_experts_stay_than_there_are() -> None:
    """What every pass needs does not fit in whole, so that it leaves a hole larger than all experts."""
    _, room = mixture(world(8, 15), 2, 1, device=23, host=40)
    assert (room.on_device, room.on_host) == (1, 0)


def test_experts_without_a_home_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"is too small for 2 experts of 512 B at a time"):
        mixture(world(5, 5), 2, 24, device=4, host=100)
    with pytest.raises(
        BudgetError,
        match=r"24 experts of 512 B do not fit into .* on the device and .* on the host, and there is no "
        r"disk",
    ):
        mixture(world(5, 5), 2, 24, device=20, host=20, disk=0)
    with pytest.raises(
        BudgetError,
        match=r"256 B of host memory is too small for one expert of 512 B, through which the others would",
    ):
        mixture(world(5, 5), 2, 24, device=20, host=1)


# ---- a large model


def test_70b_on_a_small_gpu_runs_at_the_pace_of_the_disk() -> None:
    placement = solve(llama_70b(), WeightLimits(16 * GIB, 100 * GIB), MEASURED)
    total = sum(use.size for use in llama_70b())
    assert placement.prediction.binding is Link.DISK
    assert placement.prediction.seconds == pytest.approx(placement.read / 2.5e9, rel=0.01)
    # A group on the device and half a GiB on the host are all that the rings cost.
    assert placement.read < (total - 116 * GIB) + 1.5 * GIB + GIB
    assert "bound by disk" in str(placement)
    assert 7.0 < placement.prediction.seconds < 8.0


def test_70b_from_host_memory_runs_at_the_pace_of_the_link() -> None:
    placement = solve(llama_70b(), WeightLimits(16 * GIB, 140 * GIB), MEASURED)
    assert placement.read == 0
    assert placement.prediction.binding is Link.LINK
    assert placement.prediction.seconds == pytest.approx(placement.streamed / 54e9, rel=0.01)
    assert 2.3 < placement.prediction.seconds < 2.4


def test_70b_with_more_device_memory_is_never_slower() -> None:
    predicted = [
        solve(llama_70b(), WeightLimits(gib * GIB, 140 * GIB), MEASURED).prediction.seconds
        for gib in range(2, 136, 6)
    ]
    assert predicted == sorted(predicted, reverse=True)
