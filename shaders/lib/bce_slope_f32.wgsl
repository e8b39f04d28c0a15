// (p - t) / max(p (1 - p), 1e-12), p clipped to [0, 1]: the smaller one of p and 1 - p is exact, so that neither the difference of p
// and a t of 0 or 1 cancels.
fn bce_slope_f32(p: f32, t: f32) -> f32 {
    let high = p > 0.5;
    let small = clip_f32(select(p, 1.0 - p, high), 0.0, 0.5);
    return select(small - t, (1.0 - t) - small, high) / maximum_f32(small * (1.0 - small), 1e-12);
}
