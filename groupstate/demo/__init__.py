"""A small model learns sums in a few minutes on a CPU: the example to copy from."""
