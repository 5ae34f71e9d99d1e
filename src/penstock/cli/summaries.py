"""Say what streams, in words: in the live line while it runs, and in a line for each part at the end."""

from collections.abc import Sequence

from penstock.base.meter import Flow, KVStats, MissedStats, PromptProgress, TierStats, WeightStats
from penstock.base.units import format_rate, format_size

_LEAST_BAR, _MOST_BAR = 5, 30


def fitting(forms: Sequence[str], width: int) -> str:
    """Return the first form that fits into `width`, else the last, cut; empty if there are none."""
    return next((form for form in forms if len(form) <= width), forms[-1][:width] if forms else "")


def beside(forms: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return forms of two things beside each other; the first of each is the longest."""
    if not forms or not more:
        return [*forms, *more]
    return [f"{one} | {more[0]}" for one in forms] + [f"{forms[-1]} | {more[-1]}"]


def weight_forms(stats: WeightStats, flow: Flow, seconds: float) -> list[str]:
    """Return where weights are and how they flow, in ever shorter forms.

    seconds: of a pass, 0 if not known.
    """
    took = f"pass {seconds:.3g} s" if seconds else "first pass"
    right = stats.experts.right / max(stats.experts.foretold, 1)
    flows = " | ".join(
        [
            *_flows(stats, flow),
            *([f"experts {stats.experts.hit_rate:.1%} on the device"] if stats.experts.asked else []),
            *([f"CPU {stats.experts.cpu_share:.1%} of the others"] if stats.experts.computed else []),
            *([f"foretold {right:.1%} right"] if stats.experts.foretold else []),
            *([_by_cpu(stats)] if stats.shared else []),
            f"{took} (decode predicted {stats.predicted:.3g})" if stats.predicted else took,
        ]
    )
    brief = [f"link {format_rate(flow.copied)} {flow.copied_share:.0%}", took]
    if stats.disk_rate:
        brief.insert(1, f"disk {format_rate(flow.read)} {flow.read_share:.0%}")
        brief.insert(2, f"waits disk {flow.waited_disk:.0%} link {flow.waited_link:.0%}")
    else:
        brief.insert(1, f"waits {flow.waited_link:.0%}")
    return [f"{_homes(stats)} | {flows}", flows, " | ".join(brief)]


def kv_forms(kv: KVStats, rate: float) -> list[str]:
    """Return where KV is and how it flows, in ever shorter forms. rate: bytes/s to the device."""
    return [
        f"KV {_kv_homes(kv)}, {format_size(kv.copied)} streamed, {format_rate(rate)}",
        f"KV {format_size(kv.host)} {format_rate(rate)}",
    ]


def bar(prompt: PromptProgress, now: float, width: int) -> str:
    """Return how far a prompt is, with a bar as wide as there is room for.

    It is cut where there is too little room even without a bar.
    """
    text = f"{prompt.reached:,} of {prompt.length:,} tokens"
    if rate := prompt.rate:
        minutes, seconds = divmod(round(prompt.left(now)), 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        text += f", {rate:,.0f} tokens/s, {left} left"
    room = min(width - len(f"prompt  {text}"), _MOST_BAR)
    if room < _LEAST_BAR:
        return f"prompt {text}"[:width]
    done = room * prompt.reached // prompt.length
    return f"prompt {'━' * done}{'─' * (room - done)} {text}"


def summary(stats: WeightStats, seconds: float) -> str:
    """Return a line on a run in which weights streamed: what was counted in its `seconds`."""
    passes = f"{stats.passes:,} {'pass' if stats.passes == 1 else 'passes'} in {seconds:.3g} s"
    took = f"{seconds / stats.passes:.3g} s each" if stats.passes else "none begun"
    predicted = f"decode predicted {stats.predicted:.3g}, " if stats.predicted else ""
    took = f"{took} ({predicted}bound by {stats.binding})"
    flows = [*_flows(stats, stats.flow(seconds)), *([_by_cpu(stats)] if stats.shared else [])]
    return " | ".join([f"weights: {_homes(stats)}", passes, *flows, took])


def expert_summary(stats: WeightStats) -> str:
    """Return a line on a run in which layers asked for experts that were not all on the device."""
    experts, passes = stats.experts, max(stats.passes, 1)
    disk = f", {format_size(experts.read)} of it from disk" if experts.read else ""
    by_cpu = f"{experts.computed:,} computed by the CPU | " if experts.computed else ""
    return (
        f"experts: {experts.hit_rate:.1%} of {experts.asked:,} asked were on the device | {by_cpu}"
        f"{format_size(experts.copied)} over the link{disk} | "
        f"{format_size(experts.copied // passes)} a pass"
    )


def kv_summary(kv: KVStats, seconds: float) -> str:
    """Return a line on a run in which KV streamed: what was counted in its `seconds`."""
    rate = f" ({format_rate(kv.copied / seconds)})" if seconds > 0 else ""
    disk = (
        f" | from disk {format_size(kv.read)}, to disk {format_size(kv.written)}"
        if kv.read or kv.written
        else ""
    )
    moved = (
        f"to the device {format_size(kv.copied)} in {seconds:.3g} s{rate} | from the device "
        f"{format_size(kv.sent)}"
    )
    return f"KV: {_kv_homes(kv)} | {moved}{disk}"


def missed_summary(missed: MissedStats) -> str:
    """Return a line on what attention policies have left out."""
    again = (
        f" | {missed.fallbacks:,} of {missed.choices:,} choices read everything after all"
        if missed.fallbacks
        else ""
    )
    return (
        f"attention: {missed.read:.1%} of KV blocks read | at most {missed.mean:.2%} of attention missed on "
        "average, "
        f"{missed.worst:.2%} in a layer's worst head, {missed.most:.2%} in the worst of all{again}"
    )


def tier_summary(tiers: TierStats) -> str:
    """Return a line on blocks that were kept, and that came back, since the engine started."""
    ways = (
        ("kept on the host", tiers.down),
        ("on disk", tiers.outward),
        ("brought to the device", tiers.up),
        ("from disk", tiers.inward),
    )
    parts = [f"{name} {format_size(way.bytes)} ({format_rate(way.rate)})" for name, way in ways if way.bytes]
    if tiers.disk_bytes:
        parts.append(f"disk takes {format_size(tiers.disk_bytes)}")
    parts += [
        f"{count:,} {what}"
        for count, what in ((tiers.quarantined, "damaged on disk"), (tiers.late, "too late"))
        if count
    ]
    return f"prefixes: {' | '.join(parts)}"


def _by_cpu(stats: WeightStats) -> str:
    """Return what the CPU computes where it rests, and in how many passes."""
    return (
        f"CPU {format_size(stats.by_cpu)} in {stats.shared:,} of {stats.passes:,} passes, "
        f"{format_rate(stats.cpu_rate)}"
    )


def _homes(stats: WeightStats) -> str:
    homes = [f"device {format_size(stats.device)} + ring {format_size(stats.device_ring)}"]
    if stats.host or stats.host_ring:
        homes.append(
            f"host {format_size(stats.host)}"
            + (f" + ring {format_size(stats.host_ring)}" if stats.host_ring else "")
        )
    if stats.disk:
        homes.append(f"disk {format_size(stats.disk)}")
    return " · ".join(homes)


def _kv_homes(kv: KVStats) -> str:
    disk = f" · disk {format_size(kv.disk)}" if kv.disk else ""
    return f"host {format_size(kv.host)} of {format_size(kv.room)}{disk}"


def _flows(stats: WeightStats, flow: Flow) -> list[str]:
    """Return what each link carries, and for how much of the time arithmetic waited."""
    link, waits = (
        f"link {_of(flow.copied, stats.link_rate, flow.copied_share)}",
        f"link {flow.waited_link:.0%}",
    )
    if not stats.disk_rate:
        return [link, f"waits: {waits}"]
    return [
        link,
        f"disk {_of(flow.read, stats.disk_rate, flow.read_share)}",
        f"waits: disk {flow.waited_disk:.0%}, {waits}",
    ]


def _of(rate: float, ceiling: float, share: float) -> str:
    """Return a rate beside its ceiling: `7.20 of 53.4 GB/s (13%)`."""
    now, most = format_rate(rate), format_rate(ceiling)
    if not ceiling:
        return now
    number, unit = now.split()
    return f"{number if most.endswith(f' {unit}') else now} of {most} ({share:.0%})"
