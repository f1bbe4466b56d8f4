"""A schedule of the bench, compiled for an H200: one graph that copies no pool; a recall may run beside scores."""

import re

import jax.numpy as jnp
import pytest

from bench.prefetch_programs import job_of
from bench.prefetch_stages import RECORDS, Line, Sizes
from tests.aot import compile as aot


def numbered(thunks):
    """(number, kind, the last that it waits for, the first that waits for it) of all in the command buffer."""
    found = re.findall(r"^ {4}(\d+): (k\w+) *\[(?:prev=(\d+)|source).*?(?:next=(\d+)|sink)", thunks, re.MULTILINE)
    return [(int(number), kind, int(before or 0), int(behind or 10**6)) for number, kind, before, behind in found]


@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
def test_a_recall_crosses_while_the_next_group_is_scored():
    """One graph, no branch in it, no copy of a pool; scores, selection and slots of the next group do not wait.

    They did once: a word of the next group lay where the recall's list had been, so it had to be there first.
    """
    aot.need_cuda_handlers()
    sizes, line = Sizes(groups=(1, 2), implementation="mosaic_gpu"), Line("depth 1", 2)
    job = job_of(sizes, line, aot.host((9, sizes.host_rows, *RECORDS.shape), jnp.uint32))
    compiled = aot.compile_for_h200(
        *(job.program, job.state, job.changing, job.shared, aot.device((), jnp.int32)), donate_argnums=0
    )
    assert re.findall(r"^\d+: (k\w+)", compiled.thunks, re.MULTILINE) == ["kCommandBuffer"]
    assert not {" conditional(", " while("} & set(re.findall(r" \w+\(", compiled.text))
    assert compiled.memory.host_temp_size_in_bytes == 0
    assert not re.findall(r"= u32\[\S+ copy\(", compiled.text)
    assert compiled.memory.alias_size_in_bytes == sum(pool.size * 4 for pool in job.state[0])
    thunks = numbered(compiled.thunks)
    recalls = [(before, behind) for _, kind, before, behind in thunks if kind == "kAsyncStart"]
    assert len(recalls) == line.count
    # What stands between the last that a recall waits for and the first that waits for it may run beside it.
    before, behind = recalls[0]
    assert [kind for number, kind, *_ in thunks if before < number < behind].count("kCustomCall") == 3
