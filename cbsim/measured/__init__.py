"""Measured servers: recorded runs, request logs and published points, scored; terms calibrated on them."""
