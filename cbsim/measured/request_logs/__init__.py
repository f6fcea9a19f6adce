"""Logs of single requests that others sent to real servers, replayed: how far the simulator is from each run."""
