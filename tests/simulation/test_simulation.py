"""100 seeds of the simulator; more with ``python -m tests.simulation --count 20000``."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation, first_found
from tests.simulation.simulation import run
from tests.simulation.world import Violation

SEEDS = 100
EACH = 20


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """Slaves end here for good reasons, all the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(1, SEEDS, EACH))
def test_nothing_is_violated(first: int) -> None:
    statuses: set[str] = set()
    refusals: set[str] = set()
    for seed in range(first, first + EACH):
        simulation = run(seed)
        statuses |= {status.name for status in simulation.checks.statuses}
        refusals |= set(simulation.checks.refusals)
    # The runs had all of these events.
    assert statuses == {"PUT_OK", "SLAVE_NOT_AVAILABLE", "FLUSH_SLAVE_TIMEOUT"}
    assert refusals >= {"LogsDiverged", "StoreUnavailable"}


@pytest.mark.parametrize("seed", [11_889, 12_107])
def test_a_file_that_is_deleted_while_the_word_of_it_is_under_way(seed: int) -> None:
    """A slave's retention does not invalidate the acknowledgement that is under way."""
    run(seed)


def test_a_seed_is_one_run() -> None:
    one, other = run(3), run(3)
    assert one.world.story == other.world.story and len(one.world.story) > 3
    assert one.checks.eras == other.checks.eras
    assert one.checks.statuses == other.checks.statuses
    assert run(4).checks.eras != one.checks.eras


def test_what_is_only_in_memory_is_lost() -> None:
    """RocketMQ's way to acknowledge loses acknowledged messages, and the simulator finds that."""
    with pytest.raises(Violation, match=r"seed \d+ at .*is acknowledged, and on no slave's disk"):
        for seed in range(1, SEEDS + 1):
            run(seed, acknowledge="received")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__[1:])
def test_what_was_forgotten_is_found(mutation: Mutation) -> None:
    # Seeds that found a violation before, to be quick; others may find one as well.
    hint = HINTS.get(mutation.__name__, 1)
    found = first_found(mutation, [*range(hint, SEEDS + 1), *range(1, hint)])
    assert found is not None


HINTS = {"_ack_from_before": 21, "_few_bytes": 61, "_the_silent_stay": 5}
