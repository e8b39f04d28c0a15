// 0.5 x (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3), is x / (1 + e^-2u) = max(x, 0) - a e^-v / (1 + e^-v), a = |x|,
// v = 2 u(a): nothing cancels for a negative x. v = -(hi + lo); h is a rounded to quarters, so 51/32 h + 73/1024 h^3 is
// exact up to a = 12. gelu(-inf) = 0.
fn gelu_tanh_f32(x: f32) -> f32 {
    let a = min(abs(x), 12.0);
    let h = floor(a * 4.0 + 0.5) * 0.25;
    let d = a - h;
    let s = h * h;
    let hi = -(h * (1.59375 + 0.0712890625 * s));
    let c = 3.0 * s + d * (3.0 * h + d);
    let lo = -(d * (1.59576912 + 0.0713548163 * c) + h * (0.00201912161 + 6.57537726e-5 * s));
    let w = exp_scaled_f32(a, hi, lo) / (1.0 + exp_scaled_f32(1.0, hi, lo));
    return select(max(x, 0.0) - w, x, is_nan(x));
}
