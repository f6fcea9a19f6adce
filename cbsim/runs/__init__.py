"""A server, simulated or measured: its parts, its inbox, its run, and its plans derived again."""
