"""Setup of all tests: one torch thread per process, because several processes share the cores, Triton's interpreter if
there is no GPU, the same generated examples, random numbers and rounding on any machine, whatever ran before and
however long it takes, and programs that can be interrupted, also where a shell started pytest in the background."""

import gc
import os
import platform
import random
import signal
import sys
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from baton.core.logs import enter_request
from baton.settings.environment import visible_gpus

if not visible_gpus():
    # NOTE: Triton reads it when a kernel's module is imported, so it must be set before any test module is.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Products of one CPU's instructions differ from another's in their last bits, and where a tiny model's two best tokens
# are that close, so do its tokens. With these, all of Intel's CPUs with AVX2 round alike. For AMD's, MKL has only code
# of a third of the speed that does ("conditional numerical reproducibility"). Programs that tests start inherit them.
# OpenBLAS is for Triton's interpreter, which multiplies with numpy: with its code for AVX2, a row's bits would depend
# on how many rows there are.
ROUNDING = {
    "MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Sandybridge",
}  # fmt: skip
if platform.machine() in ("x86_64", "AMD64"):
    os.environ |= {name: os.environ.get(name, value) for name, value in ROUNDING.items()}

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background; programs that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attention-table", default="", help="write the attention conformance table to this file")
    parser.addoption("--kv-matrix", default="", help="run this share of all KV transfers, such as 3/20000")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--attention-table")
    if path and not hasattr(config, "workerinput"):  # xdist's workers report to the process that writes
        from tests.attention_table import AttentionTable

        config.pluginmanager.register(AttentionTable(Path(path)))


def pytest_collection_finish() -> None:
    """Lets no garbage collection look at what collecting has made and imported: with all tests it takes half a
    second, and tests that look for garbage collect again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged may have path bytes that are no UTF-8. xdist's workers cannot send these, and end."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Each fixture, and each test, has random numbers of its own: they do not depend on the tests before."""
    _seed(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    _seed(item.nodeid)
    return (yield)


def _seed(name: str) -> None:
    seed = zlib.crc32(name.encode(errors="surrogateescape"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    else:  # `make test-quick` loads no torch; a test that does so itself gets one thread too
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> None:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import speed_up

        speed_up()


@pytest.fixture(autouse=True)
def _of_no_request() -> None:
    """A test that is not a coroutine shares its task with those before it, and what they said about that task."""
    enter_request("")
