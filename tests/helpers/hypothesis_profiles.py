"""How many examples Hypothesis tries: HYPOTHESIS_PROFILE=more or thorough for a long run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.internal.entropy import deterministic_PRNG

QUICK = 40


def load() -> None:
    """Register the profiles and load the one that the environment names."""
    # A deadline would measure the other processes; pytest's timeout ends a test that hangs.
    common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
    # The same examples in each run: a run takes the same time, and has the same result. The other
    # profiles draw other examples in each run.
    settings.register_profile("quick", common, max_examples=QUICK, derandomize=True)
    settings.register_profile("thorough", common, max_examples=5_000)
    settings.register_profile("more", common, max_examples=1_000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
    # With Python 3.14, Hypothesis warns if frozen objects hold its random generator, which the
    # first test would make. So make the generator before tests/conftest.py freezes all objects.
    with deterministic_PRNG():
        pass


def costly() -> settings:
    """Half of the quick profile's examples, for tests that take 50 ms or more for each example."""
    usual = settings.get_current_profile_name() == "quick"
    return settings(max_examples=QUICK // 2 if usual else settings().max_examples)
