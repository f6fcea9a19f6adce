"""The schedulers: one folder for each family, one file for each scheduler; the registry finds them by name."""
