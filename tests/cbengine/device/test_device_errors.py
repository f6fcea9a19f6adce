"""Errors of the device: waits that are overdue, steps that fail, and memory that is not there."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from cbengine.device.base import DeviceError
from cbengine.device.cuda import Watchdog, guarded, out_of_memory


def test_a_wait_is_overdue_after_its_limit_and_only_while_it_lasts() -> None:
    dog = Watchdog(5.0)
    try:
        assert not dog.overdue(1e12)
        with dog:
            began = dog._since
            assert began is not None
            assert not dog.overdue(began + 5.0)
            assert dog.overdue(began + 5.1)
        assert not dog.overdue(1e12)
    finally:
        dog.close()
    assert dog.closed


class Big:
    """Stands for a tensor."""


def test_a_failed_step_holds_no_memory_and_says_what_it_was() -> None:
    """The message becomes an error of its own when the frames of the failure, and their tensors, are gone."""
    held: list[weakref.ref[Big]] = []

    def fails() -> None:
        big = Big()
        held.append(weakref.ref(big))
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    with pytest.raises(DeviceError) as caught:
        guarded(lambda: "a step of 3 query tokens in 2 rows", fails)
    assert str(caught.value) == (
        "the GPU failed in a step of 3 query tokens in 2 rows: CUDA error: an illegal memory access was encountered"
    )
    assert caught.value.__context__ is None
    assert held[0]() is None


def test_errors_that_are_not_the_gpu_s_pass() -> None:
    def ours() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    def told_before() -> None:
        raise DeviceError("the GPU failed: CUDA error")

    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
        guarded(str, ours)
    with pytest.raises(DeviceError, match=r"^the GPU failed: CUDA error$"):
        guarded(str, told_before)
    assert guarded(str, lambda: 7) == 7


def test_out_of_memory_says_what_was_asked_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_s = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.00 GiB"
    )
    said = "no memory for a step of 8 query tokens in 1 rows: 2.50 GiB asked for, 1.00 of the GPU's 79.00 GiB are free"
    what = "a step of 8 query tokens in 1 rows"
    assert out_of_memory(what, torch_s, 1 << 30, 79 << 30) == said
    assert ": more asked for, " in out_of_memory(what, "CUDA error: out of memory", 0, 1)

    def fails() -> None:
        raise torch.OutOfMemoryError(torch_s)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 79 << 30))
    with pytest.raises(DeviceError) as caught:
        guarded(lambda: what, fails)
    assert str(caught.value) == said
