// An angle of hi + lo / 2^32 parts of a turn of 2^32 parts, as r + n pi/2, |r| <= pi/4, n in 0..3, for sin_quarter_f32. Whole turns
// wrap away exactly, and a small angle keeps its relative accuracy through lo.
fn turn_reduce_u32(hi: u32, lo: u32) -> vec2<f32> {
    let n = (hi + 0x20000000u) >> 30u;
    let part = bitcast<i32>(hi - (n << 30u));
    return vec2((f32(part) + f32(lo) * 2.32830644e-10) * 1.46291808e-9, f32(n));
}
