"""One op per file: the slow reference (the specification), the torch path, the fused path; one signature."""
