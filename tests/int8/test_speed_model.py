from __future__ import annotations

import pytest

from int8 import isa, speed_model
from int8.errors import IsaError


@pytest.mark.parametrize("name", isa.NAMES)
def test_formats_are_ranked_as_they_were_measured(name: str) -> None:
    """BERT-large's FFN input: calibrated scales are the fastest, floating point the slowest."""
    seconds = [speed_model.group_s(kind, 1024, 4096, isa=name) for kind in speed_model.FORMATS]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_decomposition_costs_more_with_more_outliers() -> None:
    few, many = (speed_model.group_s("llm-int8", 1024, 1024, isa="amx", outliers=count) for count in (1, 200))
    assert few < many


def test_a_dynamic_scale_weighs_most_where_the_product_is_small() -> None:
    def ratio(outer: int) -> float:
        static, dynamic = (speed_model.group_s(kind, 4096, outer, isa="amx") for kind in ("static", "dynamic"))
        return dynamic / static

    assert ratio(256) > ratio(4096) > 1.0


def test_unknown_isas_are_refused() -> None:
    with pytest.raises(IsaError, match="avx2"):
        speed_model.group_s("static", 8, 8, isa="neon")
