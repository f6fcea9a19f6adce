"""Charts as values, how they are drawn, and the folders that reports go to."""
