"""Runs: data, training, ladders, measurements over them, and the command line."""
