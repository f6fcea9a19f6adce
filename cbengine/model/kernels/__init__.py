"""The model's operations as Triton kernels: attention over paged caches, and fused small operations."""
