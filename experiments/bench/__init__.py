"""Measurements of the library itself: parity and speed of its kernels and of training."""
