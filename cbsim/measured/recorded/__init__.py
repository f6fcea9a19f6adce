"""Recorded runs of others, replayed: how far the simulator is from them, and which part of it carries the result."""
