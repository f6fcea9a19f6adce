"""The simulated machine: the loop's effects in simulated time."""
