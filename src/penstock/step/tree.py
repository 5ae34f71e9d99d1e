"""Trees of drafted tokens: how far each is from the newest token, what is before it, and which of them hold.

The nodes of a tree are numbered: 0 is the newest token, and the drafted ones follow, each behind its parent.
`parents` has the parent of each node but 0. Without any the draft is a line, in which each token is the
parent of the next.
"""

from collections.abc import Sequence


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many tokens each node is behind the newest one."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def lines(draft: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the drafted tokens up to each node, itself included."""
    found: list[tuple[int, ...]] = [()]
    for node, token in enumerate(draft):
        found.append((*found[parents[node] if parents else node], token))
    return found


def sights(parents: Sequence[int], window: int | None = None) -> list[int]:
    """Return which nodes each one sees, as bits of a number: itself and all before it on its line, as far as
    they are in a window of so many tokens."""
    found, every = [1], list[tuple[int, ...]]([(0,)])
    for node, parent in enumerate(parents, 1):
        every.append((*every[parent], node))
        found.append(sum(1 << seen for seen in every[node][-window if window else None :]))
    return found


def walk(drawn: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the nodes behind which the tokens that were drawn are accepted: the newest token, and then, as
    long as a node's child is what was drawn behind it, that child. Of equal children it is the first.

    drawn: the token that was drawn behind each node.
    """
    if not parents:
        held = next((at for at, token in enumerate(draft) if drawn[at] != token), len(draft))
        return list(range(held + 1))
    nodes = [0]
    for node, (token, parent) in enumerate(zip(draft, parents, strict=True), 1):
        if parent == nodes[-1] and drawn[parent] == token:
            nodes.append(node)
    return nodes


def repeated(draft: Sequence[int], parents: Sequence[int]) -> list[bool]:
    """Return of each drafted node whether a child of the same parent before it has the same token."""
    seen, found = set[tuple[int, int]](), list[bool]()
    for child in zip(parents, draft, strict=True):
        found.append(child in seen)
        seen.add(child)
    return found
