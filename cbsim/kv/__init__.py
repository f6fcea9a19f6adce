"""KV caches: allocation, sharing and retention of blocks. Standard library only."""
