"""Published transfer times of KV beside those of a simulated link, whose two terms are fitted to them: relative least
squares over all points. Blocks are equally large at every length, so a term a descriptor cannot be told from the rate.
"""

from __future__ import annotations

import csv
from typing import Any

import numpy as np

import cbsim
from cbsim.draw.report import Table
from cbsim.scenario import catalog, shapes
from reports import page

FILE = "public_measured/kv_transfer/mooncake_vllm_1p1d_h800.csv"
MODEL, GPUS = "qwen3-8b", 8


def transfer_ms(tokens: int, link: dict[str, float]) -> float:
    """The time of the transfer of one request alone, simulated."""
    fields: Any = {
        "question": "How long does a transfer take?",
        "model": MODEL,
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": tokens, "output_tokens": 2},
        "loop": {"mode": "async"},
        "cost": {"kind": "roofline", "tensor_parallel": GPUS},
        "fleet": {
            "pools": [{"role": "prefill", "name": "prefill"}, {"role": "decode", "name": "decode"}],
            "router": {"name": "round_robin"},
            "hand_off": {"link": link},
        },
    }
    result: Any = cbsim.run(fields)
    return float(result.summary["hand_off"]["transfer_mean_s"]) * 1000


def main() -> None:
    with catalog.data(FILE, "path").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tokens, measured = (
        [int(row["prompt_tokens"]) for row in rows],
        np.array([float(row["transfer_ms"]) for row in rows]),
    )
    size = np.array(tokens) * shapes.model(MODEL).kv_bytes_per_token
    terms, *_ = np.linalg.lstsq(np.stack([1 / measured, size / measured], axis=1), np.ones(len(rows)), rcond=None)
    link = {"latency_s": round(float(terms[0]) / 1e3, 6), "bandwidth_gb_s": round(float(1e-6 / terms[1]), 1)}
    simulated = [transfer_ms(each, link) for each in tokens]
    errors = [made / is_now - 1 for made, is_now in zip(simulated, measured.tolist(), strict=True)]
    content = [
        [f"{each:,}", f"{mib:,.0f}", f"{is_now:.2f}", f"{made:.2f}", f"{100 * error:+.1f}%"]
        for each, mib, is_now, made, error in zip(tokens, size / 2**20, measured, simulated, errors, strict=True)
    ]
    header = ["prompt tokens", "KV, MiB", "measured, ms", "simulated, ms", "error"]
    terms_made = [
        [f"{link['latency_s'] * 1000:.3f}", f"{link['bandwidth_gb_s']:.1f}", f"{100 * max(map(abs, errors)):.1f}%"]
    ]
    tables = {
        "terms": Table("", ["latency, ms", "rate, GB/s", "largest error"], terms_made),
        "points": Table("", header, content),
    }
    page.write(__file__, tables, [], {"link": link, "errors": errors, "largest": max(map(abs, errors))})


if __name__ == "__main__":
    main()
