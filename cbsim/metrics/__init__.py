"""Metrics of a run: the catalogue, their computation, conditions on them, and their formatting."""
