"""The requests of a scenario: generators, and readers of traces."""
