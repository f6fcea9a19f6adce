"""A sweep on a Ray cluster of two nodes on this machine: workers that are killed, a node that goes, one that comes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from own_policy import TEXT
from support.calls import ROOT, SMALL, Said, call, process, refused

from cbsim.errors import RunError
from cbsim.sweeps import identity, ray_cluster, sweep_file
from cbsim.sweeps.ray_cluster import RayCluster
from cbsim.sweeps.sweep import Sweep
from cbsim.sweeps.work import DIED, Here, Made

TRAPS = """
    def schedule(self) -> StepPlan | None:
        import os
        import pathlib
        import signal
        seats, folder = self.options.seats, pathlib.Path(__file__).parent
        if seats == 67:
            os.kill(os.getpid(), signal.SIGKILL)
        if seats > 70 and not (folder / f"sprung{seats}").exists():
            (folder / f"sprung{seats}").touch()
            with (folder / "traps").open("w") as traps:
                traps.write(f"{seats} {os.getpid()} {os.getppid()}\\n")
            signal.pause()
"""


class Trapped(NamedTuple):
    """A run that waits for its end: its process, and that of the node which it is on."""

    seats: int
    process: int
    node: int


class Nodes(NamedTuple):
    """A cluster of two nodes with a CPU each, and a folder that its workers import from."""

    cluster: Any
    folder: Path

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def sweep(self, store: Path, *seats: int) -> Sweep:
        """The scheduler of the documentation with traps: 67 kills its process; each above 70 is held up once."""
        path = self.folder / "trap.yaml"
        points = ", ".join(f'{{scheduler: {{name: "trapped_on_ray:SHORTEST", seats: {count}}}}}' for count in seats)
        path.write_text(f"scenario: small.yaml\naxes:\n  - points: [{points}]\n")
        return Sweep(*sweep_file.read(path), store)

    def held_up(self, count: int) -> Iterator[Trapped]:
        """So many runs, when all of them wait."""
        with os.fdopen(os.open(self.folder / "traps", os.O_RDWR)) as traps:  # it does not end before it has begun
            yield from [Trapped(*map(int, traps.readline().split())) for _ in range(count)]


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="a cluster needs ray: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("trapped")
    text = TEXT.replace("\n    def schedule(self) -> StepPlan | None:\n", TRAPS)
    assert text != TEXT
    (folder / "trapped_on_ray.py").write_text(text)
    (folder / "small.yaml").write_text(SMALL)
    os.mkfifo(folder / "traps")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]))
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        yield Nodes(cluster, folder)
        cluster.shutdown()
        sys.modules.pop("trapped_on_ray", None)


def whatever_dies_every_point_is_there_once(nodes: Nodes, folder: Path) -> None:
    """A worker is killed in mid-run, the other's node is removed in mid-run, a new node comes, and a point kills its
    process whenever it runs. That one fails; all others are what this process makes of them, to the last bit.
    """
    seats = (71, 72, 1, 67, *range(2, 11))
    sweep, heard = nodes.sweep(folder / "there", *seats), list[str]()
    (node,) = nodes.cluster.worker_nodes
    (raylet,) = (started.process.pid for started in node.all_processes["raylet"])

    def disturb() -> None:
        trapped = {run.node == raylet: run for run in nodes.held_up(2)}  # two runs, two nodes with a CPU each
        os.kill(raylet, signal.SIGKILL)
        os.kill(trapped[False].process, signal.SIGKILL)

    def hear(made: Made) -> None:
        heard.append(made.key)
        if len(heard) == 1:  # both CPUs were held up, so whoever was to die has died
            nodes.cluster.remove_node(node, allow_graceful=False)
            nodes.cluster.add_node(num_cpus=1)

    disturbing = threading.Thread(target=disturb, daemon=True)
    disturbing.start()
    swept = sweep.run(RayCluster(nodes.address), hear)
    disturbing.join()
    assert len(heard) == len(set(heard)) == len(seats)
    assert {row.reason for row in swept.rows} == {None, DIED}
    assert swept.rows[3].reason == DIED
    here = nodes.sweep(folder / "here", *(count for count in seats if count != 67)).run(Here())
    assert here.count("done") == len(seats) - 1
    assert swept.table.filter([row.reason is None for row in swept.rows]).equals(here.table)


def results_of_any_size_and_the_words_of_the_command(nodes: Nodes, folder: Path) -> None:
    """Large results come another way than small ones. Nothing that Ray says is seen; nothing is left to be done."""
    folder.mkdir()
    path = folder / "all.yaml"
    path.write_text("scenario: 8k_b32\naxes: {workload.requests: [16]}\nkeep: all\n")
    words = ("sweep", path, "--store", folder / "store", "--ray", nodes.address)
    said = process(*words)
    assert said.status == 0
    assert re.fullmatch(r"(\d of 2 points, [^\n]+\n)+", said.err)
    first, done, *_ = said.out.splitlines()
    assert re.fullmatch(rf"all: 2 points, 2 to be run; Ray cluster of \d CPUs at {re.escape(nodes.address)}", first)
    assert done == "2 done"
    runs = list(folder.glob("store/runs/*/*"))
    assert [sum(path.stat().st_size for path in run.rglob("*")) > 100_000 for run in runs] == [True, True]
    assert all((run / "figures" / "timeline.png").is_file() for run in runs)
    again, done, *_ = process(*words).out.splitlines()
    assert again.startswith("all: 2 points, 0 to be run; Ray cluster")
    assert done == "2 done"


def an_interrupted_sweep_leaves_nobody_at_work(nodes: Nodes, folder: Path) -> None:
    """It ends at once, says how to go on, and what was under way on the nodes ends with it."""
    nodes.sweep(folder / "store", 81, 82)
    words = ["-m", "cbsim", "sweep", nodes.folder / "trap.yaml", "--store", folder / "store", "--ray", nodes.address]
    pipe = subprocess.PIPE
    command = subprocess.Popen([sys.executable, *map(str, words)], stdout=pipe, stderr=pipe, text=True)
    trapped = list(nodes.held_up(2))
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=30)
    refused(Said(command.returncode, "", err), 130, "interrupted; the same command goes on where it stopped")
    assert "Traceback" not in out
    for run in trapped:
        while Path(f"/proc/{run.process}").exists():
            time.sleep(0.05)


def a_cluster_that_is_lost_is_told(nodes: Nodes, folder: Path) -> None:
    """Ray ends the process that speaks with a cluster whose head is gone; ours says so and keeps what was made."""
    sweep, cluster = nodes.sweep(folder / "store", *range(20, 30)), RayCluster(nodes.address)
    assert cluster._driver is not None
    with pytest.raises(RunError, match="the connection to the cluster is lost; the same command goes on"):
        sweep.run(cluster, lambda _, driver=cluster._driver: driver.kill())
    assert "done" in {row.status for row in sweep.now().rows} <= {"done", "missing"}


def a_node_with_other_code_or_data_ends_the_sweep(nodes: Nodes, folder: Path) -> None:
    """Its numbers would not be ours: one line says what differs, and nothing is kept of it."""
    sweep = nodes.sweep(folder / "store", 1, 2)
    module = nodes.folder / "trapped_on_ray.py"
    module.write_text(module.read_text() + "\n# changed after the points were built\n")
    with pytest.raises(RunError, match=r"has other data files, or another module of the scheduler"):
        sweep.run(RayCluster(nodes.address))
    ours = identity.code()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "code", lambda: "another")
        with pytest.raises(RunError, match=rf"has state {ours} of cbsim, expected another: install the same"):
            sweep.run(RayCluster(nodes.address))
    assert {row.status for row in sweep.now().rows} == {"missing"}


@pytest.mark.timeout(300)
def test_a_cluster_of_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """One test, since every worker of pytest-xdist would start a cluster of its own."""
    for part in (
        whatever_dies_every_point_is_there_once,
        results_of_any_size_and_the_words_of_the_command,
        an_interrupted_sweep_leaves_nobody_at_work,
        a_cluster_that_is_lost_is_told,
        a_node_with_other_code_or_data_ends_the_sweep,  # the last: it changes the module that others import
    ):
        part(nodes, tmp_path / part.__name__)


def test_where_no_cluster_answers(tmp_path: Path) -> None:
    """One line, whether nobody listens there or somebody else does."""
    pytest.importorskip("ray", reason="a cluster needs ray: pip install -e '.[ray]'")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        refused(call("sweep", "x.yaml", "--ray", address), 2, f"--ray {address}: no Ray cluster answers there")
    refused(call("sweep", "x.yaml", "--ray", address), 2, f"--ray {address}: no Ray cluster answers there")


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    refused(call("sweep", "x.yaml", "--ray", "auto"), 2, "--ray auto", "pip install -e '.[ray]'")


@pytest.mark.parametrize("address", ["", "cluster", "http://host:1", "host:port", "ray://host", "host:1234567"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    said = call("sweep", "x.yaml", "--ray", address)
    assert said.status == 2
    assert f"argument --ray: {address!r}: expected auto, HOST:PORT or ray://HOST:PORT" in said.err
