"""Measurements and their use: probes, calibration, prediction, campaigns."""
