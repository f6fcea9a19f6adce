"""The model on a device: weights, KV cache, operations, kernels."""
