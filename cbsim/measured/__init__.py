"""Comparison with measured servers: recorded runs, request logs, published points, and terms calibrated on them."""
