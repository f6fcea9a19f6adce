"""Closed loops: the interactive response time law, think times that are a user's own, and the end by the clock.

N users, each with one request at a time that takes R, who think for Z between their requests: in a time T they send
N T / (R + Z) requests, so with X = requests / T, N = X (R + Z), whatever the server does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cbsim
from cbsim.policy.request import RequestSpec
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators
from cbsim.workload.requests import Users

SECOND = 1_000_000_000


def scenario(users: int, requests: int, *, outputs: Any = 1, seats: int = 1, **arrivals: Any) -> dict[str, Any]:
    """A server with so many seats whose steps take a second."""
    closed = {"kind": "closed_loop", "users": users} | arrivals
    lengths = {"requests": requests, "prompt_tokens": 1, "output_tokens": outputs}
    return {
        "question": "What do users in a closed loop get?",
        "model": "llama-3.1-8b",
        "hardware": "h200-sxm",
        "workload": {"kind": "synthetic", "arrivals": closed} | lengths,
        "kv_cache": {"block_size": 16, "num_blocks": 512},
        "cost": {"kind": "constant", "step_s": 1.0},
        "loop": {"mode": "sync", "cuda_graphs": {"padding": "none"}},
        "scheduler": {"name": "vllm", "max_num_seqs": seats},
    }


def times(asked: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """When requests arrive and end, ns, by their index."""
    table = cbsim.run(asked).requests
    return table.column("arrival_ns").to_numpy(), table.column("last_token_ns").to_numpy()


# -- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "seats", "outputs", "think_s", "response_s"),
    [
        # one seat, never idle: whoever comes back finds N - 1 others, Z seconds of whose work are done
        (5, 1, 1, 2, 3),
        (5, 1, 2, 0, 10),
        (3, 1, 1, 2, 1),  # users who come one after the other, each when the seat is free
        (2, 1, 1, 7, 1),
        (6, 6, 4, 3, 4),  # a seat for everybody
    ],
)
def test_the_law_is_exact_over_whole_cycles(
    users: int, seats: int, outputs: int, think_s: int, response_s: int
) -> None:
    """Constant service S and thinking Z: after the first cycle a user's cycle is max(S + Z, N S) with one seat, S + Z
    with a seat for each. In a window of ten whole cycles exactly ten requests a user end, and N T = C (R + Z)."""
    arrivals, ends = times(scenario(users, 20 * users, outputs=outputs, seats=seats, think_s=think_s))
    steady = slice(2 * users, None)
    assert set((ends - arrivals)[steady]) == {response_s * SECOND}
    cycle = (response_s + think_s) * SECOND
    start, span = ends[2 * users], 10 * cycle
    completed = int(((ends > start) & (ends <= start + span)).sum())
    assert completed * cycle == users * span


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("users", [2, 12])
def test_the_law_holds_for_exponential_thinking(users: int, mode: str) -> None:
    """Over a run of T seconds all users' requests and thoughts fill N T, but for one cut cycle of each. Thoughts are
    n draws of mean Z and deviation Z, so X (R + Z) / N - 1 has the deviation Z / (R + Z) / sqrt(n); 3.3 of them are a
    99.9 % interval. It would not hold Z for half or double of what it is."""
    think_s, span_s = 5.0, 8_000.0
    asked = scenario(users, 100_000, seats=4, outputs=2, think_s=think_s, think="exponential", duration_s=span_s)
    arrivals, ends = times(asked | {"loop": {"mode": mode, "cuda_graphs": {"padding": "none"}}})
    response_s, count = float((ends - arrivals).mean()) / SECOND, len(arrivals)
    law = count / span_s * (response_s + think_s)
    width = 3.3 * think_s / (response_s + think_s) / np.sqrt(count) + users / count
    assert abs(law / users - 1) < width < 0.1


# -- whose thoughts ---------------------------------------------------------------------------------------------------


def thoughts(follow: Users, order: list[int], users: int) -> list[list[int]]:
    """Think times by user, if requests of the users end in this order, all at 0."""
    current = {user: RequestSpec(user, str(user), 0, 1, 1, 1) for user in range(users)}
    seen: list[list[int]] = [[] for _ in range(users)]
    for user in order:
        (current[user],) = follow.after(current[user], 0)
        seen[user].append(current[user].arrival_ns)
    return seen


def test_think_times_belong_to_a_user_and_a_turn() -> None:
    """Who ends before whom changes neither a user's first, nor second, nor third thought; users think differently."""
    asked = Scenario.model_validate(scenario(3, 100, think_s=1, think="exponential"))
    one, two = (generators.build(asked).follow for _ in range(2))
    assert isinstance(one, Users) and isinstance(two, Users)
    first = thoughts(one, [0, 1, 2, 0, 1, 2, 0, 1, 2], 3)
    assert first == thoughts(two, [2, 2, 1, 2, 0, 1, 1, 0, 0], 3)
    assert len({at for turns in first for at in turns}) == 9


def test_fingerprints_tell_thoughts_apart() -> None:
    """Equal scenarios are equal; another seed, mean, distribution or end is another workload."""

    def fingerprint(seed: int = 1, **arrivals: Any) -> str:
        asked = scenario(3, 9, **{"think_s": 1, "think": "exponential"} | arrivals)
        return generators.build(Scenario.model_validate(asked | {"seed": seed})).fingerprint()

    assert fingerprint() == fingerprint()
    others = [fingerprint(seed=2), fingerprint(think_s=2), fingerprint(think="constant"), fingerprint(duration_s=9)]
    assert len({fingerprint(), *others}) == 5


# -- the end by the clock ---------------------------------------------------------------------------------------------


def test_nobody_sends_after_the_duration() -> None:
    """The run is the unbounded one up to then: the same requests at the same times, the last of them at the bound
    itself, and all of them are finished."""
    bounded, _ = times(scenario(4, 100, think_s=2, duration_s=24))
    whole, ends = times(scenario(4, 100, think_s=2))
    assert bounded.tolist() == whole[whole <= 24 * SECOND].tolist()
    assert bounded.max() == 24 * SECOND and len(ends) == 100
