"""Models and GPUs in the simulator: the few numbers that memory and time follow from; and the cache blocks that fit a
GPU's memory by vLLM's rule. vLLM uses the memory that a trial run leaves free; the trial run is estimated here. Rules
of other systems are with their schedulers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, model_validator

from cbsim.errors import ScenarioError
from cbsim.files import until_changed
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.policy.kind import Role, Speculation
from cbsim.scenario import catalog, documents
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Frozen, Many, Number, PerSecond, Real, Text, Whole, complaint, shown
from cbsim.scenario.layers import MOST_LAYERS, FeedForward, Heads, Latent, Layer, Linear, Matrix

Shape = TypeVar("Shape", bound=BaseModel)
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_block": 1}
WEIGHT_BYTES: dict[str, float] = {**DTYPE_BYTES, "int4": 133 / 256, "int4_g32": 9 / 16}
WEIGHT_BYTES |= {"nvfp4": 9 / 16, "mxfp4": 17 / 32}
"""Bytes of a weight with its share of what is stored for a group. int4: two groups of 128 with a scale of 2 bytes and a
zero point of 4 bits each, 128 + 2 x 2.5 bytes; int4_g32: 32 with a scale of 2 bytes. nvfp4: a group of 16 with a scale
of a byte; mxfp4: one of 32."""


def _sight(seen: str) -> str:
    if not re.fullmatch("full|linear|(sliding|chunked) [1-9][0-9]{0,8}", seen):
        raise complaint(f"got {shown(seen)}, expected full, linear, sliding TOKENS or chunked TOKENS")
    return seen


Seen = Annotated[str, AfterValidator(_sight)]
"""A layer's view of the sequence: `full`, `sliding TOKENS` (the last ones, its own included), `chunked TOKENS`; or
`linear`, by a state."""


class FullHeads(Frozen):
    """The KV heads of layers that see the whole sequence, where those of other layers differ (Gemma 4)."""

    kv_heads: Number  #: Key and value heads.
    head_dim: Number  #: Width of a head.
    keys_are_values: bool = False  #: Does one product make both keys and values?


Narrow = Literal["fp8", "fp8_block", "nvfp4", "mxfp4", "int4", "int4_g32"]


class ModelShape(Frozen):
    """A decoder: grouped-query or latent attention, gated feed-forward layers or mixtures of such experts, RMS norms;
    one type for all tensors, unless `weights_dtype` and the other types say otherwise. `kinds` counts its layers.
    """

    name: Text  #: What reports call it.
    layers: Annotated[Number, Field(le=MOST_LAYERS)]  #: Number of decoder layers.
    hidden: Number  #: Width of the residual stream.
    heads: Number  #: Query heads.
    kv_heads: Number  #: Key and value heads; 1 with `latent`, which is shared by all.
    head_dim: Number  #: Width of a head; with `latent` of what is cached: kv_rank + rope_dim.
    latent: Latent | None = None  #: Multi-head latent attention (MLA), in all layers.
    linear: Linear | None = None  #: Linear attention, in the layers that have it.
    full_heads: FullHeads | None = None
    """KV heads of layers that see the whole sequence, if those of layers with windows are others."""
    sinks: bool = False  #: Has every head a learned sink (gpt-oss)? They take no time of their own.
    intermediate: Number  #: Width of the feed-forward layer, or of one expert.
    experts: Annotated[Whole, Field(ge=0)] = 0  #: Experts of a layer; 0: the feed-forward layer is dense.
    experts_per_token: Annotated[Whole, Field(ge=0)] = 0  #: Experts that a token goes through.
    shared_intermediate: Annotated[Whole, Field(ge=0)] = 0
    """Width of what every token goes through beside the experts: of all shared experts together."""
    feed_forward: Many[Literal["dense", "experts", "none"]] = ()
    """Of a mixture: which layers have experts, or attention alone, layer by layer, and again from the first if there
    are more; the same everywhere if empty."""
    gated: bool = True  #: Are feed-forward layers and experts gated, of three matrices? Else they have two (Nemotron).
    first_dense: Annotated[Whole, Field(ge=0)] = 0  #: Of a mixture: so many of the first layers are dense.
    dense_intermediate: Annotated[Whole, Field(ge=0)] = 0  #: Of a mixture: width of its dense layers.
    vocab: Number  #: Rows of the embedding.
    tied_embeddings: bool = False  #: Does the output layer share the embedding's weights?
    output_gate: bool = False
    """Is the output of attention multiplied by gates, that come from the same product as queries (Qwen3-Next)? Linear
    attention always has gates."""
    qk_norm: bool = False  #: Are the queries and keys of every head RMS-normed (Qwen3)?
    qkv_bias: bool = False
    """Do queries, keys and values have biases (Qwen2.5)? They take memory, but no time of their own."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  #: Type of weights, activations and KV cache.
    weights_dtype: Narrow | None = None
    """Type of the layers' matrices if not `dtype`: fp8 with a scale a tensor or channel, fp8_block with one a block of
    128 x 128, nvfp4 in groups of 16, mxfp4 in groups of 32, int4 in groups of 128, int4_g32 in groups of 32. Embedding
    and output layer have `dtype`."""
    attention_dtype: Narrow | Literal["bfloat16", "float16", "float32"] | None = None
    """Type of attention's matrices if not that of the others."""
    experts_dtype: Narrow | None = None  #: Type of the experts' matrices if not that of the others.
    kv_dtype: Literal["fp8"] | None = None  #: Type of the KV cache if not `dtype`.
    max_position: Number  #: Longest sequence that the model is made for, in tokens.
    attention: Annotated[Many[Seen], Field(min_length=1)] = ("full",)
    """What the layers see, layer by layer, and again from the first if there are more: `full`; `sliding TOKENS`, the
    last ones, its own included; `chunked TOKENS`, its part of the sequence (Llama 4); `linear`, by a state."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if not min(self.experts, 1) <= self.experts_per_token <= self.experts:
            bound = f"must be between {min(self.experts, 1)} and experts ({self.experts})"
            raise complaint(f"got {self.experts_per_token}, {bound}", "experts_per_token")
        for field in ("attention", "feed_forward"):
            if (entries := len(getattr(self, field))) > self.layers:
                raise complaint(f"got {entries} entries, must be <= layers ({self.layers})", field)
        if self.latent is None and self.heads % self.kv_heads:
            raise complaint(f"got {self.kv_heads}, must divide heads ({self.heads})", "kv_heads")
        self._mixture_agrees()
        self._heads_agree()
        return self

    def _mixture_agrees(self) -> None:
        for field in ("shared_intermediate", "feed_forward", "first_dense", "dense_intermediate", "experts_dtype"):
            if not self.experts and (value := getattr(self, field)):
                raise complaint(f"got {shown(value)}, must be absent without experts", field)
        if self.experts and self.first_dense >= self.layers:
            raise complaint(f"got {self.first_dense}, must be < layers ({self.layers})", "first_dense")
        dense = self._feed_forwards.count("dense")
        if self.experts and "experts" not in self._feed_forwards:
            raise complaint(f"got {shown(list(self.feed_forward))}, must name experts for some layer", "feed_forward")
        if self.experts and bool(dense) != bool(self.dense_intermediate):
            bound = f"must be > 0: {dense} layers are dense" if dense else "must be 0: no layer is dense"
            raise complaint(f"got {self.dense_intermediate}, {bound}", "dense_intermediate")

    def _heads_agree(self) -> None:
        if (wide := self.full_heads) is not None:
            if self.heads % wide.kv_heads:
                raise complaint(f"got {wide.kv_heads}, must divide heads ({self.heads})", "full_heads.kv_heads")
            if self.sees_all or "full" not in self.attention:
                bound = "must be absent unless some layers have windows and others see everything"
                raise complaint(f"got {wide.head_dim} wide heads, {bound}", "full_heads")
        if (rule := self.linear) and rule.value_heads % rule.key_heads:
            raise complaint(f"got {rule.key_heads}, must divide value_heads ({rule.value_heads})", "linear.key_heads")
        states = self.attention.count("linear")
        if bool(states) != bool(self.linear) or states == len(self.attention):
            bound = "must have linear and other layers" if self.linear else "must not have linear layers"
            about = "with" if self.linear else "without"
            raise complaint(f"got {shown(list(self.attention))}, {bound} {about} model.linear", "attention")
        if (of := self.latent) is not None:
            if not {*self.attention} <= {"full", "linear"}:
                raise complaint(f"got {shown(list(self.attention))}, must be full with latent", "attention")
            cached = of.kv_rank + of.rope_dim
            absent = {"qk_norm": False, "qkv_bias": False, "output_gate": False}
            for field, right in {"kv_heads": 1, "head_dim": cached, **absent}.items():
                if (value := getattr(self, field)) != right:
                    raise complaint(f"got {shown(value)}, must be {shown(right)} with latent", field)

    @property
    def _feed_forwards(self) -> list[str]:
        each = self.feed_forward or ("experts" if self.experts else "dense",)
        return ["dense" if at < self.first_dense else each[at % len(each)] for at in range(self.layers)]

    @property
    def parts(self) -> int:
        """Parts of all layers that read and write the residual stream."""
        return sum(count * layer.parts for layer, count in self.kinds)

    @property
    @lru_cache(maxsize=256)  # noqa: B019 - models are values
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """The kinds of layers, each with the number of layers that are of it."""
        attention = [self._attention_of(sees) for sees in self.pattern]
        mixed = {each: self._feed_forward_of(each) for each in ("dense", "experts", "none")}
        parts: Counter[tuple[int, str]] = Counter()  # alike by their places: fewer layers to compare
        for at, kind in enumerate(self._feed_forwards):
            parts[at % len(attention), kind] += 1
        layers: Counter[Layer] = Counter()
        for (place, of), count in parts.items():
            layers[Layer(self.hidden, attention[place], mixed[of])] += count
        return tuple(layers.items())

    def _attention_of(self, sees: Attention) -> Heads:
        dtype = self.attention_dtype or self.weights_dtype or self.dtype
        if self.linear and sees.sight is Sight.STATE:
            return Heads(sees, self.linear.value_heads, 0, self.linear.value_dim, dtype, state=self.linear)
        if self.full_heads and sees == FULL:
            wide = self.full_heads
            return Heads(sees, self.heads, wide.kv_heads, wide.head_dim, dtype, keys_are_values=wide.keys_are_values)
        return Heads(sees, self.heads, self.kv_heads, self.head_dim, dtype, self.latent, gated=self.output_gate)

    def _feed_forward_of(self, kind: str) -> FeedForward:
        dtype, inputs = self.weights_dtype or self.dtype, 2 if self.gated else 1
        if kind != "experts":
            inner = self.dense_intermediate if self.experts else self.intermediate
            return FeedForward(inner if kind == "dense" else 0, dtype, inputs=inputs)
        chosen, experts = self.experts_per_token, self.experts
        return FeedForward(
            self.shared_intermediate, dtype, experts, chosen, self.intermediate, self.experts_dtype or dtype, inputs
        )

    def stages(self, count: int) -> tuple[ModelShape, ...]:
        """Return the parts of the model on each stage of a pipeline, split as vLLM does (get_pp_indices): as many
        layers on each, of those left one more on the last but one, on the one before it, and so on. The first has the
        embedding, the last the output layer, the others no vocabulary.
        """
        sizes = [self.layers // count + (0 <= count - 2 - at < self.layers % count) for at in range(count)]
        feed_forwards, made, start = self._feed_forwards, list[ModelShape](), 0
        for at, layers in enumerate(sizes):
            places, ends = range(start, start + layers), at in (0, count - 1)
            part: dict[str, Any] = {
                "layers": layers,
                "vocab": self.vocab * ends,
                "tied_embeddings": self.tied_embeddings or count > 1,
            }
            part["attention"] = tuple([self.attention[place % len(self.attention)] for place in places])
            if self.experts:
                part |= {"feed_forward": tuple([feed_forwards[place] for place in places]), "first_dense": 0}
            made.append(self.model_copy(update=part))
            start += layers
        return tuple(made) if count > 1 else (self,)

    @property
    def sees_all(self) -> bool:
        """Whether every layer sees the whole sequence."""
        return all(seen == "full" for seen in self.attention)

    @property
    def layer_attention(self) -> tuple[Attention, ...]:
        """The part of the sequence that each layer sees."""
        pattern = self.pattern
        return tuple(pattern[layer % len(pattern)] for layer in range(self.layers))

    @property
    def pattern(self) -> tuple[Attention, ...]:
        """The entries of `attention` as policies use them."""
        return tuple(sight(seen) for seen in self.attention)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def cache_dtype(self) -> str:
        """The type of the KV cache."""
        return self.kv_dtype or self.dtype

    @property
    def expert_parameters(self) -> int:
        """Number of weights of all layers' experts; 0 for a dense model."""
        kinds = [(count * layer.hidden, layer.feed_forward) for layer, count in self.kinds]
        return sum(rows * (of.inputs + 1) * of.expert_inner * of.experts for rows, of in kinds)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of all layers' experts."""
        return int(self.expert_parameters * WEIGHT_BYTES[self.experts_dtype or self.weights_dtype or self.dtype])

    @property
    def router_parameters(self) -> int:
        """Number of weights of what chooses experts, in all layers."""
        return sum(count * layer.hidden * layer.feed_forward.experts for layer, count in self.kinds)

    def matrices(self, tensor: int = 1) -> list[tuple[Matrix, int]]:
        """Return the layers' matrices without experts and routers on one of `tensor` GPUs, and their numbers."""
        return [(matrix, count) for layer, count in self.kinds for matrix in layer.matrices(tensor)]

    @property
    def layer_parameters(self) -> int:
        """Number of weights in all layers' matrices: those of attention, feed-forward layers, experts and routers."""
        dense = sum(count * int(matrix.weights) for matrix, count in self.matrices())
        return dense + self.expert_parameters + self.router_parameters

    @property
    def parameters(self) -> int:
        """Number of all weights."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        states = sum(count for layer, count in self.kinds if layer.attention.state)
        attending = self.layers - states
        norms = (self.parts + 1) * self.hidden + 2 * attending * self.head_dim * self.qk_norm
        others = states * self.linear.others if self.linear else 0
        others += attending * self.head_dim * (self.heads + 2 * self.kv_heads) * self.qkv_bias
        return self.layer_parameters + embeddings + norms + others + attending * self.heads * self.sinks

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights. Router, embedding, output layer, norms and biases are not quantized."""
        wide = self.parameters - self.layer_parameters + self.router_parameters
        return int(self._matrix_bytes(1)) + self.expert_bytes + wide * self.dtype_bytes

    def _matrix_bytes(self, tensor: int) -> float:
        return sum(count * matrix.weights * WEIGHT_BYTES[matrix.dtype] for matrix, count in self.matrices(tensor))

    def shard_bytes(self, tensor: int, ranks: int = 1) -> int:
        """Return the bytes of weights on one GPU of `tensor` that share every layer and `ranks` that share experts."""
        experts, copied = self.expert_bytes, self._matrix_bytes(tensor) - self._matrix_bytes(1) / tensor
        return (self.weight_bytes - experts) // tensor + experts // (tensor * ranks) + int(copied)

    def kv_token_bytes(self, tensor: int = 1) -> int:
        """Return the bytes that a token has in the caches of all layers on one of `tensor` GPUs: heads are divided, but
        each GPU has at least one; a latent and an indexer's key are not.
        """
        width = DTYPE_BYTES[self.cache_dtype]
        return int(sum(count * layer.attention.cached_bytes(tensor, width) for layer, count in self.kinds))

    def state_bytes(self, tensor: int = 1) -> int:
        """Return the bytes of a request's state in a layer that keeps one, on one of `tensor` GPUs; 0 without such."""
        if self.linear is None:
            return 0
        conv, matrices = self.linear.kept(tensor)
        usual = "float32" if self.linear.rule == "kda" else self.dtype
        return int(conv * self.dtype_bytes + matrices * DTYPE_BYTES[self.linear.state_dtype or usual])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token has in the caches of all layers, on one GPU that is not divided."""
        return self.kv_token_bytes()


def sight(seen: str) -> Attention:
    """Parse the part of the sequence that a layer sees, from a scenario's text."""
    kind, _, span = seen.partition(" ")
    return Attention(Sight(kind), int(span or 0))


class Flops(Frozen):
    """Peak dense rate by type, FLOP/s."""

    bfloat16: PerSecond  #: FLOP/s in bfloat16.
    float16: PerSecond  #: FLOP/s in float16.
    float32: PerSecond  #: FLOP/s in float32.
    float8: PerSecond | None = None
    """FLOP/s in float8; null: fp8 weights are read as such, and computed in the model's dtype."""
    float4: PerSecond | None = None
    """FLOP/s in NVFP4 and MXFP4; null: such weights are read as such, and computed in the model's dtype."""

    def of(self, weights: str, dtype: str) -> float:
        """Return the FLOP/s of products with weights of one type in a model of another."""
        wide: float = getattr(self, dtype)
        narrow = {"fp8": self.float8, "fp8_block": self.float8, "nvfp4": self.float4, "mxfp4": self.float4}
        return narrow.get(weights) or wide

    def of_layers(self, model: ModelShape) -> float:
        """Return the FLOP/s of a token in a model's layers, each of the matrices that it goes through in its type."""
        wide, share = self.of(model.dtype, model.dtype), model.experts_per_token / max(model.experts, 1)
        parts = [(count * matrix.weights, matrix.dtype) for matrix, count in model.matrices()]
        parts.append((share * model.expert_parameters, model.experts_dtype or model.weights_dtype or model.dtype))
        longer = sum([weights * (wide / self.of(dtype, model.dtype)) for weights, dtype in parts])
        return wide / (longer / sum([weights for weights, _ in parts]))


class Hardware(Frozen):
    """One GPU, by its data sheet."""

    name: Text  #: What reports call it.
    memory_bytes: Number  #: Memory that a process can see on the empty device, bytes.
    memory_bandwidth_bytes_s: PerSecond  #: Peak memory bandwidth, bytes/s.
    flops: Flops  #: Peak dense FLOP/s (no sparsity) by type.
    pcie_bytes_s: PerSecond  #: Host link, bytes/s in each direction.
    link_bytes_s: PerSecond | None = None
    """To the other GPUs (NVLink), bytes/s in each direction; null: over the host link."""
    link_gpus: Number | None = None
    """GPUs that the link joins, which is the most that can share a model; null: any number."""
    price_usd_hour: Annotated[Real, Field(ge=0)] | None = None
    """Price of one GPU for an hour, USD; an assumption, dated in `source`."""
    power_w: PerSecond | None = None  #: Power that its data sheet allows the board, watts; energy is estimated from it.
    source: str = ""  #: Where the numbers come from.


def model(name: str, base: Path | None = None) -> ModelShape:
    """Load the model of that name or path. Raises ScenarioError."""
    path = catalog.shape("models", name, base)
    if path.suffix != ".json":
        return _named(path, ModelShape)
    from cbsim.scenario import pretrained

    return Document(str(path), None, pretrained.shape(path)).checked(ModelShape)


def hardware(name: str, base: Path | None = None) -> Hardware:
    """Load the GPU of that name or path. Raises ScenarioError."""
    return _named(catalog.shape("hardware", name, base), Hardware)


@until_changed
def _named(path: Path, kind: type[Shape]) -> Shape:
    return documents.read(path).checked(kind)


NAMED: dict[str, Callable[[str, Path | None], ModelShape | Hardware]] = {"model": model, "hardware": hardware}


def _read(value: Any, info: ValidationInfo) -> Any:
    base: Path | None = (info.context or {}).get("base")
    return NAMED[str(info.field_name)](value, base) if isinstance(value, str) else value


NamedModel = Annotated[ModelShape, BeforeValidator(_read, json_schema_input_type=str | ModelShape)]
NamedHardware = Annotated[Hardware, BeforeValidator(_read, json_schema_input_type=str | Hardware)]

VLLM_RUNTIME_BYTES = 600_000_000
"""CUDA context, libraries, graphs and fragmentation: what a real vLLM 0.19 on an RTX 4090 with Llama-3.1-8B (2,588
blocks of 16 at fraction 0.9, 2,048 tokens, 256 requests) leaves unexplained by weights and activations."""
FRACTION = "kv_cache.memory_fraction"
LOGIT_COPIES = 4  # float32 logits, their sorted copy, probabilities and their sum: the sampler's peak


def activation_bytes(model: ModelShape, tokens: int, requests: int) -> int:
    """Estimate the peak bytes of a step of so many query tokens and rows that sample: hidden states, queries, keys and
    values, the feed-forward's two inputs and its product; then the sampler's copies of the logits.
    """
    queries = model.heads * (model.latent.nope_dim + model.latent.rope_dim if model.latent else model.head_dim)
    if (of := model.linear) is not None:
        queries = max(queries, 2 * of.key_heads * of.key_dim + 2 * of.value_heads * of.value_dim)
    inner = max(model.intermediate, model.dense_intermediate, model.shared_intermediate)
    states = 2 * model.hidden + queries + 2 * model.kv_heads * model.head_dim + 3 * inner
    return tokens * states * model.dtype_bytes + LOGIT_COPIES * requests * model.vocab * 4


class Place:
    """The `policy.kind.Site` of a model on `gpus` GPUs, on which sizes are solved. `num_blocks`: as given. So many GPUs
    again are each of the other `ranks`, over which experts are spread, and of the other `stages` of a pipeline, whose
    tightest one counts. `drafter` is the model that drafts, if any.
    """

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        depth: int,
        block_size: int,
        memory_fraction: float,
        num_blocks: int | None,
        gpus: int = 1,
        *,
        ranks: int = 1,
        stages: int = 1,
        speculation: Speculation | None = None,
        drafter: ModelShape | None = None,
        role: Role | None = None,
    ) -> None:
        self.model, self.hardware, self.depth, self.gpus = model, hardware, depth, gpus
        self.speculation, self.stages, self.role = speculation, stages, role
        self.block_size, self.memory_fraction, self.num_blocks = block_size, memory_fraction, num_blocks
        self.block_bytes, self._weight_bytes = block_size * model.kv_token_bytes(gpus), model.shard_bytes(gpus, ranks)
        self._drafter, self._drafter_bytes = drafter, 0
        if drafter is not None:  # its layers are cached in the same blocks
            self.block_bytes += block_size * drafter.kv_token_bytes(gpus)
            self._drafter_bytes = drafter.shard_bytes(gpus, ranks)
            self._weight_bytes += self._drafter_bytes
        self._shards = [(self._weight_bytes, self.block_bytes, model.layers)]  # of a GPU of each stage
        if stages > 1:
            parts = model.stages(stages)
            sizes = [(part.shard_bytes(gpus), block_size * part.kv_token_bytes(gpus), part.layers) for part in parts]
            self._shards, self._weight_bytes = sizes, max(size[0] for size in sizes)
        self.max_position, self.layers, self.attention = model.max_position, model.layers, model.pattern
        self.gpu, self.memory_bytes = hardware.name, hardware.memory_bytes
        self.state_rule: str = model.linear.rule if model.linear else ""
        self.state_bytes = model.state_bytes(gpus)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in one layer that keeps tokens, on one GPU."""
        kept = sum(each.sight is not Sight.STATE for each in self.model.layer_attention)
        return self.model.kv_token_bytes(self.gpus) // kept

    def blocks(self, tokens: int, requests: int, layers: int | None = None, page_bytes: int = 0) -> int:
        """Return the blocks as given, else those of all layers, or of `layers`, in the fraction of the memory beside
        weights and the peak of a step, on GPUs that share weights and heads (activations are counted whole). Raises
        ScenarioError.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        peak = activation_bytes(self.model, tokens, requests)
        free, fit = int(self.memory_bytes * self.memory_fraction) - peak - VLLM_RUNTIME_BYTES, list[tuple[int, int]]()
        for weights, block, own in self._shards:
            left = free - weights
            fit.append((left // ((page_bytes or block // own) * (layers or own)), left))
        blocks, left = min(fit)
        if blocks < 2:
            raise self.misfit(left, peak_bytes=peak)
        return blocks

    def misfit(self, left_bytes: int, needed_bytes: int | None = None, peak_bytes: int | None = None) -> ScenarioError:
        sizes = (self.memory_bytes, self._weight_bytes, left_bytes, needed_bytes or 0, peak_bytes or 0)
        memory, weights, left, needed, peak = (f"{size / 1e9:.2f} GB" for size in sizes)
        share, each = self.memory_fraction, f" on each of {self.gpus} GPUs" if self.gpus > 1 else ""
        step = f", a step at its peak {peak}, the runtime {VLLM_RUNTIME_BYTES / 1e9:.2f} GB" if peak_bytes else ""
        weights += f" of weights{each}{step}; fraction {share:g} of the memory leaves {left}"
        with_it = (
            f" with the drafter {self._drafter.name} ({self._drafter_bytes / 1e9:.2f} GB)" if self._drafter else ""
        )
        reason = f"{self.gpu} has {memory} and {self.model.name}{with_it} {weights}"
        if self.num_blocks is None and share < 1:
            return ScenarioError(f"{FRACTION}: got {share}, too little for a cache: {reason}", field=FRACTION)
        if self.num_blocks is None and self._drafter and left_bytes + self._drafter_bytes > 0:
            got = f"speculation.drafter.model: got {self._drafter.name}, which"
            return ScenarioError(f"{got} leaves too little for a cache: {reason}; a smaller drafter may fit")
        if self.num_blocks is None:
            less = "a smaller model, model.weights_dtype or more GPUs (cost.tensor_parallel) may fit"
            return ScenarioError(f"model: got {self.model.name}, which leaves too little for a cache: {reason}; {less}")
        return ScenarioError(f"kv_cache.num_blocks: got {self.num_blocks}, which need {needed}: {reason}")
