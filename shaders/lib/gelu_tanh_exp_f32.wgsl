// scale * e^-2u, u = sqrt(2 / pi) (a + 0.044715 a^3), for 0 <= a <= 12. h is a rounded to quarters, so 51/32 h + 73/1024 h^3 is
// exact, and what is left of 2u is small.
fn gelu_tanh_exp_f32(scale: f32, a: f32) -> f32 {
    let h = floor(a * 4.0 + 0.5) * 0.25;
    let d = a - h;
    let s = h * h;
    let hi = -(h * (1.59375 + 0.0712890625 * s));
    let c = 3.0 * s + d * (3.0 * h + d);
    let lo = -(d * (1.59576912 + 0.0713548163 * c) + h * (0.00201912161 + 6.57537726e-5 * s));
    return exp_scaled_f32(scale, hi, lo);
}
