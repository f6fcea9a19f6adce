"""Searches over simulations: the capacity of a server, the best of several settings."""
