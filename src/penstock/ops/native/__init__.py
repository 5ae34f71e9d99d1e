"""Holds kernels for a CPU, written in C and compiled on the machine at hand, once."""
