"""Data: files found, checked and read; batches that repeat exactly, whatever makes them."""

import gzip
import hashlib
import io
import struct
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lowp.training.check import check
from lowp.training.data import SET_NAMES, base, download, files, open_data
from lowp.training.data.augment import Augment
from lowp.training.data.base import Request
from lowp.training.data.images import ResidentImages, values_of
from lowp.training.data.layouts import read_cifar, read_idx
from lowp.training.data.make_fashion14 import make, shrink
from lowp.training.data.order import epoch_order, shares
from lowp.training.data.sets import CIFAR_FILES, IMAGE_SETS, MNIST_FILES
from lowp.training.reading import read_recipe
from lowp.training.trainer import Trainer
from lowp.training.world import World
from waiting import no_host_waits

CPU = torch.device("cpu")
USER = "train.data_sets_of_a_user"
NAMES = [spellings[0] for spellings in MNIST_FILES.names]


@dataclass(frozen=True)
class Choice:
    name: str = "fashion14"
    augment: tuple[str, ...] = ()
    transform: str = ""
    limit: int = 0
    workers: int = 0
    context: int = 8
    options: dict[str, Any] = field(default_factory=dict)


def opened(choice: Choice, directory: Path | None = None, dtype: torch.dtype = torch.float32):
    return open_data(choice, device=CPU, dtype=dtype, directory=directory)


def asked(*batches: list[int], epoch: int = 0) -> list[Request]:
    return [Request(torch.tensor(indices), (5, epoch, step, 0, 0)) for step, indices in enumerate(batches)]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, *, in_train: int = 12, in_test: int = 5, packed: bool = False) -> dict[str, np.ndarray]:
    """MNIST's four files, with few random images."""
    random = np.random.default_rng(3)
    arrays = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        count = in_train if name.startswith("train") else in_test
        shape = (count, 28, 28) if "images" in name else (count,)
        arrays[name] = random.integers(0, 256 if "images" in name else 10, shape, dtype=np.uint8)
        content = idx(arrays[name])
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


# Order


def test_an_epochs_order_is_a_permutation_of_seed_and_epoch():
    orders = [epoch_order(100, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(order.sort().values.equal(torch.arange(100)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert orders[0].equal(epoch_order(100, 0, 0))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 3)])
def test_the_ranks_share_one_stretch_of_the_order_however_many_they_are(ranks, micro_batches):
    order = epoch_order(31, 0, 0)
    for step in range(2):
        cut = shares(order, step, 12, ranks, micro_batches)
        assert [len(of_rank) for of_rank in cut] == [micro_batches] * ranks
        assert torch.cat([micro for of_rank in cut for micro in of_rank]).equal(order[12 * step : 12 * step + 12])
        assert {len(micro) for of_rank in cut for micro in of_rank} == {12 // (ranks * micro_batches)}
    with pytest.raises(ValueError, match="no step 2: 31 samples in batches of 12 make 2 steps"):
        shares(order, 2, 12, ranks, micro_batches)


@pytest.mark.parametrize(("batch", "nearest"), [(10, "8 or 12"), (3, "4"), (0, "4")])
def test_a_batch_that_cannot_be_shared_names_the_nearest_that_can(batch, nearest):
    with pytest.raises(ValueError, match=rf"2 ranks with 2 micro-batches each; the nearest that can: {nearest}$"):
        shares(torch.arange(100), 0, batch, 2, 2)


# The embedded set


def test_the_embedded_set_is_the_one_that_was_made():
    path = Path(files.__file__).with_name("fashion14.npz")
    content = path.read_bytes()
    assert len(content) < 1_300_000
    assert hashlib.sha256(content).hexdigest() == "e88a1d0d3abdc1763af42d07d930a314d57abae65ecedf56dbd4cfd0ca3f6feb"
    assert "MIT" in path.with_name("fashion14.LICENSE").read_text()


def test_the_embedded_set_needs_no_directory_and_is_normalised(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWP_DATA", str(tmp_path / "absent"))
    data = opened(Choice())
    assert (data.shape, data.classes, data.kind, len(data.train), len(data.test)) == ((1, 14, 14), 10, "image", 10_000, 2_000)
    ((images, labels),) = data.train.stream([Request(torch.arange(10_000), (0,))])
    assert (images.shape, images.dtype, labels.dtype) == ((10_000, 1, 14, 14), torch.float32, torch.int64)
    assert abs(images.mean()) < 1e-4
    assert abs(images.std() - 1) < 1e-4
    counts = labels.bincount(minlength=10)
    assert counts.min() >= 940
    assert counts.max() <= 1030


def test_shrinking_averages_squares_of_four_pixels():
    images = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    images[0, 0, :2, :2] = torch.tensor([[255, 255], [255, 255]])
    images[0, 0, 26:, 0] = 33
    small = shrink(images)
    assert (small.shape, small[0, 0, 0], small[0, 13, 0], small.sum()) == ((1, 14, 14), 63, 66 // 16, 63 + 66 // 16)


# Files


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
def test_idx_files_are_found_and_read(tmp_path, packed, below):
    arrays = write_idx(tmp_path / below, packed=packed)
    data = opened(Choice("mnist"), tmp_path)
    ((images, labels),) = data.test.stream(asked([4, 0]))
    expected = (arrays["t10k-images-idx3-ubyte"][[4, 0], None] / 255 - 0.13066) / 0.30811
    assert images.equal(torch.from_numpy(expected).to(torch.float32))
    assert labels.tolist() == arrays["t10k-labels-idx1-ubyte"][[4, 0]].tolist()
    assert (len(data.train), data.shape) == (12, (1, 28, 28))


def test_the_data_directory_of_the_environment_and_the_own_folder_first(monkeypatch, tmp_path):
    write_idx(tmp_path / "mnist", in_train=3)
    write_idx(tmp_path, in_train=4)
    monkeypatch.setenv("LOWP_DATA", str(tmp_path))
    assert len(opened(Choice("mnist")).train) == 3
    with pytest.raises(ValueError, match=r"^--data .*/nowhere is not a directory$"):
        opened(Choice("mnist"), tmp_path / "nowhere")


DAMAGE = [
    ("train-images-idx3-ubyte", lambda content: content[:-1], "header promises 12 x 28 x 28 bytes, and 9407 follow"),
    ("train-images-idx3-ubyte", lambda content: content + b"!", "header promises 12 x 28 x 28 bytes, and more follow"),
    ("train-images-idx3-ubyte", lambda content: content[:9], "9 bytes are too few"),
    ("train-images-idx3-ubyte", lambda content: b"", "0 bytes are too few"),
    ("train-images-idx3-ubyte", lambda content: b"\x1f\x8b" + content[2:], "begins with 0x1f8b0803, not 0x00000803"),
    ("train-labels-idx1-ubyte", lambda content: content[:-1] + b"\x0a", "has a label 10, and there are 10 classes"),
    ("train-labels-idx1-ubyte", lambda content: idx(np.zeros(11, np.uint8)), "11 labels for the 12 images of"),
    ("train-images-idx3-ubyte", lambda content: idx(np.zeros((12, 14, 14), np.uint8)), "14 x 14 pixels, not 28 x 28"),
    (
        "train-images-idx3-ubyte",
        lambda content: idx(np.zeros((0, 28, 28), np.uint8)),
        "promises 0 x 28 x 28 bytes, and 0 follow",
    ),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE, ids=[said for _, _, said in DAMAGE])
def test_damaged_idx_files_are_named(tmp_path, name, damage, said):
    write_idx(tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(ValueError, match=f"{name}.*{said}"):
        opened(Choice("mnist"), tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-9], lambda c: b"PK" + c[2:], lambda c: c[:40] + b"\xff" * 9 + c[49:], lambda c: b""]
)
def test_damaged_gzip_files_are_named(tmp_path, damage):
    write_idx(tmp_path, packed=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte\.gz is damaged"):
        opened(Choice("mnist"), tmp_path)


def test_cifar_records_are_a_label_and_three_planes(tmp_path):
    path = tmp_path / "data_batch_1.bin"
    record = bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(256)) * 4
    with path.open("wb") as file:
        file.seek(30_730_000 - len(record))
        file.write(record)
    images, labels = read_cifar([path])
    assert (images.shape, labels[-1], labels[:-1].max()) == ((10_000, 3, 32, 32), 7, 0)
    assert images[-1, 0].eq(1).all()
    assert images[-1, 1].eq(2).all()
    assert images[-1, 2].flatten().tolist() == list(range(256)) * 4
    with path.open("r+b") as file:
        file.write(b"\x0b")
    with pytest.raises(ValueError, match=r"data_batch_1\.bin is damaged.* label 11"):
        read_cifar([path])
    with path.open("r+b") as file:
        file.truncate(30_730_000 - 3073)  # whole records, but too few of them
    with pytest.raises(ValueError, match=r"data_batch_1\.bin is damaged.* 30726927 bytes, not 10000 records of 3073"):
        read_cifar([path])


def test_an_unreadable_file_is_named(tmp_path):
    write_idx(tmp_path)
    with pytest.raises(ValueError, match=r"cannot read .*absent: No such file"):
        read_idx(tmp_path / "absent", tmp_path / NAMES[1])


# The network, which tests do not have: what it would answer is said by each.


@pytest.fixture
def network(monkeypatch):
    """Answers by URL. What is not there fails as a machine without a network does."""
    answers: dict[str, bytes] = {}

    def answer(url: str, timeout: float):
        if url not in answers:
            raise download.urllib.error.URLError("Name or service not known")
        return io.BytesIO(answers[url])

    monkeypatch.setattr(download.urllib.request, "urlopen", answer)
    return answers


def with_checksums(what: files.Files, contents: list[bytes]) -> files.Files:
    downloads = [
        replace(each, md5=hashlib.md5(content).hexdigest()) for each, content in zip(what.downloads, contents, strict=True)
    ]
    return replace(what, downloads=tuple(downloads))


def test_missing_files_are_downloaded_whole_from_the_first_mirror_that_has_them(tmp_path, network):
    write_idx(tmp_path / "elsewhere", packed=True)
    contents = [(tmp_path / "elsewhere" / f"{name}.gz").read_bytes() for name in NAMES]
    wanted = with_checksums(MNIST_FILES, contents)
    for each, content in zip(wanted.downloads, contents, strict=True):
        network[each.urls[0]] = b"an error page with status 200"
        network[each.urls[1]] = content
    found = files.locate(wanted, tmp_path)
    assert found == [tmp_path / "mnist" / f"{name}.gz" for name in NAMES]
    assert [path.read_bytes() for path in found] == contents
    assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(path.name for path in found)
    network.clear()
    assert files.locate(wanted, tmp_path) == found  # and now without a network


def test_an_archive_leaves_the_files_asked_for_and_no_others(tmp_path, network):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("readme.html", *CIFAR_FILES.downloads[0].gives, "../../outside"):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    wanted = with_checksums(CIFAR_FILES, [packed.getvalue()])
    network[wanted.downloads[0].urls[0]] = packed.getvalue()
    found = files.locate(wanted, tmp_path)
    assert [path.read_bytes().decode() for path in found] == [path.name for path in found]
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(found)


def test_without_a_network_one_line_says_where_it_looked_and_what_to_do(tmp_path, network):
    with pytest.raises(ValueError, match="Name or service not known") as error:
        opened(Choice("mnist"), tmp_path)
    said = str(error.value)
    assert "\n" not in said
    assert said.startswith(f"data set 'mnist' is not in {tmp_path}/mnist or {tmp_path}, and could not be downloaded (https://")
    assert said.endswith("t10k-labels-idx1-ubyte) there, or say where they are with --data")
    assert not list((tmp_path / "mnist").iterdir())


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path, network):
    network[MNIST_FILES.downloads[0].urls[0]] = b"half a fi"
    with pytest.raises(ValueError, match=f"its checksum is {hashlib.md5(b'half a fi').hexdigest()}, not f68b3c2d"):
        opened(Choice("mnist"), tmp_path)
    assert not list((tmp_path / "mnist").iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path, network):
    (tmp_path / "mnist").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match="/mnist cannot be written"):
        opened(Choice("mnist"), tmp_path)


# Batches of images


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 9, 9)])  # samples of the first begin 3072 bytes apart, of the second 972
@pytest.mark.parametrize("samples", [[5] * 40, [1] * 20, [32] * 3, [33] * 3, [4, 0, 7]])
def test_small_batches_that_are_made_together_are_the_same(samples, shape, monkeypatch):
    requests = [Request(torch.arange(count) * 7 % 64, (0, 0, n)) for n, count in enumerate(samples)]
    split = resident(("crop", "flip", "cutout"), shape=shape)[2]
    monkeypatch.setattr(base, "TOGETHER", ("cpu",))
    together = [*split.stream(requests)]
    monkeypatch.undo()
    assert len(together) == len(samples)
    for request, (images, labels) in zip(requests, together, strict=True):
        ((own_images, own_labels),) = split.stream([request])
        assert torch.equal(images, own_images)
        assert torch.equal(labels, own_labels)
        assert images.is_contiguous()
        assert images.storage_offset() == 0 or images.data_ptr() % 512 == 0


def test_small_texts_that_are_made_together_are_the_same(tmp_path, monkeypatch):
    (tmp_path / "tinyshakespeare.txt").write_text("abcdefghij klmnop. " * 300)
    split = open_data(Choice("shakespeare", context=7), device=CPU, dtype=torch.float32, directory=tmp_path).train
    requests = [Request(torch.arange(n, 300, 91), (0, n // 10, n)) for n in range(20)]
    monkeypatch.setattr(base, "TOGETHER", ("cpu",))
    together = [*split.stream(requests)]
    monkeypatch.undo()
    for request, (characters, following) in zip(requests, together, strict=True):
        ((own_characters, own_following),) = split.stream([request])
        assert torch.equal(characters, own_characters)
        assert torch.equal(following, own_following)


def resident(augment: tuple[str, ...] = (), dtype: torch.dtype = torch.float32, shape=(3, 12, 10), count: int = 64):
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    values = values_of((0.5, 0.4, 0.3), (0.2, 0.3, 0.25), dtype)
    return images, values, ResidentImages(images, torch.arange(count) % 10, values, Augment(augment, shape, CPU), CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ready", [False, True])
def test_normalisation_rounds_once(monkeypatch, dtype, ready):
    monkeypatch.setattr("lowp.training.data.images._READY_BYTES", 1 << 20 if ready else 0)
    images, _, split = resident(dtype=dtype)
    ((batch, labels),) = split.stream(asked([3, 63, 3]))
    middle = torch.tensor([0.5, 0.4, 0.3], dtype=torch.float64)[:, None, None]
    spread = torch.tensor([0.2, 0.3, 0.25], dtype=torch.float64)[:, None, None]
    assert batch.equal(((images[[3, 63, 3]].double() / 255 - middle) / spread).to(dtype))
    assert labels.tolist() == [3, 3, 3]


@pytest.mark.parametrize("names", [("crop",), ("flip",), ("cutout",), ("crop", "flip", "cutout")])
@pytest.mark.parametrize("ready", [False, True])
def test_augmentation_is_what_it_is_one_image_at_a_time(monkeypatch, names, ready):
    monkeypatch.setattr("lowp.training.data.images._READY_BYTES", 1 << 30 if ready else 0)
    _, _, plain = resident()
    _, _, split = resident(names)
    (request,) = asked(list(range(64)))
    ((batch, _),) = split.stream([request])
    ((originals, _),) = plain.stream([request])
    draws = Augment(names, (3, 12, 10), CPU).draw(request.key, 64).T.tolist()
    crop = "crop" in names
    padded = F.pad(originals, (4, 4, 4, 4), mode="reflect")
    for image, original, (row, column, flip, top, left) in zip(batch, padded, draws, strict=True):
        row, column = (row, column) if crop else (4, 4)
        original = original[:, row : row + 12, column : column + 10]
        if "flip" in names and flip:
            original = original.flip(2)
        if "cutout" in names:
            original = original.clone()
            original[:, top : top + 8, left : left + 8] = 0
        assert image.equal(original)
    for kind, highest in enumerate((8, 8, 1, 4, 2)):
        assert {draw[kind] for draw in draws} == set(range(highest + 1))


def test_a_batch_is_a_function_of_its_key_alone():
    everything = ("crop", "flip", "cutout")
    first, second = asked([1, 2, 3], [1, 2, 3])
    ((a, _), (b, _)) = resident(everything)[2].stream([first, second])
    ((b_again, _),) = resident(everything)[2].stream([second])
    assert b_again.equal(b)
    assert not a.equal(b)


def test_test_images_are_not_augmented():
    choice = Choice(augment=("crop", "flip", "cutout"), transform=f"{USER}:brighter")
    pairs = zip(opened(choice).test.stream(asked([5, 6])), opened(Choice()).test.stream(asked([5, 6])), strict=True)
    assert all(ours.equal(plain) for (ours, _), (plain, _) in pairs)


# Limit and transform


def test_a_limit_takes_the_same_samples_from_every_class_in_every_run():
    choice = Choice(limit=500)
    everything = opened(Choice()).train
    limited = opened(choice).train
    assert len(limited) == 500
    ((images, labels),) = limited.stream(asked(list(range(500))))
    ((again, _),) = opened(choice).train.stream(asked(list(range(500)), epoch=3))
    assert again.equal(images)
    assert labels.bincount(minlength=10).min() > 25
    ((fewer, _),) = opened(Choice(limit=20)).train.stream(asked(list(range(20))))
    assert fewer.equal(images[:20])
    ((all_images, _),) = everything.stream(asked(list(range(10_000))))
    assert {image.numpy().tobytes() for image in images} <= {image.numpy().tobytes() for image in all_images}


def test_a_transform_draws_from_the_key_and_may_drop_samples():
    plain = list(opened(Choice()).train.stream(asked([1, 2, 3], [4, 5])))
    brighter = [list(opened(Choice(transform=f"{USER}:brighter")).train.stream(asked([1, 2, 3], [4, 5]))) for _ in range(2)]
    shifts = [float((after - before).mean()) for (before, _), (after, _) in zip(plain, brighter[0], strict=True)]
    assert all(0 < shift < 1 for shift in shifts)
    assert shifts[0] != pytest.approx(shifts[1])
    assert all(a.equal(b) for (a, _), (b, _) in zip(*brighter, strict=True))
    for images, labels in opened(Choice(transform=f"{USER}:odd_ones")).train.stream(asked(list(range(30)))):
        assert 0 < len(labels) == len(images) < 30
        assert labels.remainder(2).eq(1).all()


# Text


TEXT = ("To be, or not to be: that is the question. " * 20).encode()


def test_text_windows_lie_side_by_side_and_targets_follow(tmp_path):
    (tmp_path / "play.txt").write_bytes(TEXT)
    data = opened(Choice("text:play.txt", context=10), tmp_path)
    vocabulary = sorted(set(TEXT))
    assert (data.shape, data.classes, data.kind) == ((10,), len(vocabulary), "text")
    codes = torch.tensor([vocabulary.index(byte) for byte in TEXT])
    test = codes[-(len(TEXT) // 10) :]
    assert len(data.test) == (len(test) - 1) // 10
    ((inputs, targets),) = data.test.stream([Request(torch.arange(len(data.test)), ("test", 0))])
    assert inputs.flatten().equal(test[: inputs.numel()])
    assert targets.flatten().equal(test[1 : inputs.numel() + 1])
    assert inputs.dtype == targets.dtype == torch.int64


def test_text_windows_shift_from_epoch_to_epoch_and_stay_in_the_training_part(tmp_path):
    (tmp_path / "play.txt").write_bytes(bytes(range(256)) + bytes(254))  # 459 train, 51 test
    data = opened(Choice(f"text:{tmp_path}/play.txt", context=20))
    assert len(data.train) == (459 - 20) // 20
    shifts = set()
    for epoch in range(60):
        requests = asked([0], [len(data.train) - 1], epoch=epoch)
        (first, after_first), (last, _) = data.train.stream(requests)
        shift = int(first[0, 0])
        assert first[0].equal(torch.arange(shift, shift + 20))
        assert after_first[0].equal(first[0] + 1)
        assert last.shape == (1, 20)
        shifts.add(shift)
    assert shifts <= set(range(20))
    assert len(shifts) > 10


def test_shakespeare_is_found_under_either_name(tmp_path):
    (tmp_path / "input.txt").write_bytes(TEXT)
    assert opened(Choice("shakespeare"), tmp_path).classes == len(set(TEXT))
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "tinyshakespeare.txt").write_bytes(b"ab" * 300)
    assert opened(Choice("shakespeare"), tmp_path).classes == 2


# Map-style datasets


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_set_gives_the_same_batches_with_any_number_of_workers(workers):
    torch.manual_seed(1)
    untouched = torch.get_rng_state(), np.random.get_state()[1].copy()
    data = opened(Choice(f"{USER}:pictures", workers=workers, options={"size": 30}), dtype=torch.bfloat16)
    assert (data.shape, data.classes, data.kind, len(data.train), len(data.test)) == ((3, 8, 10), 7, "image", 30, 4)
    requests = asked([3, 29], [3, 29], [7], [0, 1, 2], [5])
    batches = list(data.train.stream(iter(requests)))
    assert [labels.tolist() for _, labels in batches] == [[3, 1], [3, 1], [0], [0, 1, 2], [5]]
    assert batches[0][0].dtype == torch.bfloat16
    assert not batches[0][0].equal(batches[1][0])  # another key, other noise
    inline = opened(Choice(f"{USER}:pictures", options={"size": 30}), dtype=torch.bfloat16).train
    assert all(ours.equal(theirs) for (ours, _), (theirs, _) in zip(batches, inline.stream(requests), strict=True))
    assert torch.get_rng_state().equal(untouched[0])
    assert (np.random.get_state()[1] == untouched[1]).all()


def test_a_users_set_is_augmented_limited_and_transformed_like_ours():
    plain = opened(Choice(f"{USER}:counting"))
    assert plain.classes == 2
    choice = Choice(f"{USER}:counting", augment=("flip", "cutout"), limit=6, transform=f"{USER}:brighter")
    train = opened(choice).train
    (request,) = asked([0, 5, 3])
    ((images, _),) = train.stream([request])
    assert (len(train), images.shape) == (6, (3, 3, 8, 10))
    assert images[:, 0].eq(images[:, 0, :1, :1]).sum(dim=(1, 2)).ge(64).any()  # the hole, made brighter with the rest
    ((again, _),) = opened(choice).train.stream([request])
    assert again.equal(images)


def test_a_users_text():
    data = opened(Choice(f"{USER}:letters"))
    assert (data.shape, data.classes, data.kind) == ((4,), 30, "text")
    ((inputs, targets),) = data.train.stream(asked([2]))
    assert (inputs.tolist(), targets.tolist()) == ([[2, 3, 4, 5]], [[3, 4, 5, 6]])


# Mistakes


MISTAKES = [
    (Choice("minst"), "unknown data set 'minst'; did you mean 'mnist'?"),
    (Choice("zebra"), f"unknown data set 'zebra'; known are {', '.join(SET_NAMES)}, text:FILE and module:function"),
    (Choice(augment=("crop", "twist")), "unknown augmentation 'twist' in data.augment; known are crop, flip, cutout"),
    (Choice("text:x", augment=("flip",)), "data.augment = flip is for images, and 'text:x' is text"),
    (Choice(f"{USER}:letters", augment=("flip",)), f"data.augment = flip is for images, and '{USER}:letters' is text"),
    (Choice(limit=10_001), "data.limit = 10001, but 'fashion14' has 10000 training samples"),
    (Choice(limit=-1), "data.limit = -1, but 'fashion14' has 10000 training samples"),
    (Choice(workers=-1), "data.workers must not be negative: -1"),
    (Choice("text:/nowhere/at all"), "cannot read the text /nowhere/at all: No such file or directory"),
    (Choice("nowhere_at_all:sets"), "there is no module 'nowhere_at_all'"),
    (Choice(f"{USER}:unsaid"), "does not say how many classes it has; return (train, test, classes)"),
    (Choice(f"{USER}:alone"), "must return (train, test) or (train, test, classes), not Pictures"),
    (Choice(f"{USER}:empty"), "its training set is empty"),
    (Choice(f"{USER}:strange"), "inputs must be tensors of floats (images) or int64 (text), not str"),
    (Choice(f"{USER}:streaming"), "is not map-style: no len() or []"),
    (Choice(f"{USER}:pictures", options={"sizes": 3}), "and data.options do not fit together: got an unexpected keyword"),
]


@pytest.mark.parametrize(("choice", "said"), MISTAKES, ids=[said[:40] for _, said in MISTAKES])
def test_a_mistake_gets_one_clear_line(choice, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        opened(choice)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_text_too_short_for_its_context(tmp_path):
    (tmp_path / "play.txt").write_bytes(b"abcd" * 20)
    assert len(opened(Choice(f"text:{tmp_path}/play.txt", context=7)).test) == 1
    with pytest.raises(ValueError, match=r"has 80 characters: too short for data\.context = 8; .* must hold 9$"):
        opened(Choice(f"text:{tmp_path}/play.txt", context=8))
    with pytest.raises(ValueError, match=r"data\.context must be at least 1, not 0"):
        opened(Choice(f"text:{tmp_path}/play.txt", context=0))


def test_a_transform_that_forgets_the_targets():
    with pytest.raises(ValueError, match=r"forgetful' must return \(inputs, targets\)"):
        list(opened(Choice(transform=f"{USER}:forgetful")).train.stream(asked([1])))


@pytest.mark.parametrize(("names", "shape"), [(("crop",), (3, 4, 9)), (("cutout",), (1, 9, 7)), (("flip",), (28, 28))])
def test_images_that_cannot_be_augmented(names, shape):
    with pytest.raises(ValueError, match="needs images of"):
        Augment(names, shape, CPU)


# Against all of the real files, and on a GPU


@pytest.mark.parametrize(
    "image_set",
    [pytest.param(each, id=each.name, marks=() if each.name == "fashion14" else pytest.mark.slow) for each in IMAGE_SETS],
)
def test_means_and_deviations_are_those_of_the_training_pixels(image_set):
    if image_set.name != "fashion14" and not (Path(files.CACHE).expanduser() / image_set.name).is_dir():
        pytest.skip(f"{image_set.name} is not on this machine")
    train, _ = image_set.read(None)
    for channel, (mean, deviation) in enumerate(zip(image_set.mean, image_set.deviation, strict=True)):
        pixels = train.images[:, channel].double() / 255
        assert (round(float(pixels.mean()), 5), round(float(pixels.std()), 5)) == (mean, deviation)


@pytest.mark.slow
def test_the_embedded_set_can_be_made_again():
    if not (Path(files.CACHE).expanduser() / "fashion_mnist").is_dir():
        pytest.skip("fashion_mnist is not on this machine")
    images, labels = make(None)
    train, test = IMAGE_SETS[0].read(None)
    assert torch.cat((train.images, test.images))[:, 0].equal(images * 4)
    assert torch.cat((train.labels, test.labels)).equal(labels)


@pytest.mark.gpu
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        Choice(augment=("crop", "flip", "cutout"), limit=100, transform=f"{USER}:brighter"),
        Choice(f"{USER}:pictures", augment=("crop", "flip", "cutout"), workers=2),
        Choice(f"text:{Path(__file__)}", context=30),
    ],
    ids=lambda choice: choice.name,
)
def test_a_gpu_gives_the_same_batches_without_waiting(monkeypatch, choice, ready):
    monkeypatch.setattr("lowp.training.data.images._READY_BYTES", 1 << 30 if ready else 0)
    requests = asked(*([step, 19, 3] for step in range(8)))
    expected = list(opened(choice, dtype=torch.float16).train.stream(requests))
    on_gpu = open_data(choice, device=torch.device("cuda"), dtype=torch.float16, directory=None).train
    with no_host_waits():
        found = list(on_gpu.stream(requests))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(a.device.type == "cuda" and a.cpu().equal(b) for a, b in zip(ours, theirs, strict=True))


def test_a_mirrored_test_averages_the_outputs_for_an_image_and_its_mirror_image():
    changes = ["data.limit=64", "device=cpu", "threads=1", "model.name=cnn", "model.options={channels=[2, 2], hidden=4}"]
    trainer = Trainer(read_recipe("fp32", [*changes, "test_flip=true"]), World(0, 1, torch.device("cpu")))
    found = trainer.test()
    size, model = len(trainer.data.test), trainer.model.eval()
    ((inputs, targets),) = trainer.data.test.stream([Request(torch.arange(size), ("all",))])
    with torch.no_grad():
        logits = (model(inputs) + model(inputs.flip(-1))) / 2
    assert found["accuracy"] == (logits.argmax(-1) == targets).double().mean().item()
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    plain = Trainer(read_recipe("fp32", changes), World(0, 1, torch.device("cpu"))).test()
    assert plain["loss"] != found["loss"]


def test_a_mirrored_test_is_for_images():
    with pytest.raises(ValueError, match="test_flip: is for images, and shakespeare is text"):
        check(read_recipe("gpt", ["test_flip=true"]))
