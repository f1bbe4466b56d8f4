"""What the operating system's files say of host memory, and what is said where they are missing."""

from echo_jax import pinning


def test_available_memory_is_in_bytes(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree: 3 kB\nMemAvailable:      70 kB\n")
    assert pinning.available_bytes(meminfo) == 70 * 1024
    meminfo.write_text("MemTotal:  100 kB\n")
    assert pinning.available_bytes(meminfo) is None
    assert pinning.available_bytes(tmp_path / "none") is None
    assert (pinning.available_bytes() or 0) > 2**20


def test_every_gpu_has_a_node_or_says_that_it_has_none(tmp_path):
    for gpu in ("0000:41:00.0", "0000:01:00.0", "0000:c1:00.0"):
        (tmp_path / "driver" / gpu).mkdir(parents=True)
        (tmp_path / "bus" / gpu).mkdir(parents=True)
    (tmp_path / "bus/0000:01:00.0/numa_node").write_text("0\n")
    (tmp_path / "bus/0000:41:00.0/numa_node").write_text("1\n")
    found = pinning.numa_nodes(tmp_path / "driver", tmp_path / "bus")
    assert list(found.items()) == [("0000:01:00.0", 0), ("0000:41:00.0", 1), ("0000:c1:00.0", -1)]
    assert pinning.numa_nodes(tmp_path / "none", tmp_path / "bus") == {}


def test_the_limit_is_xlas_own_or_the_one_that_is_set(monkeypatch):
    monkeypatch.delenv(pinning.LIMIT_VARIABLE, raising=False)
    assert pinning.limit_gb() == 64
    monkeypatch.setenv(pinning.LIMIT_VARIABLE, "96")
    assert pinning.limit_gb() == 96
