"""Options of the whole suite, and the table of layouts that a full run prints."""

import pytest
from hypothesis import settings

# A busy machine must not fail a property, in whichever files a run collects.
settings.register_profile("packing", deadline=None)
settings.load_profile("packing")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-layouts", action="store_true", help="run every parallel layout, not only the usual ten")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(LAYOUT_ROWS, [])
    if rows:
        terminalreporter.section("packed against unpacked, 30 iterations")
        for row in [("layout", "ranks", "largest loss difference", "largest weight distance"), *rows]:
            terminalreporter.write_line("| " + " | ".join(str(cell) for cell in row) + " |")


LAYOUT_ROWS: pytest.StashKey[list[tuple[str, int, str, str]]] = pytest.StashKey()
