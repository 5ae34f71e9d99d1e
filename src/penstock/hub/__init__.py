"""Finds models by the names that they have on the Hugging Face Hub: in its cache on this machine, or fetched
from there."""
