"""Records to a static site. ``build(store, site, now=...)`` writes it; ``harness report`` calls that."""

from dashboards.builder import build
from dashboards.repository import of_checkout as repository_of

__all__ = ["build", "repository_of"]
