// Positive infinity. The bits sit in a `var` because WGSL refuses a constant expression whose value is infinite.
fn inf_f32() -> f32 {
    var bits = 0x7f800000u;
    return bitcast<f32>(bits);
}
