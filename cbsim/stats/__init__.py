"""Statistics of replicated runs: intervals, paired differences, Pareto frontiers."""
