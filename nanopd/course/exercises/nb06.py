"""Exercises of notebook 06: KV transfer. Bytes of a handoff, events of a relay, what a streamed transfer adds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from nanopd.course.exercise import Exercise, Mistake, Wrong, describe, expect_close, expect_equal

# --- bytes of a handoff ------------------------------------------------------------------------------------------


def handoff_bytes_stub(
    num_tokens: int, cached_tokens: int, block_size: int, num_layers: int, kv_heads: int, head_dim: int, item_bytes: int
) -> int:
    """Bytes that a handoff of num_tokens tokens' KV moves.

    Blocks move whole, also the last one, however few of its block_size slots are filled. The first cached_tokens tokens
    (a multiple of block_size) are in the decode side's prefix cache, so their blocks stay. Each token has a key and a
    value in every layer, each of kv_heads * head_dim numbers of item_bytes bytes.
    """
    raise NotImplementedError


def handoff_bytes_solution(
    num_tokens: int, cached_tokens: int, block_size: int, num_layers: int, kv_heads: int, head_dim: int, item_bytes: int
) -> int:
    """Bytes that a handoff of num_tokens tokens' KV moves."""
    blocks = -(-num_tokens // block_size) - cached_tokens // block_size
    per_token = 2 * num_layers * kv_heads * head_dim * item_bytes
    return blocks * block_size * per_token


def _tokens_only(n: int, cached: int, size: int, layers: int, heads: int, dim: int, item: int) -> int:
    return (n - cached) * 2 * layers * heads * dim * item


def _full_blocks_only(n: int, cached: int, size: int, layers: int, heads: int, dim: int, item: int) -> int:
    return (n - cached) // size * size * 2 * layers * heads * dim * item


def _one_block_too_many(n: int, cached: int, size: int, layers: int, heads: int, dim: int, item: int) -> int:
    return ((n - cached) // size + 1) * size * 2 * layers * heads * dim * item


def _sends_what_is_cached(n: int, cached: int, size: int, layers: int, heads: int, dim: int, item: int) -> int:
    return handoff_bytes_solution(n, 0, size, layers, heads, dim, item)


def _keys_only(n: int, cached: int, size: int, layers: int, heads: int, dim: int, item: int) -> int:
    return handoff_bytes_solution(n, cached, size, layers, heads, dim, item) // 2


def _test_handoff_bytes(answer: Any, rng: random.Random) -> None:
    def expect(n: int, cached: int, size: int, layers: int, heads: int, dim: int, item: int) -> None:
        where = (
            f"{n} tokens, {cached} cached, blocks of {size}, {layers} layers, {heads} x {dim} numbers of {item} bytes"
        )
        want = handoff_bytes_solution(n, cached, size, layers, heads, dim, item)
        expect_equal(answer(n, cached, size, layers, heads, dim, item), want, where)

    expect(32, 0, 16, 1, 1, 8, 2)  # two full blocks
    expect(33, 0, 16, 1, 1, 8, 2)  # and one more token
    expect(33, 32, 16, 1, 1, 8, 2)
    for _ in range(4):
        size = rng.choice((8, 16, 32))
        tokens = rng.randint(1, 500)
        cached = rng.randint(0, (tokens - 1) // size) * size
        expect(tokens, cached, size, rng.randint(1, 40), rng.randint(1, 8), rng.choice((64, 128)), rng.choice((2, 4)))


handoff_bytes = Exercise(
    notebook="06",
    name="handoff_bytes",
    title="How many bytes does this handoff move?",
    test=_test_handoff_bytes,
    stub=handoff_bytes_stub,
    solution=handoff_bytes_solution,
    hints=(
        "Count blocks first: those of the prompt, rounded up, without those that are cached.",
        "Bytes of one token: a key and a value (2) in each layer, `kv_heads * head_dim` numbers each.",
        "`blocks * block_size * bytes_of_one_token`. Rounding up in integers: `-(-n // block_size)`.",
    ),
    mistakes=(
        Mistake(_tokens_only, says="33 tokens, 0 cached"),
        Mistake(_full_blocks_only, says="33 tokens, 0 cached"),
        Mistake(_one_block_too_many, says="32 tokens, 0 cached"),
        Mistake(_sends_what_is_cached, says="33 tokens, 32 cached"),
        Mistake(_keys_only, says="expected 1024, got 512"),
    ),
)

# --- events of a relay ---------------------------------------------------------------------------------------------

STAGES = ("gather", "to the host", "from the host", "scatter")
Waits = Callable[[int, int, int], list[tuple[int, int]]]


def relay_waits_stub(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    """Events that a stage of the relay must wait for before it takes up a piece: [(piece, stage), ...].

    Stages 0 gather, 1 to the host, 2 from the host, 3 scatter, each on a stream of its own that does pieces 0, 1, ...
    in order, so nobody needs an event for its own stream. Between stages s and s + 1 lie depth buffers: piece p uses
    number p % depth. Stage s reads the buffer in front of it and writes the one behind it; gather reads the one pool,
    scatter writes the other. (p, s) stands for "stage s is through with piece p". Wait for nothing that is not needed:
    it would cost time.
    """
    raise NotImplementedError


def relay_waits_solution(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    """Events that a stage of the relay must wait for before it takes up a piece: [(piece, stage), ...]."""
    waits = []
    if stage > 0:
        waits.append((piece, stage - 1))  # the buffer in front is full
    if stage < 3 and piece >= depth:
        waits.append((piece - depth, stage + 1))  # the buffer behind is empty again
    return waits


class Streams:
    """Four streams that run pieces through rings of buffers, in an order that the waits allow. Checks every read."""

    def __init__(self, waits: Waits, num_pieces: int, depth: int) -> None:
        self.num_pieces, self.depth = num_pieces, depth
        self.waits = {
            (piece, stage): checked_waits(waits(piece, stage, depth), piece, stage)
            for piece in range(num_pieces)
            for stage in range(4)
        }

    def run_in_any_order(self, rng: random.Random) -> None:
        """Stages that may begin do so in a random order, with one stream far behind: what events do not forbid happens.

        Raises Wrong for a stage that reads another piece's buffer, a buffer that is overwritten, or a deadlock.
        """
        next_piece = [0] * 4
        rings: list[list[int | None]] = [[None] * self.depth for _ in range(3)]
        unread: list[list[int | None]] = [[None] * self.depth for _ in range(3)]
        slowest = rng.randrange(5)
        finished: set[tuple[int, int]] = set()
        while len(finished) < 4 * self.num_pieces:
            ready = [
                stage
                for stage in range(4)
                if next_piece[stage] < self.num_pieces and finished.issuperset(self.waits[next_piece[stage], stage])
            ]
            if not ready:
                stuck = ", ".join(f"{STAGES[s]} at piece {p}" for s, p in enumerate(next_piece) if p < self.num_pieces)
                raise Wrong(f"depth {self.depth}: everybody waits for ever ({stuck})")
            stage = rng.choice([s for s in ready if s != slowest] or ready)
            piece = next_piece[stage]
            slot = piece % self.depth
            if stage > 0:
                if rings[stage - 1][slot] != piece:
                    raise Wrong(self._says(piece, stage, f"reads a buffer that holds {_name(rings[stage - 1][slot])}"))
                unread[stage - 1][slot] = None
            if stage < 3:
                if unread[stage][slot] is not None:
                    raise Wrong(self._says(piece, stage, f"overwrites {_name(unread[stage][slot])}, not read yet"))
                rings[stage][slot] = unread[stage][slot] = piece
            next_piece[stage] += 1
            finished.add((piece, stage))

    def makespan(self, seconds: list[float]) -> float:
        """When the last piece is through, if stage s takes seconds[s] per piece and begins as early as it may."""
        end: dict[tuple[int, int], float] = {}

        def finish(piece: int, stage: int) -> float:
            if (piece, stage) not in end:
                own = finish(piece - 1, stage) if piece > 0 else 0.0
                end[piece, stage] = max([own, *(finish(*w) for w in self.waits[piece, stage])]) + seconds[stage]
            return end[piece, stage]

        return finish(self.num_pieces - 1, 3)

    def _says(self, piece: int, stage: int, what: str) -> str:
        return f"depth {self.depth}: {STAGES[stage]} of piece {piece} {what}"


def _name(piece: int | None) -> str:
    return "nothing yet" if piece is None else f"piece {piece}"


def checked_waits(waits: Any, piece: int, stage: int) -> list[tuple[int, int]]:
    """The answer for one stage, if it is a list of pairs that exist. Raises Wrong."""
    where = f"piece {piece}, stage {stage}"
    if not isinstance(waits, list | tuple | set):
        raise Wrong(f"{where}: expected a list of pairs (piece, stage), got {describe(waits)}")
    for pair in waits:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise Wrong(f"{where}: expected pairs (piece, stage), got {describe(pair)}")
        if pair[0] < 0 or not 0 <= pair[1] < 4:
            raise Wrong(f"{where}: waits for {pair}, which does not exist")
    return list(waits)


def _forgets_the_slot(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    return [(piece, stage - 1)] if stage > 0 else []


def _forgets_the_producer(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    return [(piece - depth, stage + 1)] if stage < 3 and piece >= depth else []


def _waits_for_nothing(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    return []


def _one_piece_at_a_time(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    waits = relay_waits_solution(piece, stage, depth)
    return [*waits, (piece - 1, 3)] if stage == 0 and piece > 0 else waits


def _slot_off_by_one(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    waits = relay_waits_solution(piece, stage, 10**6)
    return [*waits, (piece - depth + 1, stage + 1)] if stage < 3 and piece >= depth - 1 else waits


def _waits_for_the_end(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    waits = relay_waits_solution(piece, stage, 10**6)
    return [*waits, (piece - depth, 3)] if stage < 3 and piece >= depth else waits


def _waits_for_itself(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    return [*relay_waits_solution(piece, stage, depth), (piece, stage)]


def _exists_not(piece: int, stage: int, depth: int) -> list[tuple[int, int]]:
    return [(piece, stage - 1), (piece - depth, stage + 1)]


def _test_relay_waits(answer: Any, rng: random.Random) -> None:
    for depth in (2, 1, 3):
        num_pieces = rng.randint(6, 12)
        streams = Streams(answer, num_pieces, depth)
        for _ in range(12):
            streams.run_in_any_order(rng)
        best = Streams(relay_waits_solution, num_pieces, depth)
        for seconds in ([1.0, 2.0, 2.0, 1.0], [rng.randint(1, 5) / 2 for _ in range(4)]):
            took, needed = streams.makespan(seconds), best.makespan(seconds)
            if took > needed * (1 + 1e-9):
                raise Wrong(
                    f"depth {depth}: right, but slow. {num_pieces} pieces whose stages take {seconds} take {took:g} "
                    f"instead of {needed:g}: some wait is not needed"
                )


relay_waits = Exercise(
    notebook="06",
    name="relay_waits",
    title="Which events does the relay need?",
    test=_test_relay_waits,
    stub=relay_waits_stub,
    solution=relay_waits_solution,
    hints=(
        "Two questions per stage: is what I read there already? Is what I overwrite no longer needed?",
        "The first: stage `stage - 1` must be through with the same piece. Gather has nobody in front of it.",
        "The second: the buffer behind me held piece `piece - depth`, and stage `stage + 1` reads it. Scatter has no "
        "buffer behind it, and the first `depth` pieces find all buffers empty.",
    ),
    mistakes=(
        Mistake(_waits_for_nothing, says="reads a buffer that holds nothing yet"),
        Mistake(_forgets_the_slot, says="not read yet"),
        Mistake(_forgets_the_producer, says="reads a buffer that holds nothing yet"),
        Mistake(_one_piece_at_a_time, says="right, but slow"),
        Mistake(_waits_for_the_end, says="right, but slow"),
        Mistake(_slot_off_by_one, says="depth 2: right, but slow"),
        Mistake(_waits_for_itself, says="everybody waits for ever"),
        Mistake(_exists_not, says="which does not exist"),
    ),
)

# --- what a transfer adds --------------------------------------------------------------------------------------------


def exposed_ms_stub(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    """What a transfer that is streamed layer by layer adds to the prefill, in ms.

    compute_ms: how long each layer computes; they follow each other without a gap. Layer i may leave as soon as it is
    computed and the link is free: the link carries one layer at a time, in order, and each takes travel_ms. The last
    one is there latency_ms after it has passed the link. The prefill ends with the last layer's computation.
    """
    raise NotImplementedError


def exposed_ms_solution(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    """What a transfer that is streamed layer by layer adds to the prefill, in ms."""
    computed = link_free = 0.0
    for ms in compute_ms:
        computed += ms
        link_free = max(computed, link_free) + travel_ms
    return link_free + latency_ms - computed


def _last_layer_only(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    return travel_ms + latency_ms


def _what_does_not_fit(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    return max(0.0, len(compute_ms) * travel_ms - sum(compute_ms)) + latency_ms


def _leaves_before_it_is_computed(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    computed = link_free = 0.0
    for ms in compute_ms:
        link_free = max(computed, link_free) + travel_ms
        computed += ms
    return link_free + latency_ms - computed


def _link_is_never_busy(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    ends, computed = [], 0.0
    for ms in compute_ms:
        computed += ms
        ends.append(computed + travel_ms)
    return max(ends) + latency_ms - computed


def _latency_per_layer(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    return exposed_ms_solution(compute_ms, travel_ms + latency_ms, 0.0)


def _uniform_layers(compute_ms: list[float], travel_ms: float, latency_ms: float) -> float:
    layers, each = len(compute_ms), sum(compute_ms) / len(compute_ms)
    return max(travel_ms, layers * travel_ms - (layers - 1) * each) + latency_ms


def _test_exposed_ms(answer: Any, rng: random.Random) -> None:
    def expect(compute: list[float], travel: float, latency: float) -> None:
        where = f"layers compute {compute} ms and travel {travel:g} ms, latency {latency:g} ms"
        want = exposed_ms_solution(compute, travel, latency)
        expect_close(answer(list(compute), travel, latency), want, where, atol=1e-9, rtol=1e-9)

    expect([2.0, 2.0, 2.0, 2.0], 1.0, 0.0)  # a fast link: the last layer
    expect([1.0, 1.0, 1.0, 1.0], 3.0, 0.0)  # a slow one: busy from 1 to 13
    expect([2.0, 2.0, 2.0], 1.0, 0.5)
    expect([5.0, 1.0, 1.0, 1.0], 2.0, 0.0)  # not alike
    expect([1.0], 4.0, 0.25)
    for _ in range(4):
        layers = [rng.randint(1, 40) / 8 for _ in range(rng.randint(1, 12))]
        expect(layers, rng.randint(1, 60) / 8, rng.choice((0.0, 0.5)))


exposed_ms = Exercise(
    notebook="06",
    name="exposed_ms",
    title="What does a streamed transfer add?",
    test=_test_exposed_ms,
    stub=exposed_ms_stub,
    solution=exposed_ms_solution,
    hints=(
        "Walk through the layers with two clocks: when the layer is computed, and when the link is free again.",
        "A layer leaves at `max(computed, link_free)`: it must be computed *and* the link must be free.",
        "After the loop the last layer has passed at `link_free`. Add the latency once, subtract the prefill's end.",
    ),
    mistakes=(
        Mistake(_last_layer_only, says="layers compute [1.0, 1.0, 1.0, 1.0] ms and travel 3 ms"),
        Mistake(_what_does_not_fit, says="layers compute [2.0, 2.0, 2.0, 2.0] ms and travel 1 ms"),
        Mistake(_leaves_before_it_is_computed, says="expected 1, got"),
        Mistake(_link_is_never_busy, says="layers compute [1.0, 1.0, 1.0, 1.0] ms and travel 3 ms"),
        Mistake(_latency_per_layer, says="layers compute"),
        Mistake(_uniform_layers, says="layers compute [5.0, 1.0, 1.0, 1.0]"),
    ),
)
