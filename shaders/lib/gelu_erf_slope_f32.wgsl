// The derivative of gelu: Phi(x) + x phi(x). At -a, a = |x|, it is (q - a / sqrt(2 pi)) e^(-a^2 / 2), q = 0.5 erfcx(a / sqrt 2),
// and at a one less that: no tail cancels. It is 0 at -14.6. a^2 = h^2 + (a - h)(a + h), where h has 12 bits, so h^2 is exact.
fn gelu_erf_slope_f32(x: f32) -> f32 {
    let a = min(abs(x), 14.6);
    let h = bitcast<f32>(bitcast<u32>(a) & 0xfffff000u);
    let s = 0.5 * erfcx_poly_f32(0.707106781 * a) - 0.398942280 * a;
    let w = exp_scaled_f32(s, -0.5 * (h * h), -0.5 * ((a - h) * (a + h)));
    return select(select(1.0 - w, w, x < 0.0), x, is_nan(x));
}
