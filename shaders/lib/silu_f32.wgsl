// x / (1 + e^-x) = max(x, 0) - a e^-a / (1 + e^-a), a = |x|: one form for both signs, no overflow, a e^-a without an underflow
// of e^-a alone. silu(-inf) = 0.
fn silu_f32(x: f32) -> f32 {
    let a = min(abs(x), 160.0);
    let w = exp_scaled_f32(a, -a, 0.0) / (1.0 + exp_scaled_f32(1.0, -a, 0.0));
    return select(max(x, 0.0) - w, x, is_nan(x));
}
