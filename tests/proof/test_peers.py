"""`bench --peers`: the same requests for all, cores told apart, times read from what each prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cbsim.cli.parser import main
from cbsim.proof import peers


def test_the_peer_gets_the_requests_of_the_case_and_nobody_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list(peers._requests())[:50]
    monkeypatch.setattr(peers, "_requests", lambda: requests)
    lines = peers._mooncake()
    assert [(line["input_length"], line["output_length"]) for line in lines] == [
        (spec.prompt_tokens, spec.output_tokens) for spec in requests
    ]
    hashes = [fresh for line in lines for fresh in line["hash_ids"]]
    assert len(set(hashes)) == len(hashes) == sum(-(-spec.prompt_tokens // 512) for spec in requests)


def test_peers_have_a_case_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode_64", "--peers"]) == 2
    assert capsys.readouterr().err == "cbsim: bench --peers has one case of its own, got decode_64\n"


def test_the_python_core_is_read_from_its_sources() -> None:
    """Whatever is installed: of modules that are compiled, too."""
    program = peers.SOURCES_ONLY + "from cbsim.policy import core; import numpy; print(core.running(), core.__file__)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "python"
    assert said[1].endswith("core.py")


def test_times_are_what_each_prints() -> None:
    assert peers._dynosims("a table\nWall Time (ms): 1,500.25\nSaved") == 1.50025
    assert peers._ours('{"us_per_step": 50.0, "steps": 20000}') == 1.0


def test_ratios_are_against_the_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"a": 2.0, "b": 3.0}
    made = [peers.Peer(name, [], float) for name in times]
    monkeypatch.setattr(peers, "_peers", lambda folder: made)
    monkeypatch.setattr(peers, "_timed", lambda peer: {"whole process": times[peer.name]})
    assert main(["bench", "--peers"]) == 0
    said = capsys.readouterr()
    assert [line.split() for line in said.out.splitlines()[1:]] == [
        ["a", "whole", "process", "2.00", "(1.00)"],
        ["b", "whole", "process", "3.00", "(1.50)"],
    ]
    assert "DynoSim is not installed" in said.err
