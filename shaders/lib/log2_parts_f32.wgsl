// log2 of a positive finite x as top + rest, top of 12 bits, relative error about 1e-8, since x^y multiplies it by y. With x =
// 2^k a: log2 a = 2 / ln 2 atanh(s), s = (a - 1) / (a + 1) = sh + sl; products of two 12-bit parts are exact. A subnormal x
// is read through its bits.
fn log2_parts_f32(x: f32) -> vec2<f32> {
    let b = bitcast<i32>(x);
    let tiny = b < 0x00800000;
    let m = select(b, bitcast<i32>(f32(b)), tiny);
    let k = (m - 0x3f3504f3) >> 23u;
    let n = f32(k) - select(0.0, 149.0, tiny);
    let a = bitcast<f32>(m - (k << 23u));
    let f = a - 1.0;
    let dh = bitcast<f32>(bitcast<u32>(a + 1.0) & 0xfffff000u);
    let dl = a - (dh - 1.0);
    let r = 1.0 / (a + 1.0);
    let s = f * r;
    let sh = bitcast<f32>(bitcast<u32>(s) & 0xfffff000u);
    let sl = ((f - sh * dh) - sh * dl) * r;
    let w = s * s;
    let c = (0.430989124 * w + 0.576753537) * w + 0.961798266;
    let hi = sh * 2.8857421875;
    let lo = (2.88539008 * sl - 0.000352105722 * sh) + s * w * c;
    let top = bitcast<f32>(bitcast<u32>(n + (hi + lo)) & 0xfffff000u);
    return vec2<f32>(top, ((n - top) + hi) + lo);
}
