// 0.5 x (1 + erf(x / sqrt 2)) = max(x, 0) - a Q(a), a = |x|, Q(a) = 0.5 erfcx(a / sqrt 2) e^(-a^2 / 2) the normal tail: nothing
// cancels for a negative x. a^2 = h^2 + (a - h)(a + h), where h has 12 bits, so h^2 is exact. gelu(-inf) = 0.
fn gelu_erf_f32(x: f32) -> f32 {
    let a = min(abs(x), 14.4);
    let h = bitcast<f32>(bitcast<u32>(a) & 0xfffff000u);
    let s = 0.5 * a * erfcx_poly_f32(0.707106781 * a);
    let w = exp_scaled_f32(s, -0.5 * (h * h), -0.5 * ((a - h) * (a + h)));
    return select(max(x, 0.0) - w, x, is_nan(x));
}
