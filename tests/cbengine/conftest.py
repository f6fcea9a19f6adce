"""Where there is no CUDA device, Triton's kernels run in its interpreter: chosen here, before triton is imported."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
