"""Many workloads, simulated against measured: cases, causes, tally."""
