"""The comparison and drawing of run directories, its only input. All numbers are from `cbsim.metrics.metrics`."""
