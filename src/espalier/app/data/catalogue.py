"""The data sets that can be asked for by name."""

from __future__ import annotations

from espalier.app.data.cifar import Cifar
from espalier.app.data.digits import Digits
from espalier.app.data.folder import ImageFolder
from espalier.app.data.idx import Idx
from espalier.app.data.source import DataSet
from espalier.app.data.speech import Speech
from espalier.app.data.text import Text

_IDX = "{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]"

_ALL: tuple[DataSet, ...] = (
    Digits(
        name="digits",
        what="handwritten digits of scikit-learn, 1797 grey images of 8 × 8, 10 classes",
        layout="nothing: it comes with scikit-learn",
        page="https://scikit-learn.org",
        folders=(),
    ),
    Idx(
        name="mnist",
        what="handwritten digits, 60 000 + 10 000 grey images of 28 × 28, 10 classes",
        layout=f"mnist/{_IDX}",
        page="https://github.com/cvdfoundation/mnist",
        folders=("mnist",),
        classes=10,
        mode="L",
    ),
    Idx(
        name="fashion-mnist",
        what="clothes, 60 000 + 10 000 grey images of 28 × 28, 10 classes",
        layout=f"fashion-mnist/{_IDX}",
        page="https://github.com/zalandoresearch/fashion-mnist",
        folders=("fashion-mnist",),
        classes=10,
        mode="L",
    ),
    Cifar(
        name="cifar10",
        what="small photographs, 50 000 + 10 000 images of 32 × 32, 10 classes",
        layout="cifar10/{data_batch_1..5,test_batch}.bin (the binary version)",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar10", "cifar-10-batches-bin"),
        classes=10,
        mode="RGB",
        label_bytes=1,
        train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test_file="test_batch.bin",
        mean=(0.4914, 0.4822, 0.4465),
        sd=(0.2470, 0.2435, 0.2616),
    ),
    Cifar(
        name="cifar100",
        what="small photographs, 50 000 + 10 000 images of 32 × 32, 100 classes (the fine labels)",
        layout="cifar100/{train,test}.bin (the binary version)",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar100", "cifar-100-binary"),
        classes=100,
        mode="RGB",
        label_bytes=2,
        train_files=("train.bin",),
        test_file="test.bin",
        mean=(0.5071, 0.4865, 0.4409),
        sd=(0.2673, 0.2564, 0.2762),
    ),
    ImageFolder(
        name="imagenet",
        what="ILSVRC-2012: 1.28 million photographs + 50 000, 1000 classes; or any images in a folder for each class",
        layout="imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG",
        page="https://image-net.org/download.php",
        folders=("imagenet",),
    ),
    Text(
        name="text",
        what="words for a language model: WikiText-103, or any text of yours",
        layout="text/wiki.{train,valid,test}.tokens or text/{train,valid,test}.txt (tokenised), or any text/*.txt",
        page="https://huggingface.co/datasets/Salesforce/wikitext (wikitext-103-v1)",
        folders=("text", "wikitext-103"),
    ),
    Speech(
        name="speech",
        what="LJSpeech: 13 100 clips of one speaker, 24 hours, with their text",
        layout="speech/metadata.csv (id|as written|as spoken) and speech/wavs/*.wav (one channel of 16 bits)",
        page="https://keithito.com/LJ-Speech-Dataset/",
        folders=("speech", "LJSpeech-1.1"),
    ),
)

SETS: dict[str, DataSet] = {each.name: each for each in _ALL}
