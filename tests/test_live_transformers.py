"""Our policy, and our sizes of a cache, against the transformers that is installed: workloads that no trace has
recorded, and layers with windows."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from cbsim.cli.parser import main
from cbsim.live.original import load
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.transformers.settings import FIFO, VERSIONS, TransformersSettings, layer_groups, resolve


def installed() -> str:
    """The version of transformers, if its rules are ours; skips the test with the reason otherwise."""
    for package in ("transformers", "torch"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    version: str = import_module("transformers").__version__
    if version.rpartition(".")[0] not in VERSIONS:
        pytest.skip(f"transformers {version} is installed, our rules are those of {', '.join(VERSIONS)}")
    return version


def test_the_real_scheduler_decides_the_same(
    tmp_path: Path, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every pass of the installed scheduler, its events, free lists and tables, equals ours."""
    record_property("transformers", installed())
    count = 100
    status = main(["conformance", "--live", "transformers", "--count", f"{count}", "--out", str(tmp_path / "kept")])
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"{count} traces compared" in said or "itself failed" in said, said


def test_a_workload_leaves_no_trace_in_the_next() -> None:
    """A recording depends on its workload alone."""
    installed()
    original, _ = load("transformers")
    first, other = (original.draw(random.Random(seed), seed) for seed in (1, 2))
    lines = original.record(first, "")
    original.record(other, "")
    assert original.record(first, "") == lines


# -- sizes -------------------------------------------------------------------------------------------------------------

PATTERNS = [
    ("full",),
    ("sliding 4096",),
    ("sliding 1024", "full"),
    ("full", "sliding 500", "sliding 500"),
    (*["sliding 512"] * 5, "full"),
]


@pytest.mark.parametrize("seed", range(60))
def test_caches_are_sized_alike(seed: int) -> None:
    """5.17: query tokens and blocks follow from free memory, groups of layers, and what the user has given."""
    if not installed().startswith("5.17."):
        pytest.skip("the equation is that of 5.17")
    rng = random.Random(seed)
    attention = rng.choice(PATTERNS)
    given = {"max_batch_tokens": rng.choice([None, None, 512, 4096]), "num_blocks": rng.choice([None, None, 700])}
    block, depth, fast = rng.choice([16, 32, 256]), rng.choice([1, 2]), rng.choice([0, 8, 32])
    model = shapes.model("llama-3.1-8b").model_copy(
        update={
            "attention": attention,
            "layers": len(attention) * rng.randint(1, 6),
            "heads": rng.choice([8, 32]),
            "kv_heads": rng.choice([1, 2, 8]),
            "vocab": rng.choice([512, 32_000, 128_256]),
        }
    )
    hardware = shapes.hardware("h100-sxm")
    free = hardware.memory_bytes - model.weight_bytes
    place = Place(model, hardware, depth, block, 0.9, given["num_blocks"])
    settings = TransformersSettings(name=FIFO, max_batch_tokens=given["max_batch_tokens"], max_blocks_per_request=fast)
    ours = resolve(settings, place)

    made = layer_groups(place, "5.17")
    library = import_module("transformers")
    config = library.LlamaConfig(
        hidden_size=model.hidden,
        head_dim=model.head_dim,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocab,
        num_hidden_layers=model.layers,
    )
    config._attn_implementation = "paged|flash_attention_2"
    batching = library.ContinuousBatchingConfig(
        block_size=block, use_async_batching=depth > 1, max_memory_percent=0.9, **given
    )
    batching.max_blocks_per_request = 0 if made.groups else fast
    cache = import_module("transformers.generation.continuous_batching.cache")
    kinds = ["sliding_attention" if group.ring else "full_attention" for group in made.groups] or ["full_attention"]
    handler = cache.PagedAttentionMemoryHandler
    with patch.object(handler, "get_available_memory", lambda _: int(free * 0.9)):
        solver = handler(config, batching, import_module("torch").bfloat16, kinds, made.layers)
        theirs = solver.infer_max_batch_tokens_and_num_blocks()
    assert (ours.max_batch_tokens, ours.num_blocks) == tuple(theirs), (seed, attention)


@pytest.mark.parametrize("attention", PATTERNS)
def test_layers_are_grouped_alike(attention: tuple[str, ...]) -> None:
    """5.17: groups of equal size, a kind's layers in their order."""
    if not installed().startswith("5.17."):
        pytest.skip("groups of one size are those of 5.17")
    model = shapes.model("llama-3.1-8b").model_copy(update={"attention": attention, "layers": 3 * len(attention)})
    made = layer_groups(Place(model, shapes.hardware("h100-sxm"), 1, 16, 0.9, None), "5.17")
    names = {"full": "full_attention", "sliding": "sliding_attention"}
    config = import_module("transformers").LlamaConfig(num_hidden_layers=model.layers)
    config.layer_types = [names[seen.split()[0]] for seen in attention] * 3
    cache = import_module("transformers.generation.continuous_batching.cache")
    theirs, _ = cache.group_layers_by_attn_type(config)
    groups = [list(group.layers) for group in made.groups] or [list(range(model.layers))]
    assert groups == theirs
