// The derivative of gelu_tanh_f32. With e = e^-v, v = 2 u(a), a = |x|, it is e / (1 + e) (1 - a v' / (1 + e)) at -a, and at a one
// less that.
fn gelu_tanh_slope_f32(x: f32) -> f32 {
    let a = min(abs(x), 12.0);
    let r = 1.0 / (1.0 + gelu_tanh_exp_f32(1.0, a));
    let w = gelu_tanh_exp_f32(r - (a * (1.59576912 + 0.214064449 * (a * a))) * (r * r), a);
    return select(select(1.0 - w, w, x < 0.0), x, is_nan(x));
}
