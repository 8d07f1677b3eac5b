"""Rehearsals take minutes and make networks: they run for `make rehearsal` alone."""

import os

collect_ignore_glob = [] if os.environ.get("SPECSERVE_REHEARSAL") else ["test_*.py"]
