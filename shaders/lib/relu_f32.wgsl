// max(x, 0) that lets a NaN through: 0 for the bit patterns from the smallest negative number to -inf. The builtin max swallows
// a NaN, and compilers may turn `select(x, 0, x < 0)` into it.
fn relu_f32(x: f32) -> f32 {
    return select(x, 0.0, bitcast<u32>(x) - 0x80000001u < 0x7f800000u);
}
