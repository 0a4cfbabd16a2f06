"""Starting workers, talking to them, and ending them: the runner's side of :mod:`harness.worker`.

A worker is exec'd, never forked: an ISA's mask must be in place before torch is loaded, and Linux's AMX permission
survives a fork but not an exec.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import engines, fingerprint, preload
from harness.errors import HarnessError
from harness.matrix import Budget
from harness.worker import PROTOCOL, WorkerSpec
from int8 import isa as isas

#: Lines of a worker's log that a failure's reason quotes.
LOG_LINES = 4
_LOG_LINE_CHARACTERS = 200
_EXIT_GRACE_S = 5.0


class WorkerError(HarnessError):
    """A request to a worker failed. The worker lives on."""

    exit_code = 2


class WorkerDeathError(WorkerError):
    """The worker is gone: it died, or was ended because it did not answer in time."""


#: The protocol of workers that do not know ``hello``.
_OLDEST_PROTOCOL = 1


@dataclass(frozen=True)
class Home:
    """Whose code a worker runs: the folder that holds the packages, and the interpreter with what they import."""

    tree: Path
    python: Path

    @classmethod
    def own(cls) -> Home:
        """This process's code and interpreter."""
        return cls(Path(__file__).resolve().parents[1], Path(sys.executable))


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a phase may take before the worker is ended. Generous: they catch what hangs, not what is slow."""

    load: float = 600
    reference: float = 3600
    calibrate: float = 3600
    quantize: float = 3600
    compile: float = 1800
    warmup: float = 900
    time: float = 900
    evaluate: float = 7200
    evidence: float = 600
    profile: float = 600

    def of(self, phase: str) -> float:
        """Seconds for ``phase``; what has no field of its own gets those of ``load``."""
        return float(getattr(self, phase, self.load))


#: The phase that a request starts in, until the worker names another.
_FIRST_PHASE = {"prepare": "load", "warm_up": "warmup"}


def worker_cpus(root: Path = Path("/")) -> tuple[int, ...]:
    """CPUs for one worker: of the process's affinity, one a core, no more than the cgroup's quota.

    Two threads on one core share its vector units, so that a second one only adds noise. More threads than the quota
    grants would be throttled together: 10 to 45 times slower was seen.
    """
    chosen, taken = [], set[int]()
    for cpu in sorted(os.sched_getaffinity(0)):
        if cpu not in taken:
            chosen.append(cpu)
            taken.update(_siblings(root, cpu))
    return tuple(chosen[: fingerprint.usable_threads(root)])


def _siblings(root: Path, cpu: int) -> list[int]:
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return fingerprint.parse_cpu_list(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [cpu]


def compile_cache(isa: str, tree: Path | None = None) -> Path:
    """Inductor's cache folder of one ISA: its keys do not contain the ISA, so that caches must not be shared.

    ``tree``: the other revision whose cache it is; its keys do not contain our passes' code either.
    """
    return (tree or fingerprint.project_root()) / ".cache" / "inductor" / isa


def _pinning(spec: WorkerSpec) -> dict[str, str]:
    """One thread a CPU, in order: for the OpenMP of torch's wheels (GNU), and for Intel's where it is preloaded.

    Not for peers. GNU's pins the main thread to the first CPU as soon as torch is loaded, and the threads of a peer's
    own pool would inherit that one CPU. The worker as a whole is held to its CPUs whatever the engine.
    """
    if spec.engine in engines.PEER_RECIPES:
        return {}
    cpus = [str(cpu) for cpu in spec.cpus]
    return {
        "GOMP_CPU_AFFINITY": " ".join(cpus),
        "KMP_AFFINITY": f"granularity=fine,proclist=[{','.join(cpus)}],explicit",
    }


def worker_environment(spec: WorkerSpec, base: Mapping[str, str], home: Home | None = None) -> dict[str, str]:
    """The environment that a worker starts with: ``base`` with the ISA's mask, threads, pinning and caches set."""
    package_root = str((home or Home.own()).tree)
    inherited = {k: v for k, v in isas.clean_environment(base).items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    return {
        **inherited,
        **isas.environment(spec.isa),
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, base.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(spec.threads),
        "MKL_NUM_THREADS": str(spec.threads),
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        **_pinning(spec),
        # Threads spin for the microseconds between two parallel regions of a forward pass, where sleeping would cost
        # more than the region, and sleep soon after: a worker that waits for its turn must leave the cores to others.
        # So neither OMP_WAIT_POLICY=active (spins for ever) nor passive (sleeps at once). The unit of GNU's is loop
        # passes (well under a millisecond), of Intel's milliseconds.
        "GOMP_SPINCOUNT": "100000",
        "KMP_BLOCKTIME": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache(spec.isa, home.tree if home else None)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


class WorkerHandle:
    """A running worker. One request at a time; end it with :meth:`end` whatever happens."""

    def __init__(
        self,
        spec: WorkerSpec,
        log: Path,
        timeouts: Timeouts | None = None,
        environment: Mapping[str, str] | None = None,
        home: Home | None = None,
    ) -> None:
        """Start the worker; nothing is loaded before ``prepare``. ``log`` receives all that it prints.

        ``home``: the revision whose code it runs, where that is not this one's.
        """
        self.spec = spec
        self._home = home
        self._log = log
        self._timeouts = timeouts or Timeouts()
        self._buffer = b""
        self._killed = False
        child_in, self._commands = os.pipe()
        self._replies, child_out = os.pipe()
        python = sys.executable if home is None else str(home.python)
        command = [python, "-m", "harness.worker", str(child_in), str(child_out)]
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    env=worker_environment(spec, os.environ if environment is None else environment, home),
                    # `python -m` looks for packages in the current folder first.
                    cwd=None if home is None else home.tree,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(child_in, child_out),
                    # A session of its own: Ctrl-C reaches the runner alone, which then ends its workers in order, and
                    # the compilers that a worker started can be ended with it.
                    start_new_session=True,
                )
        finally:
            os.close(child_in)
            os.close(child_out)
        # Not by preexec_fn, which forks. The worker imports no torch before the first request, which comes after this.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(self._process.pid, spec.cpus)

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of all instances: this one."""
        return (self.pid,)

    @property
    def alive(self) -> bool:
        """True until the worker has ended."""
        return self._process.poll() is None

    def prepare(self, on_phase: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Send the spec; see Worker.prepare.

        Raises:
            WorkerError: the worker speaks a protocol that this harness does not, or runs other code than it should.
        """
        if self._home is not None:
            self._check_home(self._home)
        ready = self.request("prepare", on_phase=on_phase, spec=_shortest(self.spec))
        missing = preload.missing_from(self.pid)
        if missing:
            raise WorkerError(f"the worker did not load {', '.join(missing)}, which LD_PRELOAD asks for")
        return ready

    def time(self, scenario: str, budget: Budget, slowdown: float = 0.0) -> list[dict[str, Any]]:
        """One slice of a scenario: the answer of the only instance."""
        injected: dict[str, Any] = {"slowdown": slowdown} if slowdown else {}
        return [self.request("time", scenario=scenario, **slice_fields(budget), **injected)]

    def go(self) -> None:
        """Let a worker go on that waits at the barrier."""
        self._send({"do": "go"}, "time")

    def _check_home(self, home: Home) -> None:
        found = self._protocol()
        protocol = int(found["protocol"])
        if not _OLDEST_PROTOCOL <= protocol <= PROTOCOL:
            raise WorkerError(
                f"the worker of {home.tree} speaks protocol {protocol}, this harness {_OLDEST_PROTOCOL} to {PROTOCOL}; "
                "compare from a checkout of the newer revision"
            )
        tree = found.get("tree")
        if tree is not None and Path(tree) != home.tree.resolve():
            raise WorkerError(f"the worker runs the code of {tree} instead of {home.tree}")

    def _protocol(self) -> dict[str, Any]:
        try:
            return self.request("hello")
        except WorkerDeathError:
            raise
        except WorkerError as error:
            if "unknown request" in str(error):
                return {"protocol": _OLDEST_PROTOCOL}
            raise

    def request(self, name: str, *, on_phase: Callable[[str], None] | None = None, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            WorkerError: the worker answered that it failed.
            WorkerDeathError: the worker died, or did not answer within the phase's timeout and was ended.
        """
        phase = _FIRST_PHASE.get(name, name)
        self._send({"do": name, **fields}, phase)
        while True:
            reply = self._receive(phase)
            event = reply.pop("event")
            if event == "done":
                return reply
            if event == "failed":
                raise WorkerError(str(reply["reason"]))
            phase = str(reply["phase"])
            if on_phase is not None:
                on_phase(phase)

    def end(self) -> None:
        """End the worker: ask, then wait, then kill it and what it started. Harmless when repeated."""
        if self.alive:
            with contextlib.suppress(WorkerError):
                self._send({"do": "exit"}, "exit")
        self._close_pipes()
        try:
            self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._killed = True

    def kill(self) -> None:
        """Kill the worker and the compilers it started (its own session, so nobody else's). Harmless when repeated."""
        if self._killed:  # its number may belong to somebody else by now
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._killed = True
        self._process.wait()
        self._close_pipes()

    def log_text(self) -> str:
        """What the worker printed so far."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _send(self, request: Mapping[str, Any], phase: str) -> None:
        data = json.dumps(request).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except OSError:
            raise self._death(phase) from None

    def _receive(self, phase: str) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeouts.of(phase)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._replies], [], [], max(left, 0.0))
            if not ready:
                self.kill()
                raise WorkerDeathError(
                    f"no answer in phase {phase} for {self._timeouts.of(phase):.0f} s, so the worker was ended"
                    + self._last_words()
                )
            chunk = os.read(self._replies, 1 << 16)
            if not chunk:
                raise self._death(phase)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self, phase: str) -> WorkerDeathError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_GRACE_S)
        self.kill()
        ended = _how_it_ended(self._process.returncode)
        return WorkerDeathError(f"the worker {ended} in phase {phase}{self._last_words()}")

    def _last_words(self) -> str:
        lines = [line.strip()[:_LOG_LINE_CHARACTERS] for line in self.log_text().splitlines() if line.strip()]
        return f"; its last words: {' | '.join(lines[-LOG_LINES:])}" if lines else ""

    def _close_pipes(self) -> None:
        for name in ("_commands", "_replies"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)


def slice_fields(budget: Budget) -> dict[str, Any]:
    """The part of a budget that a request ``time`` carries."""
    return {
        "seconds": budget.slice_s,
        "min_iterations": budget.min_iterations,
        "max_iterations": budget.max_iterations,
    }


def _shortest(spec: WorkerSpec) -> dict[str, Any]:
    """The spec without fields that have their default: an older revision's worker may not know them."""
    defaults = {one.name: one.default for one in dataclasses.fields(spec)}
    return {name: value for name, value in dataclasses.asdict(spec).items() if value != defaults[name]}


def _how_it_ended(code: int) -> str:
    """A process's return code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"was ended by signal {-code}"
    hints = {
        "SIGKILL": " (out of memory, perhaps: the kernel's log would say)",
        "SIGILL": " (an instruction that this CPU or the kernel does not allow)",
    }
    return f"was ended by {name}{hints.get(name, '')}"
