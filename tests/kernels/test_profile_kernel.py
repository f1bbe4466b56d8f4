"""The bench of the GPU's counters: what it reads of Nsight Compute's CSV."""

from bench import profile_kernel

SAID = """==PROF== Connected to process 77
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","77","indexer_scores_mosaic_gpu_kernel","Command line profiler metrics","dram__bytes_read.sum","byte","13,000,000"
"0","77","indexer_scores_mosaic_gpu_kernel","Command line profiler metrics","gpu__time_duration.sum","ns","8,600"
"10","77","indexer_scores_mosaic_gpu_kernel","Command line profiler metrics","dram__bytes_read.sum","Mbyte","104.5"
"10","77","indexer_scores_mosaic_gpu_kernel","Command line profiler metrics","gpu__time_duration.sum","us","37.8"
"9","77","indexer_scores_mosaic_gpu_kernel","Command line profiler metrics","gpu__time_duration.sum","ms","1.5"
==PROF== Disconnected
"""


def test_counters_are_read_by_kernel_in_microseconds_and_megabytes():
    """In order of launch, which is not that of the text; a counter that is not there stays away."""
    first, second, third = profile_kernel.read(SAID, profile_kernel.MEMORY)
    assert first == {"read MB": 13.0, "time us": 8.6}
    assert second == {"time us": 1500.0}
    assert third == {"read MB": 104.5, "time us": 37.8}


def test_each_profiled_kernel_has_a_name():
    assert len(set(profile_kernel.labels())) == 2 * len(profile_kernel.SHAPES)
