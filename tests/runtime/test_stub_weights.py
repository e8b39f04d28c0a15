"""Weights: right files load exactly, wrong and hostile ones are a WeightError that changes nothing."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_stub import ModelRunner, WeightError
from runtime_stub.weight_files import read_safetensors

from .runners import Scale, Two

W = np.arange(6, dtype=np.float32).reshape(2, 3)
NAN = float("nan")


GOOD = {
    "f": np.ones(5, np.float32),
    "n": np.array([1, -2]),
    "u": np.array(3),
    "e": np.zeros((0, 4), np.float32),
    "z": np.zeros(0, int),
}


def f32(array: Any) -> bytes:
    return np.asarray(array, np.float32).tobytes()


def run(runner: ModelRunner) -> dict[str, Any]:
    return runner.call("run", {})


BF16 = {0x3F80: 1.0, 0xC2A0: -80.0, 0x7F80: np.inf, 0x0080: 1.1754944e-38, 0x0001: 9.1835e-41}


@pytest.mark.parametrize(
    ("dtype", "raw", "expected"),
    [
        ("F32", f32([0.1, -0.0, np.inf, 1e-45, 3e38]), [0.1, -0.0, np.inf, 1e-45, 3e38]),
        ("F16", np.array([0.1, -0.0, np.inf, 6e-8, 65504], np.float16).tobytes(), None),
        ("BF16", np.array(list(BF16), "<u2").tobytes(), list(BF16.values())),
        ("F64", np.array([0.1, 1e300, -1e-300, 16777217, 1]).tobytes(), [0.1, np.inf, -0.0, 16777216, 1]),
    ],
)
def test_floats_become_f32(two: Two, write: Callable[..., Path], dtype: str, raw: bytes, expected: Any) -> None:
    rest = [
        ("n", "I8", [2], b"\x01\xff"),
        ("u", "BOOL", [], b"\x01"),
        ("e", dtype, [0, 4], b""),
        ("z", "I64", [0], b""),
    ]
    two.load_weights(write([("f", dtype, [5], raw), *rest]))
    expected = np.frombuffer(raw, np.float16) if expected is None else expected
    out = run(two)
    np.testing.assert_allclose(out["f"], np.asarray(expected, np.float32), rtol=1e-4 if dtype == "BF16" else 0)
    assert np.array_equal(np.signbit(out["f"]), np.signbit(expected))
    assert out["n"].tolist() == [1, -1] and out["u"] == 1 and out["e"].shape == (0, 4)
    if dtype == "BF16":
        assert out["f"].view(np.uint32).tolist() == [word << 16 for word in BF16]


@pytest.mark.parametrize("dtype", ["I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"])
def test_integers_load_into_integer_parameters(two: Two, write: Callable[..., Path], dtype: str) -> None:
    numpy = np.dtype(bool if dtype == "BOOL" else f"<{dtype[0].lower()}{int(dtype[1:]) // 8}")
    n, u = np.array([0, 1]).astype(numpy).tobytes(), np.array(1).astype(numpy).tobytes()
    given = [
        ("f", "F32", [5], f32(np.ones(5))),
        ("n", dtype, [2], n),
        ("u", dtype, [], u),
        ("e", "F32", [0, 4], b""),
        ("z", "U8", [0], b""),
    ]
    two.load_weights(write(given))
    assert run(two)["n"].tolist() == [0, 1] and run(two)["u"] == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", np.array([2**31, 0]), r"n: expected i32\[2\], got int64\[2\] from 0 to 2147483648"),
        ("n", np.array([1.0, 2.0]), r"n: expected i32\[2\], got float64\[2\]"),
        ("u", np.array(-1), r"u: expected u32\[\], got int64\[\] from -1 to -1"),
        ("u", np.array(2**64 - 1, np.uint64), "18446744073709551615"),
        ("f", np.ones(5, np.int32), r"f: expected f32\[5\], got int32\[5\]"),
        ("f", np.ones(5, bool), r"f: expected f32\[5\], got bool\[5\]"),
        ("f", np.ones((5, 1)), r"f: expected f32\[5\], got float64\[5, 1\]"),
        ("e", np.ones((4, 0)), r"e: expected f32\[0, 4\], got float64\[4, 0\]"),
        ("f", [[1], [2, 3]], "f: .*inhomogeneous"),
        ("f", np.ones(5, complex), "complex128"),
        ("f", np.ones(5, object), "object"),
    ],
)
def test_what_does_not_fit_is_refused(two: Two, name: str, value: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        two.load_weights(GOOD | {name: value})
    assert two._missing == ["f", "n", "u", "e", "z"]


def test_mappings_load(two: Two) -> None:
    two.load_weights(GOOD | {"f": [1.0, 2.0, 3.0, 4.0, 5.0], "n": np.array([9, 0, -9])[::2]})
    assert run(two)["f"].tolist() == [1, 2, 3, 4, 5] and run(two)["n"].tolist() == [9, -9]
    two.load_weights(GOOD | {"f": np.ones(5, np.float16)})
    assert run(two)["f"].tolist() == [1] * 5
    ml_dtypes = pytest.importorskip("ml_dtypes")
    two.load_weights(GOOD | {"f": np.array([1, 2, 3, 4, -80], ml_dtypes.bfloat16)})
    assert run(two)["f"].tolist() == [1, 2, 3, 4, -80]


def test_every_problem_is_in_one_error_and_nothing_changes(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.load_weights(GOOD)
    monkeypatch.setattr(two, "upload", None)
    with pytest.raises(WeightError) as caught:
        two.load_weights({"f": np.ones(4), "n": np.ones(2), "u": np.array(1), "x": np.ones(1), "y.z": np.ones(1)})
    text = str(caught.value)
    assert all(
        part in text for part in ("f: expected", "n: expected", "e: missing, expected f32[0, 4]", "x: not", "y.z: not")
    )
    assert isinstance(caught.value, ValueError)
    monkeypatch.undo()
    assert run(two)["f"].tolist() == [1] * 5


def test_unused_tensors_are_allowed_when_not_strict(two: Two) -> None:
    two.load_weights(GOOD | {"x": np.ones(1, complex)}, strict=False)
    with pytest.raises(WeightError, match="u: missing"):
        two.load_weights({name: value for name, value in GOOD.items() if name != "u"}, strict=False)


def test_running_before_weights_names_them(two: Two) -> None:
    with pytest.raises(RuntimeError, match="two.*f, n, u, e, z"):
        run(two)
    with pytest.raises(WeightError):
        two.load_weights({})
    with pytest.raises(RuntimeError, match="f, n, u, e, z"):
        run(two)


def test_a_file_that_is_not_there_or_a_folder(two: Two, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(OSError, match="nothing|directory|denied"):
            two.load_weights(path)


def test_the_library_s_own_files_load(gpu: Any, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"w": W}, tmp_path / "w.safetensors", metadata={"format": "pt"})
    runner = Scale(gpu)
    runner.load_weights(str(tmp_path / "w.safetensors"))
    assert np.array_equal(runner.run(x=np.ones((2, 3)))["y"], W)


def test_an_empty_header_is_a_file_of_no_tensors(write: Callable[..., Path]) -> None:
    assert read_safetensors(write()) == {}
    assert read_safetensors(write(header=b"{}      ")) == {}
    assert read_safetensors(write(header={"__metadata__": {"format": "pt"}})) == {}


def test_tensors_may_stand_in_any_order_and_unaligned(write: Callable[..., Path]) -> None:
    header = {
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        "none": {"dtype": "F64", "shape": [3, 0], "data_offsets": [1, 1]},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "last": {"dtype": "F64", "shape": [0], "data_offsets": [5, 5]},
    }
    arrays = read_safetensors(write(header=header, data=b"\x07" + f32([2.5])))
    assert arrays["a"].tolist() == [7] and arrays["b"].tolist() == [2.5]
    assert arrays["none"].shape == (3, 0) and arrays["last"].shape == (0,)


def test_any_byte_of_a_bool_but_zero_is_true(write: Callable[..., Path]) -> None:
    assert read_safetensors(write([("b", "BOOL", [3], b"\x00\x01\x02")]))["b"].tolist() == [False, True, True]


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HEADERS: dict[str, Any] = {
    "not json": b"{]",
    "cut json": b'{"a": {"dtype": "F32"',
    "not utf-8": b'{"\xff": 1}',
    "utf-16": json.dumps({"a": entry()}).encode("utf-16-le"),
    "utf-16 with a mark": json.dumps({"a": entry()}).encode("utf-16"),
    "utf-32": json.dumps({"a": entry()}).encode("utf-32-be"),
    "utf-8 with a mark": json.dumps({"a": entry()}).encode("utf-8-sig"),
    "a space first": b" " + json.dumps({"a": entry()}).encode(),
    "a line break first": b"\n" + json.dumps({"a": entry()}).encode(),
    "empty": b"",
    "a list": [1],
    "a number": 7,
    "a string": "abc",
    "metadata that is a list": {"__metadata__": [], "a": entry()},
    "metadata that is a string": {"__metadata__": "x", "a": entry()},
    "an entry that is a list": {"a": []},
    "an entry that is null": {"a": None},
    "an entry that is a number": {"a": 3},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "unknown dtype": {"a": entry("F7")},
    "dtype that is a list": {"a": entry(["F32"])},
    "dtype that is null": {"a": entry(None)},
    "shape that is a number": {"a": entry(shape=2)},
    "shape that is a string": {"a": entry(shape="2")},
    "shape that is an object": {"a": entry(shape={"2": 2})},
    "shape that is an empty string": {"a": entry("U64", shape="")},
    "shape of floats": {"a": entry(shape=[2.0])},
    "shape of booleans": {"a": entry(shape=[2, True])},
    "shape of strings": {"a": entry(shape=["2"])},
    "negative shape": {"a": entry(shape=[-2])},
    "two negatives": {"a": entry(shape=[-1, -2])},
    "NaN shape": {"a": entry(shape=[NAN])},
    "infinite shape": {"a": entry(shape=[float("inf")])},
    "huge shape": {"a": entry(shape=[2**70])},
    "shape whose product wraps": {"a": entry(shape=[2**32, 2**32, 2])},
    "huge shape of nothing": {"a": entry(shape=[2**62, 2**62, 0], offsets=[0, 0]), "b": entry()},
    "many dimensions": {"a": entry(shape=[1] * 200 + [2])},
    "shape too small": {"a": entry(shape=[1])},
    "shape too large": {"a": entry(shape=[3])},
    "dtype too large": {"a": entry("F64")},
    "odd bytes": {"a": entry("F16", [2], [0, 5]), "b": entry("U8", [3], [5, 8])},
    "offsets that are a number": {"a": entry(offsets=8)},
    "one offset": {"a": entry(offsets=[8])},
    "three offsets": {"a": entry(offsets=[0, 8, 8])},
    "offsets that are an object": {"a": entry(offsets={"0": 0, "8": 8})},
    "negative offsets": {"a": entry(offsets=[-8, 0])},
    "reversed offsets": {"a": entry(offsets=[8, 0])},
    "reversed offsets of nothing": {"a": entry(shape=[0], offsets=[0, -8])},
    "boolean offsets": {"a": entry(offsets=[False, 8])},
    "float offsets": {"a": entry(offsets=[0.0, 8.0])},
    "NaN offsets": {"a": entry(offsets=[NAN, NAN])},
    "offsets out of bounds": {"a": entry(shape=[4], offsets=[0, 16])},
    "huge offsets": {"a": entry(offsets=[2**64, 2**64 + 8])},
    "nothing out of bounds": {"a": entry(), "b": entry(shape=[0], offsets=[99, 99])},
    "overlap": {"a": entry(), "b": entry(shape=[1], offsets=[4, 8])},
    "overlap at the start only": {"a": entry("U8", [6], [0, 6]), "b": entry("U8", [2], [4, 8])},
    "the same bytes": {"a": entry(), "b": entry()},
    "a hole at the start": {"a": entry(shape=[1], offsets=[4, 8])},
    "a hole in the middle": {"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [6, 8])},
    "a hole at the end": {"a": entry(shape=[1], offsets=[0, 4])},
    "no tensors for the data": {},
    "the same name twice": b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
    b'"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}',
    "the same field twice": b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}',
    "deep nesting": b"[" * 200_000,
    "a number of many digits": b'{"a": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_hostile_headers(write: Callable[..., Path], kind: str) -> None:
    with pytest.raises(WeightError, match="w.safetensors"):
        read_safetensors(write(header=HEADERS[kind], data=bytes(8)))


@pytest.mark.parametrize("length", [0, 1, 3, 2**31, 2**63, 2**64 - 1, 79, 80])
def test_a_lying_header_length(write: Callable[..., Path], length: int) -> None:
    path = write([("a", "F32", [2], bytes(8))], length=length)
    assert path.stat().st_size < 80
    with pytest.raises(WeightError, match="w.safetensors"):
        read_safetensors(path)


def test_a_header_of_150_megabytes_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 150_000_000))
        file.truncate(200_000_000)
    with pytest.raises(WeightError, match="150000000 bytes in a file of 200000000"):
        read_safetensors(path)


def test_names_are_utf_8_and_spaces_may_follow(write: Callable[..., Path]) -> None:
    text = json.dumps({"größe": entry()}, ensure_ascii=False).encode() + b"   "
    assert read_safetensors(write(header=text, data=f32([1, 2])))["größe"].tolist() == [1, 2]


def test_every_truncation(write: Callable[..., Path]) -> None:
    path = write([("a", "F32", [1], f32([1])), ("b", "U8", [3], b"abc")])
    whole = path.read_bytes()
    assert set(read_safetensors(path)) == {"a", "b"}
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightError, match="w.safetensors"):
            read_safetensors(path)
    path.write_bytes(whole + b"!")
    with pytest.raises(WeightError, match="w.safetensors"):
        read_safetensors(path)


def test_random_damage_is_never_worse_than_a_weight_error(write: Callable[..., Path]) -> None:
    path = write([("a", "F32", [1], f32([1])), ("b", "BF16", [2, 1], b"abcd")])
    whole, rng = np.frombuffer(path.read_bytes(), np.uint8), np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = whole.copy()
        damaged[rng.integers(0, len(whole), 3)] = rng.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        try:
            read_safetensors(path)
        except WeightError:
            refused += 1
    assert refused > 200


def test_a_truncated_file_is_called_truncated(write: Callable[..., Path]) -> None:
    path = write([("f", "F32", [5], f32(np.ones(5)))])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WeightError, match="truncated: .* bytes where .* are needed"):
        read_safetensors(path)


# ---- too much


def tiny(count: int) -> dict[str, Any]:
    return {f"layers.{i}.weight": entry("U8", [0], [0, 0]) for i in range(count)}


HUNGRY: dict[str, Callable[[], bytes]] = {
    "200 000 tiny tensors": lambda: json.dumps(tiny(200_000)).encode(),
    "200 000 dimensions": lambda: json.dumps({"a": entry("U8", [1] * 200_000, [0, 1])}).encode(),
    "200 000 numbers as offsets": lambda: json.dumps({"a": entry("U8", [1], [0] * 200_000)}).encode(),
    "200 000 times the same name": lambda: b"{" + b",".join([b'"a":{"data_offsets":[0,0]}'] * 200_000) + b"}",
    "millions of lists": lambda: b'{"a":[' + b",".join([b"[]"] * 5_000_000) + b"]}",
    "40 megabytes": lambda: json.dumps({"__metadata__": {"a": "a" * 40_000_000}}).encode(),
}


@pytest.mark.parametrize("kind", HUNGRY)
def test_a_hungry_header_is_refused_soon(write: Callable[..., Path], kind: str) -> None:
    path = write(header=HUNGRY[kind]())
    start = time.process_time()
    with pytest.raises(WeightError, match="w.safetensors: not a sound safetensors file"):
        read_safetensors(path)
    assert time.process_time() - start < 8, "a second on an idle machine"


def test_the_limit_of_tensors_is_far_above_real_files(write: Callable[..., Path]) -> None:
    assert len(read_safetensors(write(header=tiny(100_000)))) == 100_000
    with pytest.raises(WeightError, match="the header: ValueError: expected at most 100000 tensors, got 100001"):
        read_safetensors(write(header=tiny(100_001)))


# ---- what is no file


@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors.index.json", "link"])
def test_a_pipe_is_refused_before_it_is_opened(two: Two, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name if name != "link" else tmp_path / "pipe")
    if name == "link":
        (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(WeightError, match=f"{name}: not a regular file but a pipe or a device.*copy it to a file"):
        two.load_weights(tmp_path / name)


def test_a_device_is_refused(two: Two) -> None:
    with pytest.raises(WeightError, match="/dev/zero: not a regular file"):
        two.load_weights("/dev/zero")


@pytest.mark.parametrize(
    "source", [None, 3, b"bytes", [1], (pair for pair in ()), {1}, object()], ids=lambda source: type(source).__name__
)
def test_what_is_neither_a_path_nor_a_mapping(two: Two, source: Any) -> None:
    with pytest.raises(WeightError, match=r"expected a path, or arrays by name, such as .*named_parameters\(\)\); got"):
        two.load_weights(source)


# ---- files of other kinds

OTHERS: dict[str, tuple[bytes, str]] = {
    "npy": (b"\x93NUMPY\x01\x00v\x00{'descr'", r"an \.npy file.*\{name: numpy\.load\(path\)\}"),
    "pickle 2": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", r"a pickle.*torch\.load.*save_file"),
    "pickle 4": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}", "a pickle"),
    "zip": (b"PK\x03\x04" + bytes(40), "a zip archive"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(40), "a GGUF file: convert"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "an HDF5 file"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "a pointer of Git LFS: .*git lfs pull"),
    "gzip": (b"\x1f\x8b\x08" + bytes(40), "compressed by gzip: unpack it"),
    "web page": (b"<!doctype html><html>not found</html>", "a web page"),
    "index": (b'{"metadata": {}, "weight_map": {}}', r"JSON: .*a name that ends with \.json"),
    "text": (b"hello, this is no file of weights", "the header: ValueError: [0-9]+ bytes in a file of 33, beginning"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_files_of_other_kinds_are_named(two: Two, tmp_path: Path, kind: str) -> None:
    content, message = OTHERS[kind]
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(WeightError, match=f"w: not a sound safetensors file: .*{message}"):
        two.load_weights(tmp_path / "w")


def test_an_npz_is_named_and_its_remedy_works(two: Two, tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **GOOD)
    with pytest.raises(WeightError, match=r"an \.npz file of NumPy: give what numpy\.load\(path\) returns"):
        two.load_weights(tmp_path / "w.npz")
    two.load_weights(np.load(tmp_path / "w.npz"))
    assert run(two)["n"].tolist() == [1, -2]


def test_a_damaged_file_is_not_taken_for_another_kind(write: Callable[..., Path]) -> None:
    """Its first byte is the low byte of the header's length, which may be that of a pickle, a web page or JSON."""
    for length in range(100, 1300):
        text = b"{}" + b" " * (length - 2)
        with pytest.raises(WeightError, match="the header: ValueError: ends at byte|bytes in a file of"):
            read_safetensors(write(header=text, data=b"\0"))


# ---- dtypes that are not taken


@pytest.mark.parametrize(("dtype", "bits"), [("F8_E4M3", 8), ("F8_E5M2", 8), ("F8_E8M0", 8), ("F4", 4), ("C64", 64)])
def test_a_dtype_that_is_not_taken(two: Two, write: Callable[..., Path], dtype: str, bits: int) -> None:
    good = [(name, *of_file(array)) for name, array in GOOD.items()]
    extra = ("scaled", dtype, [2, 4], bytes(bits))
    two.load_weights(write([*good, extra]), strict=False)
    assert run(two)["n"].tolist() == [1, -2], "another tensor of the file does no harm"
    with pytest.raises(WeightError, match="scaled: not a tensor of this model"):
        two.load_weights(write([*good, extra]))
    asked = [("n", dtype, [2, 4], bytes(bits)), *(tensor for tensor in good if tensor[0] != "n")]
    with pytest.raises(WeightError, match=rf"n: expected i32\[2\], got .*{dtype}\[2, 4\] cannot be read: convert it"):
        two.load_weights(write(asked))
    with pytest.raises(WeightError, match=f"a: ValueError: .* bytes do not hold {dtype}"):
        read_safetensors(write([("a", dtype, [2, 4], bytes(bits - 1))]))


def test_the_elements_of_a_million_dimensions_are_not_counted(write: Callable[..., Path]) -> None:
    """The product of that many numbers takes minutes."""
    begin = time.perf_counter()
    with pytest.raises(WeightError, match="a: ValueError: expected at most 64 dimensions, got 1000000$"):
        read_safetensors(write([("a", "F4", [9] * 1_000_000, bytes(8))]))
    assert time.perf_counter() - begin < 20


def of_file(array: Any) -> tuple[str, list[int], bytes]:
    return {"f": "F", "i": "I"}[array.dtype.kind] + str(8 * array.dtype.itemsize), list(array.shape), array.tobytes()


def test_a_wrong_dtype_comes_with_what_to_do(two: Two) -> None:
    with pytest.raises(WeightError, match=r"f: expected f32\[5\], got int64\[5\]: convert it first"):
        two.load_weights(GOOD | {"f": np.ones(5, int)})
