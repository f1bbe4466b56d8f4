"""A cache configuration: what it refuses, in which words, and the sizes it derives.

Every refusal names the quantity, both values and the remedy, so each case gives the words that say so.
"""

import dataclasses

import pytest

from echo_jax.config import CacheConfig
from echo_jax.eviction import Clock, Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.sampling import Sampling
from echo_jax.threshold import Ema, Never

CONFIG = CacheConfig(
    layer_kinds=("full", "shared", "full"),
    records=RecordFormat("bf16", 512, 64),
    keys=KeyFormat("fp8", 128),
    threshold=Ema(),
    eviction=Lru(),
    seats=3,
    capacity=256,
    host_rows=640,
    device_slots=36,
    top_k=5,
    tokens_per_step=2,
    staging=8,
)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"seats": 0}, ["seats is 0", "at least 1"]),
        ({"capacity": 0}, ["capacity is 0", "at least 1"]),
        ({"host_rows": -64}, ["host_rows is -64", "at least 1"]),
        ({"device_slots": 0}, ["device_slots is 0", "at least 1"]),
        ({"top_k": 0}, ["top_k is 0", "at least 1"]),
        ({"tokens_per_step": 0}, ["tokens_per_step is 0", "at least 1"]),
        ({"capacity": 200}, ["capacity is 200", "page size 64", "round it up to 256"]),
        ({"host_rows": 641}, ["host_rows is 641", "page size 64", "round it up to 704"]),
        ({"layer_kinds": ()}, ["layer kinds ()", "start with 'full'"]),
        ({"layer_kinds": ("shared", "full")}, ["layer kinds ('shared', 'full')", "start with 'full'"]),
        ({"layer_kinds": ("full", "half")}, ["layer kinds ('full', 'half')", "'full' or 'shared'"]),
        ({"staging": -1}, ["staging -1", "0 switches prefetch off"]),
        ({"prefetch_per_position": -0.5}, ["prefetch_per_position -0.5", "0 switches prefetch off"]),
        ({"prefetch_per_position": float("nan")}, ["prefetch_per_position nan", "0 switches prefetch off"]),
        ({"chunk": 0}, ["chunk is 0 and block is 64", "at least 64 and chunk a multiple of it"]),
        ({"chunk": 32}, ["chunk is 32 and block is 64", "at least 64 and chunk a multiple of it"]),
        ({"chunk": 100}, ["chunk is 100 and block is 64", "at least 64 and chunk a multiple of it"]),
        ({"block": 32}, ["chunk is 512 and block is 32", "block must be at least 64"]),
        ({"block": 96}, ["chunk is 512 and block is 96", "chunk a multiple of it"]),
        ({"chunk": 64, "block": 128}, ["chunk is 64 and block is 128", "chunk a multiple of it"]),
        ({"warm_windows": -1}, ["warm_windows is -1", "0..512, the chunk"]),
        ({"chunk": 64, "warm_windows": 65}, ["warm_windows is 65", "0..64, the chunk"]),
        ({"warm_windows": 8}, ["holds 36 rows", "8 windows of 5", "may need 40", "raise device_slots or lower warm_"]),
        ({"host_memory": "rdma"}, ["host_memory 'rdma'", "one of auto, ffi, cuda, jnp"]),
        ({"encode_implementation": "rdma"}, ["encode_implementation 'rdma'", "one of auto, ffi, cuda, jnp"]),
        ({"top_k_implementation": "rdma"}, ["top_k_implementation 'rdma'", "one of auto, ffi, cuda, jnp"]),
        # One slot short: three seats of two tokens may protect 3 * 2 * (5 + 1) rows in one step.
        (
            {"device_slots": 35},
            ["device pool holds 35 rows", "3*2*(5+1) needs 36", "raise device_slots or lower the batch"],
        ),
        ({"seats": 4}, ["device pool holds 36 rows", "4*2*(5+1) needs 48"]),
        ({"top_k": 6}, ["device pool holds 36 rows", "3*2*(6+1) needs 42"]),
        ({"tokens_per_step": 3}, ["device pool holds 36 rows", "3*3*(5+1) needs 54"]),
    ],
    ids=str,
)
def test_refused(changes, words):
    with pytest.raises(ValueError) as refusal:
        dataclasses.replace(CONFIG, **changes)
    for part in words:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: RecordFormat("f16", 512, 64), ["record format 'f16'", "'f32', 'bf16' or 'fp8'"]),
        (lambda: RecordFormat("fp8", 500, 64), ["divisible by 128", "500 and 64", "use record format 'bf16'"]),
        (lambda: RecordFormat("fp8", 512, 63), ["even rope width", "512 and 63", "use record format 'bf16'"]),
        (lambda: KeyFormat("int8", 128), ["index key format 'int8'", "'f32', 'bf16' or 'fp8'"]),
        (lambda: KeyFormat("f32", 96, rotated=True), ["power of two", "96 values"]),
        (lambda: Ema(alpha=0.0), ["alpha is 0.0", "(0, 1]"]),
        (lambda: Ema(alpha=1.5), ["alpha is 1.5", "(0, 1]"]),
        (lambda: Clock(period=0), ["period is 0", "at least 1"]),
        (lambda: Sampling(temperature=-1.0), ["temperature is -1.0", "0 (greedy) or above"]),
        (lambda: Sampling(temperature=float("nan")), ["temperature is nan", "0 (greedy) or above"]),
        (lambda: Sampling(top_p=0.0), ["top-p is 0.0", "(0, 1]", "1 keeps every token"]),
        (lambda: Sampling(top_p=1.01), ["top-p is 1.01", "(0, 1]"]),
        (lambda: Sampling(top_p=float("nan")), ["top-p is nan", "(0, 1]"]),
    ],
    ids=range(13),
)
def test_the_parts_refuse_too(build, words):
    with pytest.raises(ValueError) as refusal:
        build()
    for part in words:
        assert part in str(refusal.value)


def test_corners_that_are_allowed():
    dataclasses.replace(CONFIG, device_slots=36)  # exactly what a step may protect
    dataclasses.replace(CONFIG, staging=0, prefetch_per_position=0.0)
    dataclasses.replace(CONFIG, top_k=1, capacity=64)
    dataclasses.replace(CONFIG, top_k=300, device_slots=36, offload=False)  # the resident run has no pool to fill
    dataclasses.replace(CONFIG, chunk=64, warm_windows=64, device_slots=320, threshold=Never())
    dataclasses.replace(CONFIG, warm_windows=7, block=256)
    assert Ema(alpha=1.0).alpha == 1.0 and Sampling(top_p=1.0).top_p == 1.0


def test_a_configuration_serves_as_a_static_argument():
    again = dataclasses.replace(CONFIG, top_k=4)
    assert dataclasses.replace(again, top_k=5) == CONFIG
    assert hash(dataclasses.replace(again, top_k=5)) == hash(CONFIG)
    assert again != CONFIG


def test_who_shares_a_list():
    kinds = ("full", "shared", "shared", "full", "full", "shared")
    config = dataclasses.replace(CONFIG, layer_kinds=kinds)
    assert [[*config.sharers_of(layer)] for layer in range(6)] == [[1, 2], [], [], [], [5], []]


def test_sizes_by_hand():
    assert (CONFIG.num_layers, CONFIG.pages, CONFIG.pages_per_seat, CONFIG.pool_rows) == (3, 10, 4, 36)
    # Records: 3 layers x 36 slots x 1152. Keys: 2 full layers x 640 rows x 132. Maps: 3 x (4 x 640 + 9 x 36).
    assert CONFIG.device_bytes() == {"records": 124_416, "index keys": 168_960, "metadata": 8_652}
    assert CONFIG.host_bytes() == 3 * 640 * 1152
    assert CONFIG.bytes_per_position() == 2 * 132 + 3 * 4
    resident = dataclasses.replace(CONFIG, offload=False)
    assert resident.pool_rows == 640
    assert resident.device_bytes() == {"records": 3 * 640 * 1152, "index keys": 168_960, "metadata": 0}
    assert resident.host_bytes() == 0


@pytest.mark.parametrize(
    "staging, per_position, context, cap",
    [
        (8, float("inf"), 3, 8),
        (8, float("inf"), 0, 0),
        (8, 0.25, 31, 7),
        (8, 0.25, 32, 8),
        (8, 0.25, 1000, 8),
        (8, 0.25, 3, 0),
        (8, 0.0, 1000, 0),
        (0, 1.0, 1000, 0),
    ],
)
def test_the_cap_on_prefetch(staging, per_position, context, cap):
    assert dataclasses.replace(CONFIG, staging=staging, prefetch_per_position=per_position).cap(context) == cap
