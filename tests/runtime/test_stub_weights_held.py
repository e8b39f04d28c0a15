"""Weights as people hold them: tensors of PyTorch, an index of several files, one of them."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_stub import WeightError
from runtime_stub.weight_files import read_weights

from .runners import Scale, Two
from .test_stub_weights import GOOD, run

W = np.arange(6, dtype=np.float32).reshape(2, 3)


# ---- tensors of PyTorch


class Fake:
    """A tensor as PyTorch has them: NumPy only sees one that is detached, on the CPU and of a dtype that it knows."""

    def __init__(self, array: Any, dtype: str = "", grad: bool = True, device: str = "cuda") -> None:
        self.array, self.name, self.grad, self.device = np.asarray(array), dtype, grad, device

    @property
    def dtype(self) -> Any:
        class Dtype:
            __str__ = lambda _: f"torch.{self.name or self.array.dtype.name}"  # noqa: E731

        return Dtype()

    def detach(self) -> "Fake":
        return Fake(self.array, self.name, False, self.device)

    def cpu(self) -> "Fake":
        return Fake(self.array, self.name, self.grad, "cpu")

    def float(self) -> "Fake":
        return Fake(self.array.astype("f4"), "float32", self.grad, self.device)

    def numpy(self) -> Any:
        if self.grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if self.device != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy.")
        if self.name not in ("", self.array.dtype.name):
            raise TypeError("Got unsupported ScalarType " + self.name)
        return self.array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("grad", [True, False])
def test_tensors_load(two: Two, dtype: str, device: str, grad: bool) -> None:
    stored = dtype if dtype in ("float32", "float64", "float16") else "float32"
    given = Fake(np.array([1, -2, 0.5, 4, -80], stored), dtype, grad, device)
    two.load_weights(GOOD | {"f": given, "n": Fake(np.array([7, -7]), "int64", False, device)})
    assert run(two)["f"].tolist() == [1, -2, 0.5, 4, -80] and run(two)["n"].tolist() == [7, -7]


class Meta(Fake):
    def detach(self) -> Any:
        return self

    def cpu(self) -> Any:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")


class Sparse(Fake):
    def detach(self) -> Any:
        return self

    cpu = float = detach

    def numpy(self) -> Any:
        raise TypeError("can't convert Sparse layout tensor to numpy. Use Tensor.to_dense() first.")


class Refusing:
    """An array of some other library that NumPy does not get."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("not on this device")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Fake(np.ones(4, "f4"), "bfloat16"), r"f: expected f32\[5\], got bfloat16\[4\]"),
        (Fake(np.ones(5, "i4")), r"f: expected f32\[5\], got int32\[5\]: convert it first"),
        (Meta(np.ones(5)), r"f: expected f32\[5\], got Meta: Cannot copy out of meta tensor"),
        (Sparse(np.ones(5)), r"f: expected f32\[5\], got Sparse: .*Use Tensor\.to_dense\(\)"),
        (Refusing(), r"f: expected f32\[5\], got Refusing: not on this device"),
    ],
)
def test_tensors_that_do_not_load_are_named(two: Two, value: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        two.load_weights(GOOD | {"f": value})
    assert two._missing == ["f", "n", "u", "e", "z"]


def test_an_input_may_be_such_a_tensor(gpu: Any) -> None:
    runner = Scale(gpu)
    runner.load_weights({"w": Fake(W, "bfloat16")})
    assert np.array_equal(runner.run(x=Fake(np.ones((2, 3), "f4")))["y"], W)
    with pytest.raises(ValueError, match=r"input 'x' of run: expected f32\[2, 3\], got Meta: Cannot copy"):
        runner.run(x=Meta(np.ones((2, 3))))


@pytest.mark.parity
def test_pytorch_itself(gpu: Any) -> None:
    import torch

    runner = Scale(gpu)
    module = torch.nn.Module()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        module.w = torch.nn.Parameter(torch.from_numpy(W).to(dtype))
        for given in (dict(module.named_parameters()), module.state_dict()):
            runner.load_weights(given)
            assert np.array_equal(runner.run(x=torch.ones(2, 3, requires_grad=True))["y"], W)
    for odd in (
        torch.empty(2, 3, device="meta"),
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3, dtype=torch.complex64),
    ):
        with pytest.raises(WeightError, match=r"w: expected f32\[2, 3\], got"):
            runner.load_weights({"w": odd})


@pytest.mark.parity
@pytest.mark.parametrize("old", [True, False])
def test_files_of_pytorch_are_named(gpu: Any, tmp_path: Path, old: bool) -> None:
    import torch

    torch.save({"w": torch.from_numpy(W)}, tmp_path / "w.pt", _use_new_zipfile_serialization=not old)
    runner = Scale(gpu)
    with pytest.raises(
        WeightError, match=r"w\.pt: .*PyTorch.*give what torch\.load\(path, weights_only=True\) returns"
    ):
        runner.load_weights(tmp_path / "w.pt")
    runner.load_weights(torch.load(tmp_path / "w.pt", weights_only=True))


# ---- several files

SHARDS = {"f": 1, "n": 1, "u": 2, "e": 3, "z": 3}


def shard(number: int) -> str:
    return f"model-0000{number}-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path, write: Callable[..., Path]) -> Path:
    """The weights of Two in three files, and their index."""
    dtypes = {np.dtype("f4"): "F32", np.dtype("i8"): "I64"}
    for number in (1, 2, 3):
        own = [(name, GOOD[name]) for name in SHARDS if SHARDS[name] == number]
        path = write([(name, dtypes[array.dtype], list(array.shape), array.tobytes()) for name, array in own])
        path.rename(tmp_path / shard(number))
    index = {"metadata": {"total_size": 1}, "weight_map": {name: shard(number) for name, number in SHARDS.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("as_given", [str, Path, os.fsencode])
def test_an_index_loads_all_its_files(two: Two, folder: Path, as_given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if as_given is os.fsencode:  # from its own folder, by its name alone
        monkeypatch.chdir(folder)
        two.load_weights("model.safetensors.index.json")
    else:
        two.load_weights(as_given(folder / "model.safetensors.index.json"))
    assert run(two)["f"].tolist() == [1] * 5 and run(two)["n"].tolist() == [1, -2] and run(two)["u"] == 3


def test_one_file_of_several_says_what_to_give(two: Two, folder: Path) -> None:
    with pytest.raises(WeightError) as caught:
        two.load_weights(folder / shard(2))
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [f"  {name}: missing, expected {two._named('parameter')[name]}" for name in "fnez"]
    assert lines[-1].startswith(f"  {shard(2)} looks like one of 3 files: give model.safetensors.index.json, which")


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors", "of.safetensors"])
def test_no_hint_where_it_is_the_only_file(two: Two, folder: Path, name: str) -> None:
    (folder / shard(2)).rename(folder / name)
    with pytest.raises(WeightError, match=r"z: missing, expected u32\[0\]$"):
        two.load_weights(folder / name)


def test_no_hint_where_nothing_is_missing(two: Two, tmp_path: Path, write: Callable[..., Path]) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    write([("w", "F32", [2, 3], W.tobytes()), ("x", "U8", [0], b"")]).rename(path)
    with pytest.raises(WeightError, match="x: not a tensor of this model$"):
        Scale(two.device).load_weights(path)


def test_files_that_the_index_names_must_be_there(two: Two, folder: Path) -> None:
    (folder / shard(1)).unlink()
    (folder / shard(3)).unlink()
    message = f"index.json: expected these files beside it: {shard(1)}, {shard(3)}"
    with pytest.raises(WeightError, match=message):
        two.load_weights(folder / "model.safetensors.index.json")


def test_tensors_that_the_index_names_must_be_in_their_files(two: Two, folder: Path) -> None:
    (folder / shard(1)).write_bytes((folder / shard(3)).read_bytes())
    message = f"the files lack tensors that it names:\n  f: not in {shard(1)}\n  n: not in {shard(1)}$"
    with pytest.raises(WeightError, match=message):
        two.load_weights(folder / "model.safetensors.index.json")


def test_a_damaged_file_of_several_is_named(two: Two, folder: Path) -> None:
    (folder / shard(2)).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(WeightError, match=f"{shard(2)}: .*Git LFS"):
        two.load_weights(folder / "model.safetensors.index.json")


HOSTILE = {
    "empty": b"",
    "not json": b"{",
    "not utf-8": b'{"weight_map": {"\xff": "a"}}',
    "a list": b"[]",
    "no map": b'{"metadata": {}}',
    "a map that is a list": b'{"weight_map": []}',
    "a map of numbers": b'{"weight_map": {"a": 3}}',
    "a map of lists": b'{"weight_map": {"a": ["b"]}}',
    "mixed": b'{"weight_map": {"a": "b", "c": 3}}',
    "the same name twice": b'{"weight_map": {"a": "b", "a": "c"}}',
    "deep": b"[" * 200_000,
    "a folder above": b'{"weight_map": {"a": "../secret"}}',
    "an absolute path": b'{"weight_map": {"a": "/etc/passwd"}}',
    "a folder below": b'{"weight_map": {"a": "b/c"}}',
    "a path of Windows": b'{"weight_map": {"a": "..\\\\secret"}}',
    "a null byte": b'{"weight_map": {"a": "b\\u0000"}}',
    "too large": b'{"metadata": "' + b"a" * 30_000_000 + b'"}',
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_indices(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(WeightError, match="index.json"):
        read_weights(path)


@pytest.mark.parametrize("place", ["../{}", "{folder}/{}", "./{}"])
def test_an_index_leads_to_no_other_folder(two: Two, folder: Path, place: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    places = {name: place.format(file, folder=folder) for name, file in index["weight_map"].items()}
    (folder / "below").mkdir()
    (folder / "below" / "index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(WeightError, match="not a sound index: .*expected a file beside it, got"):
        two.load_weights(folder / "below" / "index.json")


def test_an_empty_index_names_no_tensors(two: Two, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(b'{"weight_map": {}}')
    assert read_weights(path) == {}


def test_an_index_names_no_index(two: Two, folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"first": path.name}}))
    with pytest.raises(WeightError, match=f"expected a safetensors file, got '{re.escape(path.name)}', an index$"):
        two.load_weights(path)
