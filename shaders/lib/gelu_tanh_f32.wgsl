// 0.5 x (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3), is x / (1 + e^-2u) = max(x, 0) - a e^-v / (1 + e^-v), a = |x|,
// v = 2 u(a): nothing cancels for a negative x. gelu(-inf) = 0.
fn gelu_tanh_f32(x: f32) -> f32 {
    let a = min(abs(x), 12.0);
    let w = gelu_tanh_exp_f32(a, a) / (1.0 + gelu_tanh_exp_f32(1.0, a));
    return select(max(x, 0.0) - w, x, is_nan(x));
}
