"""Fixtures of the library's tests. The process is held to its ISA before anything imports torch."""

from __future__ import annotations

from int8 import isa

isa.enforce()

import pytest  # noqa: E402
import torch  # noqa: E402
from small_encoders import Encoder, make_batch  # noqa: E402
from torch import Tensor  # noqa: E402


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture
def calibration() -> list[dict[str, Tensor]]:
    return [make_batch(4, 12, pads=3, seed=1), make_batch(3, 7, seed=2)]
