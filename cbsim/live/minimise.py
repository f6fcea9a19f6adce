"""The smallest workload that still shows a difference: fewer requests, shorter texts, plain options."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from cbsim.live.original import Line, Original

TRIES = 400  # the most candidates that are recorded


def smallest(workload: Line, original: Original, differs: Callable[[Line], bool]) -> Line:
    """Return the workload cut for as long as it still `differs`, trying at most `TRIES` cuts."""
    left = TRIES
    shrunk = True
    while shrunk and left:
        shrunk = False
        for candidate in _cuts(workload, original):
            if not left:
                break
            left -= 1
            if differs(candidate):
                workload, shrunk = candidate, True
                break
    return workload


def _cuts(workload: Line, original: Original) -> Iterator[Line]:
    """Yield the workload with less in it, the largest cuts first."""
    requests = workload["requests"]
    count = len(requests) // 2
    while count:
        for start in range(0, len(requests), count):
            left = [*requests[:start], *requests[start + count :]]
            if left:
                yield _with_requests(workload, left)
        count //= 2
    options = workload[original.options]
    for name in options:
        if name not in original.plain:
            yield workload | {original.options: {key: value for key, value in options.items() if key != name}}
        elif original.plain[name] not in (..., options[name]):
            yield workload | {original.options: options | {name: original.plain[name]}}
    for i, request in enumerate(requests):
        for shorter in _shorter(request, original):
            yield _with_requests(workload, [*requests[:i], shorter, *requests[i + 1 :]])


def _with_requests(workload: Line, requests: list[Line]) -> Line:
    """Return the workload with these requests, and with the cancellations of those that are left."""
    made = workload | {"requests": copy.deepcopy(requests)}
    if "cancels" in workload:
        ids = {request["id"] for request in requests}
        made["cancels"] = [cancel for cancel in workload["cancels"] if cancel["id"] in ids]
    return made


def _shorter(request: Line, original: Original) -> Iterator[Line]:
    """Yield the request with half of each length or one less, and without what it may lack."""
    for name in original.lengths:
        value = request.get(name)
        length = len(value) if isinstance(value, list) else value or 0
        for less in dict.fromkeys((length // 2, length - 1)):
            if 0 < less < length:
                yield request | {name: value[:less] if isinstance(value, list) else less}
    for name in request:
        if name not in ("id", *original.lengths):
            if isinstance(request[name], int) and request[name]:
                yield request | {name: 0}
            elif not isinstance(request[name], int):
                yield {key: value for key, value in request.items() if key != name}
