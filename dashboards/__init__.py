"""Records to a static site. ``build(store, site, now=...)`` writes it; ``harness report`` calls that."""

from dashboards.builder import build

__all__ = ["build"]
