// -(t log p + (1 - t) log(1 - p)), p clipped to [0, 1], each logarithm at least -100. Of p and 1 - p the smaller one is exact,
// and the logarithm of the larger one is log1p of minus the smaller one.
fn bce_f32(p: f32, t: f32) -> f32 {
    let high = p > 0.5;
    let small = clip_f32(select(p, 1.0 - p, high), 0.0, 0.5);
    let a = maximum_f32(log_f32(small), -100.0);
    let b = log1p_f32(-small);
    return -(t * select(a, b, high) + (1.0 - t) * select(b, a, high));
}
