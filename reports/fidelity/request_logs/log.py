"""A folder of request logs, the times and token counts that a benchmark client recorded for every request of each run.

docs/data.md describes its files. Seconds are those of the client's clock: `launch_s` from the first request, `ttft_s`
from the launch, `generation_s` from the first token to the last.

The prefixes that prompts of a run share are given as chained ids of blocks: two requests have a block's id in common if
their texts up to its end are the same.

Every prompt begins with the chat template's head. `sharegpt`: the shared prefix of sharegpt_prefix.csv follows, whose
characters are converted to tokens by the prompt's own ratio. `short_input`: a user's prompt is the conversation so far
and one more question. Users are not recorded; they take turns, so the oldest conversation of matching length continues.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cbsim.errors import ScenarioError
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.record.tables import Floats
from cbsim.scenario.fields import near
from cbsim.scenario.rows import CsvTable, open_text

REQUESTS, PREFIXES = "requests.csv.gz", "sharegpt_prefix.csv"
COLUMNS = ("run", "scenario", "qps", "launch_s", "prompt_tokens", "generation_tokens", "ttft_s", "generation_s")
PREFIX_COLUMNS = ("index", "input_chars", "shares_prefix_with", "shared_prefix_chars")


class Key(NamedTuple):
    """The key of a run: `run` names its servers, `scenario` its prompts, `qps` the requests a second."""

    run: str
    scenario: str
    qps: float

    def __str__(self) -> str:
        return f"{self.run} {self.scenario} {self.qps:g}"


@dataclass(frozen=True, slots=True)
class Log:
    """The requests of a run in order of launch."""

    key: Key
    launch_s: Floats
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    ttft_s: Floats
    generation_s: Floats

    def __len__(self) -> int:
        return len(self.launch_s)


class Start(NamedTuple):
    """A prompt of `sharegpt`: its first `shared` characters are those of prompt `of`; None if of no earlier prompt."""

    characters: int
    of: int | None
    shared: int


def read(folder: Path) -> list[Log]:
    """Read all runs, in the order of the file. Raises ScenarioError."""
    path = folder / REQUESTS
    with open_text(path) as file:
        table = CsvTable(path, file, COLUMNS)
        rows = [
            (Key(cells[0], cells[1], table.number(2, cells[2])), _numbers(table, cells)) for cells in table.rows(None)
        ]
    logs = [_log(key, [numbers for _, numbers in part]) for key, part in groupby(rows, key=itemgetter(0))]
    if not logs:
        raise ScenarioError(f"{path}: holds no requests")
    twice = [log.key for at, log in enumerate(logs) if log.key in {other.key for other in logs[:at]}]
    if twice:
        raise ScenarioError(f"{path}: the rows of {twice[0]} do not stand together")
    for log in logs:
        if (np.diff(log.launch_s) < 0).any():
            raise ScenarioError(f"{path}: {log.key}: launch_s goes back, expected rows in order of launch")
    return logs


def _numbers(table: CsvTable, cells: Sequence[str]) -> list[float]:
    values = [table.number(3 + at, cell) for at, cell in enumerate(cells[3:])]
    for at in (1, 2):
        if values[at] < 1 or values[at] != int(values[at]):
            raise table.bad(3 + at, cells[3 + at], "a whole number >= 1")
    return values


def _log(key: Key, rows: Sequence[Sequence[float]]) -> Log:
    launch, prompts, outputs, ttft, generation = (np.array(column) for column in zip(*rows, strict=True))
    return Log(key, launch, [int(n) for n in prompts], [int(n) for n in outputs], ttft, generation)


def starts(folder: Path) -> list[Start]:
    """Read the prompts of `sharegpt`. Raises ScenarioError."""
    path, prompts = folder / PREFIXES, list[Start]()
    with open_text(path) as file:
        table = CsvTable(path, file, PREFIX_COLUMNS)
        for index, characters, of, shared in table.rows(None):
            number, before = len(prompts), table.count(2, of, -1)
            if table.count(0, index, 0) != number:
                raise table.bad(0, index, f"{number}, the number of the row")
            if before >= number:
                raise table.bad(2, of, f"-1, or the number of a row above, at most {number - 1}")
            length, part = table.count(1, characters), table.number(3, shared)
            if part > length:
                raise table.bad(3, shared, f"at most input_chars ({length})")
            prompts.append(Start(length, None if before < 0 else before, int(part)))
    return prompts


def chosen(logs: Sequence[Log], where: Mapping[str, str]) -> list[Log]:
    """Return the logs whose fields are as in `where`, a run by its name's end. Raises ScenarioError if none is."""
    matching = list(logs)
    for field, value in where.items():
        if field not in Key._fields:
            raise ScenarioError(f"--where: got {field!r}, expected fields of {', '.join(Key._fields)}")
        known = list(dict.fromkeys(f"{getattr(log.key, field):{'g' if field == 'qps' else ''}}" for log in matching))
        matching = [log for log in matching if _fits(log.key, field, value)]
        if not matching:
            bound = f"expected one of {', '.join(known)}{near(value, known)}"
            raise ScenarioError(f"--where: {field}: got {value!r}, {bound}", field=field, value=value, bound=bound)
    return matching


def _fits(key: Key, field: str, value: str) -> bool:
    if field == "qps":
        return f"{key.qps:g}" == value or str(key.qps) == value
    return f"/{getattr(key, field)}".endswith(f"/{value}")


BLOCK_TOKENS = 16
HEAD_TOKENS, TAIL_TOKENS = 31, 5  # of Llama 3.1's chat template, before and after a prompt's text
GREETING_TOKENS = HEAD_TOKENS + 12  # with which all users of `short_input` begin, up to the user's number
QUESTION_TOKENS = 29  # of a turn's question in `short_input`, with its part of the template

Chain = tuple[int, ...]


def specs(log: Log, starts: Sequence[Start], front_s: float) -> list[RequestSpec]:
    """Return the requests as servers receive them, `front_s` after their launch."""
    chains = shared_starts(log, starts) if log.key.scenario == "sharegpt" else conversations(log)
    rows = zip(log.launch_s.tolist(), log.prompt_tokens, log.output_tokens, chains, strict=True)
    return [
        RequestSpec(
            index=index,
            id=str(index),
            arrival_ns=round((launch_s + front_s) * NS),
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=output,
            prefix=chain,
            prefix_block_tokens=BLOCK_TOKENS,
            prefix_tokens=len(chain) * BLOCK_TOKENS,
        )
        for index, (launch_s, prompt, output, chain) in enumerate(rows)
    ]


def shared_starts(log: Log, starts: Sequence[Start]) -> list[Chain]:
    """Return the ids of the full blocks of each prompt of `sharegpt`."""
    ids, chains = count(), list[Chain]()
    head = _grown((), HEAD_TOKENS, ids)
    for prompt, start in zip(log.prompt_tokens, starts, strict=True):
        before, tokens = head, HEAD_TOKENS
        if start.of is not None:
            before = chains[start.of]
            tokens += max(0, prompt - HEAD_TOKENS - TAIL_TOKENS) * start.shared // start.characters
        chains.append(_grown(before[: tokens // BLOCK_TOKENS], prompt, ids))
    return chains


def conversations(log: Log) -> list[Chain]:
    """Return the ids of the full blocks of each prompt and its output, which the next turn's prompt both contains."""
    ids, chains = count(), list[Chain]()
    greeting = _grown((), GREETING_TOKENS, ids)
    waiting: dict[int, deque[Chain]] = defaultdict(deque)  # length of the next prompt -> conversations
    for prompt, output in zip(log.prompt_tokens, log.output_tokens, strict=True):
        before = next((waiting[n].popleft() for n in (prompt, prompt - 1, prompt + 1) if waiting[n]), greeting)
        chains.append(_grown(before[: prompt // BLOCK_TOKENS], prompt + output, ids))
        waiting[prompt + output + QUESTION_TOKENS].append(chains[-1])
    return chains


def _grown(chain: Iterable[int], tokens: int, ids: Iterator[int]) -> Chain:
    """Return the chain extended by new ids up to the last full block."""
    known = tuple(chain)[: tokens // BLOCK_TOKENS]
    return (*known, *(next(ids) for _ in range(tokens // BLOCK_TOKENS - len(known))))
