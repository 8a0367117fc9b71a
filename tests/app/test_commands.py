"""The command: what a person types works, and what is wrong is one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import pytest
import small
import tiny
import torch

import espalier
from espalier.app import cli
from espalier.app.errors import Problem
from espalier.app.lock import locked
from espalier.app.run import Job

SETS = [f"--set={change}" for change in (*small.SHORT, *small.NARROW["digits"])]
TRAIN = ["train", "digits", "--device=cpu", *SETS]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def call(*words: str) -> int:
    """The command's exit code."""
    before, sys.argv = sys.argv, ["espalier", *words]
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        sys.argv = before
    code = left.value.code
    return code if isinstance(code, int) else 0


def test_from_training_to_a_file_that_runs_anywhere(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*TRAIN, "--set=methods.ramda.lam=0.02") == 0
    out = capfd.readouterr().out
    assert re.search(r"accuracy [\d.]+ %, weighted group sparsity [\d.]+ %", out)
    assert call("shrink", "runs/digits/ramda-0", "--batch=3") == 0
    out = capfd.readouterr().out
    assert "largest difference" in out
    assert "of 3 examples at a time" in out
    assert call("export", "runs/digits/ramda-0") == 0
    assert "the shrunk model" in capfd.readouterr().out
    assert call("export", "runs/digits/ramda-0", "--format=pt2", "--out=small.pt2") == 0
    assert call("report", "runs/digits/ramda-0", "--out=page.html") == 0
    files = {p.name for p in Path("runs/digits/ramda-0").iterdir()}
    assert {"model.onnx", "report.html", "shrunk", "metrics.jsonl", "tensorboard", "checkpoint.pt"} <= files
    assert Path("small.pt2").stat().st_size
    assert "Dense, structured, shrunk" in Path("page.html").read_text()


def test_low_rank_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(*TRAIN) == 0
    real, asked = espalier.shrink, []
    monkeypatch.setattr(espalier, "shrink", lambda *a, low_rank, **k: asked.append(low_rank) or real(*a, **k))
    for words in ((), ("--low-rank=auto",), ("--low-rank=never",), ("--low-rank=always",)):
        assert call("shrink", "runs/digits/ramda-0", *words) == 0
    assert asked == ["always", "auto", "never", "always"]


def test_compare_trains_all_methods_and_keeps_what_is_done(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "digits", "--device=cpu", "--methods=ramda,dense", "--seeds=0,1", *SETS]
    assert call(*words) == 0
    out = capfd.readouterr().out
    assert re.search(r"RAMDA +│ +[\d.]+ ± [\d.]+ ", out)
    assert "paper" not in out  # which has no such task
    rows = {row["method"]: row for row in json.loads(Path("runs/digits/compare.json").read_text())}
    # the table's numbers are those of the runs
    for method in ("ramda", "dense"):
        looks = [Path(f"runs/digits/{method}-{seed}/metrics.jsonl").read_text().splitlines() for seed in (0, 1)]
        last = [json.loads(lines[-1]) for lines in looks]
        assert rows[method]["quality"] == [(x["structured"] or x["weights"])["accuracy"] for x in last]
    before = Path("runs/digits/ramda-0/model.safetensors").stat().st_mtime_ns
    assert call(*words) == 0
    assert Path("runs/digits/ramda-0/model.safetensors").stat().st_mtime_ns == before
    assert call("report", "runs/digits") == 0
    assert "seed" in Path("runs/digits/report.html").read_text()
    Path("runs/digits/report.html").unlink()
    Path("runs/digits/ramda-0/report.html").write_text("about this run")
    assert call("report", "runs/digits/ramda-0", "runs/digits/dense-1") == 0
    assert "2 runs of 2 methods" in Path("runs/digits/report.html").read_text()
    assert Path("runs/digits/ramda-0/report.html").read_text() == "about this run"
    assert call("report", *map(str, Path("runs/digits").iterdir())) == 0  # as the shell writes *, pages and all
    assert "4 runs of 2 methods" in Path("runs/digits/report.html").read_text()
    assert call("report", "runs/digits/report.html") == 2


AT_ONCE = ["compare", "digits", "--device=cpu", "--methods=ramda,dense", "--seeds=0,1", "--at-once=2"]


def test_several_runs_at_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # as each of two has: sums depend on it
    try:
        assert call(*AT_ONCE, "--at-once=1", "--out=alone", *SETS) == 0
    finally:
        torch.set_num_threads(threads)
    capfd.readouterr()
    assert call(*AT_ONCE, "--out=beside", *SETS) == 0
    out = capfd.readouterr().out
    assert all(f"{method}, seed {seed}: step 20 of 20" in out for method in ("ramda", "dense") for seed in (0, 1))
    alone, beside = (json.loads(Path(f"{where}/compare.json").read_text()) for where in ("alone", "beside"))
    assert [row["quality"] for row in beside] == [row["quality"] for row in alone]
    assert call(*AT_ONCE, "--out=beside", *SETS) == 0
    assert "4 of 4 runs are finished already." in capfd.readouterr().out


def test_the_first_problem_stops_the_others_too(capfd: pytest.CaptureFixture[str]) -> None:
    # seen when the other has begun, too
    late = ("--set=length=100000", "--set=evaluate_every=300", "--set=methods.dense.lr=1e9")
    assert call(*AT_ONCE, "--seeds=0", *SETS, *late) == 2
    assert re.search(r"espalier: dense, seed 0: .*training has diverged", capfd.readouterr().err)
    assert json.loads(Path("runs/digits/ramda-0/run.json").read_text())["status"] == "stopped"


@pytest.fixture
def endless() -> Iterator[subprocess.Popen[str]]:
    """Two runs of slow steps at a time, well under way, in a group of their own, which Ctrl-C would reach whole."""
    words = [sys.executable, "-m", "espalier.app.cli", *AT_ONCE, *SETS, "--set=length=100000", "--set=batch=1000"]
    looks = [Path(f"runs/digits/ramda-{seed}/metrics.jsonl") for seed in (0, 1)]
    with subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as begun:
        try:
            latest = time.monotonic() + 120
            while not all(look.exists() and look.stat().st_size for look in looks):
                assert begun.poll() is None
                assert time.monotonic() < latest
                time.sleep(0.05)
            yield begun
        finally:
            with suppress(ProcessLookupError):
                os.killpg(begun.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_signal_stops_all_with_checkpoints(
    number: signal.Signals, all_of_them: bool, endless: subprocess.Popen[str]
) -> None:
    (os.killpg if all_of_them else os.kill)(endless.pid, number)
    _, said = endless.communicate(timeout=60)
    assert endless.returncode == 128 + number
    assert said == "espalier: stopped, checkpoints written. The same command goes on.\n"
    for seed in (0, 1):
        assert json.loads(Path(f"runs/digits/ramda-{seed}/run.json").read_text())["status"] == "stopped"
        assert Path(f"runs/digits/ramda-{seed}/checkpoint.pt").exists()


def test_runs_that_nobody_watches_any_more_stop_with_checkpoints(endless: subprocess.Popen[str]) -> None:
    endless.kill()
    _, said = endless.communicate(timeout=60)  # until all have let go of its output
    assert "Traceback" not in said
    assert all(Path(f"runs/digits/ramda-{seed}/checkpoint.pt").exists() for seed in (0, 1))


def test_lists(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("recipes") == 0
    out = capfd.readouterr().out
    assert all(name in out for name in small.NARROW)
    assert call("recipes", "mnist-logreg") == 0
    assert "espalier compare mnist-logreg --data DIR" in capfd.readouterr().out
    tiny.make("cifar10", tmp_path / "sets")
    assert call("data", "sets") == 0
    out = capfd.readouterr().out
    assert re.search(r"cifar10 .*\n +found in", out)
    assert re.search(r"mnist .*\n +not found: .*mnist", out)
    assert "has no train-images-idx3-ubyte" in out
    assert call("--version") == 0
    assert espalier.__version__ in capfd.readouterr().out


def test_the_demo_clears_only_what_a_demo_left(capfd: pytest.CaptureFixture[str]) -> None:
    Path("espalier-demo").mkdir()
    Path("espalier-demo/thesis.tex").write_text("years of work")
    assert call("demo") == 2
    assert "holds something else than a demo" in capfd.readouterr().err
    assert Path("espalier-demo/thesis.tex").exists()
    # nor what only has a demo's names
    Path("espalier-demo/thesis.tex").rename("thesis.tex")
    Path("espalier-demo/dense").mkdir()
    Path("thesis.tex").rename("espalier-demo/dense/thesis.tex")
    assert call("demo") == 2
    assert Path("espalier-demo/dense/thesis.tex").exists()


def test_a_demo_makes_way_for_no_other_that_runs_and_begins_after_one_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(job: Job, *rest: object) -> None:
        job.out.mkdir()
        (job.out / ".lock").touch()  # killed before it had begun
        raise Problem("killed")

    monkeypatch.setattr("espalier.app.demo.train", train)
    for _ in range(2):
        assert call("demo") == 2
        assert capfd.readouterr().err == "espalier: killed\n"
        assert sorted(p.name for p in Path("espalier-demo").iterdir()) == [".lock", "dense"]
    with locked(Path("espalier-demo"), "demo"):
        assert call("demo") == 2
    assert_one_line(capfd.readouterr().err, r"in use by process .*\(espalier demo")


def test_the_demo_is_the_same_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def train(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise Problem("enough")

    monkeypatch.setattr("espalier.app.demo.train", train)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert call("demo") == 2
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("dance") == 2
    assert "dance" in capfd.readouterr().err


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def problems(tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    """What was typed, and what the line must say."""
    data = tiny.make("cifar10", tmp_path / "cifar")
    tiny.make("mnist", tmp_path / "other")
    broken = tiny.make("cifar10", tmp_path / "broken")
    _cut(broken / "cifar10/data_batch_2.bin")
    missing = tiny.make("cifar10", tmp_path / "missing")
    (missing / "cifar10/data_batch_3.bin").unlink()
    vgg = ["train", "vgg19-cifar10", "--device=cpu"]
    return {
        "an unknown recipe": (["train", "vgg19-cifar"], r"no recipe 'vgg19-cifar' \(did you mean 'vgg19-cifar10'\?\)"),
        "an unknown key": ([*TRAIN, "--set=lenght=3"], r"'lenght' \(did you mean 'length'\?\)"),
        "a wrong type": ([*TRAIN, "--set=batch=x"], r"batch='x': input should be a valid integer"),
        "an unknown method": ([*TRAIN, "--method=radma"], r"no method 'radma' \(did you mean 'ramda'\?\)"),
        "an unknown method to compare": (["compare", "digits", "--methods=radma"], r"no method 'radma'"),
        "seeds that are words": (["compare", "digits", "--seeds=a,b"], r"--seeds a,b: write numbers with commas"),
        "an unknown data option": ([*TRAIN, "--set=data.augmnt=1"], r"augmnt"),
        "an unknown data set": ([*TRAIN, "--set=data.name=mnits"], r"mnits"),
        "no data named": (vgg, r"needs its files: give --data DIR"),
        "no such directory": ([*vgg, "--data=nowhere"], r"--data nowhere: there is no such directory"),
        "a missing file": ([*vgg, f"--data={missing}"], r"data_batch_3.bin"),
        "a truncated file": ([*vgg, f"--data={broken}"], r"data_batch_2.bin .*bytes"),
        "another data set": ([*vgg, f"--data={tmp_path}/other/mnist"], r"holds .*mnist"),
        "a GPU that is not there": ([*vgg, f"--data={data}", "--device=cuda:7"], r"--device cuda:7: \d+ GPUs are"),
        "no such device": ([*vgg, f"--data={data}", "--device=gpu"], r"--device gpu: no such device"),
        "meta": ([*TRAIN, "--device=meta"], r"--device meta: no such device"),
        "a negative seed": (["compare", "digits", "--seeds=-1"], r"seeds are numbers from 0"),
        "a model of words": ([*TRAIN, "--set=model.width=abc"], r"width='abc': input should be a valid integer"),
        "an empty model": ([*TRAIN, "--set=model.width=0"], r"width=0: input should be greater than 0"),
        "a model for other data": ([*TRAIN, "--set=model.channels=3"], r"channels is 3, and digits has channels 1"),
        "too few classes": ([*TRAIN, "--set=model.classes=5"], r"model.classes is 5, and digits has classes 10"),
        "a model for larger images": ([*vgg, f"--data={data}", "--set=model={name: logreg}"], r"logreg can't do"),
        "another task": ([*TRAIN, "--set=task=language"], r"can't do the task language on digits"),
        "too long": ([*TRAIN, "--set=scale=1e308"], r"scale='1e308': input should be less than or equal to 100"),
        "no such module": ([*TRAIN, "--set=unpenalised=[nosuch]"], r"ramda can't take these settings: .*nosuch"),
        "a solver of another penalty": ([*TRAIN, "--set=methods.ramda.solver={name: dr}"], r"ramda can't take these"),
        "no iterations": ([*TRAIN, "--set=methods.ramda.solver={name: exact, max_iters: 3}"], r"of the solvers pg and"),
        "no such rule": ([*TRAIN, "--set=methods.ramda.solver={name: dr, rtol: 1}"], r"rtol is an option of"),
        "a solver of none": ([*TRAIN, "--set=methods.dense.solver={name: pg}"], r"adamw has no subproblem"),
        "no run": (["shrink", "nothing"], r"nothing is no run"),
        "no such GPU": (["shrink", "nothing", "--device=cuda:77"], r"cuda:77: \d GPUs are visible"),
        "no run to report on": (["report", "nothing"], r"nothing"),
        "no run to export": (["export", "nothing"], r"nothing is no run"),
        "a directory of other things": ([*TRAIN, f"--out={data}"], r"holds no run: name another --out"),
    }  # fmt: skip


def assert_one_line(err: str, message: str) -> None:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert re.search(message, lines[0]), lines[0]
    assert lines[0].startswith("espalier: ")


def test_what_is_wrong_is_one_line_and_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for case, (words, message) in problems(tmp_path).items():
        assert call(*words) == 2, case
        seen = capfd.readouterr()
        assert "Traceback" not in seen.err, case
        assert_one_line(seen.err, message)
    assert not Path("runs").exists()  # nothing was begun


def test_runs_are_not_mixed_up(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*TRAIN) == 0
    run = Path("runs/digits/ramda-0")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    capfd.readouterr()
    out = f"--out={run}"
    for words, message in (
        (TRAIN, r"holds this run already \(finished\): delete it to run it again"),
        ([*TRAIN, out, "--resume", "--method=rmda"], r"another run, with method = ramda instead of rmda"),
        ([*TRAIN, out, "--resume", "--seed=1"], r"another run, with seed = 0 instead of 1"),
        ([*TRAIN, out, "--resume", "--set=batch=4"], r"another run, with batch = 8 instead of 4"),
    ):
        assert call(*words) == 2
        assert_one_line(capfd.readouterr().err, message)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert call(*TRAIN, "--resume") == 0
    assert "finished already" in capfd.readouterr().out


def test_a_checkpoint_of_another_recipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = tiny.make("mnist", tmp_path)
    assert (
        call("train", "mnist-logreg", f"--data={data}", "--device=cpu", "--out=a", *(f"--set={x}" for x in small.SHORT))
        == 0
    )
    assert call(*TRAIN, "--out=b") == 0
    facts = json.loads(Path("b/run.json").read_text())
    Path("b/run.json").write_text(json.dumps({**facts, "status": "running"}))
    Path("b/checkpoint.pt").write_bytes(Path("a/checkpoint.pt").read_bytes())
    capfd.readouterr()
    assert call(*TRAIN, "--out=b", "--resume") == 2
    assert_one_line(capfd.readouterr().err, r"b/checkpoint.pt belongs to another run, or is damaged")
    for odd in ({"format": 1}, {"format": 1, "ranks": [1]}, [], {"format": 1, "ranks": [{}], "position": 3}):
        torch.save(odd, "b/checkpoint.pt")
        assert call(*TRAIN, "--out=b", "--resume") == 2
        assert_one_line(capfd.readouterr().err, r"b/checkpoint.pt")
    Path("b/checkpoint.pt").write_bytes(b"no checkpoint at all")
    assert call(*TRAIN, "--out=b", "--resume") == 2
    assert_one_line(capfd.readouterr().err, r"can't read b/checkpoint.pt: it is damaged. Delete it to begin")
    Path("b/checkpoint.pt").unlink()
    Path("b/checkpoint.pt").mkdir()  # whatever the system says of a file is no damage
    assert call(*TRAIN, "--out=b", "--resume") == 2
    assert_one_line(capfd.readouterr().err, r"b/checkpoint.pt: Is a directory")


def test_damaged_runs_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*TRAIN, "--out=run") == 0
    good = {name: Path("run", name).read_bytes() for name in ("run.json", "metrics.jsonl", "model.safetensors")}
    capfd.readouterr()
    for name, damaged in (
        ("run.json", b"[]"), ("run.json", b"{}"), ("run.json", b"\xff"), ("run.json", b"{"),
        ("metrics.jsonl", b"nonsense\n"), ("metrics.jsonl", b"3\n"), ("model.safetensors", b"short"),
    ):  # fmt: skip
        Path("run", name).write_bytes(damaged)
        assert call("shrink", "run") == 2, (name, damaged)
        assert_one_line(capfd.readouterr().err, r"run")
        Path("run", name).write_bytes(good[name])
    assert call("shrink", "run") == 0


def test_names_with_brackets(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*TRAIN, "--out=runs[v2][/x]", "--set=methods.ramda.lam=1") == 0
    assert "espalier shrink 'runs[v2][/x]'" in capfd.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_a_signal_ends_with_a_checkpoint_and_the_way_on(number: int, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "espalier.app.cli", *TRAIN, "--set=length=100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=tmp_path)
    metrics = tmp_path / "runs/digits/ramda-0/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert_one_line(err, r"stopped at step \d+, checkpoint written. The same command with --resume goes on.")
    assert (tmp_path / "runs/digits/ramda-0/checkpoint.pt").exists()


NOT_UTF8 = os.fsdecode(b"t\xff")


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes")
def test_names_that_are_not_utf8(capfd: pytest.CaptureFixture[str]) -> None:
    for words in ([*TRAIN, f"--out={NOT_UTF8}"], ["compare", "digits", f"--out={NOT_UTF8}"]):
        assert call(*words) == 2
        assert_one_line(capfd.readouterr().err, r"--out 't\\udcff.*is not UTF-8")
    # a name that only stands beside
    Path(NOT_UTF8).mkdir()
    Path(NOT_UTF8, "mine.yaml").write_text(Path(str(cookbook_file())).read_text())
    assert call("train", f"{NOT_UTF8}/mine.yaml", "--device=cpu", *SETS, "--out=run") == 0
    assert "udcff" in json.loads(Path("run/run.json").read_text())["command"].encode("unicode_escape").decode()
    assert call("report", "run", f"--out={NOT_UTF8}.html") == 0
    assert Path(f"{NOT_UTF8}.html").stat().st_size
    assert call("report", NOT_UTF8) == 2


def cookbook_file() -> Traversable:
    return resources.files("espalier.app") / "recipes/digits.yaml"


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links")
def test_a_link_to_itself_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    Path("loop").symlink_to("loop")
    for words in (
        ["report", "loop"], ["report", "loop", "loop"], ["shrink", "loop"], [*TRAIN, "--out=loop"],
        ["train", "mnist-logreg", "--data=loop", "--device=cpu"], ["data", "loop"],
    ):  # fmt: skip
        assert call(*words) == 2, words
        assert_one_line(capfd.readouterr().err, "loop")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
            "not enough memory",
        ),
        (ImportError("libx.so: failed to map segment from shared object"), "a package can't be loaded: libx.so"),
        (ImportError("libx.so: cannot allocate memory in static TLS block"), "there is not enough memory"),
    ],
)
def test_what_the_machine_can_not_do_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr("espalier.app.commands.app", app)
    assert call("recipes") == 2
    assert_one_line(capfd.readouterr().err, said)


def test_lost_metrics_of_a_finished_run(capfd: pytest.CaptureFixture[str]) -> None:
    one = ["compare", "digits", "--device=cpu", "--methods=ramda", *SETS]
    assert call(*one) == 0
    run = Path("runs/digits/ramda-0")
    facts = json.loads((run / "run.json").read_text())
    good = (run / "metrics.jsonl").read_text()
    capfd.readouterr()
    line = json.loads(good.splitlines()[0])
    strange = {
        "empty": "",
        "no weights": json.dumps({"step": 3}) + "\n",
        "no structured": json.dumps({**line, "weights": {}, "structured": {}}) + "\n",
        "words": json.dumps({**line, "structured": 3}) + "\n",
        "no time": json.dumps({**line, "step_ms": "x"}) + "\n",
    }
    for case, text in strange.items():
        (run / "metrics.jsonl").write_text(text)
        assert call(*one) == 2, case
        assert_one_line(capfd.readouterr().err, "metrics.jsonl is damaged, or was changed")
        # of an older version, without digests
        (run / "run.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "sha256"}))
        assert call(*one) == 2, case
        assert_one_line(capfd.readouterr().err, r"metrics.jsonl is (empty or )?damaged.*[Rr]estore it")
        (run / "run.json").write_text(json.dumps(facts))
    (run / "metrics.jsonl").unlink()
    assert call(*TRAIN, "--resume") == 2
    assert_one_line(capfd.readouterr().err, r"is finished, and metrics.jsonl is empty or gone: restore it from a copy")
