"""What every test runs under: one CPU device, float32 products in full, and no file outside temporary folders.

`tiny` has the models that the tests share.
"""

import gc
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # with libtpu installed, every start would look for a TPU
# Most of the time goes into compiling programs that run once: these make it a third. The arithmetic is the same.
_QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# Test processes share the cores: more threads get in the way.
_QUICK += ["--xla_cpu_multi_thread_eigen=false", "--xla_cpu_parallel_codegen_split_count=1"]
_jaxlib = tuple(map(int, version("jaxlib").split(".")[:2]))
if _jaxlib == (0, 10):  # later ones have no other way to make a fusion
    _QUICK.append("--xla_cpu_use_fusion_emitters=false")
if _jaxlib >= (0, 12):
    _QUICK += ["--xla_cpu_opt_preset=FAST_COMPILE", "--xla_cpu_emitter_verification_level=0"]
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_QUICK)).strip()
# Compiled programs are kept from run to run, and shared by all test processes; what they are of is part of their key.
_cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_home / "l2d_jax" / "tests"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # as `Emulator.environment`, before anything imports gcsfs
_caches = tempfile.TemporaryDirectory(prefix="l2d_jax_tests_")  # removed when the interpreter exits
os.environ.pop("L2D_JAX_CACHE", None)
os.environ["XDG_CACHE_HOME"] = _caches.name  # conversions, here and in child processes
# matplotlib's list of all fonts takes seconds to make: it stays, too.
os.environ.setdefault("MPLCONFIGDIR", str(_cache_home / "l2d_jax" / "matplotlib"))

# Large packages before jaxtyping's hook of l2d_jax, under which Python compiles what it imports anew in each process.
import datasets  # noqa: E402, F401
import diffrax  # noqa: E402, F401
import jax  # noqa: E402
import optax  # noqa: E402, F401
import orbax.checkpoint  # noqa: E402, F401
import pytest  # noqa: E402
import transformers  # noqa: E402, F401
from flax import nnx  # noqa: E402, F401
from jax.sharding import Mesh  # noqa: E402
from jaxtyping._import_hook import Typechecker  # noqa: E402

from tests.support.checking import check_when_called  # noqa: E402

# The dataclasses of transformers do not survive jaxtyping's hook, nor do ours of theirs. The other modules have no
# arrays, and functions so small and so often called that checking them took most of the time of the tests of data.
_UNCHECKED = re.compile(r"\.weights\.pytorch|\.data\.(template_bounds|word_problems)")
for finder in sys.meta_path:
    if hasattr(finder, "modules") and "l2d_jax" in finder.modules:
        check = finder.should_instrument
        finder.should_instrument = lambda name, check=check: check(name) and not _UNCHECKED.search(name)
        Typechecker.lookup[finder._typechecker.get_hash()] = check_when_called  # and not where it is defined

from l2d_jax.config.schema import MeshConfig, TrainConfig  # noqa: E402
from l2d_jax.distributed.sharding import make_mesh  # noqa: E402
from l2d_jax.storage import mirror  # noqa: E402
from l2d_jax.training import run as training  # noqa: E402

jax.config.update("jax_platforms", "cpu")  # for a jax that was imported before this file
jax.config.update("jax_default_matmul_precision", "highest")


# Files by the seconds that they take, the longest first, so that all processes end at about the same time. Those that
# compare with PyTorch lead, since they have slow tests that run on Python 3.11 only.
LONGEST = (
    "tests/weights/test_torch_path.py",
    "tests/parity/test_against_transformers.py",
    "tests/weights/test_torch_class.py",
    "tests/weights/test_transformers_suite.py",
    "tests/parity/test_against_torch.py",
    "tests/training/test_methods.py",
    "tests/programs/test_smollm2.py",
    "tests/weights/test_gguf_model.py",
    "tests/decoding/test_exactness.py",
    "tests/decoding/batch/test_lanes.py",
    "tests/decoding/test_end.py",
    "tests/model/test_anchored_path.py",
    "tests/decoding/test_search_lanes.py",
    "tests/serving/test_models.py",
    "tests/serving/api/test_choices.py",
    "tests/decoding/test_side_by_side.py",
    "tests/decoding/batch/test_lane_paths.py",
    "tests/parity/test_verify.py",
    "tests/decoding/test_integrate.py",
    "tests/model/test_lora.py",
    "tests/decoding/test_likelihood.py",
    "tests/decoding/test_stream.py",
    "tests/decoding/test_beam_search.py",
    "tests/programs/test_generate.py",
    "tests/decoding/test_generation.py",
    "tests/decoding/test_decode.py",
    "tests/programs/test_evaluate.py",
    "tests/training/test_finetuning.py",
    "tests/training/test_checkpoint.py",
    "tests/model/test_families.py",
    "tests/programs/test_report.py",
    "tests/training/test_checkpoint_in_bucket.py",
    "tests/model/test_attention.py",
    "tests/decoding/test_sampler.py",
    "tests/decoding/test_refine.py",
    "tests/weights/test_unfit_weights.py",
    "tests/programs/test_start.py",
    "tests/model/test_joint_pass.py",
    "tests/serving/test_engine.py",
    "tests/weights/test_model_folder.py",
    "tests/decoding/tools/test_call_grammar.py",
    "tests/weights/test_export.py",
    "tests/model/test_gathering.py",
    "tests/serving/test_connections.py",
    "tests/model/test_llm.py",
    "tests/decoding/tools/test_generated_calls.py",
    "tests/training/test_objective.py",
    "tests/decoding/test_pace.py",
    "tests/model/test_few_rows.py",
    "tests/decoding/test_batching.py",
    "tests/decoding/batch/test_prefix_cache.py",
    "tests/data/test_prepared.py",
    "tests/evaluation/sandbox/test_grade.py",
    "tests/model/test_diffusion_path.py",
    "tests/serving/test_deterministic.py",
    "tests/training/test_plans.py",
    "tests/data/test_examples.py",
    "tests/training/test_optimizer.py",
    "tests/device/test_check.py",
    "tests/weights/test_mapping.py",
    "tests/serving/test_prefix_cache.py",
    "tests/weights/test_gguf_file.py",
    "tests/decoding/test_stop_strings.py",
    "tests/programs/test_launch.py",
    "tests/programs/test_train.py",
    "tests/decoding/test_programs.py",
    "tests/evaluation/sandbox/test_submission.py",
    "tests/model/test_products.py",
    "tests/training/test_step.py",
    "tests/training/test_metrics.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too")
    parser.addoption("--fuzz", type=int, help="damaged files for tests/test_fuzz.py, and a table of what came of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out unless `--slow`, `-m` or their own names ask for them; longest files come first."""
    places = {config.rootpath / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    is_asked_for = config.getoption("slow") or config.option.markexpr or any("::" in name for name in config.args)
    slow = [] if is_asked_for else [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


def pytest_collection_finish() -> None:
    """What is imported stays: no garbage collection has to look at it again, of which tracing causes many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    """Lets go of compiled programs from time to time."""
    yield
    _forget(15_000)


@pytest.fixture(autouse=True)
def forget_after_long_tests() -> Iterator[None]:
    """Also within a file: the largest compile thousands of programs."""
    began = time.monotonic()
    yield
    if time.monotonic() - began > 1:
        _forget(30_000)


def _forget(most: int) -> None:
    """Let go of compiled programs if this process has more memory maps than `most`.

    A program takes 13, and Linux allows 65,530. Beyond that, XLA ends the process with a segmentation fault.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > most:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="session")
def one_step_for_each_config() -> Iterator[None]:
    """Lets runs of one config in this process share their compiled step, whose tracing takes most of a tiny run."""
    made: dict[str, Any] = {}
    make = training.make_step

    def make_once(optimizer: Any, config: TrainConfig, *arguments: Any, objective: Any) -> Any:
        if config.steps is None:  # their number, and with it the learning rate, depends on the data
            return make(optimizer, config, *arguments, objective=objective)
        key = repr((objective.__self__.config, config, arguments[1:]))  # without the values of the state
        if key not in made:
            made[key] = make(optimizer, config, *arguments, objective=objective)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_step", make_once)
        yield


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """Of one device."""
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[Any]:
    """An emulator of Google Cloud Storage, which all clients of this process and of its children find."""
    pytest.importorskip("gcsfs", reason="buckets need the extra gcs")
    pytest.importorskip("gcp_storage_emulator", reason="the emulator of buckets is in the extra dev")
    from tests.support.buckets import Emulator

    server = Emulator()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**server.environment(), "L2D_JAX_PATIENCE": "1"}.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def emulator(bucket_server: Any) -> Iterator[Any]:
    """That emulator with an empty bucket, "bucket"."""
    for name in bucket_server.files():
        bucket_server.storage.delete_file("bucket", name)
    mirror._mirrors.clear()
    yield bucket_server
    mirror._mirrors.clear()
