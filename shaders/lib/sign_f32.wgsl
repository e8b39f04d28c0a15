// -1 or 1 by the sign bit, x itself for a zero and for a NaN, which the builtin turns into 0.
fn sign_f32(x: f32) -> f32 {
    let u = bitcast<u32>(x);
    let keep = (u & 0x7fffffffu) - 1u >= 0x7f800000u;
    return select(bitcast<f32>((u & 0x80000000u) | 0x3f800000u), x, keep);
}
