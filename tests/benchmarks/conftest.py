"""Benchmarks: collected when they are asked for, `pytest tests/benchmarks`. Each gives a ratio to plain JAX in one run.

A time alone says more of the machine than of the library. So plain JAX and the wrapped function run in turn, and what is
printed, and kept in the report of pytest-benchmark, is the median of the ratios.
"""

import pathlib
import statistics
import time

import jax
import pytest

HERE = pathlib.Path(__file__).parent
_ratios: list[tuple[str, float, float]] = []


def pytest_ignore_collect(collection_path, config):
    """Leave the benchmarks out unless a path on the command line leads here."""
    asked = [pathlib.Path(arg.split("::")[0]).resolve() for arg in config.args]
    if HERE in collection_path.parents and not any(path == HERE or HERE in path.parents for path in asked):
        return True
    return None


def _seconds(f, n):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        jax.block_until_ready(f())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.fixture
def against(benchmark, request):
    """Measure ``f`` as a multiple of ``plain``, and assert that the ratio is at most ``bar``.

    The bar leaves room for noise: it finds what has become slow, and is no claim.
    """

    def measure(plain, f, *, bar, n=20, rounds=9):
        for g in (plain, f):  # compiles
            jax.block_until_ready(g())
        pairs = [(_seconds(plain, n), _seconds(f, n)) for _ in range(rounds)]
        ratio = statistics.median(b / a for a, b in pairs)
        benchmark.extra_info["ratio to plain JAX"] = ratio
        benchmark.pedantic(f, rounds=3)
        _ratios.append((request.node.nodeid.split("::")[-1], ratio, statistics.median(a for a, _ in pairs)))
        assert ratio <= bar

    return measure


def pytest_terminal_summary(terminalreporter):
    """Print the ratios."""
    if _ratios:
        terminalreporter.section("ratios to plain JAX")
        for name, ratio, seconds in _ratios:
            terminalreporter.write_line(f"{ratio:7.2f}  {name}  (plain JAX: {seconds * 1e6:.0f} us)")
