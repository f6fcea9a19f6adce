"""The five schedulers of Sarathi-Serve, and what they share."""
