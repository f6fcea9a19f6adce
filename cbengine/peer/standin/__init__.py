"""A stand-in for the package `flash_attn`, for machines that have none, under one user: transformers' continuous
batching, which insists on that package for asynchronous batches.

It holds the two functions that the library's loop calls, with attention from elsewhere: torch's own flash attention
over ragged batches, and our Triton kernels over cached pages. Figures of a run with it are not those of the package.
"""

from cbengine.peer.standin.lend import NAME, NOT_NEEDED, NOTE, is_lent, lent

__all__ = ["NAME", "NOTE", "NOT_NEEDED", "is_lent", "lent"]
