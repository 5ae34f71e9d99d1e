"""Holds several models of one server, each loaded at its first use: what they may take, and when they go."""
