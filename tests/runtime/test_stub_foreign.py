"""A host program's GPU buffers as inputs: used in place, or refused with the reason."""

from typing import Any

import numpy as np
import pytest

from runtime_stub import doctor
from runtime_stub.core import ModelRunner

from .runners import Decode, InPlace, Kinds, Scale

X = np.arange(6, dtype=np.float32).reshape(2, 3)
USAGE = ("STORAGE", "COPY_DST", "COPY_SRC")


def make(device: Any, array: Any, usage: tuple[str, ...] = USAGE) -> Any:
    flags = doctor.import_wgpu().BufferUsage
    buffer = device.create_buffer(size=array.nbytes, usage=sum(getattr(flags, name) for name in usage))
    device.queue.write_buffer(buffer, 0, array)
    return buffer


@pytest.fixture(scope="module")
def scale(gpu: Any) -> Scale:
    runner = Scale(gpu)
    runner.load_weights({"w": np.full((2, 3), 2, np.float32)})
    return runner


def test_it_is_read_in_place_and_mixes_with_arrays(scale: Scale, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(gpu, X)
    with monkeypatch.context() as patch:
        patch.setattr(scale, "upload", None)
        assert np.array_equal(scale.run(x=buffer)["y"], X * 2)
    assert np.array_equal(scale.run(x=X + 1)["y"], (X + 1) * 2)
    gpu.queue.write_buffer(buffer, 0, X + 5)
    assert np.array_equal(scale.run(x=buffer)["y"], (X + 5) * 2)


def test_a_larger_buffer_is_fine(scale: Scale, gpu: Any) -> None:
    assert np.array_equal(scale.run(x=make(gpu, np.arange(64, dtype=np.float32)))["y"], X * 2)


def test_the_runner_s_own_input_buffer_keeps_what_it_holds(gpu: Any, spy: Any) -> None:
    runner = InPlace(gpu)
    assert runner.run(a=[1, 2], b=[3, 4])["a"].tolist() == [6, 7]
    made = spy(gpu, "create_bind_group")
    assert runner.run(a=runner.b_a.gpu, b=runner.b_b.gpu)["a"].tolist() == [11, 12]
    assert not made


def test_one_bind_group_is_kept_for_each_buffer(gpu: Any) -> None:
    runner = Decode(gpu)
    first, second = make(gpu, np.ones(4, np.float32)), make(gpu, np.full(4, 3, np.float32))
    for _ in range(3):
        assert runner.decode(x=first)["z"].tolist() == [2] * 4
        runner.set_state("position", 0)
        assert runner.decode(x=second)["z"].tolist() == [12] * 4
        runner.set_state("position", 0)
    groups = (runner.g_scale_0, runner.g_add_0)
    assert [len(group.made) for group in groups] == [3, 3], "that of x itself, and of two buffers seen"


def test_buffers_seen_long_ago_are_forgotten(scale: Scale, gpu: Any) -> None:
    for i in range(70):
        assert scale.run(x=make(gpu, X + i))["y"][0, 0] == 2 * i
        assert len(scale.g_scale_0.made) <= 32


def test_one_runner_s_output_is_another_s_input(scale: Scale, gpu: Any) -> None:
    second = Scale(gpu)
    second.load_weights({"w": np.full((2, 3), 10, np.float32)})
    scale.run(outputs=(), x=X)
    assert np.array_equal(second.run(x=scale.buffer("y"))["y"], X * 20)


def test_an_output_that_is_this_input_reads_the_buffer(gpu: Any) -> None:
    runner = InPlace(gpu)
    buffer = make(gpu, np.array([7, 8], np.float32))
    assert runner.run(a=[0, 0], b=buffer)["b"].tolist() == [[7, 8]]
    with pytest.raises(ValueError, match="input 'b'.*COPY_SRC"):
        runner.run(a=[0, 0], b=make(gpu, X, ("STORAGE", "COPY_DST")))


def test_too_small(scale: Scale, gpu: Any) -> None:
    with pytest.raises(ValueError, match="input 'x' of run.*24 bytes; got a buffer of 20 bytes"):
        scale.run(x=make(gpu, np.zeros(5, np.float32)))


def test_without_storage_usage(scale: Scale, gpu: Any) -> None:
    with pytest.raises(ValueError, match="input 'x' of run.*STORAGE"):
        scale.run(x=make(gpu, X, ("COPY_DST", "COPY_SRC")))


def test_still_mapped(scale: Scale, gpu: Any) -> None:
    buffer = gpu.create_buffer(size=24, usage=scale.wgpu.BufferUsage.STORAGE, mapped_at_creation=True)
    with pytest.raises(ValueError, match="input 'x' of run.*mapped"):
        scale.run(x=buffer)
    buffer.unmap()
    assert not scale.run(x=buffer)["y"].any()


def test_destroyed_before_it_is_seen(scale: Scale, gpu: Any) -> None:
    buffer = make(gpu, X)
    buffer.destroy()
    with pytest.raises(ValueError, match="(?s)input 'x' of run.*destroyed"):
        scale.run(x=buffer)


def test_destroyed_after_it_was_used(scale: Scale, gpu: Any) -> None:
    buffer = make(gpu, X)
    assert np.array_equal(scale.run(x=buffer)["y"], X * 2)
    buffer.destroy()
    for outputs in (None, ()):
        with pytest.raises(ValueError, match="(?s)input 'x' of run.*destroyed"):
            scale.run(outputs=outputs, x=buffer)
    assert np.array_equal(scale.run(x=X)["y"], X * 2)


def test_destroyed_and_only_copied(gpu: Any) -> None:
    runner, buffer = InPlace(gpu), make(gpu, np.ones(2, np.float32))
    assert runner.run(a=[0, 0], b=buffer)["b"].tolist() == [[1, 1]]
    buffer.destroy()
    with pytest.raises(ValueError, match="(?s)input 'b' of run.*destroyed"):
        runner.run(a=[0, 0], b=buffer)


@pytest.mark.parametrize("own_device", [False, True])
def test_of_a_runner_that_was_closed(scale: Scale, gpu: Any, own_device: bool) -> None:
    with Scale(None if own_device else gpu) as other:
        buffer = other.buffer("y")
        if not own_device:
            scale.run(x=buffer)
    with pytest.raises(ValueError, match="(?s)input 'x' of run.*(destroyed|Device)"):
        scale.run(x=buffer)


def test_of_another_device(scale: Scale, gpu: Any) -> None:
    other = doctor.request_device(doctor.choose_adapter(None), ModelRunner)
    with pytest.raises(ValueError, match="(?s)input 'x' of run.*Device"):
        scale.run(x=make(other, X))
    with pytest.raises(ValueError, match="(?s)input 'b' of run.*Device"):
        InPlace(gpu).run(a=[0, 0], b=make(other, X))
    other.destroy()


def test_of_a_device_that_was_destroyed() -> None:
    device = doctor.request_device(doctor.choose_adapter(None), ModelRunner)
    runner, buffer = Scale(device), make(device, X)
    runner.init_weights()
    runner.run(x=buffer)
    device.destroy()
    with pytest.raises(ValueError, match="(?s)input 'x' of run.*lost"):
        runner.run(x=buffer)


def test_without_a_byte(gpu: Any) -> None:
    runner = Kinds(gpu)
    runner.init_weights()
    empty = gpu.create_buffer(size=0, usage=runner.wgpu.BufferUsage.STORAGE | runner.wgpu.BufferUsage.COPY_SRC)
    with pytest.raises(ValueError, match="input 'none' of run.*at least 4 bytes"):
        runner.run(ids=[0, 0, 0], i=[0, 0], s=0, none=empty)


def test_written_by_the_entry(scale: Scale, gpu: Any) -> None:
    with pytest.raises(ValueError, match="input 'a' of run.*write"):
        InPlace(gpu).run(a=make(gpu, np.zeros(2, np.uint32)), b=[0, 0])
    with pytest.raises(ValueError, match="input 'x' of run.*write"):
        scale.run(x=scale.buffer("y"))


def test_where_the_host_must_know_the_number(gpu: Any) -> None:
    with pytest.raises(ValueError, match="input 'n' of prefill.*array"):
        Decode(gpu).prefill(n=make(gpu, np.array(1, np.uint32)))


def test_refusal_comes_before_any_upload(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = InPlace(gpu)
    monkeypatch.setattr(runner, "upload", None)
    monkeypatch.setattr(runner, "encode_run", None)
    with pytest.raises(ValueError, match="input 'b'"):
        runner.run(a=[1, 2], b=make(gpu, np.zeros(1, np.float32)))
