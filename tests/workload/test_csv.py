"""CSV files of requests: which column is read as what, what is refused, and the example of docs/scenarios.md."""

import re
from io import StringIO
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
from support.reference import plain

import cbsim
from cbsim.errors import ScenarioError
from cbsim.scenario import catalog
from cbsim.workload import csv_requests
from cbsim.workload.requests import Drawn

ROWS = "0.5,7,3\n"


def read(path: Path, content: str, **columns: str) -> Drawn:
    path.write_text(content)
    return plain(path, **columns)


def values(drawn: Drawn) -> list[tuple[str, int, int, int, int, int]]:
    return [
        (spec.id, spec.arrival_ns, spec.prompt_tokens, spec.output_tokens, spec.max_tokens, spec.priority)
        for spec in drawn
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.csv"


# -- which column is what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        "arrival_s,prefill_tokens,decode_tokens",
        "timestamp,prompt_tokens,output_tokens",
        "Timestamp,Request tokens,Response tokens",  # BurstGPT
        "TIMESTAMP,ContextTokens,GeneratedTokens",  # Azure
        "arrived_at,num_prefill_tokens,num_decode_tokens",  # Vidur
        "Arrival-Time,Input_Length,Output_Length",
        "arrival,prompt,output",
        "Time,Prompt,prompt_len,response,completion_tokens",  # the words beside their lengths are texts
    ],
)
def test_common_names_need_no_mapping(file: Path, header: str) -> None:
    row = ROWS if header.count(",") == 2 else "0.5,why?,7,so,3\n"
    assert values(read(file, f"{header}\n{row}")) == [("0", 500_000_000, 7, 3, 3, 0)]


@pytest.mark.parametrize("role", csv_requests.NEEDED)
def test_every_known_name_is_found_and_documented(file: Path, role: str) -> None:
    page = (catalog.ROOT / "docs" / "scenarios.md").read_text()
    names = {part: csv_requests.NAMES[part][0] for part in csv_requests.NEEDED}
    for name in (*csv_requests.NAMES[role], *csv_requests.WORDS.get(role, ())):
        assert f"`{name}`" in page
        header = ",".join((names | {role: name}).values())
        assert len(read(file, f"{header}\n{ROWS}")) == 1


def test_a_mapping_names_any_column_in_any_order(file: Path) -> None:
    content = "out,who,in,tier,t,most\n3,a,7,-2,0.5,9\n"
    columns = {"arrival": "t", "prompt": "in", "output": "out", "max_tokens": "most", "priority": "tier", "id": "who"}
    assert values(read(file, content, **columns)) == [("a", 500_000_000, 7, 3, 9, -2)]


def test_our_own_name_wins_over_others(file: Path) -> None:
    """A file of our own format stays one, whatever else it holds; a mapping says otherwise."""
    content = "arrival_s,timestamp,prefill_tokens,decode_tokens\n1,2,7,3\n"
    assert read(file, content)[0].arrival_ns == 10**9
    assert read(file, content, arrival="timestamp")[0].arrival_ns == 2 * 10**9


def test_rows_without_ids_are_numbered(file: Path) -> None:
    file.write_text(f"time,prompt_len,output_len\n{ROWS}{ROWS}")
    requests = cbsim.run(scenario(file) | {"loop": {"mode": "sync"}}).requests
    assert requests.column("id").to_pylist() == ["0", "1"]


MISSPELT, TWICE = {"arrival": "t", "prompt": "inn", "output": "out"}, {"prompt": "out", "output": "out"}


@pytest.mark.parametrize(
    ("content", "columns", "message"),
    [
        ("t,in,out\n", MISSPELT, "prompt: no column 'inn'; did you mean in?; found t, in, out"),
        (
            "time,timestamp,input_len\n",
            {},
            "arrival: may be 'time' or 'timestamp'; say which; found time, timestamp, in",
        ),
        ("t,input_len,output_len\n", {}, "arrival: no column with a known name (arrival_s, arrival,"),
        ("time,input_len\n", {}, "output: no column with a known name (decode_tokens,"),
        ("time,input_len,out\n", {}, "output_toks); say which: columns: {output: NAME}; found time, input_len, out"),
        ("time,input_len,out\n", TWICE, "output: column 'out' cannot be both prompt and output; found"),
        ("", {}, "found nothing"),
    ],
)
def test_what_cannot_be_told_is_refused_in_one_line(
    file: Path, content: str, columns: dict[str, str], message: str
) -> None:
    """It names the file, what the column was to hold, and the columns that there are."""
    with pytest.raises(ScenarioError) as caught:
        read(file, content, **columns)
    reported = str(caught.value)
    assert reported.startswith(f"{file}:1: workload.columns.") and message in reported and "\n" not in reported


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        ('2,7,3,b,"oops', "is not a row of CSV, or a quote in it is never closed"),  # whose column nobody reads
        ("1_0,7,3,b,", "arrival_s: got '1_0', expected seconds"),
        ("\uff12,7,3,b,", "arrival_s: got '\uff12', expected seconds"),
        ("2,7,3,  ,", "id: got '  ', expected an id"),
        ("2,7,3,a,", "id: got 'a', expected an id that no row above has"),
    ],
)
def test_a_row_that_others_would_hide_or_misread_is_refused(file: Path, row: str, reported: str) -> None:
    """A quote that is never closed takes all rows behind it for a cell; Python's numbers are more than a file's."""
    with pytest.raises(ScenarioError) as caught:
        read(file, f"arrival_s,prefill_tokens,decode_tokens,id,note\n1,7,3,a,\n{row}\n" + "9,7,3,c,\n9,7,3,d,\n")
    assert str(caught.value).startswith(f"{file}:3: {reported}")


# -- a column at a time -----------------------------------------------------------------------------------------------

HEADER = ("arrival_s", "prefill_tokens", "decode_tokens", "max_tokens", "priority", "id")
ODD = (
    "",
    " 5",
    "+5",
    "0",
    "1",
    "6",
    "-1",
    "--5",
    "5-",
    "00000000000005",
    "1000000000000",
    "-999999999999",
    "5_0",
    "4.5",
    "  ",
    '"5',
    '5"',
)
ODD += (
    "nan",
    "inf",
    "1e9",
    "1e300",
    "999999999.9",
    "2023-11-16 18:17:03",
    "\u0665",
    "\u00b2",
    "\u200b",
    "\x00",
    '"a\nb"',
    "5,5",
    "r0",
)


@pytest.mark.parametrize("column", HEADER)
def test_a_column_at_a_time_reads_what_rows_read(column: str) -> None:
    """The same requests, or the same error, which names the first row that is wrong: whatever is odd in a cell."""
    at, sound = HEADER.index(column), [["0.5", "7", "3", "9", "-2", "r0"], ["2", "7", "5", "9", "0", "r1"]]
    for columns, cell, limit, (where, at_once) in product(range(max(3, at + 1), 7), ODD, (None, 1), ((0, 1), (1, 2))):
        rows = [[*row] for row in (*sound, ["999999999", "8", "2", "2", "1", "r3"])]
        rows[where][at] = cell
        text = "\n".join([",".join(row[:columns]) for row in (HEADER, *rows)])
        with patch("cbsim.scenario.rows.AT_ONCE", at_once):
            known = outcome(text, limit)
        with patch.object(csv_requests, "_by_columns", side_effect=ValueError):
            assert outcome(text, limit) == known, text


def outcome(text: str, limit: int | None) -> object:
    try:
        return values(csv_requests.plain(Path("f"), StringIO(text, newline=""), limit)[0])
    except ScenarioError as error:
        return str(error)


def test_a_plain_file_is_read_a_column_at_a_time(file: Path) -> None:
    with patch.object(csv_requests, "_by_rows", side_effect=AssertionError):
        assert len(read(file, "id,arrival_s,prefill_tokens,decode_tokens,priority\n" + "a,0.5,7,3,-1\n")) == 1


# -- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stamp", ["2023-11-16 23:59:5{}.9", "2023-11-16T23:59:5{}.9Z", "2023-11-16 23:59:5{}.9+00:00"])
def test_times_of_day_count_from_the_first(file: Path, stamp: str) -> None:
    content = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{stamp.format(8)},7,3\n{stamp.format(9)},7,3\n"
    assert [row.arrival_ns for row in read(file, content)] == [0, 10**9]


# -- what a user sees -------------------------------------------------------------------------------------------------


def scenario(file: Path) -> dict[str, object]:
    workload = {"kind": "csv", "path": str(file)}
    return {"question": "?", "model": "llama-3.1-8b", "hardware": "h100-sxm", "workload": workload}


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    """Its blocks, written as the page says, are a scenario; the run says what it has read as what."""
    page = (catalog.ROOT / "docs" / "scenarios.md").read_text()
    section = page[page.index("### Requests of your own: csv") :]
    for language, name in (("csv", "requests.csv"), ("yaml", "mine.yaml")):
        block = re.search(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert block and block[1].count("\n") < 10
        (tmp_path / name).write_text(block[1])
    result = cbsim.run(tmp_path / "mine.yaml")["sync"]
    assert result.requests.column("prompt_tokens").to_pylist() == [900, 120, 3000]
    assert result.requests.column("arrival_ns").to_pylist() == [0, 400_000_000, 1_500_000_000]
    (notice,) = result.notices
    assert notice.endswith("requests.csv: arrival from 't', prompt from 'in', output from 'out', priority from 'tier'")


@pytest.mark.parametrize(("scale", "noticed"), [(1, True), (0.001, False)])
def test_arrivals_that_look_like_milliseconds_are_noticed(file: Path, scale: float, noticed: bool) -> None:
    """A log of a request in 0.4 s, in milliseconds: taken as seconds the median gap is 400 s. Once scaled, or in a file
    that has one long night only, nothing is said; nor of columns with our own names."""
    file.write_text("arrival_s,prefill_tokens,decode_tokens\n0,7,3\n400,7,3\n800,7,3\n900,7,3\n")
    values = scenario(file)
    values["workload"] = {"kind": "csv", "path": str(file), "time_scale": scale}
    message = f"{file}: the median gap of arrivals is 400 s; if they are milliseconds, set workload.time_scale=0.001"
    assert cbsim.run(values)["sync"].notices == ((message,) if noticed else ())
    file.write_text("arrival_s,prefill_tokens,decode_tokens\n0,7,3\n1,7,3\n30000,7,3\n30001,7,3\n")
    assert cbsim.run(values)["sync"].notices == ()
