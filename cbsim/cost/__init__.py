"""Cost models: a plan in, seconds out, and nothing else."""
