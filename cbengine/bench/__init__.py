"""How fast the engine and its kernels are."""

BENCH_PARTS = ("copies", "gemms", "attention", "tiles")
"""What is measured of a device and its kernels, size by size."""
