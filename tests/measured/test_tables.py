"""`fetch-tables` from end to end: a server here holds a card's tables in the form in which aiconfigurator has them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from support import engine_folder

from cbsim.cli.parser import main
from cbsim.cost.engine_tables import EngineTables, Share
from cbsim.measured import tables
from cbsim.scenario import catalog, scenario, shapes
from reports import table_digests

CARD, ENGINE = "a100_sxm", "vllm_0.1.0"
GEMM = f"gemm__{ENGINE}.csv.gz"


class Upstream:
    """A server of the files in `folder`; it notes the paths that it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []  # type: Path, list[str]
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                asked.append(self.path)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self._server.block_on_close = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/systems"

    def file(self, name: str) -> Path:
        return self.folder / "systems" / table_digests.path(CARD, name)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    """The tables of engine_folder beside rows and columns that are not kept, and their digests, pinned."""
    monkeypatch.setenv("no_proxy", "*")
    made = engine_folder.make(tmp_path / "here" / tables.TABLES / CARD, ENGINE)
    (made / tables.SYSTEM).write_text("gpu: {}\n")
    monkeypatch.setattr(tables, "PINNED", tmp_path / "pinned.json")
    tables.PINNED.write_text(json.dumps(table_digests.pinned(made.parent)))
    server = Upstream(tmp_path / "there")
    there: dict[Path, list[dict[str, object]]] = {}
    for path in made.glob("*.csv.gz"):
        there.setdefault(server.file(path.name), []).extend(raw(pyarrow.csv.read_csv(path), path.name))
    for at, rows in there.items():
        at.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), at)
    server.file(tables.SYSTEM).write_bytes((made / tables.SYSTEM).read_bytes())
    yield server
    server.close()


def raw(table: pa.Table, name: str) -> list[dict[str, object]]:
    """Rows as they are published: with columns of the collector, and with rows of other distributions, and of times
    that are missing; times have more than five digits. One table holds the attention of all heads.
    """
    rows = [row | {"latency": row.pop("latency_ms") * (1 + 1e-9)} for row in table.to_pylist()]
    collector = {"framework": "VLLM", "version": "0.1.0", "device": "GPU", "kernel_source": "default", "power": 1.0}
    other = [rows[0] | {"latency": 0.0}, rows[0] | {"latency": None}]
    if "attention" in name:
        rows = [{"head_dim": 128, "window_size": 0} | row for row in rows]
        other = []
    if name.startswith("moe"):
        other.append(rows[0] | {"distribution": "power_law_0.8", "latency": 1e-6})
    operation = {} if name.startswith("nccl") else {"op_name": "any"}
    return [collector | operation | row for row in [*other, *rows]]


def fetch(*words: object) -> int:
    try:
        return main(["fetch-tables", *map(str, words)])
    except SystemExit as ended:
        return int(ended.code or 0)


def test_a_card_by_its_hardwares_name_is_what_it_is_here(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kernel takes the same time by the tables that were brought and by those at hand, to five digits."""
    assert fetch("a100-80gb", "--source", upstream.url, "--out", tmp_path / "new") == 0
    brought, here = tmp_path / "new" / tables.TABLES / CARD, tmp_path / "here" / tables.TABLES / CARD
    assert capsys.readouterr().out == f"{brought}\n"
    assert {path.name for path in brought.iterdir()} == {path.name for path in here.iterdir()}
    model = shapes.model("qwen3-30b-a3b").model_copy(update={"weights_dtype": "fp8_block"})
    new, old = (EngineTables(folder, ENGINE, model, Share(2)) for folder in (brought, here))
    for tokens in (1, 100, 5000):
        for name in ("linear_ns", "experts_ns", "head_ns"):
            assert getattr(new, name)(tokens) == pytest.approx(getattr(old, name)(tokens), rel=1e-4), name
        assert new.reduce_ns(tokens, graph=True) == pytest.approx(old.reduce_ns(tokens, graph=True), rel=1e-4)
        rows = (each.attended[0].decode_ns(tokens, 1000.0) for each in (new, old))
        assert next(rows) == pytest.approx(next(rows), rel=1e-4)


def test_what_is_there_is_not_fetched_again(upstream: Upstream, tmp_path: Path) -> None:
    """Neither what was brought nor what others converted, in another order with more columns; a damaged file is."""
    assert fetch(CARD, "--source", upstream.url, "--out", tmp_path / "here") == 0
    assert upstream.asked == []
    damaged = tmp_path / "here" / tables.TABLES / CARD / GEMM
    damaged.write_bytes(damaged.read_bytes()[:99])
    for _ in range(2):
        assert fetch(CARD, "--source", upstream.url, "--out", tmp_path / "here") == 0
    assert upstream.asked == [f"/systems/data/{CARD}/gemm/vllm/0.1.0/gemm_perf.parquet"]


def changed(path: Path) -> None:
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(
        table.set_column(table.column_names.index("m"), "m", pa.array([3] * table.num_rows)).slice(1), path
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (Path.unlink, "HTTP Error 404"),
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "Could not open Parquet input source"),
        (
            lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
            "Could not open Parquet input source",
        ),
        (changed, "is not the one that is pinned"),
    ],
)
def test_a_table_that_is_not_the_pinned_one_is_refused_by_name(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: object, reason: str
) -> None:
    """Nothing of it is written; all others are, and another time only it is sought."""
    spoil(upstream.file(GEMM))  # type: ignore[operator]
    folder = tmp_path / "new" / tables.TABLES / CARD
    for _ in range(2):
        assert fetch(CARD, "--source", upstream.url, "--out", tmp_path / "new") == 2
        said = capsys.readouterr().err
        assert f"not written to {folder}:\n  {GEMM}: {reason}" in said and said.count(GEMM) == 1
    names = {path.name for path in (tmp_path / "here" / tables.TABLES / CARD).iterdir()}
    assert {path.name for path in folder.iterdir()} == names - {GEMM}
    assert len(upstream.asked) >= len(names) + 1


def test_without_a_network_it_says_what_to_copy_where(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then it takes the copies from a folder."""
    upstream.close()
    assert fetch(CARD, "--source", upstream.url, "--out", tmp_path / "new") == 2
    said = capsys.readouterr().err
    folder = tmp_path / "new" / tables.TABLES / CARD
    assert "cannot be read" in said and f"to be in {folder}" in said and not folder.exists()
    for name in (tables.SYSTEM, GEMM, "nccl__nccl_2.0.csv.gz"):
        assert f"\n  {upstream.url}/{table_digests.path(CARD, name)}\n" in said
    assert fetch(CARD, "--source", upstream.folder / "systems", "--out", tmp_path / "new") == 0
    assert (folder / GEMM).is_file()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch(CARD, "--source", tmp_path / "nope", "--out", tmp_path / "new") == 2
    assert capsys.readouterr().err == f"cbsim: --source: got {tmp_path / 'nope'}, expected a folder or an address\n"


def test_mistakes_name_what_can_be_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch("h10", "--out", tmp_path) == 2
    said = capsys.readouterr().err
    assert "CARD: got h10, must be one of a100_sxm, a100-80gb, " in said and "did you mean h100_sxm?" in said
    monkeypatch.delenv("CBSIM_DATA", raising=False)
    assert fetch(CARD) == 2
    assert "required: --out" in capsys.readouterr().err
    monkeypatch.setenv("CBSIM_DATA", str(tmp_path))
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    engine = ["cost.kind=table", f"cost.path={tables.TABLES}/{CARD}", "cost.engine=vllm"]
    with pytest.raises(scenario.ScenarioError, match="`python -m cbsim fetch-tables CARD` brings those of engines"):
        catalog.tables(engine[1].partition("=")[2])


def test_pinned_digests_are_those_of_the_tables_at_hand() -> None:
    """Of all cards, that each hardware is one of `list` and each file one that is read; of the least, every digest."""
    pinned = json.loads(tables.PINNED.read_text())["cards"]
    assert {each for card in pinned.values() for each in card["hardware"]} <= set(catalog.names("hardware"))
    for card, files in ((card, of["files"]) for card, of in pinned.items()):
        assert {name: file["path"] for name, file in files.items()} == {n: table_digests.path(card, n) for n in files}
    folder = next((at / tables.TABLES for at in catalog.data_folders() if (at / tables.TABLES / CARD).is_dir()), None)
    if folder is None:
        pytest.skip("no tables of a card at hand")
    files = pinned[CARD]["files"]
    assert {name: tables.digest(folder / CARD / name) for name in files} == {
        n: file["sha256"] for n, file in files.items()
    }
