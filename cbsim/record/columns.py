"""Every column of a run directory's tables, declared once: name, unit, definition, Arrow type, whether it may be null.

The writer puts unit and definition into the file, the reader checks each column's type, docs/run_directory.md shows the
tables. Units: ns (since the start of the run), tokens, blocks, rows, requests, count, id (a number that names
something), text.
"""

from __future__ import annotations

from typing import NamedTuple

from cbsim.policy import plan

PHASES = plan.PHASES
LANES = ("h2d", "compute", "d2h")
NS = 1e9  # nanoseconds of a second


class Column(NamedTuple):
    """A column of a table. `type` is Arrow's name; a list is written `list<int64>`. `default` is what a table has that
    was written before the column was declared; without one, every table must have the column.
    """

    name: str
    unit: str
    definition: str
    type: str = "int64"
    nullable: bool = False
    default: int | None = None


TAKES = {
    "schedule": "CPU: planning, from the poll on",
    "prepare": "CPU: input tensors",
    "launch": "CPU: queueing copies and kernels, capture of a graph included",
    "await": "CPU: blocked until the outputs are on the host",
    "update": "CPU: applying the result",
    "h2d": "copy of the inputs",
    "compute": "kernels; in a pipeline those of the last stage",
    "d2h": "copy of the outputs",
}

STEPS = (
    Column("step", "id", "0, 1, 2 ..."),
    Column("rows", "rows", "rows that ran, padding excluded"),
    Column("decode_rows", "rows", "of these, rows of one new token behind a computed prompt, counted or listed"),
    Column(
        *("prefill_tokens", "tokens"),
        "query tokens of other rows: prompts, chunks, first tokens after a preemption, blank drafts",
    ),
    Column("draft_tokens", "tokens", "query tokens that are drafts, which decode rows verify", default=0),
    Column("accepted_tokens", "tokens", "of these, those that came true, of requests that had not ended", default=0),
    Column("tokens", "tokens", "`prefill_tokens` + `decode_rows` + `draft_tokens`"),
    Column("padded_tokens", "tokens", "query tokens computed, padding included: rows, left padding, CUDA graphs"),
    Column("context_tokens", "tokens", "KV tokens read, those of padding included"),
    Column("sampled_rows", "rows", "rows that yield an output token"),
    Column("new_blocks", "blocks", "handed out for the step"),
    Column("used_blocks", "blocks", "in use after planning"),
    Column("cached_blocks", "blocks", "free after planning, with content that still has a key in the prefix cache"),
    Column("running", "requests", "running after planning"),
    Column("waiting", "requests", "waiting after planning"),
    Column("preempted", "requests", "preempted since the plan before"),
    Column("recomputed_tokens", "tokens", "query tokens that had been computed before a preemption"),
    Column(
        "cached_tokens", "tokens", "found in the prefix cache by requests admitted here, also by those that come back"
    ),
    Column("finished", "requests", "ended with this step's result"),
    Column("wasted_rows", "rows", "rows whose token or chunk was of no use: the request had ended or been reset"),
    Column(
        "plan_hash", "id", "digest of everything that the plan says, of the bytes declared in docs/run_directory.md"
    ),
    *(
        Column(f"{name}_{edge}_ns", "ns", f"{edge} of: {TAKES[name]}")
        for name in (*PHASES, *LANES)
        for edge in ("start", "end")
    ),
)

REQUESTS = (
    Column("index", "id", "number in the workload"),
    Column("id", "text", "name in the workload", "string"),
    Column("arrival_ns", "ns", "when it arrived"),
    Column("queued_poll", "count", "the poll that took it in, counted from 1; -1: none, its server died before"),
    Column("queued_ns", "ns", "when that was"),
    Column("prompt_tokens", "tokens", "length of its prompt"),
    Column("output_tokens", "tokens", "what the workload declares that the model will produce"),
    Column("max_tokens", "tokens", "the limit that the scheduler knows"),
    Column("priority", "id", "least is most urgent"),
    Column("first_step", "id", "first step with a row of it, or that took blocks for its KV from elsewhere; -1: none"),
    Column(
        *("status", "text"),
        "`length`, `stop`, `aborted`, `refused`, `failed` (an engine could not go on with it), `handed_off` (a "
        "prefill, with another row); in an interrupted run also `waiting`, `unfinished`",
        "string",
    ),
    Column("reason", "text", "of a refusal or a failure, else empty", "string"),
    Column("cancelled_poll", "count", "the poll that gave it up, -1 for none"),
    Column("preemptions", "count", "how often it lost its blocks"),
    Column("cached_tokens", "tokens", "found in the prefix cache at its first admission"),
    Column("scheduled_ns", "ns", "start of planning `first_step`, null for none", nullable=True),
    Column("first_token_ns", "ns", "when its first token was there, null for none", nullable=True),
    Column("last_token_ns", "ns", "when its last token was there, null for none", nullable=True),
    Column("generated_tokens", "tokens", "tokens delivered"),
    Column(
        *("token_runs", "id"),
        "first step, count, first step, count ...: the steps that delivered its tokens, one for each, ascending",
        "list<int64>",
    ),
)

LEG = Column(
    *("leg", "id"),
    "what its server did of it: 0 all, 1 the prefill, 2 the rest, with KV from elsewhere; absent without roles",
)
SERVER = Column("server", "id", "which of several servers, 0, 1, 2 ...: theirs follow one another; absent for one")

MOVES = (
    Column("step", "id", "the step whose plan lists the move"),
    Column("request", "id", "whose KV it is, -1 for nobody's in particular"),
    Column("job", "id", "number of the job that it is part of, -1 for one in order with the steps"),
    Column("way", "id", "0 on the device, 1 to the host or another server, 2 from there"),
    Column("blocks", "blocks", "moved"),
    Column("start_ns", "ns", "start on its lane"),
    Column("end_ns", "ns", "end on its lane"),
    Column("reported_step", "id", "the step whose result said that the job is over, -1 for none"),
)

HAND_OFFS = (
    Column("request", "id", "whose KV it is"),
    Column("source", "id", "the server that prefilled, -1 for none yet"),
    Column("target", "id", "the server that decodes, -1 for none yet"),
    Column("prefilled_ns", "ns", "when the source had kept the blocks, -1 for never"),
    Column("taken_ns", "ns", "when the target had taken blocks, -1 for never"),
    Column("start_ns", "ns", "start of the transfer, or of what layers had left after the prefill, -1 for none"),
    Column("end_ns", "ns", "end of the hand-off, -1 for none yet"),
    Column("blocks", "blocks", "that the target took for it"),
    Column("bytes", "bytes", "that went over, 0 if it did not begin"),
    Column("fate", "id", "0 fetched, 1 the lease ended, 2 broken, 3 the request ended, 4 under way"),
)

PARENTS = (
    Column("step", "id", "the step whose result said so"),
    Column("request", "id", "the text"),
    Column("parent", "id", "the text that it went on with"),
)

DRAFTS = (
    Column("step", "id", "the step"),
    Column("request", "id", "whose row it is: one that sampled, of a request that had not ended by then"),
    Column("drafts", "tokens", "draft tokens that it verified"),
    Column("accepted", "tokens", "of them, those that came true"),
    Column("proposed", "tokens", "draft tokens that were proposed behind it"),
)

STAGES = (
    Column("step", "id", "the step"),
    Column("stage", "id", "of the pipeline, 0, 1, 2 ..."),
    Column("start_ns", "ns", "start of the step's kernels on it"),
    Column("end_ns", "ns", "end of the step's kernels on it"),
)

OPTIONAL = {"moves": MOVES, "hand_offs": HAND_OFFS, "parents": PARENTS, "drafts": DRAFTS, "stages": STAGES}
"""The tables that only some runs have, by name."""
FOLLOWING = ("scheduled_ns", "first_token_ns", "last_token_ns", "generated_tokens")  # from the steps
RECORDED = tuple(column for column in REQUESTS if column.name not in FOLLOWING)

TOKENS_FILE = "tokens.parquet"
TOKENS = (
    Column("index", "id", "number in the workload"),
    Column("id", "text", "name in the workload", "string"),
    Column("prompt", "id", "token ids of its prompt", "list<int32>"),
    Column("output", "id", "token ids that it was told", "list<int32>"),
)
"""The columns of the tokens of a measured run's requests, where they are saved."""
