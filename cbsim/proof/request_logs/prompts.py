"""What the prompts of a run share, as chained ids of their blocks: two requests have an id in common where their texts,
and all before, are the same.

Every prompt begins with the chat template's head. `sharegpt`: then with what sharegpt_prefix.csv says, in characters,
which count as tokens by the prompt's own ratio. `short_input`: a user's prompt is all that was said, and a question
more. Users are not recorded; they ask in turns, so the oldest conversation that has the length goes on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from cbsim.policy.request import RequestSpec
from cbsim.proof.request_logs.log import Log, Start
from cbsim.results.columns import NS

BLOCK_TOKENS = 16
HEAD_TOKENS, TAIL_TOKENS = 31, 5
"""Of Llama 3.1's chat template, before and after a prompt's text."""
GREETING_TOKENS = HEAD_TOKENS + 12
"""`short_input`: what all users begin with, up to the user's number."""
QUESTION_TOKENS = 29
"""`short_input`: a turn's question with its part of the template."""

Chain = tuple[int, ...]


def specs(log: Log, starts: Sequence[Start], front_s: float) -> list[RequestSpec]:
    """The requests as servers get them, `front_s` after their launch."""
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
    """Of the full blocks of each prompt."""
    ids, chains = count(), list[Chain]()
    head = _new(ids, HEAD_TOKENS)
    for prompt, start in zip(log.prompt_tokens, starts, strict=True):
        before, tokens = head, HEAD_TOKENS
        if start.of is not None:
            before = chains[start.of]
            tokens += max(0, prompt - HEAD_TOKENS - TAIL_TOKENS) * start.shared // start.characters
        chains.append(_grown(before[: tokens // BLOCK_TOKENS], prompt, ids))
    return chains


def conversations(log: Log) -> list[Chain]:
    """Of the full blocks of each prompt and its output: the next turn has both."""
    ids, chains = count(), list[Chain]()
    greeting = _new(ids, GREETING_TOKENS)
    waiting: dict[int, deque[Chain]] = defaultdict(deque)  # conversations by the length of their next prompt
    for prompt, output in zip(log.prompt_tokens, log.output_tokens, strict=True):
        before = next((waiting[n].popleft() for n in (prompt, prompt - 1, prompt + 1) if waiting[n]), greeting)
        chains.append(_grown(before[: prompt // BLOCK_TOKENS], prompt + output, ids))
        waiting[prompt + output + QUESTION_TOKENS].append(chains[-1])
    return chains


def _new(ids: Iterator[int], tokens: int) -> Chain:
    return _grown((), tokens, ids)


def _grown(chain: Iterable[int], tokens: int, ids: Iterator[int]) -> Chain:
    """The chain, and new ids up to the last full block."""
    known = tuple(chain)[: tokens // BLOCK_TOKENS]
    return (*known, *(next(ids) for _ in range(tokens // BLOCK_TOKENS - len(known))))
