"""Statistics over runs: loading, comparing, intervals, sweeps, reasons not to trust them."""
