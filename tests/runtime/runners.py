"""Small runners as the compiler writes them; `python runners.py CLASS ...` runs one as a script."""

import sys
from typing import Any

from runtime_stub import ModelRunner, main, unpack

SCALE = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
override N: u32;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < N) { y[id.x] = x[id.x] * w[id.x]; }
}
"""
ADD = SCALE.replace("x[id.x] * w[id.x]", "x[id.x] + w[id.x]")
STEP = """
@group(0) @binding(0) var<storage, read_write> position: array<u32>;
override N: u32;
override STEP: u32;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < N) { position[id.x] += STEP; }
}
"""
STEP_BY = """
@group(0) @binding(0) var<storage, read> n: array<u32>;
@group(0) @binding(1) var<storage, read_write> position: array<u32>;
override N: u32;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < N) { position[id.x] += n[0]; }
}
"""
C0 = """
c-muRU|{
$U1ON&K1O5
"""


class Scale(ModelRunner):
    """scale: y = x * w."""

    name = "scale"

    def buffers(self) -> None:
        self.b_w = self.parameter("w", (2, 3), nbytes=24, init="ones")
        self.b_x = self.input("run", "x", (2, 3), nbytes=24)
        self.b_y = self.buffer("y", nbytes=24)
        self.output("run", "y", self.b_y, (2, 3))

    def pipelines(self) -> None:
        self.p_scale_0 = self.pipeline(SCALE, N=6)

    def bind_groups(self) -> None:
        self.g_scale_0 = self.bind(self.p_scale_0, self.b_x, self.b_w, self.b_y)

    def encode_run(self, encoder: Any) -> None:
        # scale_0: f32[2, 3] * f32[2, 3] -> f32[2, 3]
        encoder.dispatch(self.p_scale_0, self.g_scale_0, 1, 1, 1)

    def run(self, *only: Any, outputs: Any = None, **inputs: Any) -> Any:
        return self.call("run", inputs, *only, outputs=outputs)


class Kinds(ModelRunner):
    """kinds: every kind of input and output; nothing is dispatched."""

    name = "kinds"

    def buffers(self) -> None:
        self.b_w = self.parameter("w", (4,), nbytes=16, init=("uniform", 0.5))
        self.b_v = self.parameter("v", (1000,), nbytes=4000, init=("normal", 2.0))
        self.b_k = self.parameter("k", (2,), "i32", nbytes=8, init="zeros")
        self.b_ids = self.input("run", "ids", (3,), "u32", nbytes=12)
        self.b_i = self.input("run", "i", (2,), "i32", nbytes=8)
        self.b_s = self.input("run", "s", (), nbytes=4)
        self.b_none = self.input("run", "none", (0, 3), nbytes=0)
        self.b_c0 = self.constant("c0", (5,), [0.1, -0.0, float("inf"), 1e-45, float("nan")], nbytes=20)
        self.b_c1 = self.constant("c1", (2,), unpack(C0), "u32", nbytes=8)
        self.b_cache = self.state("cache", (2, 2), nbytes=16)
        self.output("run", "s", self.b_s, ())
        self.output("run", "ids", self.b_ids, (3,), "u32")
        self.output("run", "i", self.b_i, (1, 2), "i32")
        self.output("run", "none", self.b_none, (3, 0))
        self.output("run", "c0", self.b_c0, (5,))
        self.output("run", "c1", self.b_c1, (2,), "u32")
        self.output("run", "cache", self.b_cache, (4,))
        self.output("run", "cache_again", self.b_cache, (2, 2))
        self.output("run", "w", self.b_w, (4,))
        self.output("run", "v", self.b_v, (1000,))

    def encode_run(self, encoder: Any) -> None:
        pass

    def run(self, *only: Any, outputs: Any = None, **inputs: Any) -> Any:
        return self.call("run", inputs, *only, outputs=outputs)


class Decode(ModelRunner):
    """decode: two entries that share states; one advances by 3, the other by an input."""

    name = "decode"

    def buffers(self) -> None:
        self.b_position = self.state("position", (), "u32", nbytes=4)
        self.b_rows = self.state("rows", (2,), "u32", nbytes=8)
        self.b_n = self.input("prefill", "n", (), "u32", nbytes=4)
        self.b_x = self.input("decode", "x", (4,), nbytes=16)
        self.b_y = self.buffer("y", nbytes=16)
        self.b_z = self.buffer("z", nbytes=16)
        self.output("prefill", "position", self.b_position, (1,), "u32")
        self.output("decode", "y", self.b_y, (4,))
        self.output("decode", "z", self.b_z, (4,))
        self.advance("decode", self.b_position, 3, limit=8)
        self.advance("decode", self.b_rows, 1, limit=100)
        self.advance("prefill", self.b_position, "n", limit=8)

    def pipelines(self) -> None:
        self.p_step_0 = self.pipeline(STEP, N=1, STEP=3)
        self.p_step_1 = self.pipeline(STEP, N=2, STEP=1)
        self.p_step_by_0 = self.pipeline(STEP_BY, N=1)
        self.p_scale_0 = self.pipeline(SCALE, N=4)
        self.p_add_0 = self.pipeline(ADD, N=4)

    def bind_groups(self) -> None:
        self.g_step_0 = self.bind(self.p_step_0, self.b_position)
        self.g_step_1 = self.bind(self.p_step_1, self.b_rows)
        self.g_step_by_0 = self.bind(self.p_step_by_0, self.b_n, self.b_position)
        self.g_scale_0 = self.bind(self.p_scale_0, self.b_x, self.b_x, self.b_y)
        self.g_add_0 = self.bind(self.p_add_0, self.b_x, self.b_y, self.b_z)

    def encode_prefill(self, encoder: Any) -> None:
        encoder.dispatch(self.p_step_by_0, self.g_step_by_0, 1, 1, 1)

    def encode_decode(self, encoder: Any) -> None:
        encoder.dispatch(self.p_step_0, self.g_step_0, 1, 1, 1)
        encoder.dispatch(self.p_step_1, self.g_step_1, 1, 1, 1)
        encoder.dispatch(self.p_scale_0, self.g_scale_0, 1, 1, 1)
        encoder.dispatch(self.p_add_0, self.g_add_0, 1, 1, 1)

    def prefill(self, *only: Any, outputs: Any = None, **inputs: Any) -> Any:
        return self.call("prefill", inputs, *only, outputs=outputs)

    def decode(self, *only: Any, outputs: Any = None, **inputs: Any) -> Any:
        return self.call("decode", inputs, *only, outputs=outputs)


class InPlace(ModelRunner):
    """in_place: the entry writes its own input, and gives an input back."""

    name = "in_place"

    def buffers(self) -> None:
        self.b_a = self.input("run", "a", (2,), "u32", nbytes=8)
        self.b_b = self.input("run", "b", (2,), nbytes=8)
        self.output("run", "a", self.b_a, (2,), "u32")
        self.output("run", "b", self.b_b, (1, 2))

    def pipelines(self) -> None:
        self.p_step_0 = self.pipeline(STEP, N=2, STEP=5)

    def bind_groups(self) -> None:
        self.g_step_0 = self.bind(self.p_step_0, self.b_a)

    def encode_run(self, encoder: Any) -> None:
        encoder.dispatch(self.p_step_0, self.g_step_0, 1, 1, 1)

    def run(self, *only: Any, outputs: Any = None, **inputs: Any) -> Any:
        return self.call("run", inputs, *only, outputs=outputs)


class Umlaut(ModelRunner):
    """umlaut: an output whose name is not ASCII."""

    name = "umlaut"

    def buffers(self) -> None:
        self.b_s = self.state("s", (3,), nbytes=12)
        self.output("run", "größe", self.b_s, (3,))

    def encode_run(self, encoder: Any) -> None:
        pass


if __name__ == "__main__":
    main(globals()[sys.argv[1]], sys.argv[2:])


class Two(ModelRunner):
    """two: one float and one integer parameter."""

    name = "two"

    def buffers(self) -> None:
        self.b_f = self.parameter("f", (5,), nbytes=20)
        self.b_n = self.parameter("n", (2,), "i32", nbytes=8)
        self.b_u = self.parameter("u", (), "u32", nbytes=4)
        self.b_e = self.parameter("e", (0, 4), nbytes=0)
        self.b_z = self.parameter("z", (0,), "u32", nbytes=0)
        for buffer in (self.b_f, self.b_n, self.b_u, self.b_e, self.b_z):
            self.output("run", buffer.name, buffer, buffer.shape, buffer.dtype)

    def encode_run(self, encoder: Any) -> None:
        pass
