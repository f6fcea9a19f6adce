"""The radix tree and its pool against SGLang 0.5.23's own, call by call: tests/golden/sglang_tree."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbsim.kv.radix import RANKS, RadixKey
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.plan import unpacked
from cbsim.policy.request import Request, RequestSpec
from cbsim.workload.scheduler_tests import ChainedKeys

RECORDED = Path(__file__).parents[1] / "golden" / "sglang_tree" / "0.5.23.gz"
Line = dict[str, Any]


def runs() -> Iterator[list[Line]]:
    run: list[Line] = []
    with gzip.open(RECORDED, "rt") as file:
        for line in map(json.loads, file):
            if line["op"] == "header" and run:
                yield run
                run = []
            run.append(line)
    yield run


RUNS = {(run[0]["strategy"], run[0]["page_size"]): run for run in runs()}


class Replay:
    """Our pool, told what SGLang's was told. Every answer says what the recorder wrote down."""

    def __init__(self, header: Line) -> None:
        self.size = header["page_size"]
        self.pool = RadixPool(self.size, header["pages"], header["strategy"])
        self.keys = ChainedKeys(1)
        self.requests: dict[int, Request] = {}

    def key(self, line: Line) -> tuple[RequestSpec, RadixKey]:
        prompt, outputs = line.get("prompt", line.get("tokens")), line.get("outputs", [0])
        ids = self.keys.of([*prompt, *outputs])
        index, count = line.get("id", 0), len(outputs)
        spec = RequestSpec(index, f"r{index}", 0, len(prompt), count, count, line.get("priority", 0), ids, 1, len(ids))
        return spec, RadixKey(spec)

    def admit(self, line: Line) -> Line:
        spec, key = self.key(line)
        pool, prompt = self.pool, spec.prompt_tokens
        node = pool.match(key, prompt - 1)
        hit, missing = node.end * self.size, pool.blocks_for(prompt) - node.end
        pool.lock(node)
        fits = missing <= pool.free
        said: Line = {"hit": hit}
        if fits:
            request = self.requests[spec.index] = Request(spec, spec.max_tokens, self.size)
            said["evicted"] = self.evicted(missing * self.size)
            request.admit(0, hit)
            pool.admit(request, key, node)
            said["pages"] = pool.grow(request, missing)
            request.advance(prompt - hit, 1)
            request.receive(0)
        pool.unlock(node)
        return said if fits else {**said, "refused": True}

    def match(self, line: Line) -> Line:
        _, key = self.key(line)
        return {"hit": self.pool.match(key, len(line["tokens"])).end * self.size}

    def decode(self, line: Line) -> Line:
        request = self.requests[line["id"]]
        said: Line = {}
        if request.computed % self.size == 0:
            said = {"evicted": self.evicted(self.size), "pages": self.pool.grow(request, 1)}
        request.advance(1, 1)
        request.receive(1)
        return said

    def keep(self, line: Line) -> Line:
        request = self.requests[line["id"]]
        self.pool.merge(request, request.computed // self.size)
        return {"table": self.pool.table(request)}

    def release(self, line: Line) -> Line:
        if line["result"]:
            self.pool.collect()
        for index in line["ids"]:
            self.pool.release(self.requests.pop(index), returns=not line["kept"])
        if line["result"]:
            self.pool.put_back()
        return {}

    def room(self, line: Line) -> Line:
        return {"evicted": self.evicted(line["tokens"])}

    def evicted(self, tokens: int) -> list[list[int]]:
        return [[*unpacked(pages)] for pages in self.pool.make_room(tokens)]

    def state(self) -> Line:
        nodes = self.pool.tree.nodes()
        places = {node: i for i, node in enumerate(nodes)}
        return {
            "free": self.pool.free_order(),
            "nodes": [
                [places.get(node.parent, -1), [*unpacked(node.pages)], node.lock, node.hits, node.priority]
                for node in nodes
            ],
            "used": sorted(range(len(nodes)), key=lambda i: nodes[i].time),
        }


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("strategy", RANKS)
def test_every_call_does_what_it_did_there(strategy: str, page_size: int) -> None:
    """Hits, evictions node by node, pages handed out, tables; the free list in order; every node with its pages,
    locks, hits and priority, its place among its siblings and its place in the order of use."""
    header, *lines = RUNS[strategy, page_size]
    replay = Replay(header)
    for number, line in enumerate(lines):
        said = getattr(replay, line["op"])(line) | replay.state()
        replay.pool.check()
        assert line | said == line, (number, line["op"])
