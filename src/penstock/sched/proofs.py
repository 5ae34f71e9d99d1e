"""Proves invariants of the scheduler, between steps and of every plan.

Each function raises AssertionError, which says what is violated.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from penstock.kv.ledger.host import HostLedger
from penstock.sched.request import Request
from penstock.step.plan import HostBlockId, Plan, RequestId, Row, ShareKind


def prove_rows(
    running: Sequence[Request],
    waiting: Sequence[Request],
    by_row: Mapping[Row, Request],
    free: Sequence[Row],
    rows: int,
) -> None:
    """Prove that running requests have a row each, that waiting ones have nothing, and the queues' order."""
    assert sorted([*free, *by_row]) == list(range(rows)), "a row is lost or given twice"
    for queue in (running, waiting):
        assert all(sooner.turn < later.turn for sooner, later in pairwise(queue)), (
            "a queue is not in order of turns"
        )
    for request in running:
        owner = None if request.row is None else by_row[request.row]
        assert owner is request, f"request {request.id} does not own its row"
    for request in waiting:
        kv = request.kv
        holds = request.row is not None or kv.pages or kv.host or kv.computed
        assert not holds, f"waiting request {request.id} holds something"


def prove_kv(request: Request, size: int) -> None:
    """Prove that a request's computed positions lie in its blocks of `size` tokens, without a gap."""
    name, kv = f"request {request.id}", request.kv
    first, pages, host = kv.first_page, len(kv.pages), len(kv.host)
    # A draft that is being verified counts as computed.
    assert kv.computed <= request.length or request.ending, f"{name} is computed beyond its end"
    assert max(host, first + pages) * size >= kv.computed, f"{name} lacks blocks for its KV"
    assert first <= host, f"{name} has a gap between host blocks and pages"
    assert not pages or first + pages >= host, f"{name} has pages that end before its host blocks"
    assert host * size <= kv.computed, f"{name} has host blocks beyond its KV"
    assert kv.long or not host, f"{name} is short and has host blocks"
    if kv.fast_decode_until:
        assert not kv.long, f"{name} decodes fast and is long"
        assert kv.fast_decode_until <= pages * size, f"{name} decodes fast where it has no place"
        assert kv.table_length == pages, f"{name} decodes fast, and the workers do not know of all its pages"
        assert kv.computed + 1 >= request.length, f"{name} decodes fast and lacks more than its newest token"


def prove_plan(
    plan: Plan, by_row: Mapping[Row, Request], ahead: Mapping[RequestId, int], host: HostLedger, size: int
) -> None:
    """Prove that a step writes only to its own host blocks, and reads only blocks that are written.

    ahead: for each request, how many leading host blocks a step under way fills.
    """
    admitted = {admission.row for admission in plan.admissions}
    sources = {order.target: order.source for order in plan.orders}
    assert len(sources) == len(plan.orders), "two orders go to one block"
    leaving = set(sources.values())
    written: set[HostBlockId] = set()
    for share in plan.shares:
        request = by_row[share.row]
        name, kv, blocks = f"request {request.id}", request.kv, request.kv.host
        assert share.row not in admitted or request.share_prefix or not share.start, (
            f"{name} shares no prefix, and does not begin at its first token"
        )
        assert share.cold_stop == len(blocks) * size == kv.host_table_length * size, (
            f"{name} has a wrong table of host blocks"
        )
        assert kv.table_length == kv.first_page + len(kv.pages) == -(-share.stop // size), (
            f"{name} has a wrong block table"
        )
        assert share.near == kv.first_page * size <= share.cold_stop, f"{name} has a gap before its pages"
        assert share.cold_start == min(share.near, share.start), (
            f"{name} reads what is neither on the host nor in pages"
        )
        assert share.cold_start % size == 0, f"{name} has part of a block on the host"
        assert share.cold_stop <= share.start or share.start % size == 0, (
            f"{name} writes part of a block to the host"
        )
        decodes = share.kind is ShareKind.DECODE
        assert decodes == (len(share.tokens) == 1), f"{name} has a share of another kind than its tokens"
        assert not decodes or share.cold_stop <= share.start, f"{name} decodes into a host block"
        for index in range(max(kv.host_sealed, ahead.get(request.id, 0)), len(blocks)):
            assert host.is_private(blocks[index]), f"{name} writes a host block that others read"
            assert blocks[index] not in written, f"{name} writes a host block that another writes"
            ordered = sources.pop(blocks[index], None) is not None
            assert ordered == (index * size < share.start), (
                f"{name} reads a host block before it is written, or writes it twice"
            )
            written.add(blocks[index])
        pages = kv.pages[max(0, share.start // size - kv.first_page) :]
        assert not leaving.intersection(pages), f"{name} writes a page that is copied to the host"
    assert not sources, "an order of a block that no request has"
