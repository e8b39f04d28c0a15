// 1 / (1 + e^-x) through e^-|x|, which cannot overflow: relative accuracy down to the smallest normal number.
fn sigmoid_f32(x: f32) -> f32 {
    let e = exp_scaled_f32(1.0, -abs(x), 0.0);
    return select(select(1.0, e, x < 0.0) / (1.0 + e), x, is_nan(x));
}
