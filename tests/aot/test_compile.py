"""The helper that compiles for an H200: what it reports is what happened."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench import gpu_timing
from tests.aot import compile as aot

pytestmark = pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))


def kernel_of(values):
    """A kernel that keeps `values` floats a thread alive at once, in a block of 1024 threads (64 registers each)."""

    def body(source, out):
        rows = lax.axis_index("thread") * 128

        def read(index):
            layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
            return plgpu.load(source.at[index, pl.ds(rows, 128)], layout=layout)

        kept = [read(index) for index in range(values)]

        @pl.loop(0, 3)
        def _(step):
            for index, value in enumerate(kept):
                out[(index + step) % values, pl.ds(rows, 128)] = jnp.sin(value)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((values, 1024), jnp.float32),
        num_threads=8,
        thread_name="thread",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def test_a_kernel_that_spills_is_refused():
    compiled = aot.compile_for_h200(kernel_of(72), aot.device((72, 1024), jnp.float32))
    with pytest.raises(AssertionError, match="spills"):
        compiled.assert_no_spills()


def test_a_kernel_that_fits_is_described(capsys):
    compiled = aot.compile_for_h200(kernel_of(2), aot.device((2, 1024), jnp.float32))
    compiled.assert_no_spills()
    assert f"{compiled.kernels[0].registers} registers" in capsys.readouterr().out
    assert 0 < compiled.kernels[0].registers <= 64


def test_an_argument_in_host_memory_stays_there():
    def total(pool):
        return jnp.sum(jax.device_put(pool, jax.memory.Space.Device))

    compiled = aot.compile_for_h200(total, aot.host((64, 128), jnp.float32))
    assert compiled.memory.host_argument_size_in_bytes == 64 * 128 * 4
    assert "S(5)" in compiled.text


def test_a_donated_argument_is_aliased():
    def step(pool, rows):
        return lax.dynamic_update_slice(pool, rows, (0, 0))

    arguments = aot.device((64, 128), jnp.float32), aot.device((2, 128), jnp.float32)
    assert aot.compile_for_h200(step, *arguments, donate_argnums=0).memory.alias_size_in_bytes == 64 * 128 * 4
    assert aot.compile_for_h200(step, *arguments).memory.alias_size_in_bytes == 0


def test_repeated_calls_stay_apart_in_one_graph():
    """`graph_time` once timed one call in ten: behind barriers that XLA drops, equal calls were merged."""
    calls = 10
    program = gpu_timing.repeated(kernel_of(2), calls, calls)
    compiled = aot.compile_for_h200(program, (aot.device((2, 1024), jnp.float32),))
    steps = [line for line in compiled.thunks.splitlines() if "kCustomCall" in line or "kCustomKernel" in line]
    assert "kCommandBuffer" in compiled.thunks
    assert sum("kCustomCall" in line for line in steps) == 2 * calls  # an overwrite and a call each time
    assert all("prev=" in line for line in steps[1:])  # one after another
