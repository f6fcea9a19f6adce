"""Measurements by clients of a served session, compared with those of its server."""
