// The derivative of x * sigmoid(x): s * (1 + x * (1 - s)) with s = sigmoid(x).
fn silu_slope_f32(x: f32) -> f32 {
    let s = sigmoid_f32(x);
    return s * (1.0 + x * (1.0 - s));
}
