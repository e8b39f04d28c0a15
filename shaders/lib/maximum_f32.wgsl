// numpy.maximum: a NaN in either operand gives a NaN, where the builtin max returns the other operand.
fn maximum_f32(a: f32, b: f32) -> f32 {
    return select(select(max(a, b), b, is_nan(b)), a, is_nan(a));
}
