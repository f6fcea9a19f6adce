"""The peer with the stand-in for `flash_attn`: the library's flash paths, on a CPU as far as that goes, and a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from peer_runs import LOOPS, alone, checked, fifo, prompt, regret, scenario, statuses, tiny
from transformers.generation.continuous_batching import initialization
from transformers.utils import import_utils

from cbengine.cli import commands, parser
from cbengine.peer import peer_device, standin
from cbengine.peer.standin import functions, plain
from cbengine.peer.transformers_server import PeerError, TransformersServer
from cbsim.results.record import Record
from cbsim.workload import generators

GPU = torch.device("cuda")
ROUNDING = 0.1  # standard deviations of the logits: see `regret`
OVER_TIME = {"arrivals": {"kind": "poisson", "rate_per_s": 200}}


def server(loop: str, model: Any, load: dict[str, Any] | None = None, **more: Any) -> TransformersServer:
    asked = scenario(load or OVER_TIME, scheduler=fifo(max_blocks_per_request=8))
    given = {"cuda_graphs": False, "stand_in": True} | more
    return TransformersServer(asked, loop, generators.build(asked), model, prompt, Record(80), **given)


# -- on a CPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """transformers takes its flash paths on a CPU: it believes in CUDA where it looks for the package, and in paged
    decode. Gives the names of the stand-in's functions as they are called.
    """
    if importlib.util.find_spec(standin.NAME) is not None:
        pytest.skip("the package is installed: nothing is lent")
    called: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(plain, name)

        def function(*given: Any) -> Any:
            called.append(name)
            called.extend(["padding"] * int(name == "decode" and (given[5] < 0).any()))
            return original(*given)

        return function

    for name in ("varlen", "decode"):
        monkeypatch.setattr(plain, name, noted(name))
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    monkeypatch.setattr(peer_device, "attention", lambda *_: (peer_device.FLASH, [standin.NOTE]))
    import_utils.is_flash_attn_2_available.cache_clear()
    yield called
    import_utils.is_flash_attn_2_available.cache_clear()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("padded", [False, True])
def test_requests_say_what_they_would_say_alone(loop: str, padded: bool, flash: list[str]) -> None:
    """Through both functions, with batches padded as for CUDA graphs or not, tokens are those of `generate`, whose
    attention is another; and nothing of the stand-in is left behind.
    """
    one = server(loop, tiny())
    one._manager.batch_processor.model_runner.pad_inputs = padded
    one.run()
    checked(one.record, loop)
    assert statuses(one.record.requests()) == ["length"] * 12
    assert {spec: alone(spec) for spec in one.outputs} == one.outputs
    assert set(flash) == {"varlen", "decode"} | ({"padding"} if padded else set())
    assert one.facts["attention"] == "paged|flash_attention_2, flash_attn by the stand-in"
    assert standin.NOTE in one.facts["notes"]
    assert not standin.is_lent()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels take no host memory: see test_on_a_gpu")
def test_the_kernels_read_the_cache_as_the_library_lays_it_out(
    flash: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding rows, padding among them, by the GPU's kernels in Triton's interpreter; ragged ones by plain torch."""
    import interpreted  # noqa: F401 - skips this test where triton cannot run

    from cbengine.model.kernels.triton_ops import TritonOps
    from cbengine.peer.standin.append import GpuAttention

    monkeypatch.setattr(GpuAttention, "varlen", lambda _, *given: plain.varlen(*given))
    monkeypatch.setattr(functions, "for_device", lambda _: functions.FlashAttention(GpuAttention(TritonOps(4))))
    one = server("async", tiny(), {"requests": 3, "output_tokens": 6})
    one._manager.batch_processor.model_runner.pad_inputs = True
    one.run()
    assert {spec: alone(spec) for spec in one.outputs} == one.outputs
    assert set(flash) == {"varlen"}


def test_a_soft_reset_of_a_small_cache(flash: list[str]) -> None:
    """Requests that lose their blocks come back through both functions."""
    asked = scenario(
        {"output_tokens": 30, "requests": 6},
        scheduler=fifo(max_blocks_per_request=10),
        kv_cache={"num_blocks": 14, "block_size": 8},
    )
    record = Record(14)
    one = TransformersServer(
        asked, "async", generators.build(asked), tiny(), prompt, record, cuda_graphs=False, stand_in=True
    )
    one.run()
    assert checked(record, "async")["preempted"].sum() > 0
    assert {spec: alone(spec) for spec in one.outputs} == one.outputs


def test_half_precision_says_what_is_likely(flash: list[str]) -> None:
    """What a GPU is held to below, where no other attention gives the same bits; and a wrong cache would show."""
    model = tiny("cpu", "bfloat16")
    one = server("async", model)
    one.run()
    assert max(regret(model, spec, tokens) for spec, tokens in one.outputs.items()) < ROUNDING
    plausible = plain._attended
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plain, "_attended", lambda q, k, v: plausible(q, k, v.roll(1, 0)))
        other = server("async", model)
        other.run()
    assert max(regret(model, spec, tokens) for spec, tokens in other.outputs.items()) > 5 * ROUNDING


def test_the_stand_in_ends_with_the_server(flash: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run or not, and also if there never was one."""
    kept = server("sync", tiny())
    assert standin.is_lent()
    kept.close()
    kept.close()
    assert not standin.is_lent()

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peer_device, "configuration", fail)
    with pytest.raises(KeyboardInterrupt):
        server("sync", tiny())
    assert not standin.is_lent()


def test_the_package_wins(flash: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package installed the option changes nothing, and the facts say so."""
    monkeypatch.setattr(standin, "lent", lambda _: nullcontext())
    monkeypatch.setattr(peer_device, "attention", lambda *_: (peer_device.SDPA, []))
    one = server("sync", tiny())
    one.close()
    assert one.facts["notes"] == [standin.NOT_NEEDED]


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_flash_attention_takes_no_float32(flash: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for the stand-in does not get attention with a mask instead."""
    monkeypatch.undo()
    monkeypatch.setattr(standin, "is_lent", lambda: True)
    for available, says in ((True, "the weights are float32"), (False, "does not take it for the package")):
        monkeypatch.setattr(peer_device, "is_flash_attn_2_available", lambda found=available: found)
        with pytest.raises(PeerError, match=f"^--flash-attn stand-in: .*{says}"):
            peer_device.attention(GPU, torch.float32, "sync")
    monkeypatch.setattr(peer_device, "is_flash_attn_2_available", lambda: True)
    assert peer_device.attention(GPU, torch.bfloat16, "sync") == (peer_device.FLASH, [standin.NOTE])


@pytest.mark.parametrize(
    "words",
    [("--device", "cuda"), ("--engine", "transformers", "--device", "inline"), ("--device", "process")],
    ids=" ".join,
)
def test_the_option_is_for_the_peer_on_a_gpu(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anywhere else it would be ignored, so it is refused by name, and nothing is written."""
    given = ["replay", "tiny_cpu", "--flash-attn", "stand-in", "--out", str(tmp_path / "runs"), *words]
    assert parser.main(given) == 2
    assert "--flash-attn stand-in: needs --engine transformers and --device cuda" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_option_is_part_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the peer, and the run directory says how to run it again."""
    heard: list[tuple[list[str], bool]] = []

    def replay(options: Any, _: Any, *, stand_in: bool, **__: Any) -> int:
        heard.append((list(options.extra), stand_in))
        return 0

    monkeypatch.setattr(commands, "replay", replay)
    words = ("--engine", "transformers", "--device", "cuda")
    assert parser.main(["replay", "tiny_cpu", *words, "--flash-attn", "stand-in"]) == 0
    assert parser.main(["replay", "tiny_cpu", *words]) == 0
    asked, plain_run = ["--engine", "transformers", "--flash-attn", "stand-in", *words[2:]], [*words]
    assert heard == [(asked, True), (plain_run, False)]


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(loop: str, graphs: bool) -> None:
    """Both loops run through the flash paths, graphs are captured and replayed, and every token is as likely as
    rounding allows: bfloat16 is not the same bits through another attention.
    """
    asked = scenario(scheduler=fifo(max_blocks_per_request=8), kv_cache={"num_blocks": 40, "block_size": 256})
    model, record = tiny("cuda", "bfloat16"), Record(40)
    one = TransformersServer(
        asked, loop, generators.build(asked), model, prompt, record, cuda_graphs=graphs, stand_in=True
    )
    one.run()
    steps = checked(record, loop)
    assert statuses(record.requests()) == ["length"] * 12
    assert [spec for spec, tokens in one.outputs.items() if len(tokens) != spec.output_tokens] == []
    assert max(regret(model, spec, tokens) for spec, tokens in one.outputs.items()) < ROUNDING
    assert (steps.lane("compute") > 0).all()
    resolved = one.facts["continuous_batching"]
    assert resolved["use_async_batching"] == (loop == "async")
    assert resolved["use_cuda_graph"] == (graphs, graphs)
    assert resolved["max_blocks_per_request"] == 8
    if standin.NOT_NEEDED not in one.facts["notes"]:
        assert standin.NOTE in one.facts["notes"]
    assert not standin.is_lent()
