"""The schedulers: a folder a family, a file a scheduler; the registry finds them by name."""
