"""A worker, and all that starts it, without Linux's permission for AMX, as in many containers and VMs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from int8 import isa

ROOT = Path(__file__).resolve().parents[2]

#: Run with the mask and a folder. The filter stays with the process and its workers.
MEASURE = """
import json, sys
from pathlib import Path
import amx_denial
amx_denial.deny()
from harness import processes
from harness.processes import WorkerHandle
from harness.worker import WorkerSpec
mask, folder, scenario = sys.argv[1], Path(sys.argv[2]), "offline:b2:s16"
spec = WorkerSpec(
    "tiny-bert", "int8", "sq-static", mask, "jit", "tiny-reviews", (scenario,), processes.worker_cpus(), scenario, 32
)
worker = WorkerHandle(spec, folder / "log")
try:
    worker.prepare()
    evidence = worker.request("compile", scenario=scenario)["evidence"]
    answer = worker.request("evaluate", scenario=scenario, limit=32, path=str(folder / "out.npz"))
finally:
    worker.kill()
print(json.dumps({"evidence": evidence, "accuracy": answer["accuracy"], "denied": amx_denial.is_denied()}))
"""


def test_a_worker_without_permission_for_amx_finishes(tmp_path: Path) -> None:
    """Where AMX is in CPUID but not granted, others died of SIGILL (kvcache-ai/ktransformers#320)."""
    mask = next(name for name in isa.supported() if name != "amx")
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "int8")))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, mask, str(tmp_path)],
        env=isa.clean_environment() | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if "no seccomp filters" in done.stderr:
        pytest.skip("this kernel has no seccomp filters")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    evidence = found["evidence"]
    assert found["denied"], "the filter does not work"
    assert evidence["isa_effective"] == mask
    assert evidence["fused_linears"] == evidence["quantized_linears"] == 12
    assert not evidence["amx_permission"]
    assert not any("amx" in name or "ref" in name for name in evidence["kernels"])
    assert found["accuracy"]["sqnr_db"] > 20
