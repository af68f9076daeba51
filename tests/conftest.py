"""What all tests share. Imports neither pyspark nor numba: most tests need none of them."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.golden_data import unpack_golden

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What started the tests in the background had interrupts ignored, and so would every process
    # that they start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Marks what uses the session: `make test` runs those apart from the others."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the golden stores, shared by the tests of one worker: copy what you change."""
    return unpack_golden(tmp_path_factory.mktemp("golden-data"))
