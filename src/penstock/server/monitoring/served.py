"""Describes one of several models of a server, as /state tells of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Describes one of several models that are loaded at their first use.

    state: unloaded, loading, loaded or unloading.
    bytes: of its weights. device_memory, host_memory: what it may take when it is loaded.
    running, waiting: requests that use it, and that wait for it.
    load_seconds: what loading it takes, as expected. ready_in: seconds until it would be there; 0 if it is.
    expires_in: seconds until it is unloaded unless it is used; None if it never is, or is not loaded.
    loads: how often it was loaded.
    fault: why its last load, or its engine, has failed; empty if it has not.
    """

    name: str
    state: str
    bytes: int
    device_memory: int
    host_memory: int
    running: int
    waiting: int
    load_seconds: float
    ready_in: float
    expires_in: float | None
    loads: int
    fault: str
