"""Compares run directories and draws them. Reads nothing else, and takes every number from `cbsim.metrics.metrics`."""
