"""Knows the keys of clients: the owner of a request, and the requests with which it shares prefixes."""

import asyncio
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16
PACE, LONGEST = 0.02, 10.0
"""Seconds."""
NO_OWNER = b""
"""The owner of requests to a server without keys."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Lets a client be answered that sends it. `priority` is the least number that this client may ask
    for."""

    secret: bytes
    priority: int = 0


class RefusalThrottle:
    """Delays the refusals of a key that is refused again and again: one every PACE seconds, so that refusals
    are not what a server is busy with. Of one loop."""

    def __init__(self) -> None:
        self._due: dict[bytes, float] = {}
        """By key, when it may be refused again."""

    async def turn(self, owner: bytes) -> None:
        """Wait until a key may be refused once more, LONGEST seconds at most."""
        now = asyncio.get_running_loop().time()
        self._due = {whose: due for whose, due in self._due.items() if due > now or whose == owner}
        due = min(max(self._due.get(owner, now), now), now + LONGEST)
        self._due[owner] = due + PACE
        if due > now:
            await asyncio.sleep(due - now)


def owner_of(key: bytes) -> bytes:
    """Return what stands for a key wherever something is kept for it, in memory or on disk: a digest, from
    which a key can only be guessed."""
    return blake2b(key, digest_size=DIGEST_BYTES, person=b"penstock-owner").digest()


def salt_of(owner: bytes, given: str | None, *, share: bool) -> bytes:
    """Return the salt of a request's prefixes, which are shared between requests of the same salt: of one key
    that send the same `cache_salt`, or none. share: between those of any key."""
    whose = NO_OWNER if share else owner
    if not whose and given is None:
        return b""
    said = b"" if given is None else b"\1" + given.encode("utf-8", "surrogatepass")
    return blake2b(whose + said, digest_size=DIGEST_BYTES, person=b"penstock-salt").digest()
