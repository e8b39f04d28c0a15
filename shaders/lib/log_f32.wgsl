// Natural logarithm of x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2)), so that nothing cancels near 1, where the builtin has an
// absolute error only (relative 2e-2 seen). A subnormal x is read through its bits. log(0) = -inf, log(x < 0) = NaN.
fn log_f32(x: f32) -> f32 {
    let b = bitcast<i32>(x);
    let tiny = b < 0x00800000;
    let m = select(b, bitcast<i32>(f32(b)), tiny);
    let k = (m - 0x3f3504f3) >> 23u;
    let n = f32(k) - select(0.0, 149.0, tiny);
    let f = bitcast<f32>(m - (k << 23u)) - 1.0;
    let y = n * 0.693359375 + (log1p_poly_f32(f) - n * 0.000212194440);
    let u = bitcast<u32>(x);
    let edge = select(select(nan_f32(), -inf_f32(), (u << 1u) == 0u), x, is_nan(x) || u == 0x7f800000u);
    return select(y, edge, (u - 1u) >= 0x7f7fffffu);
}
