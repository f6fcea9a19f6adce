"""A prefix-heavy workload of agents, in the form of an agentic trace: made from a seed, so that no data is needed.

All sessions begin with the same tools and system prompt; those of a group share a repository, too; a task is each
session's own. Every further turn adds a tool's answer to what was said before.
"""

from __future__ import annotations

import json

import numpy as np

BLOCK = 512  # tokens that a hash id names
TOOLS, REPOSITORY = 4, 6  # blocks that all share, that a group shares
GROUPS, SESSIONS, TURNS = 8, 48, 6
GAP_MS, TOOL_MS = 400.0, 800.0  # between sessions, and until a tool has answered; means of exponentials


def lines(seed: int = 0) -> str:
    """One JSON object a turn, session by session in order of arrival."""
    rng = np.random.default_rng(seed)
    said, fresh, arrival = [], 1_000_000, 0.0
    for session in range(SESSIONS):
        group = int(rng.integers(GROUPS))
        for turn in range(TURNS):
            own = int(np.clip(rng.lognormal(5.8, 0.7), 16, 3000))
            ids = [*range(TOOLS), *(1000 * (group + 1) + i for i in range(REPOSITORY))] if turn == 0 else []
            tokens = len(ids) * BLOCK + own
            ids += range(fresh, fresh + -(-own // BLOCK))
            fresh += -(-own // BLOCK)
            line = {
                "session_id": f"agent-{session}",
                "input_length": tokens,
                "output_length": int(np.clip(rng.lognormal(4.6, 0.7), 8, 600)),
                "hash_ids": ids,
            }
            line |= {"timestamp": round(arrival, 1), "group_id": group} if turn == 0 else {}
            line |= {"delay": round(float(rng.exponential(TOOL_MS)), 1)} if turn else {}
            said.append(json.dumps(line))
        arrival += float(rng.exponential(GAP_MS))
    return "\n".join(said) + "\n"
