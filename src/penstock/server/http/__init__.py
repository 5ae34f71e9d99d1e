"""Serves HTTP: connections, keys, request bodies, routes, and how answers are sent."""
