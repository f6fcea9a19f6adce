"""Write `scenarios/tables/aiconfigurator.json`, by which `python -m cbsim fetch-tables` knows the tables of a card,
from those at hand: `python -m reports.table_digests DATA`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cbsim.measured.tables import PINNED, SYSTEM, TABLES, digest

COMMIT = "095f58a51c4ca8e61b66ec108d86f223f8d559ce"
FOLDERS = {  # there, of the operations that are read
    "gemm": "gemm",
    "context_attention": "attention",
    "generation_attention": "attention",
    "context_attention_heads": "attention",
    "generation_attention_heads": "attention",
    "context_mla": "mla",
    "generation_mla": "mla",
    "moe": "moe",
    "custom_allreduce": "comm",
    "nccl": "comm",
}
HARDWARE = {  # names of `cbsim list`, where their letters and digits are not those of the card
    "a100_sxm": ["a100-80gb"],
    "b200_sxm": ["b200"],
    "rtx_pro_6000_server": ["rtx-pro-6000"],
}


def path(card: str, name: str) -> str:
    """Where a file lies below `systems` at that commit."""
    if name == SYSTEM:
        return f"{card}.yaml"
    operation, _, engine = name.removesuffix(".csv.gz").partition("__")
    file = f"{operation.removesuffix('_heads')}_perf.parquet"
    return f"data/{card}/{FOLDERS[operation]}/{engine.replace('_', '/', 1)}/{file}"


def pinned(tables: Path) -> dict[str, object]:
    """The commit, and the files of each card: those of the operations that are read."""
    cards: dict[str, object] = {}
    for folder in sorted(file.parent for file in tables.glob(f"*/{SYSTEM}")):
        tables_ = [file for file in sorted(folder.glob("*.csv.gz")) if file.name.partition("__")[0] in FOLDERS]
        files = {
            file.name: {"path": path(folder.name, file.name), "sha256": digest(file)}
            for file in (folder / SYSTEM, *tables_)
        }
        cards[folder.name] = {"hardware": HARDWARE.get(folder.name, []), "files": files}
    return {"commit": COMMIT, "cards": cards}


if __name__ == "__main__":
    PINNED.write_text(json.dumps(pinned(Path(sys.argv[1]) / TABLES), indent=1) + "\n")
