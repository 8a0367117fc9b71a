"""A model that is loaded computes what the saved one did, or it is refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import espalier
from espalier.compact.probe import RECORD
from espalier.compact.restore import load
from espalier.compact.store import digest, save

QUICK: dict[str, Any] = {"latency": False, "gather": "never", "low_rank": "never"}


class Attention(nn.Module):
    """Its number of heads is kept where a case says."""

    def __init__(self, where: str = "_n_heads") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.proj = (nn.Linear(32, 32) for _ in range(4))
        self.where = where
        if where == "config":
            self.config = SimpleNamespace(num_heads=4, name="x")
        else:
            setattr(self, where, 4)

    def forward(self, x: Tensor) -> Tensor:
        n = self.config.num_heads if self.where == "config" else getattr(self, self.where)
        q, k, v = (f(x).view(*x.shape[:2], n, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


def two_heads(model: Any) -> Any:
    with torch.no_grad():
        model.proj.weight[:, :16] = 0
    return model


class Net(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.run, self.power = nn.Linear(6, 16), nn.Linear(16, 4), run, 2.0
        with torch.no_grad():
            self.second.weight[:, :8] = 0

    def forward(self, x: Tensor) -> Any:
        y = self.second(self.first(x).relu() ** self.power)
        return y if self.run is None else self.run(self, y)


def shrunk(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    return espalier.shrink(model, inputs or torch.randn(3, 6), **QUICK | options).model


@pytest.mark.parametrize("where", ["num_heads", "_n_heads", "config"])
def test_numbers_of_heads_come_back_wherever_they_are(where: str, tmp_path: Path) -> None:
    small = shrunk(two_heads(Attention(where)), torch.randn(2, 6, 32))
    assert small.proj.in_features == 16
    save(small, tmp_path / "m")
    dense = Attention(where)
    back = load(tmp_path / "m", lambda: dense)
    x = torch.randn(2, 6, 32)
    assert torch.equal(back(x), small(x))
    if where == "config":
        assert (dense.config.num_heads, back.config.num_heads) == (4, 2)
    # what came back is saved as well as what was saved, and so is a part of it
    save(back, tmp_path / "m")
    assert torch.equal(load(tmp_path / "m", partial_of(where))(x), small(x))
    save(nn.Sequential(back), tmp_path / "n")
    assert torch.equal(load(tmp_path / "n", lambda: nn.Sequential(Attention(where)))(x), small(x))


def partial_of(where: str) -> Callable[[], nn.Module]:
    return lambda: Attention(where)


def other_power() -> nn.Module:
    model = Net()
    model.power = 3.0
    return model


def failing() -> nn.Module:
    def fail(net: Any, y: Tensor) -> Tensor:
        raise KeyError("no such key")

    return Net(fail)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (other_power, r"output differs by .* of its largest entry, and rounding allows 1e-07"),
        (lambda: Net(lambda net, y: y[:1]), r"output has the shape \[1, 4\], not \[2, 4\]"),
        (lambda: Net(lambda net, y: (y,)), r"output has the shape None, not \[2, 4\]"),
        (failing, "fails on them with KeyError"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(build: Any, words: str, tmp_path: Path) -> None:
    save(shrunk(Net()), tmp_path)
    load(tmp_path, Net)
    with pytest.raises(ValueError, match=f"does not compute what the saved one did: .*{words}.*probe=False"):
        load(tmp_path, build)
    load(tmp_path, build, probe=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_dtype_has_a_probe(dtype: torch.dtype, tmp_path: Path) -> None:
    save(shrunk(Net().to(dtype), torch.randn(3, 6, dtype=dtype)), tmp_path)
    load(tmp_path, lambda: Net().to(dtype))
    with pytest.raises(ValueError, match="differs by"):
        load(tmp_path, lambda: other_power().to(dtype))


def test_a_model_that_was_cast_since_has_a_probe(tmp_path: Path) -> None:
    save(shrunk(Net()).bfloat16(), tmp_path)
    load(tmp_path, lambda: Net().bfloat16())


def test_no_data_of_the_user_are_stored(tmp_path: Path) -> None:
    x = torch.rand(5, 6) + 100
    x[3, 3] = 12345.0
    save(shrunk(Net(), x), tmp_path)
    (given,) = (t for name, t in load_file(tmp_path / "probe.safetensors").items() if name.startswith("input"))
    assert given.shape == (2, 6)
    assert not set(given.flatten().tolist()) & set(x.flatten().tolist())


class Words(nn.Module):
    """Text with lengths, which must be in order."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(9, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, ids: Tensor, lengths: Tensor, flag: bool = False, more: Any = None) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True)
        y: Tensor = self.head(self.lstm(packed)[1][0][-1])
        return y


def test_inputs_of_several_kinds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids, lengths = torch.randint(9, (4, 7)), torch.tensor([7, 5, 3, 1])
    call = {"ids": ids, "lengths": lengths, "flag": True, "more": [None, (torch.ones(2, 2) > 0, 3)]}
    save(espalier.shrink(Words(), call, **QUICK).model, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["probe"]["outputs"] == [["", [2, 2]]]
    load(tmp_path, Words)


def test_inputs_given_to_save_are_stored_as_they_are(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(3, 6)
    save(model, tmp_path / "without")
    assert not (tmp_path / "without" / "probe.safetensors").exists()
    save(model, tmp_path / "with", x)
    assert torch.equal(load_file(tmp_path / "with" / "probe.safetensors")["input.0"], x)
    load(tmp_path / "with", Net)
    with pytest.raises(ValueError, match="differs by"):
        load(tmp_path / "with", other_power)
    for inputs, words in ((torch.randn(3, 7), "fails on them"), (("text",), "an input is a str")):
        with pytest.raises(ValueError, match=f"no probe can be stored with these example_inputs: .*{words}"):
            save(model, tmp_path / "bad", inputs)
    assert not (tmp_path / "bad").exists()


LEFT_OUT: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "random": (Net(lambda net, y: y + torch.rand(())), (torch.randn(3, 6),), "outputs are random"),
    "large": (nn.Linear(2, 2), (torch.randn(1, 2**20, 2),), "2,097,152 entries, and 1,048,576 are stored at most"),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_probe_that_is_left_out_is_told(kind: str, tmp_path: Path) -> None:
    model, inputs, words = LEFT_OUT[kind]
    small = shrunk(model, *inputs)
    with pytest.warns(UserWarning, match=f"saved without a probe, because .*{words}"):
        save(small, tmp_path)
    assert words in json.loads((tmp_path / "manifest.json").read_text())["probe"]["left_out"]
    load(tmp_path, lambda: copy.deepcopy(model))


def test_what_shrink_leaves_for_save_is_light(tmp_path: Path) -> None:
    small = shrunk(Net())
    assert small.state_dict().keys() == Net().state_dict().keys()
    held = vars(copy.deepcopy(small))[RECORD]
    assert json.loads(json.dumps(held)) == held
    assert b"espalier.compact" not in pickle.dumps(held)
    again = shrunk(pickle.loads(pickle.dumps(small)))
    save(again, tmp_path)
    load(tmp_path, Net)


HUGE, FAR = (
    {"inputs": ["list", [["tuple", [["normal", "float32", [size], mean, 1.0]]], ["dict", []]]]}
    for size, mean in ((10**12, 0.0), (2, 10**400))
)
DAMAGED = [
    *({"inputs": ["os", "x"]}, {"inputs": ["list", 3]}, HUGE, FAR, {"outputs": [["", [2, 4]], ["x", []]]}),
    *({"dtype": "no type"}, {"dtype": "load"}),
]


def test_a_damaged_probe_is_refused(tmp_path: Path) -> None:
    save(shrunk(Net()), tmp_path)
    file = tmp_path / "probe.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"probe\.safetensors: changed since it was saved"):
        load(tmp_path, Net)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["probe"]["sha256"] = digest(file)
    for spoiled in DAMAGED:
        text = json.dumps(manifest | {"probe": manifest["probe"] | spoiled})
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="Copy or save the model again"):
            load(tmp_path, Net)


def test_a_folder_of_the_first_format_loads(tmp_path: Path) -> None:
    save(Net(), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["probe"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))
    load(tmp_path, Net)
