"""What clients do while the simulated machine runs: they give up, wait for the last answer, and are refused."""

from __future__ import annotations

from support.machines import DEPTHS, NAMES, STEP, load, run, server, spec, statuses

from cbsim.record.tables import requests_of
from cbsim.workload.requests import Sessions, Users


@NAMES
@DEPTHS
def test_a_request_given_up_half_way_ends_there(name: str, depth: int) -> None:
    """Steps of 10 ns: the client leaves at 25. Steps planned after that have no row for it; tokens that it has got
    remain its own, those in flight are thrown away, and its blocks come back."""
    asked = spec(0, 4, 8)
    machine = server(load(asked, cancels=[(25, asked)]), STEP, name=name, depth=depth)
    steps = run(machine)
    row = requests_of(machine.record)[0]
    assert row.status == "aborted"
    assert row.cancelled_poll > 0
    assert 1 <= sum(row.token_runs[1::2]) < 8
    assert int(steps["decode_rows"][steps["schedule_start_ns"] >= 25].sum()) == 0
    assert machine.scheduler.pool.free == machine.scheduler.pool.num_blocks


@NAMES
@DEPTHS
def test_a_request_given_up_before_it_is_taken_in(name: str, depth: int) -> None:
    """It arrives while a step runs and is given up before the server looks again: it is recorded, and never runs."""
    unlucky = spec(1, 4, 8, at=12)
    machine = server(load(spec(0, 4, 4), unlucky, cancels=[(13, unlucky)]), STEP, name=name, depth=depth)
    run(machine)
    assert statuses(machine) == {"0": "length", "1": "aborted"}
    assert requests_of(machine.record)[1].first_step == -1


def test_a_cancellation_too_early_or_too_late_changes_nothing() -> None:
    """One comes before its request, one after its end, and one for a request that was refused."""
    first, second, refused = spec(0, 4, 2, at=50), spec(1, 4, 2), spec(2, 400, 1)
    cancels = [(10, first), (30, second), (30, refused)]
    machine = server(load(first, second, refused, cancels=cancels), STEP)
    run(machine)
    assert statuses(machine) == {"0": "length", "1": "length", "2": "refused"}
    assert not machine.record.cancels


@NAMES
@DEPTHS
def test_the_end_of_a_request_is_followed_once(name: str, depth: int) -> None:
    """Two users and eight requests, of which some are refused, or given up before or while they run: each user sends
    its next one when the last is over for whatever reason, so never more than two are present, and all are sent."""
    asked = [spec(i, 400 if i in (0, 5, 6) else 4, 3) for i in range(8)]
    follow = Users(asked[2:], think_ns=15)
    workload = load(*asked[:2], cancels=[(0, asked[0]), (0, asked[1])], follow=follow)
    machine = server(workload, STEP, name=name, depth=depth)
    steps = run(machine)
    assert len(requests_of(machine.record)) == 8
    assert int((steps["running"] + steps["waiting"]).max()) <= 2
    assert [i for i, status in statuses(machine).items() if status == "refused"] == ["0", "5", "6"]
    assert statuses(machine)["1"] == "aborted"


@NAMES
def test_a_refused_turn_does_not_end_its_session(name: str) -> None:
    """A session's second turn is too long for the cache. It is in the record with the reason, and the third turn
    comes its delay after the refusal; so does what follows a first turn that is refused."""
    first, second, third = spec(0, 4, 1), spec(1, 400, 1), spec(2, 4, 1)
    machine = server(load(first, follow=Sessions({0: (second, 5), 1: (third, 7)})), STEP, name=name)
    run(machine)
    rows = requests_of(machine.record)
    assert [row.status for row in rows] == ["length", "refused", "length"]
    assert [row.arrival_ns for row in rows] == [0, 15, 22]
    assert "400" in rows[1].reason or "401" in rows[1].reason
    alone = server(load(spec(0, 400, 1), follow=Sessions({0: (spec(1, 4, 1), 5)})), STEP, name=name)
    run(alone)
    assert list(statuses(alone).values()) == ["refused", "length"]
