"""Many runs: sweeps over fields, kept in a store and resumed, on the cores of a machine or of a cluster."""
