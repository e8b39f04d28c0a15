// Truncation towards zero, saturating: NaN -> 0, below -2^31 -> -2^31, from 2^31 on -> 2^31 - 1. The bare conversion leaves a
// NaN undefined and stops at 2147483520.
fn f32_to_i32(x: f32) -> i32 {
    let inside = x >= -2147483648.0 && x < 2147483648.0 && !is_nan(x);
    let edge = select(select(-2147483647 - 1, 2147483647, bitcast<i32>(x) >= 0), 0, is_nan(x));
    return select(edge, i32(select(0.0, x, inside)), inside);
}
