"""What happened: the record, its columns, the run directory, and the numbers made of it."""
