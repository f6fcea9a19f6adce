"""The command line of the engine: arguments and exit codes only."""
