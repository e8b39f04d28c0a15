// -(t log p + (1 - t) log(1 - p)), p clipped to [1e-7, 1 - 1e-7]. Of p and 1 - p the smaller one is clipped, which f32 can, and the
// logarithm of the larger one is log1p of minus the smaller one.
fn bce_f32(p: f32, t: f32) -> f32 {
    let high = p > 0.5;
    let small = clip_f32(select(p, 1.0 - p, high), 1e-7, 0.5);
    let a = log_f32(small);
    let b = log1p_f32(-small);
    return -(t * select(a, b, high) + (1.0 - t) * select(b, a, high));
}
