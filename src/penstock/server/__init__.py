"""Serves a model over HTTP: many clients at once on one engine."""
