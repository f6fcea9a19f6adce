"""Exit statuses of the commands."""

OK, ERROR, USAGE, CHECK_FAILED = 0, 1, 2, 3
