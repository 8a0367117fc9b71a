"""The report shows what the run directories hold, says plainly what is wrong, and opens clean in a browser."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import ask

from espalier.app.errors import Problem
from espalier.app.picks import picked
from espalier.app.report import looks, write_report
from espalier.app.report.chart import Line, Style, lines, thin
from espalier.app.report.looks import Look
from espalier.app.report.plots import stages
from espalier.app.report.runs import Info, Run

PAPER = {
    "ramda": {"quality": 92.89, "structure": 86.31},
    "rmda": {"quality": 93.13, "structure": 90.22},
    "proxsgd": {"quality": 92.82, "structure": 82.76},
    "dense": {"quality": 93.95, "structure": None},
}
LEVEL = {"ramda": 86.0, "rmda": 90.0, "proxsgd": 82.0, "dense": 0.0}


def fake_run(
    path: Path,
    method: str = "ramda",
    seed: int = 0,
    epochs: int = 30,
    *,
    layers: int = 6,
    status: str = "finished",
    shrunk: bool = True,
    info: dict[str, Any] | None = None,
) -> Path:
    """A run directory like one that `espalier train` fills; `info` overrides entries of run.json."""
    noise = random.Random(f"{method} {seed}")
    path.mkdir(parents=True)
    run = {
        "recipe": "vgg19-cifar10",
        "title": "VGG19 on CIFAR-10",
        "method": method,
        "seed": seed,
        "status": status,
        "metric": "accuracy",
        "better": "max",
        "structure": "weighted_group_sparsity",
        "settings": {
            "model": {"name": "vgg19", "classes": 10},
            "optimizer": {"name": method, "lr": 0.1 if method == "rmda" else 0.01, "momentum": 0.99},
            "milestones": [epochs // 3, 2 * epochs // 3],
            "amp": False,
            "seed": seed,
        },
        "environment": {"espalier": "0.4.0", "torch": "2.13.0", "device": "cpu", "started": "2026-11-16 04:00"},
        "paper": PAPER[method],
        "total_steps": epochs * 391,
        "seconds": 27.1 * epochs,
        "command": f"espalier train vgg19-cifar10 --method {method} --seed {seed} --data data",
    }
    (path / "run.json").write_text(json.dumps(run | (info or {})))
    with (path / "metrics.jsonl").open("w") as stream:
        for epoch in range(1, epochs + 1):
            stream.write(json.dumps(_look(noise, method, epoch, epochs)) + "\n")
    if method == "dense":
        return path
    entries = []
    for index in range(layers):
        groups = 64 * 2 ** min(index // 4, 3)
        zero = round(groups * min(0.98, LEVEL[method] / 100 * (index + 1) / layers * 1.2))
        entries.append(
            {
                "name": f"features.{3 * index}.weight",
                "shape": [groups, groups, 3, 3],
                "groups": groups,
                "zero_groups": zero,
                "elements": groups * groups * 9,
                "rank": None,
                "full_rank": None,
            }
        )
    (path / "structure.json").write_text(json.dumps(entries))
    if shrunk:
        models = [("dense", 93.9, None, 20.04e6, 3.1), ("structured", 92.9, 86.3, 20.04e6, 3.1)]
        models.append(("shrunk", 92.9, None, 2.1e6, 0.9))
        rows = [
            {"name": n, "quality": q, "structure": s, "parameters": p, "bytes": 4 * p, "latency_ms": ms}
            for n, q, s, p, ms in models
        ]
        (path / "shrunk.json").write_text(json.dumps({"rows": rows, "difference": 1.2e-6, "device": "cpu"}))
    return path


def _look(noise: random.Random, method: str, epoch: int, epochs: int) -> dict[str, Any]:
    stage = min(2, 3 * (epoch - 1) // epochs)
    done = epoch / epochs
    accuracy = 93.4 - 50 * math.exp(-8 * done) + noise.gauss(0, 1.2 * 0.25**stage)
    level = LEVEL[method] * (1 - math.exp(-6 * done)) + noise.gauss(0, 0.8 * 0.2**stage)
    structured = {"accuracy": accuracy - (1.5 - stage / 2), "loss": 0.3, "structure": max(level, 0.0)}
    return {
        "step": epoch * 391,
        "epoch": float(epoch),
        "seconds": 27.1 * epoch,
        "lr": 0.01 * 0.1**stage,
        "train_loss": 2.3 * math.exp(-5 * done) + 0.004 * noise.random() + 0.002,
        "step_ms": 8.1,
        "weights": {"accuracy": accuracy, "loss": 0.3, "structure": level if stage == 2 and method != "dense" else 0.0},
        "structured": None if method == "dense" else structured,
        "flipped": round(400 * math.exp(-12 * done)) if done < 0.8 else 0,
        "groups": 3000,
        "stable_since": 1,
    }


class Text(HTMLParser):
    """The table cells of a page as text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data.replace("\u00a0", " ")

    def row(self, name: str) -> list[str]:
        """The first row of that name."""
        return next(row for row in self.rows if row and row[0] == name)


def last_look(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def change_look(run: Path, index: int, **changes: Any) -> None:
    """Put other values into one look of a run."""
    looks = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    looks[index] |= changes
    (run / "metrics.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))


def card(page: str, name: str) -> tuple[str, str]:
    """The big number and the note of a card."""
    found = re.search(f'<dt>{name}</dt><dd class="big">(.*?)</dd><dd class="note">(.*?)</dd>', page)
    assert found, f"no card {name!r}"
    return found[1], found[2]


def page_of(tmp_path: Path, *runs: Path) -> str:
    return write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Four methods, two or three seeds, and their report."""
    home = tmp_path_factory.mktemp("runs")
    kinds = [("ramda", 0), ("ramda", 1), ("ramda", 2), ("rmda", 0), ("rmda", 1), ("proxsgd", 0), ("dense", 0)]
    runs = [fake_run(home / f"{method}-{seed}", method, seed, layers=16) for method, seed in kinds]
    return runs, write_report(runs, home / "report.html")


def test_means_and_deviations_are_those_of_the_last_looks(several: tuple[list[Path], Path]) -> None:
    runs, page = several
    row = Text(page.read_text()).row("RAMDA")
    looks = [last_look(run)["structured"] for run in runs[:3]]
    for cell, paper, name, published in ((2, 3, "accuracy", 92.89), (4, 5, "structure", 86.31)):
        values = [look[name] for look in looks]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        assert row[cell] == f"{mean:.2f} ± {deviation:.2f} %"
        assert row[paper] == f"{published} ({mean - published:+.2f})".replace("-", "−")
    assert row[1] == "3"


def test_one_run_has_no_deviation_and_dense_no_structure(several: tuple[list[Path], Path]) -> None:
    runs, page = several
    row = Text(page.read_text()).row("dense")
    assert row[2] == f"{last_look(runs[-1])['weights']['accuracy']:.2f} %"
    assert row[4:] == ["–", "–"]


def test_means_leave_out_what_is_not_finished(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / str(seed), seed=seed, status="running" if seed else "finished") for seed in range(3)]
    row = Text(page_of(tmp_path, *runs)).row("RAMDA")
    assert row[1] == "3, 1 finished"
    assert row[2] == f"{last_look(runs[0])['structured']['accuracy']:.2f} %"


def look_of(step: int, structured: float | None, weights: float = 0.0) -> dict[str, Any]:
    point = None if structured is None else {"structure": structured}
    return {"step": step, "weights": {"structure": weights}, "structured": point}


@pytest.mark.parametrize(
    ("pick", "structures", "step"),
    [
        ("last", [3.0, 9.0, 5.0], 3),
        ("most-structured", [3.0, 9.0, 5.0], 2),
        ("most-structured", [9.0, 9.0, 5.0], 2),  # of equals the latest
        ("most-structured", [9.0, math.nan, 5.0], 1),
        ("most-structured", [math.nan, math.nan], 2),
        ("most-structured", [None, None, None], 3),  # a dense run, whose weights have no zero
    ],
)
def test_the_picked_look(pick: str, structures: list[float | None], step: int) -> None:
    looks = [look_of(index, value) for index, value in enumerate(structures, 1)]
    assert picked(looks, pick)["step"] == step


def test_the_weights_are_picked_from_where_there_is_no_structured_point() -> None:
    assert picked([look_of(1, None, 7.0), look_of(2, None, 8.0), look_of(3, 2.0, 9.0)], "most-structured")["step"] == 2
    assert picked([{"step": 1, "weights": {}}, {"step": 2, "weights": {}}], "most-structured")["step"] == 2
    with pytest.raises(ValueError, match="'best'"):
        picked([look_of(1, 1.0)], "best")


def test_numbers_of_the_most_structured_epoch(tmp_path: Path) -> None:
    """One peak of structure amid the run: everything that is one number a run comes from it."""
    info = {"pick": "most-structured", "structure": "element_sparsity"}
    runs = [fake_run(tmp_path / str(seed), seed=seed, info=info) for seed in range(2)]
    runs.append(fake_run(tmp_path / "dense", "dense", info=info))
    for run, accuracy in zip(runs[:2], (60.5, 61.5), strict=True):
        peak = {"accuracy": accuracy, "loss": 1.0, "structure": 99.25}
        change_look(run, 11, structured=peak, weights={"accuracy": accuracy - 10, "loss": 2.0, "structure": 0.0})
    page = page_of(tmp_path, *runs)
    mean = Text(page).row("RAMDA")
    assert (mean[2], mean[4]) == ("61.00 ± 0.71 %", "99.25 ± 0.00 %")
    assert mean[3] == "92.89 (−31.89)"
    assert mean[6] == "the most structured epoch"
    row = Text(page).row("RAMDA, seed 0")
    assert (row[2], row[3], row[4], row[5]) == ("30", "60.50 %", "50.50 %", "99.25 %")
    assert row[-1] == "the most structured epoch, 12"
    assert Text(page).row("dense")[6] == "the last epoch"
    assert card(page, "highest zero weights") == ("99.25 %", "RAMDA, mean of 2 seeds")
    assert "RAMDA, seed 0: 60.5 at 99.25 %" in page  # a point of the trade-off
    alone = page_of(tmp_path, runs[0])
    assert card(alone, "accuracy")[0] == "60.50 %"
    assert card(alone, "accuracy")[1].startswith("at the structured point of the most structured epoch, 12;")
    assert "most structured" not in page_of(tmp_path, fake_run(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("measure", "name", "told", "changing"),
    [
        ("weighted_group_sparsity", "weighted group sparsity", "the share of weights in groups", "groups"),
        ("low_rank_level", "low-rank level", "1 − Σ rank / Σ full rank", "ranks"),
        ("element_sparsity", "zero weights", "the share of single weights", "weights"),
    ],
)
def test_each_measure_has_its_name(tmp_path: Path, measure: str, name: str, told: str, changing: str) -> None:
    run = fake_run(tmp_path / "run", epochs=4, info={"structure": measure})
    change_look(run, -1, flipped=2, groups=161)
    page = page_of(tmp_path, run)
    assert f"{name.capitalize()}: {told}" in page
    assert card(page, name)[1].startswith(f"not stable: 2 of 161 {changing} changed at the last look;")
    assert f"{changing} that changed</text>" in page
    both = page_of(tmp_path, run, fake_run(tmp_path / "other", "rmda", epochs=4, info={"structure": measure}))
    assert Text(both).row("RAMDA, seed 0")[6] == f"not stable: 2 of 161 {changing} changed at the last look"
    assert Text(both).row("RMDA, seed 0")[6] == "since epoch 2"  # 400 exp(-12 · 2/4) rounds to 1, and at 3/4 to 0


def test_a_run_that_did_not_compare_structures_says_nothing_of_stability(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", epochs=2)
    for index in range(2):
        change_look(run, index, flipped=None)
    assert card(page_of(tmp_path, run), "weighted group sparsity")[1].startswith("–;")


def test_methods_are_called_as_the_paper_does(several: tuple[list[Path], Path], tmp_path: Path) -> None:
    page = several[1].read_text()
    # as the name of a line, a point, a row or a legend; commands and settings keep what was typed
    assert not re.search(r"(?<![\w-])(ramda|rmda|proxsgd)(, (mean|seed|paper)|</th>|</li>)", page)
    for name in ("RAMDA", "RMDA", "ProxSGD", "dense"):
        assert f'aria-hidden="true"></span>{name}</li>' in page
    alone = page_of(tmp_path, fake_run(tmp_path / "own", epochs=4, info={"method": "my [way]"}))
    assert "my [way], seed 0: finished" in alone


def test_the_best_structured_quality_is_called_so(several: tuple[list[Path], Path], tmp_path: Path) -> None:
    runs, path = several
    page = path.read_text()
    means = {
        name: statistics.mean(last_look(run)["structured"]["accuracy"] for run in runs if run.name.startswith(key))
        for name, key in (("RAMDA", "ramda"), ("RMDA", "rmda"), ("ProxSGD", "proxsgd"))
    }
    best = max(means, key=lambda name: means[name])
    big, note = card(page, "best structured accuracy")
    assert big == f"{means[best]:.2f} %"
    assert note.startswith(f"{best}, ")
    assert "best accuracy" not in page
    dense = [fake_run(tmp_path / str(seed), "dense", seed, epochs=4) for seed in range(2)]
    values = [last_look(run)["weights"]["accuracy"] for run in dense]
    assert card(page_of(tmp_path, *dense), "best accuracy") == (
        f"{statistics.mean(values):.2f} %",
        "dense, mean of 2 seeds",
    )


def test_the_page_says_how_batch_norm_was_treated(tmp_path: Path) -> None:
    told = (
        "the structured point is evaluated with batch norm’s statistics taken anew, the weights with their running ones"
    )
    assert told in page_of(tmp_path, fake_run(tmp_path / "run", epochs=4))
    assert told not in page_of(tmp_path, fake_run(tmp_path / "dense", "dense", epochs=4))


@pytest.mark.parametrize("title", ["", " ", None])
def test_a_run_without_a_title_has_its_recipe_as_one(tmp_path: Path, title: str | None) -> None:
    run = fake_run(tmp_path / "run", epochs=4, info={"recipe": "my <own>", "title": title})
    if title is None:
        facts = json.loads((run / "run.json").read_text())
        del facts["title"]
        (run / "run.json").write_text(json.dumps(facts))
    page = page_of(tmp_path, run)
    assert "<h1>my &lt;own&gt;</h1>" in page
    assert "<title>my &lt;own&gt;</title>" in page


def test_stable_since_is_the_last_change(tmp_path: Path) -> None:
    page = page_of(tmp_path, fake_run(tmp_path / "run", epochs=30))
    flips = [json.loads(line)["flipped"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last_change = max(epoch for epoch, flipped in enumerate(flips, 1) if flipped)
    assert f"stable since epoch {last_change};" in page


def test_size_before_and_after(tmp_path: Path) -> None:
    page = page_of(tmp_path, fake_run(tmp_path / "run"))
    assert "80.2\u00a0MB\u00a0→\u00a08.4\u00a0MB" in page
    assert "9.54 times smaller" in page  # 80.16 / 8.4 = 9.543
    assert Text(page).row("shrunk") == ["shrunk", "92.90 %", "–", "2.1 M", "8.4 MB", "0.9 ms"]


@pytest.mark.parametrize(
    ("layer", "share", "told"),
    [
        ({"groups": 8, "zero_groups": 2}, "25 %", "2 of 8 groups zero"),
        ({"groups": 1, "zero_groups": 0, "rank": 10, "full_rank": 40}, "75 %", "rank 10 of 40"),
        ({"groups": 0, "zero_groups": 0}, "0 %", "0 of 0 groups zero"),
    ],
)
def test_layers_by_groups_or_by_rank(tmp_path: Path, layer: dict[str, Any], share: str, told: str) -> None:
    run = fake_run(tmp_path / "run")
    (run / "structure.json").write_text(json.dumps([{"name": "fc", "shape": [40, 64], "elements": 2560} | layer]))
    page = page_of(tmp_path, run)
    assert Text(page).row("fc 40×64") == ["fc 40×64", "2.56 k", share]
    assert f'title="seed 0: {told}"' in page


def test_settings_that_differ_stand_apart(several: tuple[list[Path], Path]) -> None:
    page = several[1].read_text()
    assert "<mark>0.1</mark>" in page  # RMDA's learning rate
    row = Text(page).row("optimizer.lr")
    assert row[1:] == ["0.01", "0.01", "0.01", "0.1", "0.1", "0.01", "0.01"]
    assert Text(page).row("optimizer.momentum") == ["optimizer.momentum", "0.99"]  # one value for all
    assert Text(page).row("milestones") == ["milestones", "10, 20"]


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", status="running", shrunk=False, info={"total_steps": 391 * 60})
    (run / "structure.json").unlink()
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 12121, "epoch": 31.0, "weigh')
    page = page_of(tmp_path, run)
    assert "still running at epoch 30, 50% of the way" in page
    assert "Layer by layer" not in page
    assert "Dense, structured, shrunk" not in page


def test_a_million_evaluations_are_thinned_but_for_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "MOST", 10)
    lines = [
        {"step": n, "epoch": n, "weights": {"structure": 50.0 if n == 3 else 0.0}, "flipped": int(n == 77)}
        for n in range(1, 1000)
    ]
    lines[500]["train_loss"] = math.nan
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = looks.read_looks(path, finished=True)
    assert {3, 77, 501, 999} <= {look.step for look in found}
    assert len(found) < 20
    assert picked([look.model_dump() for look in found], "most-structured")["step"] == 3
    path.write_text(path.read_text() + '{"step": 1000, "ep')  # being written
    assert looks.read_looks(path, finished=False) == found
    path.write_text(path.read_text() + "\n" + json.dumps(lines[0]) + "\n")
    with pytest.raises(Problem, match=r"line 1000 cannot be read.*delete this line"):
        looks.read_looks(path, finished=False)


def test_a_run_that_diverged_is_named(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", epochs=12)
    looks = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for look in looks[8:]:
        look |= {"train_loss": math.nan, "weights": {"accuracy": math.nan}, "structured": {"accuracy": math.nan}}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, looks)))
    for runs in ([run], [run, fake_run(tmp_path / "other", "rmda", epochs=12)]):
        page = page_of(tmp_path, *runs)
        assert "not a finite number at 4 looks, first at epoch 9" in page
        assert not re.search(r"\bnan\b", page, flags=re.IGNORECASE)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_has_just_begun(tmp_path: Path, epochs: int) -> None:
    page = page_of(tmp_path, fake_run(tmp_path / "run", epochs=epochs, status="running"))
    assert page.count('<svg class="plot"') == 4  # quality, structure, stability, loss; no zoom yet


def test_perplexity_and_rank(tmp_path: Path) -> None:
    info = {"metric": "perplexity", "better": "min", "structure": "low_rank_level", "paper": None}
    runs = []
    for method, value in (("ramda", 27.5), ("rmda", 26.25)):
        runs.append(fake_run(tmp_path / method, method, info=info))
        looks = [json.loads(line) for line in (runs[-1] / "metrics.jsonl").read_text().splitlines()]
        for look in looks:
            look["weights"]["perplexity"] = look["structured"]["perplexity"] = value * 50 / look["epoch"]
        looks[-1]["structured"]["perplexity"] = value
        (runs[-1] / "metrics.jsonl").write_text("\n".join(map(json.dumps, looks)))
    page = page_of(tmp_path, *runs)
    assert 'best structured perplexity</dt><dd class="big">26.25</dd><dd class="note">RMDA, seed 0' in page
    assert "low-rank level" in page
    assert len(Text(page).row("RMDA")) == 4  # method, seeds, perplexity, rank: the paper has no numbers
    assert "paper" not in page


def test_everything_from_files_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>\'&'
    info = {"title": evil, "method": evil, "command": evil, "settings": {evil: evil}, "environment": {evil: evil}}
    runs = [fake_run(tmp_path / f"run{seed}", seed=seed, info=info) for seed in range(2)]
    for run in runs:
        (run / "structure.json").write_text(
            json.dumps([{"name": evil, "shape": [1], "groups": 1, "zero_groups": 0, "elements": 1}])
        )
        (run / "shrunk.json").write_text(
            json.dumps({"rows": [{"name": evil, "parameters": 1, "bytes": 1}], "device": evil})
        )
    for chosen in (runs[:1], runs):
        page = page_of(tmp_path, *chosen)
        assert "<script" not in page
        assert "&lt;script&gt;" in page
    # not one of them became an element or an attribute
    seen = ask(tmp_path / "report.html", "() => document.querySelectorAll('main script').length")
    assert (seen["answer"], seen["errors"]) == (0, [])


BINARY = bytes(range(128, 256))
DEEP = b"[" * 200_000


def damaged(run: Path, name: str, content: bytes | None) -> None:
    """Replace a file, or delete it."""
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("run.json", None, "is not a run directory: it has no run.json"),
        ("run.json", b'{"recipe": ', "run.json cannot be read: Expecting value"),
        ("run.json", b"", "run.json cannot be read: Expecting value"),
        ("run.json", b"[]", "run.json cannot be read: the whole: Input should be a valid dictionary"),
        ("run.json", b"{}", "run.json cannot be read: recipe: Field required"),
        ("run.json", BINARY, "run.json cannot be read: 'utf-8' codec can't decode"),
        ("run.json", DEEP, "run.json cannot be read: maximum recursion depth exceeded"),
        ("metrics.jsonl", None, "is finished, and metrics.jsonl is empty or gone: restore it"),
        ("metrics.jsonl", b'{"step": 1, "ep', "is finished, and metrics.jsonl is empty or gone: restore it"),
        ("metrics.jsonl", BINARY, "is finished, and metrics.jsonl is empty or gone: restore it"),
        ("structure.json", b'[{"name": "fc"}]', "structure.json cannot be read: 0.shape: Field required"),
        ("structure.json", b"{}", "structure.json cannot be read: the whole: Input should be a valid list"),
        ("structure.json", b"[1]", "structure.json cannot be read: 0: Input should be a valid dictionary"),
        ("structure.json", b"", "structure.json cannot be read: Expecting value"),
        ("structure.json", BINARY, "structure.json cannot be read: 'utf-8' codec can't decode"),
        ("shrunk.json", b"[]", "shrunk.json cannot be read: the whole: Input should be a valid dictionary"),
        ("shrunk.json", b"null", "shrunk.json cannot be read: the whole: Input should be a valid dictionary"),
        ("shrunk.json", b'{"rows": [{}]}', "shrunk.json cannot be read: rows.0.name: Field required"),
        ("shrunk.json", BINARY, "shrunk.json cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    run = fake_run(tmp_path / "run", epochs=4)
    damaged(run, name, content)
    assert told in problem(run, tmp_path / "report.html")


@pytest.mark.parametrize(
    ("name", "value"), [("seed", "many"), ("structure", "beauty"), ("pick", "best"), ("paper", {"quality": math.nan})]
)
def test_a_wrong_value_is_named(tmp_path: Path, name: str, value: Any) -> None:
    run = fake_run(tmp_path / "run", epochs=4, info={name: value})
    assert f"run.json cannot be read: {name}" in problem(run, tmp_path / "report.html")


@pytest.mark.parametrize(
    "line",
    [b'{"step": 391, "epo', b"garbage", b"[1, 2]", b"7", b"null", b"{}", BINARY, DEEP,
     b'{"step": 1, "epoch": NaN, "weights": {}}', b'{"step": 1, "epoch": 1, "weights": {"accuracy": "good"}}'],
)  # fmt: skip
def test_damage_amid_the_metrics_is_one_line_that_names_it(tmp_path: Path, line: bytes) -> None:
    run = fake_run(tmp_path / "run", epochs=4)
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    lines[1] = line
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert "metrics.jsonl, line 2 cannot be read" in problem(run, tmp_path / "report.html")


def problem(run: Path, out: Path) -> str:
    """What is said of a run that cannot be shown."""
    with pytest.raises(Problem) as caught:
        write_report([run], out)
    assert str(run) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    return str(caught.value)


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    one = fake_run(tmp_path / "one", epochs=4)
    other = fake_run(tmp_path / "other", epochs=4, info={"metric": "loss"})
    with pytest.raises(Problem, match="their metric is 'accuracy' and 'loss'"):
        write_report([one, other], tmp_path / "report.html")
    with pytest.raises(Problem, match="no run directory given"):
        write_report([], tmp_path / "report.html")


def test_recipes_that_measure_alike_share_a_page(tmp_path: Path) -> None:
    one = fake_run(tmp_path / "one", epochs=4)
    other = fake_run(tmp_path / "other", epochs=4, info={"recipe": "resnet50-cifar10", "title": "ResNet50 on CIFAR-10"})
    page = page_of(tmp_path, one, other)
    assert "<h1>VGG19 on CIFAR-10 and ResNet50 on CIFAR-10</h1>" in page
    assert Text(page).row("resnet50-cifar10 · RAMDA")[1] == "1"


def test_a_page_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    out.write_text("before")
    run = fake_run(tmp_path / "run", epochs=4)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", refuse)
        with pytest.raises(Problem, match="cannot be written: No space left on device"):
            write_report([run], out)
    assert out.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "run"}
    with pytest.raises(Problem, match="is a directory: name a file"):
        write_report([run], tmp_path)
    assert write_report([run], out).read_text().startswith("<!doctype html>")


def test_the_same_runs_give_the_same_page(several: tuple[list[Path], Path], tmp_path: Path) -> None:
    runs, page = several
    assert write_report(runs, tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_ten_long_runs_stay_under_a_megabyte(tmp_path: Path) -> None:
    # ten names, so that no two lines are drawn as one
    runs = [fake_run(tmp_path / str(k), epochs=1000, layers=54, info={"method": f"method {k}"}) for k in range(10)]
    assert write_report(runs, tmp_path / "report.html").stat().st_size < 1_000_000


def test_seeds_are_their_mean_in_a_band(several: tuple[list[Path], Path]) -> None:
    runs, page = several
    looks = [json.loads((run / "metrics.jsonl").read_text().splitlines()[9])["structured"] for run in runs[:3]]
    values = [look["accuracy"] for look in looks]
    told = f"RAMDA, mean of 3 seeds: {statistics.mean(values):.4g} ({min(values):.4g} to {max(values):.4g}) %"
    strips = re.findall(r"<title>epoch 10\n(.*?)</title>", page.read_text(), flags=re.DOTALL)
    assert told in strips[0].split("\n")


def test_seeds_of_unlike_length_stay_apart(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / str(epochs), seed=epochs, epochs=epochs) for epochs in (8, 12)]
    page = page_of(tmp_path, *runs)
    assert "mean of 2 seeds:" not in page
    assert {"RAMDA, seed 8", "RAMDA, seed 12"} <= {line.split(":")[0] for line in page.splitlines()}


def test_the_same_run_twice_is_one(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", epochs=4)
    assert page_of(tmp_path, run, run.parent / "." / "run") == page_of(tmp_path, run)


def test_ticks_keep_their_digits() -> None:
    x = np.arange(1.0, 11.0)
    drawn = lines(Style("k", "loss", "", "log"), [Line("a", 0, x, 2.0 / x**2)])
    ticks = re.findall(r"<text[^>]*>([\d.]+)</text>", drawn)
    assert {"0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"} <= set(ticks)


def ticks(drawn: str) -> set[float]:
    return {float(tick) for tick in re.findall(r"<text[^>]*>([\d.e+-]+)</text>", drawn)}


def test_a_perplexity_that_explodes_at_first_leaves_the_frame() -> None:
    x = np.arange(1.0, 5.0)
    wild, tame = np.array([1e12, 300.0, 200.0, 150.0]), np.array([260.0, 200.0, 150.0, 120.0])
    data = [Line("a", 0, x, wild), Line("b", 1, x, tame)]
    drawn = lines(Style("k", "perplexity", "", "log", frame=100), data)
    assert {200, 500, 10000} <= ticks(drawn)
    assert max(ticks(drawn)) <= 15000
    assert "cut off above 15,000" in drawn
    whole = lines(Style("k", "loss", "", "log"), data)
    assert "cut off" not in whole
    assert len([tick for tick in ticks(whole) if tick >= 1e3]) >= 3  # labels, however many decades there are


def test_the_strips_cover_the_plot() -> None:
    x = np.arange(1.0, 11.0)
    drawn = lines(Style("k", "accuracy", ""), [Line("a", 0, x, x * 1000)])
    boxes = re.findall(r'<rect[^>]*?x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn)
    area = re.search(
        r'<clipPath id="k-[^"]*">\s*<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn
    )
    assert area
    left, top, width, height = map(float, area.groups())
    strips = [tuple(map(float, box)) for box in boxes if box != area.groups()]
    assert len(strips) == 10
    assert strips[0][0] == pytest.approx(left, abs=0.2)
    assert strips[-1][0] + strips[-1][2] == pytest.approx(left + width, abs=0.2)
    assert all(
        strip[1] == pytest.approx(top, abs=0.2) and strip[3] == pytest.approx(height, abs=0.2) for strip in strips
    )


@pytest.mark.parametrize(
    ("rates", "falls"),
    [
        ([[1, 1, 0.1, 0.1, 0.01]], (2.0, 4.0)),
        ([[1, 0.8, 0.6, 0.4, 0.3]], ()),
        ([[1, 1, 0.1, 0.1, 0.01], [1, 1, 0.1]], (2.0, 4.0)),  # the second has not come to the second fall
        ([[1, 1, 0.1, 0.1, 0.1], [1, 1, 1, 1, 1]], ()),
    ],
)
def test_stages_are_where_the_learning_rate_falls(rates: list[list[float]], falls: tuple[float, ...]) -> None:
    runs = []
    for index, own in enumerate(rates):
        looks = [Look(step=k, epoch=float(k), lr=lr, weights={}) for k, lr in enumerate(own, 1)]
        info = Info(recipe="r", title="t", method="m", seed=index, status="running", metric="loss", better="min",
                    structure="low_rank_level", total_steps=5)  # fmt: skip
        runs.append(Run(path=Path(str(index)), info=info, looks=looks, layers=[], shrunk=None))
    assert stages(runs) == falls


def test_stages_fall_between_looks() -> None:
    """Not at the look before: every 5 epochs of 10 steps, milestones at 12, 20, 22 and 24 epochs and one to come."""
    rates = {5: 1.0, 10: 1.0, 15: 0.1, 20: 0.1, 25: 1e-4, 30: 1e-4}
    looks = [Look(step=10 * epoch, epoch=float(epoch), lr=lr, weights={}) for epoch, lr in rates.items()]
    info = Info(recipe="r", method="m", seed=0, status="running", metric="loss", better="min", milestones=[
                120, 200, 220, 240, 400], structure="low_rank_level", total_steps=500)  # fmt: skip
    run = Run(path=Path("0"), info=info, looks=looks, layers=[], shrunk=None)
    assert stages([run]) == (12.0, 20.0, 22.0, 24.0)


def test_thinning_keeps_the_ends_and_the_spikes() -> None:
    x = np.arange(5000.0)
    y = np.sin(x / 300)
    y[[777, 4321]] = 9, -9
    kept = thin(x, y, 100)
    assert len(kept) <= 100
    assert {0, 777, 4321, 4999} <= set(kept.tolist())
    assert thin(x[:50], y[:50], 100).tolist() == list(range(50))


LOOK = """() => ({
  plots: [...document.querySelectorAll("svg.plot")].map((plot) => {
    const box = plot.getBoundingClientRect();
    return {width: box.width, height: box.height, label: plot.getAttribute("aria-label"),
            strips: plot.querySelectorAll(".strip, .spot").length,
            lines: [...plot.querySelectorAll("path")].filter((path) => path.getBBox().width > box.width / 4).length};
  }),
  ids: [...document.querySelectorAll("[id]")].map((element) => element.id),
  lost: [...document.querySelectorAll("svg.plot use")].filter((use) =>
    !document.getElementById(use.getAttribute("xlink:href").slice(1))).length,
  page: getComputedStyle(document.body).backgroundColor,
  text: getComputedStyle(document.querySelector("svg.plot text")).fill,
  font: getComputedStyle(document.querySelector("svg.plot text")).fontFamily,
  broken: [...document.querySelectorAll(".big")].filter((big) => {
    const range = document.createRange();
    range.selectNodeContents(big);
    return range.getClientRects().length !== 1 || big.scrollWidth > big.clientWidth;
  }).map((big) => big.textContent),
  overflow: document.documentElement.scrollWidth - innerWidth,
  headers: [...document.querySelectorAll("th")].every((cell) => cell.scope),
  headings: [...document.querySelectorAll("h1, h2, h3")].map((heading) => heading.textContent),
})"""


@pytest.mark.parametrize(
    ("dark", "width", "page_colour", "text_colour"),
    [
        (False, 1280, "rgb(247, 248, 245)", "rgb(91, 102, 96)"),
        (True, 1280, "rgb(20, 24, 22)", "rgb(163, 174, 167)"),
        (False, 500, "rgb(247, 248, 245)", "rgb(91, 102, 96)"),
        (False, 800, "rgb(247, 248, 245)", "rgb(91, 102, 96)"),
    ],
    ids=["light", "dark", "phone", "tablet"],
)
def test_in_a_browser(
    several: tuple[list[Path], Path], dark: bool, width: int, page_colour: str, text_colour: str
) -> None:
    seen = ask(several[1], LOOK, dark=dark, width=width)
    assert seen["errors"] == []
    assert seen["console"] == []
    assert seen["requests"] == []
    answer = seen["answer"]
    assert len(answer["plots"]) == 7  # quality and structure with their zooms, trade-off, stability, loss
    for plot in answer["plots"]:
        assert plot["width"] > 300
        assert plot["height"] > 200
        assert plot["strips"] >= 6
        assert re.search("RAMDA, (mean of 3 seeds|seed 2)", plot["label"])
    assert answer["lost"] == 0
    assert len(set(answer["ids"])) == len(answer["ids"])
    assert (answer["page"], answer["text"]) == (page_colour, text_colour)
    assert "system-ui" in answer["font"]
    assert answer["overflow"] <= 0
    assert answer["broken"] == []  # each big number stands in one line
    assert answer["headers"]
    assert {"Predictive quality", "Structure", "Layer by layer", "Stability", "Settings"} <= set(answer["headings"])


def test_the_page_names_no_address(several: tuple[list[Path], Path]) -> None:
    page = several[1].read_text()
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert "<script" not in page


def test_the_browser_sees_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    body = "<img src='http://127.0.0.1:9/none.png'><script>console.error('told'); lost()</script>"
    page.write_text(f"<html><head></head><body>{body}</body></html>")
    seen = ask(page, "() => 1")
    assert any("lost is not defined" in error for error in seen["errors"])
    assert any("none.png" in request for request in seen["requests"])
    assert any("told" in line for line in seen["console"])


def test_the_methods_settings_stand_beside_the_others(tmp_path: Path) -> None:
    paths = [fake_run(tmp_path / method, method, 0, 3) for method in ("ramda", "rmda")]
    for path, method, lr in zip(paths, ("ramda", "rmda"), (0.25, 0.75), strict=True):
        facts = json.loads((path / "run.json").read_text())
        facts["settings"] = {"batch": 128, "methods": {method: {"lr": lr}}}
        (path / "run.json").write_text(json.dumps(facts))
    page = write_report(paths, tmp_path / "page.html").read_text()
    assert "<code>lr</code>" in page
    assert "methods." not in page
    assert "<mark>0.25</mark>" in page
