"""The HTTP server: connections, keys, request bodies, routes, and how answers are sent."""
