"""One server in either world: its parts, its inbox, a run of it, and its plans derived again."""
