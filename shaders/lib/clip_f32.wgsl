// numpy.clip: minimum(maximum(x, low), high), NaN visible. The builtin clamp turns a NaN into a bound.
fn clip_f32(x: f32, low: f32, high: f32) -> f32 {
    return minimum_f32(maximum_f32(x, low), high);
}
