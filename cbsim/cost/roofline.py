"""The cost model `roofline`: time from the model's shape and the GPU's data sheet.

Every part of a step takes the longer of its arithmetic and its memory traffic: the linear layers (weights read once a
step, 2 FLOP a weight and query token), attention of the chunks, attention of the decoding rows (their KV read once),
and the output head for the rows that sample. Parts run one after the other. An efficiency a regime is the share of the
data sheet that is reached; efficiencies are the only free constants. Copies: three 4-byte inputs a query token and one
a block of the tables to the device, one 4-byte token a row back.

If each token goes through k of E experts, t tokens are expected to read E (1 - (1 - k/E)^t): all sets of k are equally
likely. Each of p GPUs that share every layer has a p-th of weights, heads and cache; twice a layer they add up their
results, which takes a latency and 2 (p - 1) / p of the residual stream over the link (a ring).

A layer with a state reads and writes that of every request once, and computes with it for every token.

Where layers have windows, each kind of layer reads and computes what it sees, so its share of attention's time is that
of its own pairs and tokens. Schedulers of such models list all rows one by one, none as a decode batch, as they do with
speculation; rows of one token, and those with guesses, run at the rates of decoding. With an indexer attention is as if
in a window of the tokens that it chooses, beside the indexer itself, whose keys and scores are of all tokens, on every
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbsim.cost.base import CpuCost, cpu_cost, nearest
from cbsim.cost.table import counted, reached
from cbsim.policy.groups import FULL, Attention, Sight, whole_pairs
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.policy.value import value
from cbsim.scenario.costs import RooflineSettings
from cbsim.scenario.scenario import Scenario


@value(frozen=True)
class Read:
    """The attention of the `share` of the layers that are of one kind: seconds of a pair of a query and a KV token, of
    reading a KV token, of a decoding row's pair, and of a KV token that a row of one token attends to. `whole`: these
    layers see everything.
    """

    kind: Attention
    share: float
    pair_s: float
    kv_s: float
    decode_pair_s: float
    context_s: float
    whole: bool


class Rates(NamedTuple):
    """The data sheet's rates times the efficiency of their regime: FLOP/s and bytes/s."""

    flops_prefill: float
    flops_decode: float
    bytes_weights: float
    bytes_kv: float
    bytes_pcie: float
    linear: float = 1.0  # FLOP/s of the linear layers, which may have a type of their own, over those of the rest

    def read(self, kind: Attention, share: float, pair_flop: float, decode_flop: float, kv_bytes: float) -> Read:
        """Return the seconds of such pairs and tokens."""
        kv_s, decode_s = kv_bytes / self.bytes_kv, decode_flop / self.flops_decode
        return Read(kind, share, pair_flop / self.flops_prefill, kv_s, decode_s, max(kv_s, decode_s), kind == FULL)


class Weights(NamedTuple):
    """The sizes that follow from a model's shape."""

    linear: int  # weights that every query token passes through, embedding and head not counted
    head: int
    hidden: int
    attention_flop: int  # of a pair of a query and a KV token in all layers
    decode_flop: int  # of such a pair of a decoding row
    bytes: int  # of a weight or an activation
    kv_bytes: int  # of a token in all layers
    linear_bytes: int | None = None  # of the linear weights, if they have a type of their own
    experts_share: float = 0.0  # of the experts of a layer, those that a token goes through
    experts_bytes: float = 0.0  # of all layers
    indexer_flop: int = 0  # of a query and the key of any token, in all layers
    indexer_bytes: int = 0  # of a token's keys, in all layers
    state_bytes: float = 0.0  # of a request's states in all layers
    state_flop: float = 0.0  # of a token's in all layers


def copy_ns(plan: StepPlan, byte_ns: float) -> tuple[int, int]:
    """Return the ns of a step's copies to the device and back, over a host link that takes `byte_ns` a byte."""
    work = plan.work
    tokens, rows = work.prefill_tokens + work.decodes, work.decodes + len(work.chunks)
    return nearest(4 * (3 * tokens + plan.counts.table_blocks) * byte_ns), nearest(4 * rows * byte_ns)


class RooflineCost:
    """A roofline model. `overhead_s` is added to every step; `launch_s` is the CPU time to launch its kernels one by
    one. `weights` are those of one GPU; their `linear_bytes` leaves experts out, `linear` counts those of a token.
    `reduces_s`: seconds of a step's all-reduces whatever its size, and for each query token. `attention` is what each
    layer sees. `listed`: also decoding rows are listed one by one.
    """

    def __init__(
        self,
        cpu: CpuCost,
        rates: Rates,
        weights: Weights,
        overhead_s: float,
        launch_s: float,
        *,
        reduces_s: tuple[float, float] = (0.0, 0.0),
        attention: Sequence[Attention] = (FULL,),
        listed: bool = False,
    ) -> None:
        self.cpu_ns = cpu
        self._overhead_s = overhead_s
        self.launch_ns = round(launch_s * 1e9)
        self._linear_flop, self._head_flop = 2 * weights.linear / rates.linear, 2 * weights.head  # of a token
        linear_bytes = weights.linear * weights.bytes if weights.linear_bytes is None else weights.linear_bytes
        self._linear_s = linear_bytes / rates.bytes_weights  # to read them once
        self._head_s = weights.head * weights.bytes / rates.bytes_weights
        self._flops_prefill, self._flops_decode = rates.flops_prefill, rates.flops_decode
        self._pcie_ns = 1e9 / rates.bytes_pcie  # of a byte
        self._embedding_s = weights.hidden * weights.bytes / rates.bytes_weights  # of a token
        self._experts_share, self._experts_s = weights.experts_share, weights.experts_bytes / rates.bytes_weights
        self._reduces_s, self._reduce_token_s = reduces_s
        self._state_s = 2 * weights.state_bytes / rates.bytes_kv  # to read and write the states of a request
        self._state_flop = weights.state_flop
        sizes = weights.attention_flop, weights.decode_flop, weights.kv_bytes
        shares = {kind: attention.count(kind) / len(attention) for kind in dict.fromkeys(attention)}
        self._reads = [rates.read(kind, share, *sizes) for kind, share in shares.items()]
        self._listed = listed or not all(read.whole for read in self._reads) or self._state_s > 0
        if weights.indexer_bytes:
            scored = weights.indexer_flop, weights.indexer_flop, weights.indexer_bytes
            self._reads.append(rates.read(FULL, 1.0, *scored))

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        work = plan.work
        decodes, chunks = work.decodes, work.chunks
        rows = decodes + len(chunks)
        if not rows:
            return 0, 0, 0
        sampled, flops = decodes + work.padding_rows, self._flops_decode
        context_s = attention_s = 0.0
        for read in self._reads:
            context_s += read.share * (counted(work, read.kind) + sampled) * read.context_s
            if chunks:
                attention_s += read.share * self._attention_s(read, chunks)
        time = self._overhead_s + tokens * self._embedding_s + context_s
        if self._state_s:
            time += sampled * self._states_s(1) + sum(map(self._states_s, [c.tokens + c.padding for c in chunks]))
        if chunks:
            if not self._listed or not all(chunk.reads_once for chunk in chunks):
                flops = self._flops_prefill
            for chunk in chunks:
                sampled += chunk.outputs
            time += attention_s
        weights_s = self._linear_s
        if self._experts_s:
            weights_s += self._experts_s * reached(self._experts_share, tokens)
        time += self._reduces_s + tokens * self._reduce_token_s
        linear_s, head_s = tokens * self._linear_flop / flops, sampled * self._head_flop / flops
        time += linear_s if linear_s > weights_s else weights_s
        if sampled:
            time += head_s if head_s > self._head_s else self._head_s
        h2d_ns, d2h_ns = copy_ns(plan, self._pcie_ns)
        return h2d_ns, nearest(time * 1e9), d2h_ns

    def _states_s(self, tokens: int) -> float:
        """Return the seconds of the states of a request with so many query tokens."""
        flops = self._flops_prefill if tokens > 1 else self._flops_decode
        return max(tokens * self._state_flop / flops, self._state_s)

    def _attention_s(self, read: Read, chunks: tuple[Chunk, ...]) -> float:
        """Return the seconds of attention of chunks if all layers were of this kind."""
        time = 0.0
        for c in chunks:
            start, tokens = c.start, c.tokens + c.padding
            pair_s = read.decode_pair_s if self._listed and c.reads_once else read.pair_s
            pairs, seen = whole_pairs(start, tokens), start + tokens
            if not read.whole:
                pairs, seen = read.kind.pairs(start, tokens), read.kind.seen(start, tokens)
            computed_s, read_s = pairs * pair_s, seen * read.kv_s
            time += computed_s if computed_s > read_s else read_s
        return time


def roofline_cost(scenario: Scenario, settings: RooflineSettings, *, whole: bool = True) -> RooflineCost:
    """Build the cost model `roofline` with the efficiencies that are given; unless `whole`, without the overhead."""
    model, gpu = scenario.model, scenario.hardware
    flops = getattr(gpu.flops, model.dtype)
    (compute, memory), bandwidth = settings.efficiencies, gpu.memory_bandwidth_bytes_s
    rates = Rates(
        flops_prefill=flops * compute.prefill,
        flops_decode=flops * compute.decode,
        bytes_weights=bandwidth * memory.weights,
        bytes_kv=bandwidth * memory.kv,
        bytes_pcie=gpu.pcie_bytes_s,
        linear=gpu.flops.of_layers(model) / flops,
    )
    ranks, experts = settings.tensor_parallel, model.expert_parameters
    indexer = model.latent.indexer if model.latent else None
    keys_bytes = indexer.cached_bytes * model.layers if indexer else 0
    share = model.experts_per_token / model.experts if model.experts else 0.0
    reduces = model.parts if ranks > 1 else 0  # of the residual stream
    token_s = 2 * (ranks - 1) / ranks * model.hidden * model.dtype_bytes / (gpu.link_bytes_s or gpu.pcie_bytes_s)
    dense = model.layer_parameters - experts
    states = sum(count for layer, count in model.kinds if layer.attention.state)
    attending = [each for each in model.layer_attention if each.sight is not Sight.STATE]
    embeddings = model.parameters - model.layer_parameters
    linear_bytes = model.weight_bytes - model.expert_bytes - embeddings * model.dtype_bytes
    weights = Weights(
        linear=(dense + round(experts * share)) // ranks,
        head=model.vocab * model.hidden // ranks,
        hidden=model.hidden,
        attention_flop=sum(count * layer.attention.pair_flop for layer, count in model.kinds) // ranks,
        decode_flop=sum(count * layer.attention.decode_flop for layer, count in model.kinds) // ranks,
        bytes=model.dtype_bytes,
        kv_bytes=model.kv_token_bytes(ranks) - keys_bytes,
        linear_bytes=linear_bytes // ranks,
        experts_share=share,
        experts_bytes=model.expert_bytes / ranks,
        indexer_flop=2 * indexer.heads * indexer.head_dim * model.layers if indexer else 0,
        indexer_bytes=keys_bytes,
        state_bytes=states * model.state_bytes(ranks),
        state_flop=states * model.linear.flop(ranks) if model.linear else 0.0,
    )
    return RooflineCost(
        cpu_cost(settings.cpu),
        rates,
        weights,
        whole * settings.step_overhead_s,
        settings.launch_s_per_layer * model.layers,
        reduces_s=(reduces * settings.all_reduce_latency_s, reduces * token_s),
        attention=[Attention(Sight.SLIDING, indexer.top_k)] if indexer else attending,
        listed=scenario.speculation is not None,
    )
