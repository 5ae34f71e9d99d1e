"""Stands between an event loop with many clients and what computes for them: calls, their limits, and
backends."""
