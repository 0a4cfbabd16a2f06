"""What tests of tasks share."""

from __future__ import annotations

import pytest
import tiny_heads


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tiny_heads.TinyHeads:
    """Tiny checkpoints that learned something, and their data."""
    return tiny_heads.TinyHeads(tmp_path_factory.mktemp("tiny-heads"))
