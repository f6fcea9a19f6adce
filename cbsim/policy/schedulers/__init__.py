"""Scheduling policies, one file a family, and the registry that finds them by name."""
