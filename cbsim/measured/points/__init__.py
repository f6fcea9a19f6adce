"""Predictions of published measurements of whole servers: points, server flags, terms, scores."""
