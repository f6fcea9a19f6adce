"""The first contact with a GPU machine: smoke checks, and packs for machines without a network."""
