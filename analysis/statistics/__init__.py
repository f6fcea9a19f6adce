"""What runs say beside each other: loading, comparing, intervals, sweeps, when not to trust them."""
