// The derivative of x * sigmoid(x): s * (1 + x * (1 - s)) with s = sigmoid(x). Where x is clamped, s is 0 or 1, and so
// is the slope, as at the infinities.
fn silu_slope_f32(x: f32) -> f32 {
    let s = sigmoid_f32(x);
    return s * (1.0 + clamp(x, -160.0, 160.0) * (1.0 - s));
}
