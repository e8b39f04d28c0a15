// e^x - 1 without cancellation near 0: a polynomial there, e^x elsewhere. No such builtin.
fn expm1_f32(x: f32) -> f32 {
    return select(exp_f32(x) - 1.0, expm1_poly_f32(x), abs(x) < 0.3466);
}
