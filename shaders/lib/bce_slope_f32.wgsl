// (p - t) / (p (1 - p)), p clipped to [1e-7, 1 - 1e-7] as in bce_f32: the smaller one of p and 1 - p is exact, so that neither the
// difference of p and a t of 0 or 1 cancels.
fn bce_slope_f32(p: f32, t: f32) -> f32 {
    let high = p > 0.5;
    let small = clip_f32(select(p, 1.0 - p, high), 1e-7, 0.5);
    return select(small - t, (1.0 - t) - small, high) / (small * (1.0 - small));
}
