"""What holds for every test: this host may be busy, and other tests may run on it."""

from __future__ import annotations

import os
import tempfile

from harness import disturbance, host_lock

# Tests assert no times, so other load is no reason to call their runs invalid; tests of that very check set it anew.
os.environ.setdefault(disturbance.VARIABLE, "record")
# A lock of this test session's own: it waits for nobody's measurement, and nobody's waits for it.
os.environ.setdefault(host_lock.VARIABLE, os.path.join(tempfile.mkdtemp(prefix="harness-tests-"), "lock"))  # noqa: PTH118
