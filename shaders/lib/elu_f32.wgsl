// x for x > 0, else alpha (e^x - 1) without cancellation near 0.
fn elu_f32(x: f32, alpha: f32) -> f32 {
    return select(alpha * expm1_f32(x), x, x > 0.0);
}
