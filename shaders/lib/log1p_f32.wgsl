// log(1 + x) without the rounding of 1 + x where it would show. No such builtin.
// log1p(-1) = -inf, log1p(x < -1) = NaN.
fn log1p_f32(x: f32) -> f32 {
    let v = 1.0 + x;
    let b = bitcast<i32>(v);
    let k = (b - 0x3f3504f3) >> 23u;
    let n = f32(k);
    let f = select(bitcast<f32>(b - (k << 23u)) - 1.0, x, k == 0);
    let y = n * 0.693359375 + (log1p_poly_f32(f) - n * 0.000212194440);
    let u = bitcast<u32>(v);
    let edge = select(select(nan_f32(), -inf_f32(), (u << 1u) == 0u), x, is_nan(x) || u == 0x7f800000u);
    return select(y, edge, (u - 1u) >= 0x7f7fffffu);
}
