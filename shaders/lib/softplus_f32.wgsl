// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), the latter without the rounding of 1 + e^-|x|: softplus(-90) = e^-90.
fn softplus_f32(x: f32) -> f32 {
    let e = exp_scaled_f32(1.0, -abs(x), 0.0);
    let far = e > 0.4142;
    let t = log1p_poly_f32(select(e, 0.5 * e - 0.5, far)) + select(0.0, 0.693147181, far);
    return select(max(x, 0.0) + t, x, is_nan(x));
}
