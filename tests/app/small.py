"""The recipes made small enough for a test: 20 steps of a narrow network on tiny data."""

from __future__ import annotations

from pathlib import Path

import tiny

from espalier.app import cookbook
from espalier.app.run import Job

SHORT = [
    "unit=steps",
    "length=20",
    "milestones=[6,12]",
    "evaluate_every=5",
    "recalibrate=2",
    "batch=8",
    "eval_batch=16",
]
NARROW = {
    "mnist-logreg": [],
    "vgg19-cifar10": ["model.width=0.0625"],
    "vgg19-cifar100": ["model.width=0.0625"],
    "resnet50-cifar10": ["model.width=4"],
    "resnet50-cifar100": ["model.width=4"],
    "resnet50-imagenet": ["methods.rmda.lr=0.1", "model.width=4", "data.size=32", "data.workers=0"],
    "transformerxl-wt103": [
        "model.layers=2", "model.d_model=16", "model.heads=2", "model.d_head=8", "model.d_inner=32", "model.memory=8",
        "model.cutoffs=[5,12]", "data.length=8", "batch=4", "eval_batch=4",
    ],
    "tacotron2-ljspeech": [
        "model.embedding=8", "model.encoder_channels=8", "model.prenet=8", "model.attention_rnn=8",
        "model.decoder_rnn=8", "model.attention=8", "model.location_filters=4", "model.location_kernel=5",
        "model.postnet_channels=8", "batch=4", "data.hop=1024",
    ],
    "mlp-fashionmnist": ["model.sizes=[784,16,12,10]"],
    "vit-mim-cifar10": ["model.hidden=16", "model.layers=2", "model.heads=2", "model.inner=32"],
    "digits": ["model.width=4"],
}  # fmt: skip


def job(
    name: str, where: Path, *, method: str = "", changes: tuple[str, ...] = (), seed: int = 0, out: str = "run"
) -> Job:
    """A short run of a recipe on its tiny data, which are made under `where`."""
    loaded = cookbook.load(name, [*SHORT, *NARROW[name], *changes])
    method = method or next(iter(loaded.methods))
    data = tiny.make(loaded.data.name, where / "data")
    return Job(name, loaded.only(method), method, seed, where / out, data, device="cpu", command="a test")
