"""Comparison with measured servers: recorded runs, published points, and a user's own server, its terms fitted."""
