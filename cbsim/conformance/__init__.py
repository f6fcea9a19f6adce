"""Replay of recorded schedulers: the same arrivals through our policy, loop and block pool, compared line by line."""
