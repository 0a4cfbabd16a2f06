"""Suites for airspeed velocity: the cells of a harness profile, tracked along the commits of the project.

Thin: the harness measures (``measure.py``), the suites only read its records (``cells.py``). ``check.py`` tells whether
asv saved anything, ``asv_plugin.py`` sees to it that ``asv run`` keeps samples and never succeeds with nothing.
"""
