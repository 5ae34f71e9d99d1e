"""Measures how well a model finds things in a long text."""
