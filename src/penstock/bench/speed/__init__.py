"""Measures the engine, beside the least time that the machine allows."""
