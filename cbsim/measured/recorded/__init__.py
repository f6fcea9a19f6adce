"""Replays of recorded runs: the simulator's errors, and the part of the model on which the result depends."""
