"""Replay of recorded schedulers: the same arrivals through this project's policy, loop and block pool, line by line."""
