"""Sweeps: many runs over the values of fields, kept in a store and resumed, on a machine's cores or a Ray cluster."""
