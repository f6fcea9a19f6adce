"""KV caches: who gets which blocks, what is shared and what is kept. Standard library only."""
