"""Scenarios of any scheduler with random settings, tiny caches, clients that leave, shared prefixes and samples."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import cbsim
from cbsim.policy.groups import Sight
from cbsim.policy.request import RequestSpec
from cbsim.scenario.scenario import Scenario
from cbsim.schedulers import registry
from cbsim.workload import generators
from cbsim.workload.served import came, left

WHOLE, SHARES = [0, 1, 2, 3, 5, 8, 16, 33, 64, 128], [0.0, 0.02, 0.3, 1.0, 2.0]
CHOICES: dict[str, list[Any]] = {  # of settings whose usable values lie elsewhere; hosts of a few blocks
    "kv_connector": ["none"],
    "cpu_bytes_to_use": [50_000, 200_000, 800_000],
    "swap_space_gib": [0.00005, 0.0002, 0.001],
    "cpu_offload_gib": [0.00005, 0.0002, 0.001],
    "max_model_len": [None, 40, 100],
    "num_beams": [1, 2, 4],
}
WINDOWS = [["sliding 8", "full"], ["sliding 16"], ["full", "chunked 16"], ["sliding 8", "sliding 24", "full"]]
STATES = [["linear", "linear", "full"], ["sliding 8", "linear", "full"], ["linear", "full", "chunked 32"]]
LINEAR = {"rule": "gated_delta", "key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 8}
SHAPE = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 128, "vocab": 512}
ARRIVALS = [{"kind": "at_once"}, {"kind": "closed_loop", "users": 3}, {"kind": "poisson", "rate_per_s": 1e6}]
CPU = {phase: {"base_s": 2e-7, "per_chunk_s": 1e-8} for phase in ("schedule", "prepare", "launch", "update")}
HOSTS = [{}, {}, {"cpu_offload_gib": 0.0002}]
KEPT: dict[str, list[dict[str, Any]]] = {  # settings that give a scheduler a host, drawn more often than chance does
    "vllm": [
        {},
        {"kv_connector": "simple_cpu"},
        {"kv_connector": "offloading"},
        {"preemption_mode": "swap", "swap_space_gib": 0.0002},
    ],
    "transformers_fifo": HOSTS,
    "transformers_prefill_first": HOSTS,
}


def any_value(hint: Any, dice: random.Random) -> Any:
    """A value of a setting's type, whatever its bounds."""
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        return any_value(inner[0], dice)
    if get_origin(hint) is Literal:
        return dice.choice(inner)
    if inner:
        return any_value(dice.choice(inner), dice)
    return dice.choice({bool: [False, True], int: WHOLE, float: SHARES}.get(hint, [None]))


def any_settings(name: str, dice: random.Random) -> dict[str, Any]:
    """Settings of a scheduler, some of them not the default."""
    drawn: dict[str, Any] = {"name": name}
    for field, hint in get_type_hints(registry.OURS[name].settings, include_extras=True).items():
        if field != "name" and dice.random() < 0.35:
            drawn[field] = dice.choice(CHOICES[field]) if field in CHOICES else any_value(hint, dice)
    drawn |= dice.choice(KEPT.get(name, [{}]))
    if drawn.get("kv_connector", "none") != "none":
        drawn["cpu_bytes_to_use"] = dice.choice(CHOICES["cpu_bytes_to_use"])
    return drawn


def any_log(dice: random.Random, longest: int) -> str:
    """Requests of a session, one in thirty too large, whose prefixes are of three texts; some clients leave."""
    unit, gap, leaving = dice.choice([1, 2, 4, 16]), dice.choice([0, 300, 3000]), dice.choice([0, 0.3, 1])
    lines, events, at_ns = list[str](), list[tuple[int, str]](), 0
    for index in range(dice.choice([6, 12, 25])):
        prompt = (
            dice.randint(1, dice.choice([1, *[max(1, longest * 2 // 3)] * 5])) if dice.randrange(30) else 3 * longest
        )
        most = dice.randint(1, max(1, longest // 3))
        text = dice.randint(0, dice.choice([0, prompt, prompt + most]) // unit)
        first = 1 + 100_000 * dice.choice([0, 1, index + 2])
        shared = tuple(range(first, first + text))
        at_ns += dice.randint(0, gap)
        outputs = dice.choice([most, dice.randint(1, most)])
        spec = RequestSpec(
            *(index, str(index), at_ns, prompt, outputs, most, dice.choice([0, 0, 1, -3]), shared, unit, text * unit)
        )
        lines.append(came(spec))
        if dice.random() < leaving:
            after_ns = at_ns + dice.randint(0, dice.choice([2_000, 60_000]))
            events.append((after_ns, left(spec, after_ns)))
    return "".join([*lines, *(line for _, line in sorted(events))])


def any_document(name: str, dice: random.Random) -> tuple[dict[str, Any], int]:
    """The fields of a scenario, and the longest request of its workload."""
    kind = registry.OURS[name]
    size, blocks = max(dice.choice([1, 2, 4, 8, 16]), kind.least_block_size), dice.choice([6, 9, 12, 17, 24, 33])
    longest = min((blocks - 1) * size, dice.choice([24, 60, 200]))
    model, workload = "tiny", {"kind": "served", "path": "log.jsonl"}
    if kind.windows and dice.random() < 0.3:
        sees = dice.choice(WINDOWS)
        linear = {"linear": LINEAR} if Sight.STATE in kind.serves and dice.random() < 0.5 else {}
        sees = dice.choice(STATES) if linear else sees
        model = {"name": "m", "layers": len(sees), "attention": sees, "max_position": 4096, **SHAPE, **linear}
    if name == "beam" or dice.random() < 0.3:
        prompt, output = ({"uniform": {"low": 1, "high": max(1, longest // part)}} for part in (2, 3))
        more = {"priorities": [0, 1, 2], "arrivals": dice.choice(ARRIVALS), "samples": dice.choice([1, 1, 3])}
        workload = {"kind": "synthetic", "requests": 9, "prompt_tokens": prompt, "output_tokens": output, **more}
    document = {
        "question": "What breaks?",
        "seed": dice.randrange(1000),
        "model": model,
        "hardware": "laptop-cpu",
        "workload": workload,
        "scheduler": any_settings(name, dice),
        "kv_cache": {"block_size": size, "num_blocks": blocks},
        "loop": {"mode": dice.choice(["sync", "async"]), "streams": dice.random() < 0.7},
        "cost": {"kind": "constant", "step_s": dice.choice([0, 1e-6]), "cpu": CPU},
    }
    if registry.OURS[name].drafts and dice.random() < 0.3:
        document["speculation"] = any_speculation(dice)
    return document, longest


def any_speculation(dice: random.Random) -> dict[str, Any]:
    method, k = dice.choice(["ngram", "eagle", "draft_model"]), dice.choice([1, 2, 3, 5])
    accepts = [{"rate": dice.choice([0, 0.5, 1])}, {"length": 1 + k * dice.random()}, {"rates": [0.7, 0.2][:k]}]
    drafted: dict[str, Any] = {"method": method, "k": k, "acceptance": dice.choice(accepts)}
    if dice.random() < 0.3:
        drafted["by_rows"] = [[2, k], [4, dice.randint(0, k)]]
    return drafted | ({"drafter": {"fraction": 0.1}} if method == "draft_model" else {})


def any_scenario(name: str, dice: random.Random, folder: Path) -> Scenario:
    """A scenario that can be run: a setting that is refused is left out, or all is drawn again."""
    document, longest = any_document(name, dice)
    for _ in range(100):
        (folder / "log.jsonl").write_text(any_log(dice, longest))
        (folder / "any.yaml").write_text(json.dumps(document))
        try:
            scenario = cbsim.load(folder / "any.yaml")
            generators.build(scenario)
            scenario.options(scenario.loop.mode)
        except cbsim.UserError as error:
            field = (error.field or "").rpartition(".")[2]
            if field == "name" or document["scheduler"].pop(field, None) is None:
                document, longest = any_document(name, dice)
            continue
        return scenario
    raise AssertionError(f"no settings of {name} can be used")


def checks_of(scheduler: Any) -> list[Callable[[], None]]:
    """What of a scheduler can be checked at any time."""
    parts = [
        scheduler,
        scheduler.decoding,
        *(getattr(scheduler, name, None) for name in ("transfers", "swapping", "host")),
    ]
    return [part.check for part in parts if hasattr(part, "check")]
