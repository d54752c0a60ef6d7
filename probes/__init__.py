"""Measurements: an instrumented model (or a ladder) in, a tidy table out."""
