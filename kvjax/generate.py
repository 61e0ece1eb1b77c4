"""The only loop, the only jit and the only donation: prompts in, tokens out.

decoder = Decoder(model, placement)
result = generate(decoder, cache, prompts, max_new_tokens=64, stop_tokens=ends)
result = generate(decoder, result.cache, next_prompts, max_new_tokens=64)
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from kvjax.cache.state import Cache
from kvjax.config import check_range
from kvjax.delivery.placement import Placement, check_cache
from kvjax.model.transformer import Transformer, split

NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn from logits. Static: part of a program, but for the seed.

    Attributes:
      temperature: Divides the logits; 0 takes the best token (greedy).
      top_k: Keeps the k best tokens and ties with the last of them; 0 keeps all.
      top_p: Keeps the fewest best of those whose probabilities reach p; 1 keeps all.
      seed: Of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(
                "temperature must be 0 (greedy) or between 1e-6 and 1e6, got "
                f"{self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1 (1 = off), got {self.top_p}"
            )
        check_range("top_k", self.top_k, 0, 1 << 30)
        check_range("seed", self.seed, 0, (1 << 32) - 1)

    @property
    def unseeded(self) -> "Sampling":
        """This without the seed: a new seed compiles nothing."""
        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )


GREEDY = Sampling()


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, " B"], sampling: Sampling
) -> Int[Array, " B"]:
    """Draws a token for each sequence: temperature, then top-k, then top-p.

    Args:
      logits: float32.
      keys: One key a sequence, so that a draw doesn't depend on batch mates.
      sampling: Its seed isn't used.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    best = jnp.max(logits, axis=-1, keepdims=True)
    scores = (logits - best) / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        num_kept = min(sampling.top_k or scores.shape[1], scores.shape[1])
        ranked = jax.lax.top_k(scores, num_kept)[0]
        scores = jnp.where(scores < _worst_kept(ranked, sampling), -jnp.inf, scores)
    return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)


def _worst_kept(ranked: Float[Array, "B k"], sampling: Sampling) -> Float[Array, "B 1"]:
    """The last score whose better ones have less than top_p together."""
    if sampling.top_p == 1:
        return ranked[:, -1:]
    chances = jax.nn.softmax(ranked, axis=-1)
    better = jnp.cumsum(chances, axis=-1) - chances
    kept = jnp.where(better < sampling.top_p, ranked, jnp.inf)
    return jnp.min(kept, axis=-1, keepdims=True)


def _keys(seed: UInt32[Array, ""], lengths: Int[Array, " B"]) -> Key[Array, " B"]:
    """A key for each sequence's draw, by the seed, its row and the cells it holds."""
    key = jax.random.key(seed)

    def of_sequence(row, length):
        return jax.random.fold_in(jax.random.fold_in(key, row), length)

    return jax.vmap(of_sequence)(jnp.arange(lengths.shape[0]), lengths)


def _goes_on(
    running: Bool[Array, " B"], tokens: Int[Array, " B"], stops: Int[Array, " n"]
) -> Bool[Array, " B"]:
    for stop in stops:  # not reduced over them: XLA makes one kernel of the rest, too
        running = running & (tokens != stop)
    return running


class Decoder:
    """A model split into arrays, once, and the jitted functions that run it on a cache.

    The functions, with the order of their arguments; each donates the cache and returns
    it where it lay. `leaves` are `decoder.leaves`, other arrays come from
    `decoder.place`:

        prefill(leaves, cache, tokens [B, T], num_new [B], logits [B, V])
            -> logits [B, V], cache
        first(logits [B, V], lengths [B], seed [], sampling=)
            -> tokens [B]
        step(leaves, cache, tokens [B], running [B], stops [n], seed [], sampling=)
            -> cache, tokens [B], running [B]
        steps(leaves, cache, tokens [B], running [B], stops [n], seed [],
              sampling=, limit=)
            -> fed [B, limit], count [], cache

    The constructor computes nothing: a model of abstract arrays will do to lower them.

    Attributes:
      placement: Where the cache's cells lie.
      chunk: The most tokens of a prompt that one prefill call takes.
      vocab_size: V.
      leaves: The model's arrays.
    """

    def __init__(self, model: Transformer, placement: Placement, *, chunk: int = 256):
        check_range("chunk", chunk, 1, 1 << 20)
        self.placement = placement
        self.chunk = chunk
        self.vocab_size = model.config.vocab_size
        self._skeleton, self.leaves = split(model)

        every, cells = placement.sharding(P()), placement.cache_shardings()
        self.prefill = jax.jit(
            self._prefill, donate_argnames="cache", out_shardings=(every, cells)
        )
        self.first = jax.jit(
            self._first, static_argnames="sampling", out_shardings=every
        )
        self.step = jax.jit(
            self._step,
            donate_argnames="cache",
            static_argnames="sampling",
            out_shardings=(cells, every, every),
        )
        self.steps = jax.jit(
            self._steps,
            donate_argnames="cache",
            static_argnames=("sampling", "limit"),
            out_shardings=(every, every, cells),
        )

    def place(self, x: np.ndarray | np.generic) -> Array:
        """Copies a small array to every device of the mesh."""
        return jax.device_put(x, self.placement.sharding(P()))

    def _forward(self, leaves, cache, tokens, num_new):
        model = self._skeleton.merge(leaves)
        return model(tokens, cache, self.placement, num_new, logits="last")

    def _prefill(self, leaves, cache, tokens, num_new, logits):
        """Takes a chunk of each prompt; a sequence with none left keeps its logits."""
        made, cache = self._forward(leaves, cache, tokens, num_new)
        return jnp.where(num_new[:, None] > 0, made, logits), cache

    def _first(self, logits, lengths, seed, *, sampling):
        return sample(logits, _keys(seed, lengths), sampling)

    def _step(self, leaves, cache, tokens, running, stops, seed, *, sampling):
        """Feeds each sequence its token and draws the next.

        A sequence that is fed a stop token stops: neither that token nor any after it
        takes a cell, so lengths are right however far the device has run ahead.

        The cache comes first: jax gives the memory of the lengths to the first result
        of their shape, which are then updated in place.
        """
        running = _goes_on(running, tokens, stops)
        fed = jnp.where(running, tokens, 0)[:, None]
        logits, cache = self._forward(leaves, cache, fed, running)
        return cache, sample(logits, _keys(seed, cache.lengths), sampling), running

    def _steps(self, leaves, cache, tokens, running, stops, seed, *, sampling, limit):
        """Steps until all have stopped or been fed `limit` tokens; returns those."""

        def unfinished(state):
            count, tokens, running, _, _ = state
            return (count < limit) & _goes_on(running, tokens, stops).any()

        def body(state):
            count, tokens, running, cache, fed = state
            cache, made, running = self._step(
                leaves, cache, tokens, running, stops, seed, sampling=sampling
            )
            fed = fed.at[:, count].set(jnp.where(running, tokens, NO_TOKEN))
            return count + 1, made, running, cache, fed

        fed = jnp.full((tokens.shape[0], limit), NO_TOKEN, jnp.int32)
        state = (jnp.int32(0), tokens, running, cache, fed)
        count, _, _, cache, fed = jax.lax.while_loop(unfinished, body, state)
        return fed, count, cache


class Timings(NamedTuple):
    """Where the time of a call went, in seconds."""

    compile_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int  # of all sequences
    decode_steps: int  # calls or iterations, each over the whole batch


class Generated(NamedTuple):
    """What `generate` made.

    Attributes:
      output_ids: Of each sequence, without the stop token.
      stopped: Whether a stop token ended each sequence, rather than the limit.
      cache: Behind what it held before: exactly the prompts and `output_ids`.
      timings: Of this call.
    """

    output_ids: list[list[int]]
    stopped: list[bool]
    cache: Cache
    timings: Timings


def generate(
    decoder: Decoder,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Sequence[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    on_prefill: Callable[[int], None] | None = None,
    one_jit: bool = False,
) -> Generated:
    """Continues each sequence by its prompt, then by tokens of the model.

    The device runs one step ahead of the host: token t is read while step t + 1 runs.

    Args:
      decoder: The model, and where the cache lies.
      cache: Donated. Sequences may hold tokens already; a prompt is then a chat's next
        turn.
      prompts: Token ids, at least one for each sequence; lengths may differ.
      max_new_tokens: The most for each sequence.
      sampling: Greedy by default.
      stop_tokens: Ids that end a sequence.
      on_token: Called with (sequence, token) as a token arrives; not for stop tokens.
        An exception in it loses the cache.
      on_prefill: Called with the number of prompt tokens that a prefill call took.
      one_jit: Runs all steps in one program (`lax.while_loop`); tokens then arrive
        together.

    Raises:
      ValueError: before any work, the cache untouched: a prompt, a token or a number is
        out of range, prompts and new tokens don't fit behind what the cache holds, or
        the cache is not of the decoder's placement.
    """
    check_range("max_new_tokens", max_new_tokens, 1, 1 << 30)
    _check_tokens(decoder.vocab_size, prompts, stop_tokens)
    _check_cache(decoder.placement, cache, len(prompts))
    lengths = np.asarray(cache.lengths).tolist()
    check_room(decoder.placement.config.num_cells, lengths, prompts, max_new_tokens)
    clock = _Clock()
    outputs = _Outputs(len(prompts), stop_tokens, on_token)
    seed = decoder.place(np.uint32(sampling.seed))
    logits, cache = _prefill(decoder, cache, prompts, clock, on_prefill)
    drawn = (logits, cache.lengths, seed)
    clock.compile(decoder.first, *drawn, sampling=sampling.unseeded)
    tokens = decoder.first(*drawn, sampling=sampling.unseeded)

    running = decoder.place(np.ones(len(prompts), bool))
    stops = decoder.place(np.array(stop_tokens, np.int32).reshape(-1))
    decode = _decode_at_once if one_jit else _decode_by_step
    cache, steps = decode(
        decoder,
        (decoder.leaves, cache, tokens, running, stops, seed),
        sampling.unseeded,
        max_new_tokens,
        outputs,
        clock,
    )
    jax.block_until_ready(cache.lengths)
    timings = Timings(
        compile_s=clock.compile_s,
        prefill_s=clock.prefill_s,
        decode_s=clock.lap(),
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        decode_steps=steps,
    )
    stopped = [not running for running in outputs.running]
    return Generated(outputs.ids, stopped, cache, timings)


def chunks(
    prompts: Sequence[Sequence[int]], chunk: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts prompts into (tokens [B, T], num_new [B]): the next T tokens of each.

    With chunk 4, where the widest chunk of short prompts is a power of two:

        abcdef     abcd  4     ef..  2
        gh     ->  gh..  2  ,  ....  0

    T is one number for all chunks, so that prefill compiles once.
    """
    longest = max(len(prompt) for prompt in prompts)
    width = min(chunk, 1 << (longest - 1).bit_length())
    for start in range(0, longest, width):
        tokens = np.zeros((len(prompts), width), np.int32)
        num_new = np.zeros(len(prompts), np.int32)
        for row, prompt in enumerate(prompts):
            part = prompt[start : start + width]
            tokens[row, : len(part)] = part
            num_new[row] = len(part)
        yield tokens, num_new


def _prefill(decoder, cache, prompts, clock, on_prefill):
    shape = (len(prompts), decoder.vocab_size)
    logits = decoder.place(np.zeros(shape, np.float32))
    for i, chunk in enumerate(chunks(prompts, decoder.chunk)):
        args = (decoder.leaves, cache, *map(decoder.place, chunk), logits)
        if i == 0:
            clock.compile(decoder.prefill, *args)
        logits, cache = decoder.prefill(*args)
        if on_prefill is not None:
            jax.block_until_ready(logits)
            on_prefill(int(chunk[1].sum()))
    jax.block_until_ready(logits)
    clock.prefill_s = clock.lap()
    return logits, cache


def _decode_by_step(decoder, args, sampling, limit, outputs, clock):
    """Dispatches each step before it reads the token that the step is fed.

    step      |  0  |  1  |  2  |
    reads   0 |     |  1  |  2  |
    """
    leaves, cache, tokens, running, stops, seed = args
    count = 0
    if outputs.take(np.asarray(tokens)):
        clock.compile(decoder.step, *args, sampling=sampling)
        for count in range(1, limit + 1):
            fed = tokens
            cache, tokens, running = decoder.step(
                leaves, cache, fed, running, stops, seed, sampling=sampling
            )
            if count > 1 and not outputs.take(np.asarray(fed)):
                break
    return cache, count


def _decode_at_once(decoder, args, sampling, limit, outputs, clock):
    clock.compile(decoder.steps, *args, sampling=sampling, limit=limit)
    fed, count, cache = decoder.steps(*args, sampling=sampling, limit=limit)
    for tokens in np.asarray(fed).T:
        if not outputs.take(tokens):
            break
    return cache, int(count)


class _Outputs:
    """The host's books of what each sequence made."""

    def __init__(self, num_seqs: int, stop_tokens: Sequence[int], on_token):
        self.ids: list[list[int]] = [[] for _ in range(num_seqs)]
        self.running = [True] * num_seqs
        self._stops = frozenset(stop_tokens) | {NO_TOKEN}
        self._on_token = on_token

    def take(self, tokens: np.ndarray) -> bool:
        """Books a token for each running sequence; tells whether any still runs."""
        for sequence, token in enumerate(tokens.tolist()):
            if token in self._stops:
                self.running[sequence] = False
            if self.running[sequence]:
                self.ids[sequence].append(token)
                if self._on_token is not None:
                    self._on_token(sequence, token)
        return any(self.running)


class _Clock:
    """Seconds since the last lap, without those spent compiling."""

    def __init__(self):
        self.compile_s = self.prefill_s = 0.0
        self._start = time.perf_counter()

    def compile(self, function, *args, **static) -> None:
        start = time.perf_counter()
        function.lower(*args, **static).compile()
        seconds = time.perf_counter() - start
        self.compile_s += seconds
        self._start += seconds

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds


def _check_tokens(
    vocab_size: int, prompts: Sequence[Sequence[int]], stop_tokens: Sequence[int]
) -> None:
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: give each at least one token")
        for token in prompt:
            check_range(f"a token of prompt {row}", token, 0, vocab_size - 1)
    for token in stop_tokens:
        check_range("a stop token", token, 0, vocab_size - 1)


def _check_cache(placement: Placement, cache: Cache, num_prompts: int) -> None:
    num_seqs = placement.config.batch_size
    if num_prompts != num_seqs:
        raise ValueError(
            f"the cache holds {num_seqs} sequences, got {num_prompts} prompts: give "
            "each sequence one"
        )
    check_cache(placement, cache)
    for held, wanted in zip(
        jax.tree.leaves(cache),
        jax.tree.leaves(placement.cache_shardings()),
        strict=True,
    ):
        if not held.sharding.is_equivalent_to(wanted, held.ndim):
            raise ValueError(
                f"an array of the cache lies on {held.sharding}, its placement says "
                f"{wanted}: make caches with init_cache, reset them with reset"
            )


def check_room(
    num_cells: int,
    lengths: Sequence[int],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> None:
    """Raises ValueError unless prompts and new tokens fit behind `lengths` cells.

    Args:
      num_cells: That the cache has for each sequence.
      lengths: Cells that each sequence holds.
      prompts: Token ids of each sequence.
      max_new_tokens: Of each sequence; each takes a cell.
    """
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        needed = length + len(prompt) + max_new_tokens
        if needed > num_cells:
            raise ValueError(
                f"sequence {row} needs {needed} cells ({length} held, a prompt of "
                f"{len(prompt)}, max_new_tokens {max_new_tokens}), the cache has "
                f"{num_cells} for each: raise the capacity, lower max_new_tokens or "
                "reset the sequence"
            )
