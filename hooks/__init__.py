"""What runs inside a forward pass: the instrumented model, its kernels, switches and adapters."""
