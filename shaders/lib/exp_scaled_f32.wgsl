// scale * e^(hi + lo), |lo| a few units at most, |scale| in 1e-30..1e20: no underflow of e^hi alone, no rounded argument.
// n = round(x / ln 2), ln 2 in two parts (n * 0.693359375 is exact), 2^n in two halves. NaN is the caller's business.
// Not the builtin exp: its error grows with |x|.
fn exp_scaled_f32(scale: f32, hi: f32, lo: f32) -> f32 {
    let h = clamp(hi, -170.0, 170.0);
    let n = floor((h + lo) * 1.44269504 + 0.5);
    let r = ((h - n * 0.693359375) + lo) + n * 0.000212194440;
    let k = bitcast<i32>(n + 12582912.0) - 0x4b400000;
    let k1 = k >> 1u;
    let k2 = k - k1;
    let p = scale + scale * expm1_poly_f32(r);
    return p * bitcast<f32>((k1 + 127) << 23u) * bitcast<f32>((k2 + 127) << 23u);
}
