"""The layers of a decoder: what each sees, keeps and computes. Weights, cache, arithmetic and kernels follow from its
matrices and its heads; a model is a count of each kind of layer.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.scenario.fields import Frozen, Number, Whole

MOST_LAYERS = 10_000  # of a model each of whose layers is looked at by itself


class Matrix(NamedTuple):
    """The weights of a product [tokens, inputs] x [inputs, outputs] on one GPU, and their type."""

    outputs: float
    inputs: float
    dtype: str

    @property
    def weights(self) -> float:
        return self.outputs * self.inputs


class Indexer(Frozen):
    """What chooses the tokens that a query of sparse latent attention attends to (DeepSeek-V3.2, arXiv 2512.02556): its
    own query heads score the keys of all tokens, one key a token. Every GPU has all of it.
    """

    heads: Number  #: Query heads.
    head_dim: Annotated[Whole, Field(ge=2)]  #: Width of such a head, and of a token's key.
    top_k: Number  #: Tokens that a query attends to, at most.
    key_bytes: Number | None = None
    """Bytes of a token's key in the cache; null: as in vLLM (DeepseekV32IndexerCache) and SGLang (DSATokenToKVPool), 8
    bits a value and 4 bytes for each 128, 132 for 128. transformers keeps values of the model's dtype, 256 bytes."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of a token's key in the cache of a layer."""
        return self.key_bytes or self.head_dim + 4 * -(-self.head_dim // 128)


class Latent(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1): the widths of what it makes of a token."""

    query_rank: Annotated[Whole, Field(ge=0)] = 0  #: Width of the queries' latent; 0: queries have none.
    kv_rank: Number  #: Width of the latent of keys and values, which is cached.
    nope_dim: Number  #: Part of a head's keys and queries that is not rotated.
    rope_dim: Number  #: Part that is rotated; one key for all heads, cached beside the latent.
    value_dim: Number  #: Width of a head's values.
    token_bytes: Number | None = None
    """Bytes of a token's latent in the cache; null: values of its type. The sparse kernels of vLLM and SGLang on Hopper
    (FlashMLA) have 656 in fp8: with four scales, and the rotated part in bfloat16."""
    indexer: Indexer | None = None
    """Chooses the tokens that a query attends to (sparse attention, DSA), in all layers; null: all of them."""


class Linear(Frozen):
    """Linear attention: a state for each request, and nothing for a token. For each of the value heads it is a matrix
    of `value_dim` x `key_dim` numbers, and of every channel of queries, keys and values the last inputs of a
    convolution.
    """

    rule: Literal["gated_delta", "kda", "mamba2"]  #: Gated delta rule (Qwen3-Next), Kimi Delta Attention, or Mamba-2.
    key_heads: Number  #: Heads of queries and keys; of mamba2: groups.
    value_heads: Number  #: Heads of values, each with a state.
    key_dim: Number  #: Width of a key; of mamba2: size of the state of a channel.
    value_dim: Number  #: Width of a head's values.
    conv: Number = 4  #: Tokens that the convolution before it covers.
    state_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type of the state; null: of kda float32, else `dtype`, which is that of the convolution's inputs."""

    def kept(self, tensor: int) -> tuple[float, float]:
        """Return the numbers of the convolution and of the matrices that one of `tensor` GPUs keeps for a request."""
        values = self.value_heads * self.value_dim / tensor
        return (self.conv - 1) * (2 * self._keys(tensor) + values), values * self.key_dim

    @property
    def others(self) -> int:
        """Number of weights beside the products: of the convolution, of decays, and of the norm of what is read."""
        heads, values = self.value_heads, self.value_heads * self.value_dim
        channels = 2 * self.key_heads * self.key_dim + values
        if self.rule == "mamba2":
            return (self.conv + 1) * channels + 3 * heads + values
        return self.conv * channels + heads + (values if self.rule == "kda" else heads) + self.value_dim

    def flop(self, tensor: int) -> float:
        """Return the least FLOP of a token on one of `tensor` GPUs: a delta rule reads a state twice and adds."""
        return (4 if self.rule == "mamba2" else 6) * self.value_heads / tensor * self.key_dim * self.value_dim

    def moved(self, tensor: int) -> float:
        """Return the numbers that its kernels read and write for a token on one of `tensor` GPUs: the convolution its
        channels twice, the rule these and the values.
        """
        values = self.value_heads * self.value_dim / tensor
        return 3 * (2 * self._keys(tensor) + values) + values

    def _keys(self, tensor: int) -> float:
        """Return the width of the keys on one of `tensor` GPUs; Mamba's groups are copied if they cannot be divided."""
        copied = self.rule == "mamba2" and self.key_heads % tensor
        return self.key_dim * (1.0 if copied else self.key_heads / tensor)

    def matrices(self, hidden: int, tensor: int) -> list[tuple[float, float]]:
        """Return outputs and inputs of the products on one of `tensor` GPUs: queries, keys, values, gates, output."""
        keys, heads = self._keys(tensor), self.value_heads / tensor
        values, wide = heads * self.value_dim, float(hidden)
        if self.rule == "kda":
            low = [(2.0 * self.value_dim, wide), (2 * values, float(self.value_dim))]  # decay and gate have a low rank
            return [(2 * keys + values + heads, wide), *low, (wide, values)]
        return [(2 * keys + 2 * values + heads * (1 if self.rule == "mamba2" else 2), wide), (wide, values)]


class Heads(NamedTuple):
    """The attention of a layer: `query` heads of `width`, `kv` heads of keys and values; `latent` if they are kept as
    one, `state` if only a state is. `keys_are_values`: both come from one product; they are cached apart, since only
    keys are rotated. `stored` is the type of what is cached, if not the model's. `gated`: as many gates as queries come
    from their product and multiply the output.
    """

    sees: Attention
    query: int
    kv: int
    width: int
    dtype: str
    latent: Latent | None = None
    keys_are_values: bool = False
    state: Linear | None = None
    gated: bool = False
    stored: str = ""

    @property
    def indexer(self) -> Indexer | None:
        return self.latent.indexer if self.latent else None

    def parts(self, tensor: int) -> list[Heads]:
        """Return the attention that kernels compute. With an indexer these are its heads, which read the keys of all
        tokens and no values, on each of `tensor` GPUs all of them; and then attention to the tokens that were chosen.
        """
        if (of := self.indexer) is None:
            return [self]
        scores = Heads(FULL, of.heads * tensor, 0, of.head_dim // 2, self.dtype, stored="fp8")  # two halves: no values
        return [scores, self._replace(sees=Attention(Sight.SLIDING, of.top_k))]

    def matrices(self, hidden: int, tensor: int) -> list[Matrix]:
        """Return the matrices on one of `tensor` GPUs: each has its share of the query heads, at least one KV head, and
        the whole of the products that make latents. Keys and values of all heads count as one product of the latent;
        where it is absorbed into queries and outputs, the weights and the arithmetic are as many.
        """
        query, of = self.query / tensor, self.latent
        if self.state is not None:
            shapes = self.state.matrices(hidden, tensor)
        elif of is None:
            kv = max(1.0, self.kv / tensor) * (1 if self.keys_are_values else 2)
            queries = query * self.width * (2 if self.gated else 1)
            shapes = [(queries + kv * self.width, hidden), (hidden, query * self.width)]
        else:
            down = of.query_rank + of.kv_rank + of.rope_dim
            shapes = [(down, hidden), (query * (of.nope_dim + of.rope_dim), of.query_rank or hidden)]
            shapes += [(query * (of.nope_dim + of.value_dim), of.kv_rank), (hidden, query * of.value_dim)]
            if by := of.indexer:  # queries, from their latent; keys and the weights of heads
                shapes += [(by.heads * by.head_dim, of.query_rank or hidden), (by.head_dim + by.heads, hidden)]
        return [Matrix(outputs, inputs, self.dtype) for outputs, inputs in shapes]

    def cached(self, tensor: int) -> float:
        """Return the values that a token has in the cache of one of `tensor` GPUs. A latent is not divided."""
        if self.state is not None:
            return 0.0
        return self.width if self.latent else 2 * max(1.0, self.split(tensor)) * self.width

    def cached_bytes(self, tensor: int, width: int) -> float:
        """Return the bytes that a token has in that cache, whose values are `width` bytes each."""
        of = self.latent.token_bytes if self.latent else None
        return (of or self.cached(tensor) * width) + (self.indexer.cached_bytes if self.indexer else 0)

    def split(self, tensor: int) -> float:
        """Return the KV heads that the rows of one of `tensor` GPUs are split by; 0 if all heads have the same keys."""
        return max(1.0, self.kv / tensor) if self.kv and not self.latent else 0.0

    def moved(self, tensor: int) -> float:
        """Return the values that kernels beside products and attention read and write for a token on one of `tensor`
        GPUs. They rotate or norm queries and keys, a latent's likewise, and multiply outputs, states' normed, by gates.
        """
        queries = self.query * (self.latent.rope_dim if self.latent else self.width) / tensor
        gate = 3 * queries if self.gated or self.state else 0.0
        return gate + (0.0 if self.state else 2 * (queries + self.cached(tensor)))

    @property
    def pair_flop(self) -> int:
        """FLOP of a pair of a query and a KV token in all heads; of a latent, of keys and values made from it, unless
        each query has tokens of its own.
        """
        of = self.latent
        if self.state is not None:
            return 0
        if self.indexer:
            return self.decode_flop
        return 2 * self.query * (of.nope_dim + of.rope_dim + of.value_dim if of else 2 * self.width)

    @property
    def decode_flop(self) -> int:
        """FLOP of such a pair of a decoding row, whose query reads a latent itself."""
        of = self.latent
        if self.state is not None:
            return 0
        return 2 * self.query * (2 * of.kv_rank + of.rope_dim if of else 2 * self.width)


class FeedForward(NamedTuple):
    """The feed-forward part of a layer: `inner` wide for every token (0: none), with `experts` of `expert_inner` beside
    it of which a token goes through `chosen`. `inputs` matrices read the stream: 2 if it is gated, else 1.
    """

    inner: int
    dtype: str
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    expert_dtype: str = ""
    inputs: int = 2

    def matrices(self, hidden: int, tensor: int) -> list[Matrix]:
        """Return the matrices of what every token goes through, on one of `tensor` GPUs that share them."""
        inner = self.inner / tensor
        return [Matrix(self.inputs * inner, hidden, self.dtype), Matrix(hidden, inner, self.dtype)] if inner else []


class Layer(NamedTuple):
    """A layer of a residual stream of `hidden` values."""

    hidden: int
    attention: Heads
    feed_forward: FeedForward

    def matrices(self, tensor: int) -> list[Matrix]:
        """Return its matrices without experts and router, on one of `tensor` GPUs."""
        return self.attention.matrices(self.hidden, tensor) + self.feed_forward.matrices(self.hidden, tensor)

    @property
    def parts(self) -> int:
        """Parts that read and write the residual stream: attention, and a feed-forward part if there is one."""
        return 2 if self.feed_forward.inner or self.feed_forward.experts else 1
