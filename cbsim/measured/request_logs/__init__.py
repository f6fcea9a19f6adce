"""Replays of request logs, which others recorded at real servers: the simulator's errors for each run."""
