"""The command line: arguments and exit statuses only."""
