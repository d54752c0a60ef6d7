"""Foreign checkpoints as instrumented models: one file per format."""
