"""Informs those who run a server: log lines and traces of requests, and the state that the page shows."""
