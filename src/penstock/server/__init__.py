"""A model behind HTTP: many clients at once on one engine."""
