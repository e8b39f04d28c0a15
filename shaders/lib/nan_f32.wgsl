// A quiet NaN. The bits sit in a `var` because WGSL refuses a constant expression whose value is NaN.
fn nan_f32() -> f32 {
    var bits = 0x7fc00000u;
    return bitcast<f32>(bits);
}
