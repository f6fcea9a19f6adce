"""Baselines: static and dynamic batching, TGI, contiguous caches, beam search."""
