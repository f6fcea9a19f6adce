"""Metrics of a run: the catalogue, their computation, conditions on them, how they are shown."""
