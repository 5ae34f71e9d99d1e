"""Parses what a model says as it comes: reasoning, content, calls of tools."""
