"""vLLM V1's scheduler, its cache groups and KV connectors."""
