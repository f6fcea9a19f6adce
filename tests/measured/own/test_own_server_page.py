"""The three commands of docs/own_server.md as they stand there, against what `cbsim serve` serves, in virtual time."""

from __future__ import annotations

import builtins
import json
import re
import shlex
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import Said, call
from support.own_servers import hidden, server

import cbsim
import cbsim.virtual
from cbsim.http.app import App
from cbsim.http.metrics import VllmMeter
from cbsim.measured.own import campaign
from cbsim.scenario import catalog
from cbsim.scenario.scenario import Scenario
from cbsim.virtual.server import IN_PROCESS, VirtualServer

PAGE = (catalog.ROOT / "docs" / "own_server.md").read_text()
SMALLER = {  # of each command, so that the test takes seconds
    "measure": ["--budget", "seconds=60,tokens=30_000,users=4"],
    "fit": [],
    "capacity": ["--width", "40%", "--replicates", "6", "--json", "--set", "workload.requests=200"],
}


def block(kind: str) -> str:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]


class Served:
    """Where the command looks for a server, one with hidden terms; each event loop finds it afresh."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.last: VirtualServer

    def connected(self, url: str, key: str) -> Any:
        assert (url, key) == ("http://127.0.0.1:8000", "none")
        self.last = cbsim.virtual.virtual(self.scenario, model="llama")
        self.last.app = App(self.last.backend, IN_PROCESS, VllmMeter(self.last.backend))
        return self.last.openai()

    def run(self, client: Coroutine[Any, Any, Any]) -> Any:
        return self.last.run(client)


def test_three_commands_from_a_server_to_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they say holds, holds by the hidden terms; what fails, fails: well beyond each, as a p99 has noise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text(block("yaml"))
    (tmp_path / "server.log").write_text("vLLM API server version 0.33.0\nnon-default args: {'max_num_seqs': 64}\n")
    open_terms = cbsim.load("server.yaml", "scheduler.max_num_seqs=64")
    served = Served(server(open_terms, hidden(open_terms, np.random.default_rng(4))))
    monkeypatch.setattr(campaign, "connected", served.connected)
    monkeypatch.setattr(campaign.asyncio, "run", served.run)
    monkeypatch.setattr(builtins, "input", lambda plan: "y")
    said = dict[str, Said]()
    for line in block("sh").splitlines():
        words = shlex.split(line)[3:]
        said[words[0]] = call(*words, *SMALLER[words[0]])
        assert said[words[0]].status == 0, said[words[0]]
    assert "max_num_seqs: 64, as the server says (server.log)" in said["fit"].out
    errors = re.search(r"left out: (?:error )?TTFT ([\d.]+)%, TPOT ([\d.]+)%", said["fit"].out)
    assert errors and float(errors[1]) <= 5 and float(errors[2]) <= 1, "of loads that it has not seen"
    found = json.loads(said["capacity"].out)
    assert any("calibrated on" in each and "requests of this server" in each for each in found["notices"])
    for rate, holds in ((0.7 * found["holds"], True), (1.4 * found["fails"], False)):
        result = cbsim.run(served.scenario, {"workload.arrivals.rate_per_s": rate})
        assert isinstance(result, cbsim.Result)
        tpot_s, ttft_s = (result.summary[name]["p99"] for name in ("tpot_s", "ttft_s"))
        assert (tpot_s <= 0.05 and ttft_s <= 2) == holds, "the hidden terms have the same capacity"
