// numpy.minimum: a NaN in either operand gives a NaN, where the builtin min returns the other operand.
fn minimum_f32(a: f32, b: f32) -> f32 {
    return select(select(min(a, b), b, is_nan(b)), a, is_nan(a));
}
