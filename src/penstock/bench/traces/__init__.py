"""Replays recorded and generated workloads through prefix caches, without a model."""
