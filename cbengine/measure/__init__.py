"""Probes, calibration, prediction, campaigns: what is measured, and what is made of it."""
