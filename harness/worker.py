"""The worker: one fresh process that makes one model ready and answers requests about it over a pipe.

Started as ``python -m harness.worker COMMANDS REPLIES`` (numbers of two inherited file descriptors) with the ISA's
mask, thread settings and compile cache already in its environment, because torch reads them once, when it is loaded.
Requests and replies are JSON, one object a line, on these descriptors only: whatever torch, a compiler or a C library
prints goes to stdout and stderr, which are the worker's log.

A request is ``{"do": NAME, ...}``; NAME is a method of :class:`Worker` marked as a request. The answer is
``{"event": "done", ...}`` or ``{"event": "failed", "reason": ...}``; before it may come ``{"event": "phase", ...}``.
Between requests the worker blocks in a read, burning no CPU, and ends when the pipe does.

``PROTOCOL`` numbers this language. The answer to ``hello`` holds the number, because `harness compare` runs workers of
other revisions, which must not be misunderstood. Workers of protocol 1 do not know ``hello``; 2 only added options.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from harness import engines, faults, timing
from harness.engines import Batch, Clocks, Prepared
from harness.errors import HarnessError
from harness.matrix import Scenario
from harness.records import Evidence
from int8 import recipe as recipes
from int8.errors import Int8Error

if TYPE_CHECKING:
    from torch import Tensor

    from harness.models import LoadedModel
    from harness.tasks import Floats, Task

#: Batches of random tokens that calibrate a model for which no task has text.
SYNTHETIC_CALIBRATION_BATCHES = 8
SEED = 20260
#: The version of requests and replies; see the module's docstring.
PROTOCOL = 2
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker makes ready.

    ``scenarios``: all that it will be asked for. ``judged_in``: the one in whose graph the task is judged, on ``limit``
    examples (None: the task's default). ``cpus``: those it may run on, one OpenMP thread each. ``checkpoint``, ``data``
    and ``labels``: where model and task come from instead of the catalog; see ``harness.sources``.
    """

    model: str
    engine: str
    recipe: str
    isa: str
    deploy: str
    task: str | None
    scenarios: tuple[str, ...]
    cpus: tuple[int, ...]
    judged_in: str | None = None
    limit: int | None = None
    checkpoint: str | None = None
    data: str | None = None
    labels: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """How the worker is called in messages."""
        deploy = "" if self.deploy == "jit" else f"/{self.deploy}"
        return f"{self.model}/{self.engine}/{self.recipe}/{self.isa}{deploy}"

    @property
    def threads(self) -> int:
        """One thread on each CPU."""
        return len(self.cpus)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerSpec:
        """The spec in ``data``, made by dataclasses.asdict and sent as JSON."""
        labels = data.get("labels")
        lists = {"scenarios": tuple(data["scenarios"]), "cpus": tuple(data["cpus"])}
        return cls(**{**data, **lists, "labels": None if labels is None else tuple(labels)})


class Channel:
    """Requests in, replies out."""

    def __init__(self, commands: IO[str], replies: IO[str]) -> None:
        self._commands = commands
        self._replies = replies

    def requests(self) -> Iterator[dict[str, Any]]:
        """Requests until the runner closes the pipe (or dies, which closes it)."""
        for line in self._commands:
            yield json.loads(line)

    def wait_for_go(self) -> None:
        """Block until the runner says ``go``: the barrier of instances that start together.

        Raises:
            HarnessError: it said something else, or is gone.
        """
        line = self._commands.readline()
        if not line or json.loads(line).get("do") != "go":
            raise HarnessError("the other instances did not start")

    def send(self, event: str, **fields: Any) -> None:
        """Send one reply."""
        self._replies.write(json.dumps({"event": event, **fields}) + "\n")
        self._replies.flush()


class Worker:
    """One prepared model, and what can be asked of it. Public methods are the requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._spec: WorkerSpec | None = None
        self._model: LoadedModel | None = None
        self._task: Task | None = None
        self._prepared: Prepared | None = None
        self._batches: dict[str, Batch] = {}
        self._references: dict[tuple[int, int | None], Floats] = {}
        self._expected: dict[str, Tensor] = {}
        self._cosines: dict[str, float] = {}
        self._notes: tuple[str, ...] = (f"fault injected: {faults.named()}",) if faults.named() else ()

    def hello(self) -> dict[str, Any]:
        """Who answers: the protocol's version, and the folder whose code runs."""
        return {"protocol": PROTOCOL, "tree": str(Path(__file__).resolve().parents[1])}

    def prepare(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Load, calibrate and quantize. Answers clocks, what the model is, and its memory."""
        self._spec = wanted = WorkerSpec.from_json(spec)
        clock = Clocks(on_phase=self._tell_phase)
        engine = engines.get(wanted.engine)
        recipe = recipes.get(wanted.recipe)
        with clock.measure("load"):
            faults.before_torch()
            model = _load(wanted)
            faults.after_torch()
            self._task = _task(wanted, model)
        self._model = model
        reason = _too_long(wanted, model)
        if reason is not None:
            raise HarnessError(reason)
        if self._task is not None and wanted.judged_in is not None:
            self._tell_phase("reference")  # before the engine, which may change the module
            self._make_reference(Scenario.parse(wanted.judged_in).seq, wanted.limit)
        if self._task is None:
            self._tell_phase("reference")
            self._expected = {scenario: self._eager(scenario) for scenario in wanted.scenarios}
        prepared = engine.prepare(model, recipe, wanted.isa, self._calibration(model), clock)
        self._prepared = _deployed(prepared, wanted.deploy)
        return {
            "seconds": dict(clock.seconds),
            "family": model.family,
            "weights": model.weights,
            "memory": self._memory(),
        }

    def compile(self, scenario: str) -> dict[str, Any]:
        """Run a scenario's shape for the first time. Answers the seconds and the evidence."""
        self._tell_phase("compile")
        batch = self._batch(scenario)
        clock = Clocks()
        with clock.measure("compile"):
            output = self._ready()(batch)
        expected = self._expected.pop(scenario, None)
        if expected is not None:
            self._cosines[scenario] = cosine(output, expected)
        return {"seconds": clock.seconds["compile"], "evidence": self._evidence(scenario)}

    def warm_up(self, scenario: str, cap_s: float) -> dict[str, Any]:
        """Run a scenario until its times are steady, at most about ``cap_s`` seconds."""
        self._tell_phase("warmup")
        prepared, batch = self._ready(), self._batch(scenario)
        with _no_grad():
            return dataclasses.asdict(timing.warm_up(lambda: prepared(batch), cap_s))

    def time(
        self,
        scenario: str,
        seconds: float,
        min_iterations: int,
        max_iterations: int,
        barrier: bool = False,
        slowdown: float = 0.0,
    ) -> dict[str, Any]:
        """Time one slice of a scenario. Answers ``t0``, ``process`` and ``samples_s``.

        With ``barrier`` the worker says that it is there (phase ``barrier``) and starts when the runner answers ``go``.
        ``slowdown`` is for `harness selftest` alone: each iteration is made longer by that fraction of itself.
        """
        prepared, batch = self._ready(), self._batch(scenario)
        call = faults.slowed(lambda: prepared(batch), slowdown) if slowdown else lambda: prepared(batch)
        if barrier:
            self._tell_phase("barrier")
            self._channel.wait_for_go()
        with _no_grad():
            found = timing.time_slice(call, seconds, min_iterations, max_iterations)
        return {"t0": found.t0, "process": os.getpid(), "samples_s": list(found.samples_s)}

    def split(self, scenario: str, seconds: float, min_passes: int, max_passes: int) -> dict[str, Any]:
        """Profile a scenario for about ``seconds``: its passes split by kind, and its kernels by shape."""
        from harness import time_split

        prepared, batch = self._ready(), self._batch(scenario)
        with _no_grad():
            found = time_split.profile(lambda: prepared(batch), seconds, min_passes, max_passes)
        return {"process": os.getpid(), **dataclasses.asdict(found)}

    def shape(self) -> dict[str, Any]:
        """The sizes of the model's encoder that its GEMMs follow from."""
        if self._model is None:
            raise HarnessError("nothing is prepared; send prepare first")
        from harness import models

        return {"shape": models.encoder_shape(self._model)}

    def evaluate(self, scenario: str, limit: int | None, path: str) -> dict[str, Any]:
        """Judge the task in a scenario's graph. Writes arrays per example to ``path``; answers the accuracy."""
        if self._task is None or self._model is None:
            raise HarnessError("this worker has no task to judge")
        from harness import tasks
        from harness.tasks import notable

        self._tell_phase("evaluate")
        shape, prepared = Scenario.parse(scenario), self._ready()
        reference = self._references.get((shape.seq, limit))
        if reference is None:
            raise HarnessError(f"no FP32 reference for length {shape.seq} and limit {limit}; name it in the spec")
        outputs = tasks.evaluate(self._task, lambda **batch: prepared(batch), shape.batch, shape.seq, limit)
        accuracy = self._task.judge(outputs, reference)
        _write_arrays(Path(path), {**self._task.kept(outputs), **notable.notable(self._task, outputs, reference)})
        return {"accuracy": dataclasses.asdict(dataclasses.replace(accuracy, scenario=scenario))}

    def evidence(self, scenario: str) -> dict[str, Any]:
        """What runs for a scenario, and the AMX permission as it is now; with the memory at its peak so far."""
        return {"evidence": self._evidence(scenario), "memory": self._memory()}

    def profile(self, scenario: str, rows: int) -> dict[str, Any]:
        """A table of the operators of one forward pass, by torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        prepared, batch = self._ready(), self._batch(scenario)
        with _no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            prepared(batch)
        table: str = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows)
        return {"table": table}

    def _ready(self) -> Prepared:
        if self._prepared is None:
            raise HarnessError("nothing is prepared; send prepare first")
        return self._prepared

    def _batch(self, scenario: str) -> Batch:
        """Full-length random inputs of a scenario: made once, outside any clock."""
        if scenario not in self._batches:
            from harness import models

            assert self._model is not None
            self._batches[scenario] = models.batch_inputs(self._model, Scenario.parse(scenario), SEED)
        return self._batches[scenario]

    def _calibration(self, model: LoadedModel) -> Iterable[Batch]:
        """The task's training text; random tokens where there is none, which the evidence then says."""
        if self._task is not None:
            return self._task.calibration()
        assert self._spec is not None
        if recipes.get(self._spec.recipe).quantized:
            self._notes += ("calibrated on random tokens: no task gives text",)
        return _random_batches(model, self._spec.scenarios[0])

    def _evidence(self, scenario: str) -> dict[str, Any]:
        assert self._spec is not None
        with _no_grad():
            found: Evidence = self._ready().evidence(self._batch(scenario))
        known: dict[str, Any] = {"threads": self._spec.threads, "fp32_cosine": self._cosines.get(scenario)}
        return dataclasses.asdict(dataclasses.replace(found, notes=(*found.notes, *self._notes), **known))

    def _memory(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return dataclasses.asdict(dataclasses.replace(self._ready().memory(), peak_rss_bytes=peak))

    def _eager(self, scenario: str) -> Tensor:
        """Eager FP32's output for the batch that is timed, while the module is still as it was loaded."""
        from harness.tasks.base import plain_fp32

        assert self._model is not None
        with plain_fp32():
            output: Tensor = self._model.module(**self._batch(scenario))
        return output

    def _make_reference(self, seq: int, limit: int | None) -> None:
        """Outputs of eager FP32, from the cache on disk or computed while the module is still as it was loaded."""
        from harness import tasks

        assert self._model is not None and self._task is not None
        outputs = tasks.reference(self._model, self._task, seq=seq, limit=limit)
        self._task.judge(outputs, outputs)  # a head that has to be trained is trained now, on FP32 outputs
        self._references[seq, limit] = outputs

    def _tell_phase(self, phase: str) -> None:
        self._channel.send("phase", phase=phase)


_REQUESTS = ("hello", "prepare", "compile", "warm_up", "time", "split", "shape", "evaluate", "evidence", "profile")


def serve(channel: Channel) -> None:
    """Answer requests until ``exit`` or the end of the pipe. A failed request is answered and the worker lives on."""
    worker = Worker(channel)
    for request in channel.requests():
        name = request.pop("do")
        if name == "exit":
            return
        if name not in _REQUESTS:
            channel.send("failed", reason=f"unknown request {name!r}")
            continue
        try:
            channel.send("done", **getattr(worker, name)(**request))
        except Exception as error:
            traceback.print_exc()
            channel.send("failed", reason=_one_line(error))


def main(arguments: list[str]) -> None:
    """Be a worker on the two descriptors named in ``arguments``."""
    commands, replies = (int(argument) for argument in arguments)
    _die_with_parent()
    faulthandler.enable()  # SIGILL and SIGSEGV leave a trace in the log
    with os.fdopen(commands, encoding="utf-8") as incoming, os.fdopen(replies, "w", encoding="utf-8") as outgoing:
        serve(Channel(incoming, outgoing))


def _load(spec: WorkerSpec) -> LoadedModel:
    """torch under its mask, then the model. Imports are part of what a user waits for."""
    from int8 import isa

    effective = isa.enforce()
    if effective != spec.isa:
        raise HarnessError(f"worker runs under ISA {effective} instead of {spec.isa}")
    import torch

    from harness import models, tasks

    torch.set_num_threads(spec.threads)
    head = None if spec.task is None else tasks.head_of(spec.task)
    return models.load(spec.model, head=head, source=spec.checkpoint)


def _deployed(prepared: Prepared, deploy: str) -> Prepared:
    """``prepared`` in the form in which it is measured."""
    if deploy == "jit":
        return prepared
    if not isinstance(prepared, engines.Packageable):
        raise HarnessError(f"deploy {deploy}: {type(prepared).__name__} cannot be packaged")
    return prepared.packaged()


def _task(spec: WorkerSpec, model: LoadedModel) -> Task | None:
    """The task, for texts as long as those of the scenario that judges them."""
    if spec.task is None:
        return None
    from harness import tasks

    seq = Scenario.parse(spec.judged_in or spec.scenarios[0]).seq
    return tasks.load(spec.task, model, data=spec.data, labels=spec.labels, seq=seq)


def _too_long(spec: WorkerSpec, model: LoadedModel) -> str | None:
    for scenario in spec.scenarios:
        if Scenario.parse(scenario).seq > model.max_seq:
            return f"scenario {scenario} is longer than the {model.max_seq} tokens that {model.name} takes"
    return None


def cosine(output: Tensor, expected: Tensor) -> float:
    """Cosine of the angle between two outputs of one shape, all their values taken as one vector.

    Raises:
        HarnessError: the shapes differ.
    """
    if output.shape != expected.shape:
        raise HarnessError(f"the output's shape is {tuple(output.shape)}, but eager FP32's is {tuple(expected.shape)}")
    one, other = output.detach().double().flatten(), expected.double().flatten()
    return float(one @ other / (one.norm() * other.norm()))


def _random_batches(model: LoadedModel, scenario: str) -> Iterator[Batch]:
    from harness import models

    for index in range(SYNTHETIC_CALIBRATION_BATCHES):
        yield models.batch_inputs(model, Scenario.parse(scenario), SEED + 1 + index)


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    import numpy as np

    np.savez(path, **arrays)


def _no_grad() -> Any:
    import torch

    return torch.no_grad()


def _one_line(error: Exception) -> str:
    """The error's own line where it is ours, with its kind where it is not."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, (HarnessError, Int8Error)) else f"{type(error).__name__}: {text}"


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the runner dies; the runner may already have died before we asked."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
