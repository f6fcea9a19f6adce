"""The command line: arguments and exit codes only."""
