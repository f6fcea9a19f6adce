"""The public kernel tables of a card, brought from NVIDIA's aiconfigurator to where `cbsim.cost.engine_tables` reads
them. `scenarios/tables/aiconfigurator.json`, which `python -m reports.table_digests` writes, pins the commit, and of
every card the files: where they lie there, and the SHA-256 of what is kept of each.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from hashlib import sha256
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from cbsim.cost.engine_files import TIME
from cbsim.cost.table import HEAD_DIM
from cbsim.draw.folder import write
from cbsim.errors import OK, ScenarioError
from cbsim.files import read_json
from cbsim.scenario.catalog import SCENARIOS
from cbsim.scenario.fields import bare, near

TABLES = "public_measured/aiconfigurator"
PINNED = SCENARIOS / "tables" / "aiconfigurator.json"
SOURCE = "https://github.com/ai-dynamo/aiconfigurator/raw/{commit}/aic-core/src/aiconfigurator_core/systems"
SYSTEM = "system.yaml"
DISTRIBUTIONS = ("balanced", "power_law_1.01", "power_law_1.2")
PLAIN = {"head_dim": (HEAD_DIM,), "window_size": (0, None)}  # others are a file of their own, HEADS
HEADS = "attention_heads__"
COLUMNS = """nccl_dtype num_gpus message_size backend gemm_dtype m n k
batch_size isl num_heads num_key_value_heads head_dim window_size attn_dtype kv_cache_dtype step
moe_dtype num_tokens hidden_size inter_size topk num_experts moe_tp_size moe_ep_size distribution"""


def fetch(arguments: argparse.Namespace) -> int:
    """Write what is missing of a card's files. Raises ScenarioError: of wrong files, after all others are written."""
    pinned, card = read_json(PINNED), arguments.card
    names = {each: of for of, one in pinned["cards"].items() for each in (of, *one["hardware"])}
    if not (name := {bare(each): of for each, of in names.items()}.get(bare(card))):
        raise ScenarioError(f"CARD: got {card}, must be one of {', '.join(names)}{near(card, names)}")
    systems = _address(arguments.source) if arguments.source else SOURCE.format(**pinned)
    folder, files = arguments.out / TABLES / name, pinned["cards"][name]["files"]
    missing = {file: each for file, each in files.items() if digest(folder / file) != each["sha256"]}
    print(f"{name}: {len(missing)} files to fetch from {systems}", file=sys.stderr)
    wrong = []
    for file, each in missing.items():
        try:
            kept = _fetched(f"{systems}/{each['path']}", file, each["sha256"])
        except (LookupError, ValueError) as error:
            wrong.append(f"\n  {file}: {error}")
            continue
        except (HTTPException, OSError) as error:
            copies = "".join(f"\n  {systems}/{each['path']}" for each in missing.values())
            by_hand = f"Copy these to a folder DIR, their paths below {systems} kept, and add --source DIR:{copies}"
            raise ScenarioError(f"{systems}: cannot be read: {error}. {by_hand}\nto be in {folder}") from None
        write(folder, {file: kept if file == SYSTEM else gzip.compress(kept, mtime=0)})
        print(f"  {file}", file=sys.stderr)
    if wrong:
        raise ScenarioError(f"{systems}: not written to {folder}:{''.join(wrong)}")
    print(folder)
    return OK


def _address(source: str) -> str:
    if "://" in source:
        return source
    if not Path(source).is_dir():
        raise ScenarioError(f"--source: got {source}, expected a folder or an address")
    return Path(source).resolve().as_uri()


def _fetched(url: str, file: str, pinned: str) -> bytes:
    """Return what is kept of a file. Raises LookupError or ValueError if it is another one or none, OSError or
    HTTPException if the source cannot be read.
    """
    try:
        with urlopen(Request(url, headers={"User-Agent": "cbsim"}), timeout=60) as answer:
            kept = _kept(file, answer.read())
    except OSError as error:
        if getattr(error, "code", 0) == 404 or isinstance(getattr(error, "reason", 0), FileNotFoundError):
            raise ValueError(str(error)) from None
        raise
    if sha256(kept).hexdigest() != pinned:
        raise ValueError("is not the one that is pinned")
    return kept


def digest(path: Path) -> str:
    """Return the SHA-256 of what is kept of a file, which may be converted already; "" if it cannot be read."""
    try:
        return sha256(_kept(path.name, path.read_bytes())).hexdigest()
    except (OSError, LookupError, ValueError):
        return ""


def _kept(file: str, content: bytes) -> bytes:
    """Return what is kept of a file: of a table, the columns that are read, of rows that were measured, in order."""
    if file == SYSTEM:
        return content
    converted = content.startswith(b"\x1f\x8b")  # as gzip begins
    stream = pa.input_stream(BytesIO(content), compression="gzip" if converted else None)
    table = pa.csv.read_csv(stream) if converted else pa.parquet.read_table(stream)
    time = table[TIME if converted else "latency"]
    keep = pc.greater(time, 0)
    if "distribution" in table.column_names:
        keep = pc.and_(keep, pc.is_in(table["distribution"], pa.array(DISTRIBUTIONS)))
    plain = pa.array([True] * len(table))
    for name in PLAIN.keys() & table.column_names:
        plain = pc.and_(plain, pc.is_in(table[name], pa.array(PLAIN[name])))
    keep = pc.and_(keep, pc.invert(plain) if HEADS in file else plain)
    known = f"op_name {COLUMNS}" if file.startswith("nccl") else COLUMNS  # of other tables it is the operation's name
    dropped = () if HEADS in file else PLAIN
    columns = [name for name in known.split() if name in table.column_names and name not in dropped]
    times = [f"{ms:.5g}" for ms in time.filter(keep).to_pylist()]
    rows = zip(*(map(str, table[name].filter(keep).to_pylist()) for name in columns), times, strict=True)
    return "\n".join([",".join((*columns, TIME)), *sorted(map(",".join, rows)), ""]).encode()
