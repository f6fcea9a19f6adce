"""A report's folder: an earlier report is replaced whole, anything else stays; the index lists what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.scripts import script

from cbsim.draw import folder
from cbsim.errors import UserError
from cbsim.scenario import catalog

index = script("index")


def report(place: Path, title: str = "title", kinds: tuple[str, ...] = ("simulated",)) -> Path:
    facts = {"title": title, "question": "why | how?", "command": "python -m analysis report", "figures": ["a"]}
    facts["runs"] = [{"label": kind, "kind": kind} for kind in kinds]
    folder.check(place)
    folder.clear(place)
    folder.write(place, {folder.FACTS: json.dumps(facts).encode()})
    folder.write(place, {"report.md": b"# text", "figures/a.png": b"png"})
    return place


def test_an_earlier_report_is_replaced_whole(tmp_path: Path) -> None:
    """No figure of an earlier report passes for one of the next; what somebody put beside it stays."""
    place = report(tmp_path / "r")
    (place / "notes.txt").write_text("mine")
    folder.check(place)
    folder.clear(place)
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


def test_nothing_is_removed_that_no_report_wrote(tmp_path: Path) -> None:
    """Not in a folder with somebody else's report.json, and not beside our own figures."""
    (tmp_path / "mine" / "figures").mkdir(parents=True)
    (tmp_path / "mine" / folder.FACTS).write_text('{"command": "other", "figures": ["a"]}')
    (tmp_path / "mine" / "figures" / "a.png").write_text("precious")
    with pytest.raises(UserError, match="which is no report"):
        folder.check(tmp_path / "mine")
    folder.clear(tmp_path / "mine")
    assert (tmp_path / "mine" / "figures" / "a.png").read_text() == "precious"
    place = report(tmp_path / "ours")
    (place / "figures" / "photo.png").write_text("precious")
    folder.clear(place)
    assert [path.name for path in place.rglob("*.*")] == ["photo.png"]


@pytest.mark.parametrize("name", ["data.csv", "figures"])
def test_a_folder_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"holds {name}, which is no report"):
        folder.check(tmp_path)
    assert (tmp_path / name).exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match=r"--out .*out: cannot be written"):
        folder.check(tmp_path / "out")


def test_the_index_is_made_from_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order of their folders, the more so when they lie deeper; bars in a text do not break the table."""
    report(tmp_path / "b", "second")
    report(tmp_path / "hardware" / "gpu", "third", ("measured on X", "simulated", "simulated"))
    report(tmp_path / "a", "first")
    index.main(tmp_path)
    rows = (tmp_path / "README.md").read_text().splitlines()[-3:]
    assert rows == [
        "| [first](a/report.md) | why \\| how? | 1 | simulated |",
        "| [second](b/report.md) | why \\| how? | 1 | simulated |",
        "| [third](hardware/gpu/report.md) | why \\| how? | 3 | measured on X, simulated |",
    ]
    assert str(tmp_path / "README.md") in capsys.readouterr().out


def test_the_committed_index_is_that_of_the_committed_reports() -> None:
    """Generated, not written by hand; every report can be read without the page. Each of its pictures is there, or the
    report says that its command makes it again.
    """
    place = catalog.ROOT / "reports"
    assert index.readme(place) == (place / "README.md").read_text()
    for facts in place.rglob(folder.FACTS):
        text = (facts.parent / "report.md").read_text()
        shown = re.findall(
            r"!\[[^]]*\]\(([^)]*)\)|^Picture `([^`]*)`: made again by the command of this report\.$", text, re.MULTILINE
        )
        files = [link or missing for link, missing in shown]
        assert files == [f"figures/{key}.png" for key in json.loads(facts.read_text())["figures"]]
        assert all((facts.parent / link).is_file() for link, _ in shown if link)  # others may have been made again
