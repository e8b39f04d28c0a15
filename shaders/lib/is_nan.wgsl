// True for a NaN. Tested on the bits: a shader compiler may assume that there is no NaN and fold `x != x` to false.
fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}
