"""The command line of the analysis: arguments and exit codes only."""
