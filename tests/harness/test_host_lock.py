"""One measurement at a time on a host: real processes, one locked file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import host_lock
from harness.errors import StoreError

HOLD = (
    "from harness import host_lock; import sys\nwith host_lock.exclusive(): print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(host_lock.VARIABLE, str(tmp_path / "lock"))
    return tmp_path / "lock"


def test_another_process_is_named_and_its_end_frees_the_host() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=rf"\(pid {holder.pid}\) is measuring on this host"), host_lock.exclusive():
            pytest.fail("two measurements at once")
    finally:
        holder.kill()
        holder.wait()
    with host_lock.exclusive():
        pass


def test_it_may_be_held_again_and_is_for_every_user(lock: Path) -> None:
    for _ in range(2):
        with host_lock.exclusive():
            assert lock.stat().st_mode & 0o666 == 0o666


def test_a_folder_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_lock.VARIABLE, "/no/such/folder/lock")
    with pytest.raises(StoreError, match="INT8_HOST_LOCK"), host_lock.exclusive():
        pass


def test_by_default_it_lies_where_all_users_of_the_host_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(host_lock.VARIABLE)
    assert host_lock.path().name == "int8-harness.lock"
    assert host_lock.path().parent.is_dir()
