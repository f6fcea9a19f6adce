"""TensorRT-LLM's Python schedulers: capacity, then micro-batches."""
