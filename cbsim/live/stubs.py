"""Stubs of packages that SGLang's modules import and its scheduler never calls: where one is not installed, imports
written in SGLang's own modules find a stub.
"""

from __future__ import annotations

import logging
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

import transformers
from pydantic_core import core_schema

PACKAGES = """IPython compressed_tensors cuda deep_ep flash_attn flashinfer pynvml sentencepiece sgl_kernel
torch_memory_saver torchcodec torchvision tvm_ffi xgrammar"""


class Stub(type):
    """A class whose every attribute is another one. As a decorator it changes nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__get_pydantic_core_schema__":
            return lambda *_: core_schema.any_schema()
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name, (), {})

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else cls


class Stubs(MetaPathFinder, Loader):
    """The last finder, so that an installed package is never replaced."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "") if frame is not None else ""
        stubbed = name.partition(".")[0] in PACKAGES.split() and importer.partition(".")[0] == "sglang"
        return ModuleSpec(name, self, is_package=True) if stubbed else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__version__="0", __getattr__=Stub("Stub", (), {}).__getattr__)


def install() -> None:
    """Answer imports from now on. transformers looks for torchvision first, and registers no image models without.
    SGLang warns of a GPU that is not there, and of full caches.
    """
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="sglang")
    assert transformers.AutoProcessor
    for name in ("AutoImageProcessor", "AutoVideoProcessor"):
        setattr(sys.modules["transformers"], name, Stub(name, (), {}))  # the lazy import above has replaced the module
    sys.meta_path.append(Stubs())
