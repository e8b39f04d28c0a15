"""What weights become: f16 storage, and starting values."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_stub import ModelRunner, WeightError

from .runners import Kinds, Two


def run(runner: ModelRunner) -> dict[str, Any]:
    return runner.call("run", {})


class Half(ModelRunner):
    """half: parameters stored as f16."""

    name = "half"

    def buffers(self) -> None:
        self.b_w = self.parameter("w", (5, 7), "f16", nbytes=72, init=("normal", 2.0))
        self.b_one = self.parameter("one", (), "f16", nbytes=4, init="ones")
        self.b_even = self.parameter("even", (2, 3), "f16", nbytes=12, init=("uniform", 0.5))
        self.b_none = self.parameter("none", (0, 4), "f16", nbytes=16, init="zeros")
        for buffer in (self.b_w, self.b_one, self.b_even, self.b_none):
            self.output("run", buffer.name, buffer, buffer.shape, buffer.dtype)

    def encode_run(self, encoder: Any) -> None:
        pass


# Ties go to the even neighbour; what is too large becomes inf, what is too small 0.
ROUNDED = {
    1 + 2**-11: 1.0,
    1 + 3 * 2**-11: 1 + 2**-9,
    1 + 2**-11 + 2**-20: 1 + 2**-10,
    65519.0: 65504.0,
    65520.0: np.inf,
    -1e6: -np.inf,
    np.inf: np.inf,
    2**-24: 2**-24,
    2**-25: 0.0,
    -(2**-26): -0.0,
    0.1: 0.0999755859375,
    3.0: 3.0,
}
BFLOATS = {
    0x3F80: 1.0,
    0xC2A0: -80.0,
    0x7F80: np.inf,
    0x4780: np.inf,
    0x3DCD: 0.10009765625,
    0x0080: 0.0,
    0x3380: 2**-24,
}


def filled(values: Any, dtype: Any) -> Any:
    return np.resize(np.array(list(values), dtype), (5, 7))


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("F64", filled(ROUNDED, "f8"), filled(ROUNDED.values(), "f2")),
        ("F32", filled(ROUNDED, "f4"), filled(ROUNDED.values(), "f2")),
        ("F16", filled(ROUNDED.values(), "f2"), filled(ROUNDED.values(), "f2")),
        ("BF16", filled(BFLOATS, "u2"), filled(BFLOATS.values(), "f2")),
    ],
)
def test_floats_become_f16(gpu: Any, write: Callable[..., Path], dtype: str, given: Any, expected: Any) -> None:
    runner = Half(gpu)
    rest = [("one", dtype, [], given[:1, :1]), ("even", dtype, [2, 3], given[0, :6]), ("none", dtype, [0, 4], b"")]
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        runner.load_weights(
            write([("w", dtype, [5, 7], given.tobytes()), *((n, d, s, bytes(memoryview(x))) for n, d, s, x in rest)])
        )
    out = run(runner)
    assert out["w"].dtype == np.float16 and out["w"].tobytes() == expected.tobytes()
    assert out["one"].tobytes() == expected[0, 0].tobytes() and out["even"].tobytes() == expected[0, :6].tobytes()
    assert out["none"].shape == (0, 4)
    assert bytes(gpu.queue.read_buffer(runner.b_w.gpu, 68, 4)) == expected[-1, -1].tobytes() + b"\0\0"


def test_arrays_become_f16_and_integers_do_not(gpu: Any) -> None:
    runner = Half(gpu)
    good = {"w": filled(ROUNDED, "f8"), "one": 0.5, "even": [[1.0, 2, 3], [4, 5, 6]], "none": np.zeros((0, 4), "f4")}
    runner.load_weights(good)
    out = run(runner)
    assert out["w"].tobytes() == filled(ROUNDED.values(), "f2").tobytes() and out["one"] == 0.5
    assert out["even"].tolist() == [[1, 2, 3], [4, 5, 6]]
    runner.load_weights(good | {"w": filled(ROUNDED, "f4").T.copy().T, "even": np.ones((4, 3), "f2")[::2]})
    assert run(runner)["w"].tobytes() == out["w"].tobytes()
    for wrong in (np.ones((5, 7), int), np.ones((5, 7), bool), np.ones((5, 7), complex), np.ones((7, 5))):
        with pytest.raises(WeightError, match=r"w: expected f16\[5, 7\], got"):
            runner.load_weights(good | {"w": wrong})
    assert "parameter w f16[5, 7]" in Half.describe() and runner.parameters["one"] == ((), "f16")


def test_f16_starting_values_are_those_of_f32_rounded(gpu: Any) -> None:
    class Full(ModelRunner):
        def buffers(self) -> None:
            self.b_w = self.parameter("w", (5, 7), nbytes=140, init=("normal", 2.0))
            self.output("run", "w", self.b_w, (5, 7))

        def encode_run(self, encoder: Any) -> None:
            pass

    half, full = Half(gpu), Full(gpu)
    half.init_weights(3)
    full.init_weights(3)
    out = run(half)
    assert out["w"].tobytes() == run(full)["w"].astype(np.float16).tobytes() and out["w"].std() > 1
    assert out["one"] == 1 and np.abs(out["even"]).max() <= 0.5 and len(np.unique(out["even"])) == 6


def test_init_weights_differ_from_name_to_name(gpu: Any) -> None:
    class Uniform(ModelRunner):
        def buffers(self) -> None:
            for name in ("a", "b"):
                buffer = self.parameter(name, (64,), nbytes=256, init=("uniform", 0.5))
                self.output("run", name, buffer, (64,))

        def encode_run(self, encoder: Any) -> None:
            pass

    runner = Uniform(gpu)
    runner.init_weights(0)
    a, b = run(runner).values()
    assert not np.isin(a, b).any() and a.min() < -0.25 and a.max() > 0.25 and np.abs([a, b]).max() <= 0.5


@pytest.mark.parametrize("init", ["zeros", "ones", ("uniform", 0.5), ("normal", 2.0)])
def test_init_weights_of_scalars_integers_and_nothing(gpu: Any, init: Any) -> None:
    class Odd(ModelRunner):
        def buffers(self) -> None:
            for name, shape, dtype in (("scalar", (), "f32"), ("nothing", (0, 2), "f32"), ("n", (2,), "i32")):
                buffer = self.parameter(name, shape, dtype, nbytes=4 * int(np.prod(shape)), init=init)
                self.output("run", name, buffer, shape, dtype)

        def encode_run(self, encoder: Any) -> None:
            pass

    runner = Odd(gpu)
    runner.init_weights(0)
    out = run(runner)
    assert out["scalar"].shape == () and out["nothing"].shape == (0, 2)
    if isinstance(init, str):
        assert out["scalar"] == (init == "ones") and out["n"].tolist() == [init == "ones"] * 2


def test_init_weights_depend_on_seed_and_name_only(gpu: Any) -> None:
    class Reordered(Kinds):
        def buffers(self) -> None:
            self.b_v = self.parameter("v", (1000,), nbytes=4000, init=("normal", 2.0))
            self.output("run", "v", self.b_v, (1000,))

    first, other, again = Kinds(gpu), Kinds(gpu), Reordered(gpu)
    given = {"ids": [1, 2, 3], "i": [1, 2], "s": 0, "none": np.zeros((0, 3))}
    for runner, seed in ((first, 3), (other, 4), (again, 3)):
        runner.init_weights(seed)
    out, v = first.run(**given), again.run()["v"]
    assert v.tobytes() == out["v"].tobytes() != other.run(**given)["v"].tobytes()
    assert (np.abs(out["w"]) <= 0.5).all() and len(set(out["w"].tolist())) == 4
    assert 1.8 < v.std() < 2.2 and abs(v.mean()) < 0.3
    assert not np.allclose(out["w"] * 4, v[:4])
    twice = Kinds(gpu)
    twice.init_weights(9)
    twice.init_weights(3)
    assert twice.run(**given)["v"].tobytes() == v.tobytes()


def test_init_weights_names_parameters_without_init(two: Two) -> None:
    with pytest.raises(RuntimeError, match="without init: f, n, u, e, z"):
        two.init_weights(0)
    with pytest.raises(RuntimeError, match="f, n, u, e, z"):
        run(two)
