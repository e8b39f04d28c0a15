"""One call: what inputs become, which outputs come back, what is refused and that a refusal changes nothing."""

import concurrent.futures
import math
import re
import time
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from runtime_stub import ModelRunner

from .runners import Decode, InPlace, Kinds, Scale

X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
GIVEN = {"ids": [1, 2, 4294967295], "i": [-2147483648, 7], "s": 1.5, "none": np.zeros((0, 3))}


@pytest.fixture(scope="module")
def scale(gpu: Any) -> Scale:
    runner = Scale(gpu)
    runner.load_weights({"w": np.full((2, 3), 3, np.float32)})
    return runner


@pytest.fixture(scope="module")
def kinds(gpu: Any) -> Kinds:
    runner = Kinds(gpu)
    runner.init_weights(1)
    return runner


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "?", "i1", "u1", "i4", "u4", "i8", "u8", "g"])
def test_numbers_of_every_kind_become_f32(scale: Scale, dtype: str) -> None:
    x = np.abs(X).astype(dtype)
    assert np.array_equal(scale.run(x=x)["y"], x.astype(np.float32) * 3)


def test_lists_views_and_scalars_are_taken(scale: Scale, kinds: Kinds) -> None:
    assert np.array_equal(scale.run(x=X.tolist())["y"], X * 3)
    assert np.array_equal(scale.run(x=np.asfortranarray(X))["y"], X * 3)
    assert np.array_equal(scale.run(x=np.repeat(X, 2, axis=1)[:, ::2])["y"], X * 3)
    for one in (1.5, np.float32(1.5), np.array(1.5)):
        assert kinds.run(**GIVEN | {"s": one})["s"] == np.float32(1.5)


def test_beyond_float32_is_inf_without_a_warning(kinds: Kinds, recwarn: pytest.WarningsRecorder) -> None:
    assert kinds.run(**GIVEN | {"s": -1e300})["s"] == -math.inf
    assert math.isnan(kinds.run(**GIVEN | {"s": math.nan})["s"])
    assert not recwarn.list


def test_integers_are_kept_exactly(kinds: Kinds) -> None:
    out = kinds.run(**GIVEN)
    assert out["ids"].dtype == np.uint32 and out["ids"].tolist() == [1, 2, 4294967295]
    assert out["i"].dtype == np.int32 and out["i"].tolist() == [[-2147483648, 7]]
    assert kinds.run(**GIVEN | {"ids": [True, False, True]})["ids"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", [1.0, 2.0, 3.0], r"ids.*u32\[3\], got float64\[3\]"),
        ("ids", [-1, 2, 3], r"ids.*u32\[3\], got int64\[3\] from -1 to 3"),
        ("ids", [0, 1, 4294967296], r"ids.*4294967296"),
        ("ids", [0, 1, 2**80], r"ids.*got object"),
        ("ids", [0, 1], r"ids.*u32\[3\], got int64\[2\]"),
        ("ids", 1, r"ids.*u32\[3\], got int64\[\]"),
        ("i", [2147483648, 0], r"i'.*i32\[2\].*2147483648"),
        ("i", np.ones(2, np.float32), r"i'.*i32\[2\], got float32\[2\]"),
        ("s", [1.5], r"s'.*f32\[\], got float64\[1\]"),
        ("s", 1j, r"s'.*f32\[\], got complex128\[\]"),
        ("s", "1", r"s'.*got str"),
        ("s", None, r"s'.*got object"),
        ("s", b"1", r"s'.*got bytes"),
        ("s", np.datetime64(1, "s"), r"s'.*got datetime64"),
        ("none", np.zeros((3, 0)), r"none.*f32\[0, 3\], got float64\[3, 0\]"),
        ("i", [[1], [2, 3]], r"i'.*inhomogeneous"),
    ],
)
def test_what_does_not_fit_is_refused(kinds: Kinds, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kinds.run(**GIVEN | {name: value})


def test_nothing_is_broadcast(scale: Scale) -> None:
    for x in (1.0, X[0], X[:1], X[None], X.T):
        with pytest.raises(ValueError, match=re.escape("input 'x' of run: expected f32[2, 3], got float")):
            scale.run(x=x)


def test_missing_and_unknown_inputs_are_named(kinds: Kinds) -> None:
    with pytest.raises(ValueError, match=r"expected \['ids', 'i', 's', 'none'\], got \['ids', 'i', 's'\]"):
        kinds.run(**{name: value for name, value in GIVEN.items() if name != "none"})
    with pytest.raises(ValueError, match="got .*'other'"):
        kinds.run(**GIVEN, other=1)


def test_an_array_that_numpy_cannot_take_is_a_value_error(scale: Scale) -> None:
    class Odd:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("on another device")

    with pytest.raises(ValueError, match="x.*on another device"):
        scale.run(x=Odd())


def test_outputs_are_picked_in_declaration_order(kinds: Kinds) -> None:
    assert list(kinds.run(**GIVEN)) == list(kinds.outputs)
    assert list(kinds.run(outputs=("cache", "c1", "s"), **GIVEN)) == ["s", "c1", "cache"]
    assert list(kinds.run(outputs=iter(["s"]), **GIVEN)) == ["s"]
    with pytest.raises(ValueError, match="'nope'.*expected one of s, ids"):
        kinds.run(outputs=("s", "nope"), **GIVEN)


@pytest.mark.parametrize("outputs", ["y", "yy", 5, 1.5, np.array(1), [5], ["y", None], [["y"]], {"y": 1, "x": 2}, b"y"])
def test_outputs_that_are_no_names_are_refused(scale: Scale, outputs: Any) -> None:
    with pytest.raises(ValueError, match=r"expected (a tuple of some of \['y'\], got|one of y)"):
        scale.run(outputs=outputs, x=X)


def test_a_text_is_not_taken_for_names(gpu: Any) -> None:
    with pytest.raises(ValueError, match=r"outputs of decode: expected a tuple of some of \['y', 'z'\], got 'zy'"):
        Decode(gpu).decode(outputs="zy", x=[1, 2, 3, 4])


@pytest.mark.parametrize("room", [0, 8, 12, 20, 24, 4000, 4020, 10**6])
def test_outputs_come_back_in_parts(gpu: Any, monkeypatch: pytest.MonkeyPatch, spy: Any, room: int) -> None:
    monkeypatch.setattr("runtime_stub.core.STAGING", room)
    runner = Kinds(gpu)
    runner.init_weights(1)
    runner.set_state("cache", [[1, 2], [3, 4]])
    maps = spy(runner._staging, "map_sync")
    out = runner.run(**GIVEN)
    sizes = {name: array.nbytes for name, array in out.items()}
    assert list(sizes) == list(runner.outputs) and sizes["v"] == 4000
    assert runner._staging.size == min(sum(sizes.values()), max(room, 4000))
    parts = [size for _, _, size in maps]
    assert sum(parts) == sum(sizes.values()) and max(parts) <= runner._staging.size
    assert len(parts) == 1 + (room < sum(sizes.values())), "all before v fit in its room"
    assert out["ids"].tolist() == [1, 2, 4294967295] and out["none"].shape == (3, 0)
    assert out["cache"].tolist() == [1, 2, 3, 4] == out["cache_again"].ravel().tolist()
    assert out["v"].tobytes() == bytes(gpu.queue.read_buffer(runner.buffer("v")))
    kept = {name: array.copy() for name, array in out.items()}
    for array in runner.run(**GIVEN).values():
        array[...] = 7
    assert all(np.array_equal(array, kept[name], equal_nan=True) for name, array in out.items())
    maps.clear()
    assert list(runner.run(outputs=("w", "v", "s"), **GIVEN)) == ["s", "w", "v"] and len(maps) == 1 + (room < 4020)


def test_more_outputs_than_one_buffer_holds(gpu: Any) -> None:
    shape = 100, 2**18

    class Large(Scale):
        def buffers(self) -> None:
            super().buffers()
            self.b_s = self.state("s", shape, nbytes=100 * 2**20)
            for name in "abc":
                self.output("run", name, self.b_s, shape)

    runner = Large(gpu)
    runner.init_weights()
    gpu.queue.write_buffer(runner.buffer("s"), 100 * 2**20 - 4, np.array([9], np.float32))
    out = runner.run(x=X)
    assert list(out) == ["y", "a", "b", "c"] and np.array_equal(out["y"], X)
    assert all(out[name][-1, -1] == 9 and out[name][0, 0] == 0 for name in "abc")
    runner.close()


def test_one_runner_in_many_threads(gpu: Any) -> None:
    runner = Decode(gpu)

    def work(thread: int) -> list[list[float]]:
        got = []
        for i in range(30):
            x = [thread, i, 1, 2]
            runner.set_state("position", 0) if i % 3 else runner.reset()
            try:
                got.append(runner.decode(x=x)["z"].tolist())
            except RuntimeError:  # the others have brought it to its limit
                got.append([v * v + v for v in x])
            assert runner.get_state("rows").shape == (2,)
        return got

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for thread, got in enumerate(pool.map(work, range(4))):
            assert got == [[thread * thread + thread, i * i + i, 2, 6] for i in range(30)]


def test_the_threads_of_a_call_wait_for_one_another(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    most: list[int] = []
    real = scale.upload

    def upload(*arguments: Any) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        real(*arguments)
        inside.pop()

    monkeypatch.setattr(scale, "upload", upload)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        given = [X + i for i in range(8)]
        for x, out in zip(given, pool.map(lambda x: scale.run(x=x), given), strict=True):
            assert np.array_equal(out["y"], x * 3)
    assert max(most) == 1


class Bounded(ModelRunner):
    """bounded: numbers with a bound."""

    def buffers(self) -> None:
        self.b_ids = self.input("run", "ids", (2, 2), "u32", nbytes=16, bounds=(0, 4))
        self.b_one = self.input("run", "one", (), "u32", nbytes=4, bounds=(-1, 0))
        self.b_far = self.input("run", "far", (2,), "u32", nbytes=8, bounds=(0, 2**32 - 1))
        self.b_none = self.input("run", "none", (0,), "u32", nbytes=4, bounds=(0, -1))
        self.output("run", "ids", self.b_ids, (4,), "u32")

    def encode_run(self, encoder: Any) -> None:
        pass


def test_integers_that_reach_their_bound_are_refused(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Bounded(gpu)
    good = {"ids": [[4, 0], [1, 4]], "one": 0, "far": [2**32 - 1, 0], "none": np.zeros(0, int)}
    assert runner.call("run", good)["ids"].tolist() == [4, 0, 1, 4]
    monkeypatch.setattr(runner, "upload", None)
    with pytest.raises(ValueError, match="input 'ids' of run: expected numbers from 0 to 4, got 7$"):
        runner.call("run", good | {"ids": [[4, 7], [9, 4]]})
    with pytest.raises(ValueError, match="input 'ids' of run: expected numbers from 0 to 4, got 5$"):
        runner.call("run", good | {"ids": np.array([[4, 4], [4, 5]], np.uint8)})
    with pytest.raises(ValueError, match="input 'one' of run: expected numbers from -1 to 0, got 1$"):
        runner.call("run", good | {"one": True})


def test_no_outputs_read_nothing_back(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMap(Exception):
        pass

    def map_sync(*_: Any) -> None:
        raise NoMap

    monkeypatch.setattr(scale._staging, "map_sync", map_sync)
    assert scale.run(outputs=(), x=X) == {}
    with pytest.raises(NoMap):
        scale.run(x=X)


def test_zero_size_alone_reads_nothing_back(kinds: Kinds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds._staging, "map_sync", None)
    assert kinds.run(outputs=("none",), **GIVEN)["none"].shape == (3, 0)


def test_no_buffer_is_smaller_than_four_bytes(kinds: Kinds) -> None:
    assert kinds.b_none.gpu.size == 4 and kinds.run(**GIVEN)["none"].shape == (3, 0)


def test_arrays_are_fresh_and_writable(scale: Scale) -> None:
    first = scale.run(x=X)["y"]
    kept = first.copy()
    second = scale.run(x=-X)["y"]
    assert np.array_equal(first, kept) and np.array_equal(second, -kept)
    first[:] = 9
    assert np.array_equal(second, -kept)


@pytest.mark.parametrize("when", ["pending", "mapped"])
def test_an_interrupted_read_back_does_no_harm(scale: Scale, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    staging = scale._staging

    def map_sync(mode: int, *span: int) -> None:
        promise = staging.map_async(mode, *span)
        if when == "mapped":
            promise.sync_wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(staging, "map_sync", map_sync)
    with pytest.raises(KeyboardInterrupt):
        scale.run(x=X)
    assert staging.map_state == when
    assert np.array_equal(scale.run(x=X)["y"], X * 3) and scale._staging is not staging


def test_constants_are_exact_to_the_bit(kinds: Kinds) -> None:
    out = kinds.run(**GIVEN)
    expected = np.array([0.1, -0.0, np.inf, 1e-45, np.nan], np.float32)
    assert out["c0"].tobytes() == expected.tobytes()
    assert out["c1"].tolist() == [1, 4294967295]


def test_one_buffer_may_be_several_outputs(kinds: Kinds) -> None:
    kinds.set_state("cache", [[1, 2], [3, 4]])
    out = kinds.run(**GIVEN)
    assert out["cache"].tolist() == [1, 2, 3, 4] and out["cache_again"].tolist() == [[1, 2], [3, 4]]
    assert out["w"].shape == (4,)


def test_dispatches_run_in_order_and_pipelines_change(gpu: Any) -> None:
    runner = Decode(gpu)
    out = runner.decode(x=[1, 2, 3, 4])
    assert out["y"].tolist() == [1, 4, 9, 16] and out["z"].tolist() == [2, 6, 12, 20]


def test_a_refused_call_uploads_and_encodes_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Decode(gpu)
    runner.set_state("position", 6)
    touched: list[str] = []
    monkeypatch.setattr(runner, "upload", lambda *_: touched.append("upload"))
    monkeypatch.setattr(runner, "encode_decode", lambda *_: touched.append("encode"))
    for outputs, inputs in (
        (None, {"x": [1, 2, 3, 4]}),
        (("nope",), {"x": [1, 2, 3, 4]}),
        (None, {"x": 1}),
        (None, {}),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            runner.decode(outputs=outputs, **inputs)
    assert not touched


def test_a_write_to_an_input_starts_from_each_call_s_own_array(gpu: Any) -> None:
    runner = InPlace(gpu)
    for _ in range(2):
        out = runner.run(a=[1, 2], b=[3, 4])
        assert out["a"].tolist() == [6, 7] and out["b"].tolist() == [[3, 4]]


def test_replays_are_bit_identical_and_create_nothing(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("create_buffer", "create_bind_group", "create_compute_pipeline", "create_shader_module"):
        monkeypatch.setattr(scale.device, name, None, raising=True)
    first = scale.run(x=X)["y"].tobytes()
    assert {scale.run(x=X)["y"].tobytes() for _ in range(20)} == {first}


def test_entries_describe_themselves(gpu: Any) -> None:
    runner = Decode(gpu)
    assert runner.entries["decode"].inputs == {"x": ((4,), "f32")}
    assert runner.entries["prefill"].outputs == {"position": ((1,), "u32")}
    assert runner.states == {"position": ((), "u32"), "rows": ((2,), "u32")} and runner.parameters == {}
    assert Scale(gpu).inputs == {"x": ((2, 3), "f32")} and Scale(gpu).outputs == {"y": ((2, 3), "f32")}
    for what in ("inputs", "outputs"):
        with pytest.raises(ValueError) as caught:
            getattr(runner, what)
        expected = f'{what} of decode: expected a model with one entry, got prefill, decode: runner.entries["prefill"]'
        assert str(caught.value) == f"{expected}.{what}"


def test_one_array_without_a_name(scale: Scale, kinds: Kinds, gpu: Any) -> None:
    assert np.array_equal(scale.run(X)["y"], X * 3)
    assert scale.run(X, outputs=()) == {}
    assert np.array_equal(scale.call("run", {}, X)["y"], X * 3)
    assert Decode(gpu).decode([1, 2, 3, 4])["y"].tolist() == [1, 4, 9, 16]
    for use, message in (
        (lambda: scale.run(X, X), "expected x= by name, .*; got 2 without a name and .."),
        (lambda: scale.run(("y",), x=X), r"got 1 without a name and \['x'\].*outputs="),
        (lambda: scale.call("run", {"x": X}, ("y",)), "inputs of run: expected x= by name"),
        (lambda: kinds.run(X), "expected ids=, i=, s=, none= by name"),
        (lambda: ModelRunnerWithout(gpu).call("run", {}, X), "inputs of run: expected none by name"),
        (lambda: scale.run(X[0]), r"input 'x' of run: expected f32\[2, 3\], got float32\[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_emitted_methods_take_one_array(gpu: Any) -> None:
    one, both = Graph(), Graph()
    one.set_outputs({"y": one.input("x", (3,)) * 2.0})
    both.set_outputs({"sum": both.input("a", (3,)) + both.input("b", (3,))})
    runner = compile_graph({"double": one, "add": both}).load(device=gpu)
    assert runner.double(X[0])["y"].tolist() == [-4, -2, 0]
    assert runner.double(X[0], outputs=()) == {} == runner.double(outputs=(), x=X[0])
    with pytest.raises(ValueError, match="inputs of add: expected a=, b= by name"):
        runner.add(X[0])


class ModelRunnerWithout(ModelRunner):
    """without: an entry without inputs."""

    def encode_run(self, encoder: Any) -> None:
        pass


def test_gpu_buffers_are_found_by_name(gpu: Any) -> None:
    runner = Decode(gpu)
    assert runner.buffer("y") is runner.b_y.gpu and runner.buffer("y", "decode") is runner.b_y.gpu
    assert runner.buffer("rows") is runner.b_rows.gpu and runner.buffer("position") is runner.b_position.gpu
    assert Scale(gpu).buffer("w").size == 24
    for name, entry in (("nope", None), ("y", "prefill"), ("x", None)):
        with pytest.raises(ValueError, match=name):
            runner.buffer(name, entry)


def test_describing_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_stub.core.import_wgpu", None)
    text = Kinds.describe()
    assert "ids u32[3]" in text and "none f32[3, 0]" in text and "w f32[4]" in text and "cache f32[2, 2]" in text


@pytest.mark.parametrize("given", [None, X, [X], "x", 3], ids=repr)
def test_inputs_that_are_no_mapping(gpu: Any, given: Any) -> None:
    kind = re.escape(type(given).__name__)
    with pytest.raises(ValueError, match=f"inputs of run: expected a mapping, {{name: array}}, got {kind}$"):
        Scale(gpu).call("run", given)
