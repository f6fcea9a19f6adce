"""Published measurements of speculation beside what is predicted for the same servers, point by point.

Nothing is fitted to a point that is shown. Step times of gpt-oss are kernel tables with terms that were calibrated on
servers without speculation, those of the DeepSeek server efficiency curves of its card. Acceptance is what each source
says of its own runs, or that of another head where it says nothing.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import cbsim
from cbsim.draw.report import Table
from cbsim.scenario import catalog, shapes
from reports import page

FOLDER = "public_measured/speculation"
DRAFTS = 8  # of the longest acceptance curves
HEAD = {  # of gpt-oss-120b: one dense layer and a vocabulary of the most frequent tokens, as EAGLE-3 heads have
    "name": "EAGLE-3 head",
    "layers": 1,
    "hidden": 2880,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 64,
    "intermediate": 17280,
    "vocab": 32000,
    "max_position": 131072,
}
CARD_LENGTH, CARD_DRAFTS = 2.41, 3  # AL of the model card at its drafts
OTHER_LENGTH, OTHER_DRAFTS = 2.46, 7  # AL of another head of the same model, at temperature 1
BLOCK_LENGTH, BLOCK_SHARE = 3.4, 0.03  # AL of the DSpark arms; passes of a drafter that is a layer of 61, and its head


def published(name: str) -> list[dict[str, str]]:
    with catalog.data(f"{FOLDER}/{name}", "path").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rate(length: float, drafts: int) -> float:
    """The acceptance rate at which so many drafts have this mean length: (1 - a^(k+1)) / (1 - a), by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**at for at in range(drafts + 1)) < length else (low, middle)
    return low


def summary(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    result: Any = cbsim.run(cbsim.load({"question": "How fast?", "loop": {"mode": "async"}, **fields}))
    return result.summary  # type: ignore[no-any-return]


# -- acceptance by number of drafts -----------------------------------------------------------------------------------


def drawn_length(curve: str, drafts: int) -> float:
    """The mean length that a run with such a curve has, over 8,000 tokens."""
    fields = {
        "model": "llama-3.2-1b",
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 4, "prompt_tokens": 8, "output_tokens": 2000},
        "scheduler": {"name": "vllm"},
        "cost": {"kind": "constant", "step_s": 0.01},
        "speculation": {"method": "ngram", "k": drafts, "acceptance": {"curve": curve}},
    }
    return float(summary(fields)["drafts"]["acceptance_length"])


def acceptance() -> tuple[Table, list[dict[str, Any]]]:
    """A row a curve: published and drawn by drafts."""
    curves: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for row in published("golden_acceptance.csv"):
        curves[f"{row['file']}/{row['thinking']}"][int(row["drafts"])] = float(row["acceptance_length"])
    rows, points = [], []
    for name, lengths in sorted(curves.items()):
        drawn = {drafts: drawn_length(name, drafts) for drafts in lengths}
        points += [{"curve": name, "drafts": k, "published": lengths[k], "drawn": drawn[k]} for k in lengths]
        cells = [f"{drawn[k]:.2f} ({lengths[k]:.2f})" if k in lengths else "" for k in range(1, DRAFTS + 1)]
        rows.append((name, *cells))
    return Table("", ("curve", *(f"{k}" for k in range(1, DRAFTS + 1))), rows), points


# -- gpt-oss with EAGLE-3 ---------------------------------------------------------------------------------------------


def gpt_oss(
    card: str, workload: Mapping[str, Any], drafts: int, length: tuple[float, int], largest_graph: int | None = None
) -> Mapping[str, Any]:
    """The summary of gpt-oss-120b on one GPU, with an EAGLE-3 head if there are drafts."""
    speculation = {
        "method": "eagle",
        "k": drafts,
        "acceptance": {"rate": rate(*length)},
        "drafter": {"model": HEAD},
    }
    tables = f"public_measured/aiconfigurator/{card.replace('-', '_')}"
    fields = {
        "model": "gpt-oss-120b",
        "hardware": card,
        "workload": {"kind": "synthetic", **workload},
        "scheduler": {
            "name": "vllm",
            "enable_prefix_caching": False,
            "max_cudagraph_capture_size": largest_graph,
        },
        "cost": {"kind": "table", "path": tables, "engine": "vllm", "terms": "vllm-windows"},
        "speculation": speculation if drafts else None,
    }
    return summary(fields)


def card_points() -> list[dict[str, Any]]:
    """The points of the model card with EAGLE-3: ten prompts a run, so that at 64 ten run."""
    known: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in published("eagle3_gpt-oss.csv"):
        if row["source"].startswith("hf Dogacel") and row["draft"] != "D-Flash":
            known[int(row["concurrency"])]["none" if row["draft"] == "none" else "eagle"] = float(row["low"])
    points = []
    for users, of in known.items():
        load: dict[str, Any] = {"requests": 10, "prompt_tokens": 150, "output_tokens": 1024}
        load["arrivals"] = {"kind": "closed_loop", "users": min(users, 10)}
        none, eagle = (
            float(gpt_oss("h100-sxm", load, k, (CARD_LENGTH, CARD_DRAFTS))["output_tokens_per_s"])
            for k in (0, CARD_DRAFTS)
        )
        points.append({"users": users, "published": of, "predicted": {"none": none, "eagle": eagle}})
    return points


def card_table(points: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for point in points:
        says, made = point["published"], point["predicted"]
        tok_s = [f"{made[arm]:.0f} ({says[arm]:.0f})" for arm in ("none", "eagle")]
        ratio, theirs = made["eagle"] / made["none"], says["eagle"] / says["none"]
        rows.append((f"{point['users']}", *tok_s, f"{ratio:.2f} ({theirs:.2f})", f"{ratio / theirs - 1:+.0%}"))
    return Table("", ("concurrency", "tokens/s without", "tokens/s with 3 drafts", "speed-up", "its error"), rows)


USERS, MOST_DRAFTS = (25, 50, 100, 200), 5


def gains() -> list[dict[str, Any]]:
    """Throughput of gpt-oss-120b on an H200 by users and drafts, over that without."""
    points = []
    for users, largest in (*((users, None) for users in USERS), (200, 1024)):
        load = {"requests": 2 * users, "lengths": "sharegpt", "arrivals": {"kind": "closed_loop", "users": users}}
        found = [
            float(gpt_oss("h200-sxm", load, k, (OTHER_LENGTH, OTHER_DRAFTS), largest)["output_tokens_per_s"])
            for k in range(MOST_DRAFTS + 1)
        ]
        points.append({"users": users, "largest_graph": largest or 512, "gains": [each / found[0] for each in found]})
    return points


def gains_table(points: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (f"{point['users']}", f"{point['largest_graph']:,}", *(f"{gain - 1:+.0%}" for gain in point["gains"][1:]))
        for point in points
    ]
    return Table("", ("users", "largest graph", *(f"{k + 1} drafts" for k in range(MOST_DRAFTS))), rows)


# -- the DSpark server ------------------------------------------------------------------------------------------------


def nearest_model() -> dict[str, Any]:
    """Width, experts and types of DeepSeek-V4-Pro with the attention of V3, as its own cannot be built."""
    part = {"experts": 384, "experts_per_token": 6, "intermediate": 3072, "shared_intermediate": 3072}
    dense = {"first_dense": 0, "dense_intermediate": 0}
    other = {"name": "V4-Pro with V3's attention", "experts_dtype": "mxfp4", "kv_dtype": "fp8"}
    return shapes.model("deepseek-v3").model_copy(update=part | dense | other).model_dump(mode="json")


def block_points() -> list[dict[str, Any]]:
    """Tokens/s a user of the arms that are right: without speculation, and with a fixed number of drafts."""
    points = []
    for row in published("dspark_b300.csv"):
        drafts = {"none": 0, "fixed 5": 5, "fixed 6": 6, "fixed 7": 7}.get(row["arm"])
        if drafts is None:
            continue
        users = int(row["concurrency"])
        one_pass = {"method": "eagle", "k": drafts, "acceptance": {"length": BLOCK_LENGTH}}
        one_pass["drafter"] = {"fraction": BLOCK_SHARE / max(drafts, 1)}
        load = {"requests": max(4, 2 * users), "prompt_tokens": 300, "output_tokens": 512}
        fields = {
            "model": nearest_model(),
            "hardware": "b300",
            "workload": {"kind": "synthetic", **load, "arrivals": {"kind": "closed_loop", "users": users}},
            "scheduler": {
                "name": "vllm",
                "max_num_seqs": 256,
                "max_num_batched_tokens": 16384,
                "max_model_len": 8192,
            },
            "cost": {"kind": "roofline", "tensor_parallel": 8},
            "speculation": one_pass if drafts else None,
        }
        predicted = 1 / float(summary(fields)["tpot_s"]["mean"])
        says = float(row["tok_s_a_user"])
        points.append({"users": users, "drafts": drafts, "published": says, "predicted": predicted})
    return points


def block_table(points: Sequence[Mapping[str, Any]]) -> Table:
    by = {(point["users"], point["drafts"]): point for point in points}
    rows = []
    for users in sorted({point["users"] for point in points}):
        cells = [
            f"{by[users, k]['predicted']:.0f} ({by[users, k]['published']:.0f})" if (users, k) in by else ""
            for k in (0, 5, 6, 7)
        ]
        rows.append((f"{users}", *cells))
    return Table("", ("concurrency", "without", "5 drafts", "6 drafts", "7 drafts"), rows)


def main() -> None:
    curves, lengths = acceptance()
    card, by_drafts, blocks = card_points(), gains(), block_points()
    off = [abs(point["drawn"] - point["published"]) for point in lengths]
    print(f"{len(off)} lengths: mean difference {fmean(off):.3f}, largest {max(off):.2f}")
    tables = {"card": card_table(card), "gains": gains_table(by_drafts), "blocks": block_table(blocks)}
    data = {"card": card, "gains": by_drafts, "blocks": blocks, "lengths": lengths}
    page.write(__file__, {**tables, "lengths": curves}, [], data)


if __name__ == "__main__":
    main()
