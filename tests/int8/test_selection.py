"""How kernels are chosen: by measuring, as a model meets them, once; said in the evidence, and overridable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from int8 import evidence, isa, kernels
from int8.errors import QuantizationError
from int8.kernels import selection
from int8.kernels.layout import KERNELS, KERNELS_7BIT
from int8.kernels.selection import ONEDNN, Problem

kernels.load()
ISA = isa.effective()
PROBLEM = Problem(6, 40, 24, "gelu+int8", "float32")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No choice is known, and choices are kept in a folder of the test's own."""
    monkeypatch.delenv(selection.OVERRIDE, raising=False)
    monkeypatch.setattr(selection, "_chosen", {})
    monkeypatch.setattr(selection, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_noise_is_no_reason_to_leave_the_first_kernel() -> None:
    """Both end-to-end losers of pytorch/pytorch#148494 had won a micro-benchmark by little."""
    assert selection.preferred({"ours": 1.0, ONEDNN: 0.98}) == "ours"
    assert selection.preferred({"ours": 1.0, ONEDNN: 0.9}) == ONEDNN
    assert selection.preferred({"first": 1.0, "second": 0.8, ONEDNN: 0.9}) == "second"


def test_a_choice_is_measured_once_kept_and_reported(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = selection.choose(PROBLEM, ISA, 7)
    assert set(first.times_s) == {*selection.own_kernels(ISA, 7), ONEDNN}
    assert all(seconds > 0 for seconds in first.times_s.values())
    assert evidence._described(first)["times_s"] == dict(first.times_s)
    assert first in selection.choices()
    (file,) = (fresh / "selection").iterdir()
    monkeypatch.setattr(selection, "_measured", lambda *_: pytest.fail("measured again"))
    assert selection.choose(PROBLEM, ISA, 7) == first
    monkeypatch.setattr(selection, "_chosen", {})
    assert selection.choose(PROBLEM, ISA, 7) == first, "read from disk"
    file.write_text("{")
    monkeypatch.setattr(selection, "_measured", lambda problem, *_: selection.Choice(problem, "measured", {}))
    monkeypatch.setattr(selection, "_chosen", {})
    assert selection.choose(PROBLEM, ISA, 7).kernel == "measured", "a damaged cache costs time alone"


def test_kept_choices_are_of_one_isa_and_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for name, threads in (("avx2", 1), ("amx", 1), ("amx", 2)):
        monkeypatch.setattr(isa._State, "enforced", name)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        selection._host_key.cache_clear()
        keys.add(selection._host_key())
    selection._host_key.cache_clear()
    assert len(keys) == 3


def test_weights_are_measured_out_of_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that stays in a core's cache from call to call favours the wrong kernel (pytorch/pytorch#148494)."""
    addresses: list[int] = []

    def recording(problem: Problem, kernel: str, levels: Tensor) -> object:
        return lambda weight: addresses.append(weight.data_ptr())

    monkeypatch.setattr(selection, "_own_call", recording)
    problem = Problem(4, 1024, 1024, "none", "float32")
    call = selection._call(problem, KERNELS[ISA][0])
    for _ in range(48):
        call()
    turn = len(set(addresses))
    assert turn * 1024 * 1024 >= 16 * 2**20
    assert addresses[:turn] == addresses[turn : 2 * turn]
    assert len(set(addresses[:turn])) == turn


def test_what_would_saturate_is_no_candidate(fresh: Path) -> None:
    choice = selection.choose(PROBLEM, "avx2", 8)
    assert (choice.kernel, dict(choice.times_s)) == ("int8:avx2", {})


def test_the_override_is_obeyed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ONEDNN, *KERNELS[ISA], *KERNELS_7BIT.get(ISA, ()), "int8:portable"):
        monkeypatch.setenv(selection.OVERRIDE, name)
        assert selection.choose(PROBLEM, ISA, 7).kernel == name
    monkeypatch.setenv(selection.OVERRIDE, "int8:other")
    with pytest.raises(QuantizationError, match="names no kernel"):
        selection.choose(PROBLEM, ISA)
