"""The store on a bad day: kills, full disks, torn and damaged files, two writers."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from samples import RUN_ID, header, record, write_run

from harness.errors import AssetError, StoreError
from harness.records import Store, Timing, to_json

HERE = Path(__file__).parent
RECIPES = ("fp32", "sq-static", "sq-dynamic")


def run_file(store: Store, run_id: str = RUN_ID) -> Path:
    return store.root / "runs" / f"{run_id}.jsonl"


def child(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    """A process that runs ``code`` with the tests' folder and the project on its path."""
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )


def test_truncation_at_every_byte_keeps_all_complete_records(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = tuple(record(recipe=recipe, timing=Timing(), accuracy=None) for recipe in RECIPES[:2])
    write_run(store, *made)
    content = run_file(store).read_bytes()
    # A line is complete from its closing brace on; the newline after it says no more.
    ends = [position for position, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content)):
        run_file(store).write_bytes(content[:length])
        complete = sum(end <= length for end in ends)
        if complete == 0:
            with pytest.raises(StoreError, match="cut short"):
                store.load(RUN_ID)
            assert store.runs() == []
            assert len(store.listing().problems) == 1
            continue
        run = store.load(RUN_ID)
        assert run.records == made[: complete - 1]
        assert run.finished == (complete == len(ends))
        torn = length > ends[complete - 1] + 1 and length not in ends
        assert len(run.problems) == (1 if torn else 0), (length, run.problems)
        assert not torn or "cut short" in run.problems[0]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\x00" * 40,
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\xfa",
        b"[" * 100_000,
        b'{"status": "ok"}',
        b'{"end": 3}',
        b"NaN",
    ],
)
def test_a_damaged_line_is_reported_and_skipped(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path)
    made = [record(recipe=recipe) for recipe in RECIPES]
    write_run(store, *made)
    lines = run_file(store).read_bytes().splitlines()
    lines[2] = damage
    run_file(store).write_bytes(b"\n".join(lines) + b"\n")
    run = store.load(RUN_ID)
    assert run.records == (made[0], made[2])
    assert run.finished
    if damage:
        assert "line 3 is damaged" in run.problems[0]
    assert "3 records were written but 2 can be read" in run.problems[-1]


def test_a_record_with_a_changed_type_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_run(store, record(), record(recipe="fp32"))
    content = run_file(store).read_text()
    run_file(store).write_text(content.replace('"throughput":80.0', '"throughput":"80"', 1))
    run = store.load(RUN_ID)
    assert [item.cell.recipe for item in run.records] == ["fp32"]
    assert "line 2 is damaged and left out: timing: throughput: expected a number" in run.problems[0]


def test_a_newer_run_is_refused_and_the_others_are_listed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_run(store, run_id="old", started_at=1.0)
    write_run(store, run_id="new", started_at=2.0)
    path = run_file(store, "new")
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":2'))
    assert [item.run_id for item in store.runs()] == ["old"]
    with pytest.raises(StoreError, match=r"run new cannot be read: a newer harness .*upgrade"):
        store.load("new")
    latest = store.load("latest")
    assert latest.header.run_id == "old"
    assert any("run new cannot be read" in problem for problem in latest.problems)


def test_a_newer_record_in_an_older_run_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_run(store, record(), finish=False)
    with run_file(store).open("a") as file:
        file.write(json.dumps(to_json(record()) | {"schema_version": 99}) + "\n")
    run = store.load(RUN_ID)
    assert run.records == (record(),)
    assert "schema version 99" in run.problems[0]


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_run(store)
    run_file(store).rename(run_file(store, "other"))
    with pytest.raises(StoreError, match="rename the file back"):
        store.load("other")


def test_the_same_run_twice_is_refused_and_keeps_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_run(store, record())
    with pytest.raises(StoreError, match="exists already"):
        store.create_run(header())
    assert store.load(RUN_ID).records == (record(),)


def test_two_runs_at_once_do_not_mix(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.create_run(header("one")) as one, store.create_run(header("two")) as two:
        for recipe in RECIPES:
            one.append(record("one", recipe))
            two.append(record("two", recipe))
    for run_id in ("one", "two"):
        assert store.load(run_id).records == tuple(record(run_id, recipe) for recipe in RECIPES)


def test_a_writer_that_is_killed_keeps_what_it_reported(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from samples import header, record
        from harness.records import Store
        with Store(Path(sys.argv[1])).create_run(header()) as writer:
            while True:
                writer.append(record())
                print(writer.count, flush=True)
    """
    process = child(code, str(tmp_path))
    assert process.stdout is not None and process.stderr is not None
    reported = 0
    while reported < 20:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        reported = int(line)
    process.kill()
    rest, _ = process.communicate(timeout=60)
    reported = max([reported, *(int(line) for line in rest.split("\n")[:-1])])
    assert process.returncode == -signal.SIGKILL
    run = Store(tmp_path).load("latest")
    assert len(run.records) in (reported, reported + 1)
    assert all(item == record() for item in run.records)
    assert not run.finished
    assert len(run.problems) <= 1


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_what_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    with store.create_run(header()) as writer:
        writer.append(record())
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk)
            with pytest.raises(
                StoreError, match=r"No space left.*free some space; records written before \(1\) are kept"
            ) as caught:
                writer.append(record(recipe="fp32"))
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 74
        writer.append(record(recipe="sq-dynamic"))
        writer.finish()
    run = store.load(RUN_ID)
    assert [item.cell.recipe for item in run.records] == ["sq-static", "sq-dynamic"]
    assert run.problems == () and run.finished


def test_a_failing_sync_takes_the_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    with store.create_run(header()) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(StoreError):
            writer.append(record())
    assert store.load(RUN_ID).records == ()


def test_a_full_disk_at_the_start_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(StoreError, match="No space left"):
            Store(tmp_path).create_run(header())
    assert list((tmp_path / "runs").iterdir()) == []
    write_run(Store(tmp_path), record())


def test_a_full_disk_takes_no_part_of_a_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    with store.create_run(header()) as writer:
        kept = writer.write_outputs("cell", {"x": np.zeros(3)})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_disk)
            with pytest.raises(StoreError, match="No space left"):
                writer.write_outputs("cell", {"x": np.ones(3)})
            with pytest.raises(StoreError, match="No space left"):
                writer.write_log("cell", "text")
    assert np.array_equal(store.outputs(kept)["x"], np.zeros(3))
    assert [path.name for path in tmp_path.rglob("*cell*")] == [Path(kept).name]


def test_a_line_that_the_disk_takes_in_part_is_taken_back(tmp_path: Path) -> None:
    """A real short write: the limit on a file's size lets a part of the line through and refuses the rest."""
    code = """
        import os, resource, signal, sys
        from pathlib import Path
        from samples import header, record
        from harness.errors import StoreError
        from harness.records import Store
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = Store(Path(sys.argv[1]))
        with store.create_run(header()) as writer:
            writer.append(record())
            size = store._path(writer.header.run_id).stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
            try:
                writer.append(record(recipe="fp32"))
            except StoreError as error:
                print(error)
            assert store._path(writer.header.run_id).stat().st_size == size
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            writer.append(record(recipe="sq-dynamic"))
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    output, errors = child(code, str(tmp_path)).communicate(timeout=120)
    assert "File too large" in output, errors
    run = Store(tmp_path).load(RUN_ID)
    assert [item.cell.recipe for item in run.records] == ["sq-static", "sq-dynamic"]
    assert run.problems == ()


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from samples import header, record
        from harness.errors import StoreError
        from harness.records import Store
        store = Store(Path(sys.argv[1]) / "store")
        with store.create_run(header()) as writer:
            try:
                while True:
                    writer.append(record())
            except StoreError as error:
                print(error)
        run = store.load()
        print(len(run.records) == writer.count > 3, run.problems)
    """
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this process may not mount a small file system of its own (unshare -rm)")
    script = f'mount -t tmpfs -o size=64k tmpfs "$0" && exec "{sys.executable}" -c "$1" "$0"'
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    command = ["unshare", "-rm", "sh", "-c", script, str(tmp_path), textwrap.dedent(code)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "mount:" in answer.stderr:
        pytest.skip("this process may not mount a small file system of its own")
    first, second = answer.stdout.splitlines()
    assert "No space left on device: free some space" in first and "are kept" in first
    assert second == "True ()", answer.stderr


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    store = Store(tmp_path)
    write_run(store, record())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="make it writable, or choose another folder with --results"):
            store.create_run(header("second"))
        with pytest.raises(StoreError, match="--results"), store.exclusive():
            pass
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(StoreError, match="--results"):
            Store(tmp_path / "other").create_run(header())
    assert store.load(RUN_ID).records == (record(),)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file")
    with pytest.raises(StoreError, match="--results"):
        store.create_run(header())
    with pytest.raises(AssetError):
        store.load()


def test_a_damaged_sidecar_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.create_run(header()) as writer:
        relative = writer.write_outputs("cell", {"x": np.arange(1000)})
    content = (tmp_path / relative).read_bytes()
    for damaged in (b"", b"PK", content[:100], content[:-30], content[:200] + b"\x00" * 60 + content[260:]):
        (tmp_path / relative).write_bytes(damaged)
        with pytest.raises(StoreError, match="is damaged"):
            store.outputs(relative)


def test_only_one_process_measures_into_a_store(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from harness.records import Store
        with Store(Path(sys.argv[1])).exclusive():
            print("held", flush=True)
            sys.stdin.read()
    """
    store = Store(tmp_path)
    holder = child(code, str(tmp_path), stdin=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=rf"\(pid {holder.pid}\) is measuring"), store.exclusive():
            pass
        write_run(store, record())
    finally:
        holder.kill()
        holder.communicate(timeout=60)
    with store.exclusive():
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    with store.exclusive():
        pass
    assert [item.run_id for item in store.runs()] == [RUN_ID]
