// cos(x) for every finite x, with relative accuracy near its zeros; cos(+-inf) = NaN. The builtin promises 2^-11 absolute and
// only on [-pi, pi].
fn cos_f32(x: f32) -> f32 {
    let t = trig_reduce_f32(x);
    let y = sin_quarter_f32(t.x, t.y + 1.0);
    return select(y, nan_f32(), (bitcast<u32>(x) & 0x7fffffffu) >= 0x7f800000u);
}
