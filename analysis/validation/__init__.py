"""The validation of simulated against measured runs over many workloads: cases, causes, tally."""
