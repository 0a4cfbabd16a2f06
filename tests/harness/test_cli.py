"""The command line: exit codes, what goes where, and every kind of bad input that needs no measurement."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from samples import RUN_ID, header, record, write_run

from harness import cli, records
from harness.errors import StoreError
from harness.records import Cell, Evidence, Speedup, Store, Timing
from int8 import isa

ROOT = Path(__file__).parents[2]
VERBS = ("doctor", "fetch", "run", "show", "gate", "accept", "replay", "outliers", "report")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def harness(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; returns its exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return call


def process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    return subprocess.run(command(arguments), env=environment(), capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "harness", *arguments]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | changes


def is_one_line(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and text.endswith("\n")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with one finished run: an FP32 baseline and an INT8 cell twice as fast."""
    made = Store(tmp_path / "results")
    write_run(made, record(recipe="fp32", seconds=0.2, accuracy=None, speedup=Speedup(1.0)), record())
    return made


# --- help and usage ---------------------------------------------------------------------------------------------------


def test_the_help_lists_every_verb_and_needs_no_torch() -> None:
    code = (
        "import sys, harness.cli\n"
        "assert harness.cli.main(['--help']) == 0\n"
        "assert harness.cli.main(['run', '--help']) == 0\n"
        "loaded = {'torch', 'transformers', 'numpy', 'scipy', 'plotly', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stderr
    for verb in VERBS:
        assert f"\n  {verb} " in answer.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_an_example(harness: Run, verb: str) -> None:
    code, out, err = harness(verb, "--help")
    assert (code, err) == (0, "")
    assert f"Example: harness {verb}" in out


def test_no_arguments_show_the_help(harness: Run) -> None:
    code, out, err = harness()
    assert (code, out) == (64, "")
    assert "Usage: harness" in err and "doctor" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nope",), "No such option: --nope; see `harness --help`"),
        (("mesure",), "No such command 'mesure'"),
        (("show", "--nope"), "see `harness show --help`"),
        (("show", "--format", "xml"), "'table', 'json', 'csv'"),
        (("accept",), "RUN"),
        (("gate", "extra"), "extra"),
        (("run", "--limit", "0"), "--limit"),
        (("run", "--limit", "many"), "--limit"),
        (("run", "--models", "minilm,,x"), "empty name"),
        (("run", "--models", "minlm"), "unknown model 'minlm'; did you mean minilm"),
        (("run", "--engines", "torchoa"), "unknown engine 'torchoa'; did you mean torchao"),
        (("run", "--recipes", "sq-statc"), "unknown recipe 'sq-statc'; did you mean sq-static"),
        (("run", "--isa", "avx3"), "unknown ISA 'avx3'; did you mean"),
        (("run", "--scenarios", "ofline:b8:s128"), "offline:b8:s128"),
        (("run", "--scenarios", "offline:b0:s128"), "at least 1"),
        (("run", "--deploy", "jot"), "unknown deploy 'jot'; did you mean jit"),
        (("run", "--task", "review"), "unknown task 'review'; did you mean reviews"),
        (("run", "--profile", "quik"), "unknown profile 'quik'; did you mean quick"),
        (("run", "--shard", "3/2"), "1 <= i <= n"),
        (("run", "--run-id", "../evil"), "cannot name a run"),
        (("run", "--run-id", "latest"), "cannot name a run"),
        (("replay", "minilm"), "write model/engine/recipe/isa/scenario"),
        (("replay", "minilm/int8/sq-statc/avx2/single:s8"), "did you mean sq-static"),
    ],
)
def test_wrong_use_is_one_line_and_64(harness: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    extra = ("--results", str(tmp_path / "results")) if arguments[0] == "run" else ()
    code, out, err = harness(*arguments, *extra)
    assert (code, out) == (64, "")
    assert is_one_line(err), err
    assert words in err
    assert not (tmp_path / "results").exists(), "wrong use must leave nothing behind"


def test_an_isa_that_this_host_lacks(harness: Run, tmp_path: Path) -> None:
    lacking = [name for name in isa.NAMES if name not in isa.supported()]
    if not lacking:
        pytest.skip("this host has every ISA")
    code, _, err = harness("run", "--isa", lacking[0], "--results", str(tmp_path))
    assert code == 64
    assert is_one_line(err) and lacking[0] in err and isa.best() in err


# --- show -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["show", "gate"])
def test_a_store_without_runs(harness: Run, tmp_path: Path, verb: str) -> None:
    code, out, err = harness(verb, "--results", str(tmp_path / "none"))
    assert (code, out) == (66, "")
    assert is_one_line(err) and "harness run" in err


def test_an_unknown_run_names_the_nearest(harness: Run, store: Store) -> None:
    for arguments in (
        ("show", "--run", "2026"),
        ("gate", "--run", "2026"),
        ("gate", "--baseline", "2026"),
        ("accept", "2026"),
    ):
        code, out, err = harness(*arguments, "--results", str(store.root))
        assert (code, out) == (66, "")
        assert is_one_line(err) and RUN_ID in err


def test_show_json_is_the_list_of_records(harness: Run, store: Store) -> None:
    code, out, err = harness("show", "--format", "json", "--results", str(store.root))
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert [records.from_json(item) for item in shown] == list(store.load().records)
    assert shown[1]["cell"]["recipe"] == "sq-static"


def test_show_csv_has_a_row_a_record(harness: Run, store: Store) -> None:
    code, out, _ = harness("show", "--format", "csv", "--results", str(store.root))
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["cell.recipe"] for row in rows] == ["fp32", "sq-static"]
    assert float(rows[1]["timing.throughput"]) == pytest.approx(80.0)
    assert json.loads(rows[1]["evidence.kernels"]) == {"qlinear": 36}
    assert rows[0]["accuracy.value"] == "", "what was not measured is empty"
    assert json.loads(rows[1]["speedup.ci95"]) == [1.9, 2.1]


def test_show_table_has_every_number(harness: Run, store: Store) -> None:
    code, out, _ = harness("show", "--results", str(store.root))
    assert code == 0
    for text in (RUN_ID, "minilm/int8/sq-static/vnni/offline:b8:s128@reviews", "2.00x [1.90, 2.10]", "0.7300", "1.20%"):
        assert text in out
    for text in ("80", "100", "36/36/36", "21.5", "4000"):
        assert text in out


def test_a_speed_up_without_its_accuracy_is_not_shown(harness: Run, tmp_path: Path) -> None:
    store = Store(tmp_path)
    good = record()
    assert good.accuracy is not None
    bad = record(accuracy=records.Accuracy("accuracy", 0.6, 0.732, 0.58, -0.132, None, 4000, 0.3, 0, 528, 3.0, 0.5))
    write_run(store, bad)
    _, out, _ = harness("show", "--results", str(tmp_path))
    assert "0.6000" in out and "2.00x" not in out


def test_hostile_text_does_nothing_to_the_terminal(harness: Run, tmp_path: Path) -> None:
    store = Store(tmp_path)
    cell = Cell("[red]/x\x1b[2J\n../y", "int8", "sq-static", "vnni", "single:s8")
    write_run(store, record(cell=cell, status="failed", reason="\x1b]0;title\x07 [bold]no\nsecond line", speedup=None))
    code, out, _ = harness("show", "--results", str(tmp_path))
    assert code == 0
    assert "[red]" in out and "[bold]no second line" in out
    assert "\x1b" not in out and "\x07" not in out


def test_a_run_with_no_record_is_shown(harness: Run, tmp_path: Path) -> None:
    write_run(Store(tmp_path), finish=False)
    code, out, err = harness("show", "--format", "json", "--results", str(tmp_path))
    assert (code, json.loads(out)) == (0, [])
    assert "has no end" in err


def test_a_file_cut_short_is_read_and_said(harness: Run, store: Store) -> None:
    path = store.root / "runs" / f"{RUN_ID}.jsonl"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:50])
    code, out, err = harness("show", "--format", "json", "--results", str(store.root))
    assert code == 0
    assert [item["cell"]["recipe"] for item in json.loads(out)] == ["fp32"]
    assert "cut short" in err and "no end" in err
    assert harness("gate", "--results", str(store.root))[0] in (0, 1, 2, 3, 4)
    path.write_bytes(lines[0][:20])
    code, out, err = harness("show", "--run", RUN_ID, "--results", str(store.root))
    assert (code, out) == (74, "")
    assert is_one_line(err) and "cut short" in err


# --- gate and accept --------------------------------------------------------------------------------------------------


def copy_of(store: Store, run_id: str, started_at: float, **changes: object) -> None:
    """A later run with the same cells, the INT8 one with ``changes``."""
    cells = [record(run_id, "fp32", 0.2, accuracy=None, speedup=Speedup(1.0)), record(run_id, **changes)]  # type: ignore[arg-type]
    write_run(store, *cells, run_id=run_id, started_at=started_at)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"seconds": 0.125}, 1),
        ({"status": "failed", "reason": "it died", "timing": Timing(), "accuracy": None, "speedup": None}, 2),
        ({"evidence": Evidence(36, 36, 30, {}, "vnni", False)}, 2),
    ],
)
def test_the_gates_exit_code(harness: Run, store: Store, changes: dict[str, object], code: int) -> None:
    copy_of(store, "second", 2000.0, **changes)
    files = store.root / "verdicts.json", store.root / "comment.md"
    found, out, _ = harness("gate", "--results", str(store.root), "--json", str(files[0]), "--markdown", str(files[1]))
    assert found == code, out
    verdicts = json.loads(files[0].read_text())
    assert verdicts["exit_code"] == code and verdicts["baseline_run"] == RUN_ID
    assert "| cell |" in files[1].read_text()
    assert ("minilm/int8/sq-static/vnni/offline:b8:s128@reviews" in out) and f"exit {code}" in out


def test_a_baseline_of_another_host(harness: Run, store: Store) -> None:
    write_run(
        store, record("second"), run_id="second", started_at=2000.0, fingerprint="bbbbbbbbbbbb", host={"cpu_model": "B"}
    )
    code, out, err = harness("gate", "--baseline", RUN_ID, "--results", str(store.root))
    assert (code, out) == (64, "")
    assert is_one_line(err) and "another host" in err


def test_accept_makes_a_baseline(harness: Run, store: Store) -> None:
    code, out, _ = harness("accept", "latest", "--results", str(store.root))
    assert (code, out) == (0, f"{RUN_ID}\n")
    assert store.accepted() == [RUN_ID]


# --- the store refuses ------------------------------------------------------------------------------------------------

SMALL = (
    "run",
    "--models",
    "tiny-bert",
    "--recipes",
    "fp32",
    "--scenarios",
    "single:s8",
    "--task",
    "none",
    "--isa",
    "native",
)


def test_a_results_folder_that_cannot_be(harness: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, out, err = harness(*SMALL, "--results", str(tmp_path / "file" / "results"))
    assert (code, out) == (74, "")
    assert is_one_line(err.splitlines(keepends=True)[-1]) and "--results" in err


def test_a_results_folder_that_is_read_only(store: Store, tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this process may not mount a file system of its own (unshare -rm)")
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    shell = ["unshare", "-rm", "sh", "-c", script, str(store.root)]
    for arguments, code in ((SMALL, 74), (("accept", RUN_ID), 74), (("show",), 0), (("gate",), 0)):
        answer = subprocess.run(
            [*shell, *command((*arguments, "--results", str(store.root)))],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if "mount:" in answer.stderr:
            pytest.skip("this process may not mount a file system of its own")
        assert answer.returncode == code, answer.stderr
        if code:
            assert "Read-only file system: make it writable, or choose another folder" in answer.stderr.splitlines()[-1]


def test_two_measurements_at_once(harness: Run, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from harness.records import Store\n"
        "with Store(pathlib.Path(sys.argv[1])).exclusive(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        found, out, err = harness(*SMALL, "--results", str(tmp_path))
    finally:
        holder.kill()
        holder.communicate(timeout=60)
    assert (found, out) == (74, "")
    assert is_one_line(err.splitlines(keepends=True)[-1]) and f"pid {holder.pid}" in err


def test_a_run_id_that_exists(harness: Run, store: Store) -> None:
    before = store.load(RUN_ID)
    code, out, err = harness(*SMALL, "--results", str(store.root), "--run-id", RUN_ID)
    assert (code, out) == (74, "")
    assert "exists already" in err
    assert store.load(RUN_ID) == before


def test_no_compiler(harness: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, out, err = harness(*SMALL, "--results", str(tmp_path / "results"))
    assert (code, out) == (69, "")
    assert is_one_line(err) and "apt install g++" in err
    assert not (tmp_path / "results").exists()


def test_no_assets_and_no_index(tmp_path: Path) -> None:
    answer = subprocess.run(
        command(("fetch",)),
        env=environment(INT8_ASSETS=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=""),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (66, "")
    assert "harness fetch" in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr


# --- interruptions, pipes, faults -------------------------------------------------------------------------------------


def test_an_interruption_says_what_was_kept(harness: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import runner

    def interrupted(options: runner.RunOptions, store: Store, on_event: runner.OnEvent) -> runner.Summary:
        assert options.run_id is not None
        with store.create_run(header(options.run_id)) as writer:
            writer.append(record(options.run_id))
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    code, out, err = harness(*SMALL, "--results", str(tmp_path), "--run-id", "mine")
    assert (code, out) == (130, "")
    assert err == "error: interrupted; records kept: 1, read them with `harness show --run mine`\n"
    assert harness("show", "--run", "mine", "--results", str(tmp_path))[0] == 0


def test_an_interruption_before_the_first_record(harness: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import runner

    def interrupted(*_: object) -> runner.Summary:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    code, _, err = harness(*SMALL, "--results", str(tmp_path))
    assert (code, err) == (130, "error: interrupted; nothing was measured yet\n")


def test_a_termination_is_told_from_an_interruption(
    harness: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import runner

    def terminated(*_: object) -> runner.Summary:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        raise AssertionError("SIGTERM did not arrive")

    monkeypatch.setattr(runner, "run", terminated)
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = harness(*SMALL, "--results", str(tmp_path))
    assert (code, err) == (143, "error: terminated; nothing was measured yet\n")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(1)])
def test_a_fault_is_never_taken_for_a_regression(
    harness: Run, store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Store, "load", fail)
    code, _, err = harness("gate", "--results", str(store.root))
    assert code == 70
    assert "Traceback" in err and is_one_line(err.splitlines(keepends=True)[-1])


@pytest.mark.parametrize("arguments", [("show", "--format", "json"), ("gate",)])
def test_a_reader_that_goes_away_changes_no_exit_code(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    store = Store(tmp_path)
    write_run(store, record())
    write_run(store, record("second", seconds=0.5), run_id="second", started_at=2000.0)
    expected = {"show": 0, "gate": 1}[arguments[0]]
    reader = subprocess.Popen(
        command((*arguments, "--results", str(tmp_path))),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None and reader.stderr is not None
    reader.stdout.close()
    err = reader.stderr.read()
    reader.stderr.close()
    assert reader.wait(timeout=120) == expected, err
    assert "Traceback" not in err and "BrokenPipe" not in err


def test_a_full_stdout_is_an_error(store: Store) -> None:
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            command(("show", "--format", "json", "--results", str(store.root))),
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert answer.returncode == 74
    assert answer.stderr.startswith("error: cannot write to stdout: No space left on device")


def test_report_builds_the_site(harness: Run, store: Store, tmp_path: Path) -> None:
    code, out, err = harness("report", "--results", str(store.root), "--site", str(tmp_path / "site"))
    assert code == 0, err
    assert Path(out.strip()) == tmp_path / "site" / "index.html"
    assert RUN_ID in (tmp_path / "site" / "index.html").read_text()


def test_a_site_that_cannot_be_written(harness: Run, store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, out, err = harness("report", "--results", str(store.root), "--site", str(tmp_path / "file" / "site"))
    assert (code, out) == (74, "")
    assert is_one_line(err)


def test_doctor_prints_its_table(harness: Run, tmp_path: Path) -> None:
    code, out, err = harness("doctor", "--results", str(tmp_path))
    assert code in (0, 3) and err == ""
    assert "C++ compiler" in out and isa.best() in out
    assert ("fail" in out) == (code == 3)


# --- the real thing, on a tiny model ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_interrupted_stays_readable(tmp_path: Path) -> None:
    """Measures for real: two scenarios, Ctrl-C after the first one's record, then show, gate and report."""
    what = "run --models tiny-bert --engines int8 --recipes fp32,sq-static --isa native --limit 32 --run-id mine"
    where = "--scenarios offline:b2:s16,single:s8 --task tiny-reviews"
    measured = command([*what.split(), *where.split(), "--results", str(tmp_path)])
    run = subprocess.Popen(
        measured, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stderr is not None
    lines: list[str] = []
    for line in run.stderr:
        lines.append(line)
        if line.rstrip().endswith("@tiny-reviews ok"):
            run.send_signal(signal.SIGINT)
            break
    out, err = run.communicate(timeout=300)
    assert run.returncode == 130, "".join(lines) + err
    assert out == ""
    assert err.splitlines()[-1].startswith("error: interrupted; ")
    found = Store(tmp_path).load("mine")
    assert found.records and all(item.status == "ok" for item in found.records)
    assert not found.finished and found.problems == ()
    shown = process("show", "--run", "mine", "--format", "json", "--results", str(tmp_path), timeout=120)
    assert len(json.loads(shown.stdout)) == len(found.records)
    assert process("gate", "--results", str(tmp_path), timeout=120).returncode in (0, 2, 4)
    site = process("report", "--results", str(tmp_path), "--site", str(tmp_path / "site"), timeout=300)
    assert site.returncode == 0, site.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_gives_its_id_and_nothing_else_on_stdout(tmp_path: Path) -> None:
    answer = process(*SMALL, "--engines", "int8", "--results", str(tmp_path), timeout=800)
    assert answer.returncode == 0, answer.stderr
    run_id = answer.stdout.strip()
    (found,) = Store(tmp_path).load(run_id).records
    assert found.status == "ok" and found.timing.throughput is not None
    assert found.cell.key == f"tiny-bert/int8/fp32/{isa.best()}/single:s8"
    assert f"harness show --run {run_id}" in answer.stderr
    with pytest.raises(StoreError, match="exists already"):
        Store(tmp_path).create_run(header(run_id))
