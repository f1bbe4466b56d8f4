"""What becomes of the launches that CUPTI reports; the launches themselves need a GPU."""

import pytest

from bench import gpu_timing


def test_the_kernels_of_a_call_are_told_from_the_overwriting_before_it():
    launches = [("overwrite", 0.1), ("first", 0.002), ("second", 0.003)] * 5
    times = gpu_timing._per_call(launches, repeats=5, before=1)
    assert [name for name, _ in times.kernels] == ["first", "second"]
    assert times.total.median == pytest.approx(5.0)  # us
    assert times.kernels[1][1].p90 == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("launches", "words"),
    [
        ([("overwrite", 0.1)] * 4, "not a whole number"),  # the function launched nothing
        ([("overwrite", 0.1), ("first", 0.1)] * 3 + [("overwrite", 0.1)], "7 kernels in 4 calls"),
        ([("overwrite", 0.1), ("first", 0.1)] * 3 + [("overwrite", 0.1), ("other", 0.1)], "other"),
    ],
)
def test_calls_that_differ_are_refused(launches, words):
    with pytest.raises(RuntimeError, match=words):
        gpu_timing._per_call(launches, repeats=4, before=1)


@pytest.mark.gpu
def test_no_time_on_a_gpu_is_shorter_than_the_data_sheet_allows():
    """A clock that misses part of the work shows more than the H200's 4.8 TB/s. Other processes only make it less."""
    limit = gpu_timing.device_bandwidth(megabytes=256, repeats=10)
    assert 0 < limit.copy < 4.9e12 and 0 < limit.read < 4.9e12
