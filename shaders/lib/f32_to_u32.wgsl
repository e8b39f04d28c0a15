// Truncation towards zero, saturating: NaN and negative -> 0, from 2^32 on -> 2^32 - 1. The bare conversion leaves a NaN
// undefined and stops at 4294967040.
fn f32_to_u32(x: f32) -> u32 {
    let inside = x >= 0.0 && x < 4294967296.0 && !is_nan(x);
    let edge = select(0u, 0xffffffffu, bitcast<i32>(x) > 0 && !is_nan(x));
    return select(edge, u32(select(0.0, x, inside)), inside);
}
