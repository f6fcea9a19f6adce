"""Making the stand-in importable as `flash_attn`, for as long as a run of transformers lasts.

The library looks for the package at every use: an importable module, the distribution it comes from, a version that is
new enough, and CUDA; the answers are cached, and so are the functions once imported. All of it is given and taken back
here, whether transformers was imported before or not. Only this process is told, and a package that is there is left
alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from cbengine.peer.standin import functions

NOTE = (
    "flash_attn is cbengine's stand-in: ragged rows by torch's own flash attention, decoding rows by our Triton "
    "kernels; figures are not those of the flash_attn package"
)
NOT_NEEDED = "the stand-in for flash_attn was not needed: the package is installed and was used"
NAME, PADDING, DISTRIBUTION = "flash_attn", "flash_attn.bert_padding", "flash-attn"
VERSION = "2.8.3+standin"  # of the functions that it resembles; transformers asks for 2.3.3 or later
CACHED = ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn")


class StandIn(ModuleType):
    """A module that says of itself what it is."""

    def __init__(self, name: str, **contents: object) -> None:
        super().__init__(name, NOTE)
        self.__spec__ = ModuleSpec(name, None, origin="cbengine.peer.standin")
        self.__path__: list[str] = []
        self.__version__ = VERSION
        vars(self).update(contents)


@contextmanager
def lent(device: torch.device) -> Iterator[None]:
    """While this lasts, `flash_attn` is the stand-in, computing on `device`; where the package is installed, nothing
    changes. One at a time. Raises RuntimeError if something of that name is no package that transformers takes.
    """
    from transformers.utils import import_utils

    assert not is_lent(), "the stand-in is lent already"
    if importlib.util.find_spec(NAME) is not None:
        if not import_utils.is_flash_attn_2_available():
            raise RuntimeError(f"{NAME} is importable, but transformers does not take it: no stand-in replaces it")
        yield
        return
    distributions = import_utils.PACKAGE_DISTRIBUTION_MAPPING
    known = distributions.get(NAME)
    sys.modules.update(_modules(device))
    distributions[NAME] = [DISTRIBUTION]
    _forget()
    try:
        yield
    finally:
        for name in (NAME, PADDING):
            del sys.modules[name]
        if known is None:
            del distributions[NAME]
        else:
            distributions[NAME] = known
        _forget()


def is_lent() -> bool:
    """Is `flash_attn` the stand-in now?"""
    return isinstance(sys.modules.get(NAME), StandIn)


def _modules(device: torch.device) -> dict[str, ModuleType]:
    """What transformers imports."""
    ours = functions.for_device(device)
    padding = StandIn(PADDING, pad_input=functions.missing, unpad_input=functions.missing)
    package = StandIn(
        NAME,
        bert_padding=padding,
        flash_attn_func=functions.missing,
        flash_attn_varlen_func=ours.flash_attn_varlen_func,
        flash_attn_with_kvcache=ours.flash_attn_with_kvcache,
    )
    return {NAME: package, PADDING: padding}


def _forget() -> None:
    """What transformers has remembered of `flash_attn`: whether it is there, and its functions."""
    from transformers import modeling_flash_attention_utils as user
    from transformers.utils import import_utils

    for name, answer in vars(import_utils).items():
        if name.startswith("is_flash_attn") and hasattr(answer, "cache_clear"):
            answer.cache_clear()
    user._loaded_implementation = None
    for name in CACHED:
        assert hasattr(user, name), f"transformers has no {name}"
        setattr(user, name, None)
