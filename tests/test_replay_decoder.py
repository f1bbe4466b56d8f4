"""The replay against the decoder: a layer that moves records counts, step by step, what its replay counts without any.

The decoder's layer runs offloaded, on drawn projections, with requests that come and go; its scores, as its selector is
handed them, are the trace.
"""

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import eviction, indexer, threshold
from echo_jax import state as state_lib
from echo_jax.config import CacheConfig
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.layer import LayerInputs, echo_layer
from echo_jax.replay import caps
from echo_jax.replay.run import run_layer
from echo_jax.replay.settings import Setting, plan
from echo_jax.traces import TraceInfo
from echo_jax.types import NO_ROW
from tests.test_replay_counts import Listed

SEATS, P, K, STEPS, S = 3, 64, 6, 45, 3
CONFIG = CacheConfig(
    layer_kinds=("full",),
    records=RecordFormat("f32", 4, 2),
    keys=KeyFormat("f32", 4),
    threshold=threshold.Ema(0.25),
    eviction=eviction.Lfu(),
    seats=SEATS,
    capacity=P,
    host_rows=SEATS * P,
    device_slots=SEATS * (K + 3),
    top_k=K,
    staging=S,
    prefetch_per_position=0.1,
)
COMES_AND_GOES = {0: (30, 0, 20), 1: (5, 3, 45), 2: (0, 8, 30)}
"""Seat -> positions written before it starts, its first step, the step in which it has gone."""
SECOND = (0, 11, 25)
"""Seat, length and first step of a request that takes a place that became free."""


@jax.jit
def step(state, inputs):
    """One decode step of the only layer, and what its selector was handed."""
    view, seen = state_lib.begin_step(CONFIG, state), []

    def keeping(score, visible, top_k):
        seen.append(score)
        return indexer.select(score, visible, top_k)

    layer, output = echo_layer(CONFIG, state.layers[0], state.host_pool, 0, view, inputs, scale=1.0, selector=keeping)
    active = view.new_rows[:, 0] != NO_ROW
    length = jnp.where(active, view.lengths, 0)
    state = state_lib.finish_step(CONFIG, state, [layer], [output.new_records], view)
    return state, output.moved, (seen[0], length, active)


def decoded():
    """Moved of every step, and the steps as a trace holds them."""
    random = np.random.default_rng(8)
    state = state_lib.create(CONFIG)
    assert state.layers[0].index_keys is not None
    keys = jnp.asarray(random.normal(size=state.layers[0].index_keys.shape), jnp.float32)
    state = state.replace(layers=(state.layers[0].replace(index_keys=keys),))
    query = random.normal(size=(SEATS, 1, 2, 4))
    moved, trace = [], []
    for t in range(STEPS):
        starts = np.zeros(SEATS, bool)
        arrivals = {seat: length for seat, (length, first, _) in COMES_AND_GOES.items() if first == t}
        for seat, (_, _, last) in COMES_AND_GOES.items():
            if last == t:
                state = state_lib.release(CONFIG, state, seat)
        arrivals |= {SECOND[0]: SECOND[1]} if SECOND[2] == t else {}
        for seat, length in arrivals.items():
            state = state_lib.admit(CONFIG, state, seat, P)
            lengths = state.tables.lengths.at[seat].set(length)  # as if a prompt had been read, without its history
            state, starts[seat] = state.replace(tables=state.tables.replace(lengths=lengths)), True
        query = 0.9 * query + 0.4 * random.normal(size=query.shape)
        drawn = [(SEATS, 1, 1, 6), (SEATS, 1, 6), (SEATS, 1, 2, 4), (SEATS, 1, 2), (SEATS, 1, 4)]
        values = [random.normal(size=shape) for shape in drawn]
        values[2] = query
        inputs = LayerInputs(*(jnp.asarray(value, jnp.float32) for value in values))
        state, counts, seen = step(state, inputs)
        moved.append(jax.tree.map(int, counts))
        trace.append((*(np.asarray(one) for one in seen), starts))
    return moved, Listed(*(jnp.asarray(np.stack(one)) for one in zip(*trace, strict=True)))


def test_a_replay_counts_what_the_decoder_moves():
    moved, source = decoded()
    info = TraceInfo(1, SEATS, STEPS, P, K, ("full",), ("recorded",), "record", 0)
    setting = Setting(K + 3, CONFIG.threshold, CONFIG.eviction, caps.Proportional(0.1, S))
    counts = run_layer(plan(info, "full", [setting], CONFIG.records), source, STEPS, chunk=STEPS)
    for name in vars(moved[0]):
        found, wanted = getattr(counts.each.moved, name)[:, 0].tolist(), [getattr(one, name) for one in moved]
        assert found == wanted, name
        assert sum(wanted) > 0, name
