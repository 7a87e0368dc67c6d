import os

import pytest

from l2d_jax.distributed import memory
from l2d_jax.errors import InputError


def test_the_memory_of_cpus_is_that_of_the_machine_or_its_container(tmp_path, monkeypatch):
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.device_bytes() <= there
    for text, found in (("max\n", there), ("1048576\n", 2**20), (f"{2**63 - 4096}\n", there)):
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "limit"), str(tmp_path / "missing")))
        assert memory.device_bytes() == found


def test_what_exceeds_it_is_refused_with_its_largest_parts(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda: 3 * 2**30)
    memory.require_memory({"a": 2**31, "b": 2**30}, "c")
    parts = r"3.5 GiB of memory \(2.0 GiB of a, 1.0 GiB of b\), and the devices have 3.0 GiB: lower c"
    with pytest.raises(InputError, match=parts):
        memory.require_memory({"a": 2**31, "small": 2**29, "b": 2**30}, "c")
    monkeypatch.setattr(memory, "device_bytes", lambda: None)
    memory.require_memory({"a": 2**60}, "c")
