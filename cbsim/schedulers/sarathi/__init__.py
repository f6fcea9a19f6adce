"""The five schedulers of Sarathi-Serve, and their common parts."""
