"""Simulator of continuous batching: scheduling, KV blocks, chunked prefill and CPU/GPU overlap."""
