// x^y as numpy.power: x^0 = 1^y = 1 even for a NaN; x < 0 finite needs a whole y (else NaN), an odd y keeps its sign; zeros and
// infinities are limits. |x|^y = 2^(y log2 |x|), the product in two parts. The builtin is NaN for x < 0 and off by
// |y log2 x| ulp elsewhere.
fn pow_f32(x: f32, y: f32) -> f32 {
    let ux = bitcast<u32>(x);
    let ax = ux & 0x7fffffffu;
    let l = log2_parts_f32(bitcast<f32>(ax));
    let e = clamp(y, -4.0e9, 4.0e9);
    let eh = bitcast<f32>(bitcast<u32>(e) & 0xfffff000u);
    let hi = eh * l.x;
    let lo = (e - eh) * l.x + e * l.y;
    let z = clamp(hi + lo, -160.0, 160.0);
    let n = floor(z + 0.5);
    let p = 1.0 + expm1_poly_f32(0.693147181 * ((hi - n) + lo));
    let k = bitcast<i32>(n + 12582912.0) - 0x4b400000;
    let k1 = k >> 1u;
    let k2 = k - k1;
    var v = p * bitcast<f32>((k1 + 127) << 23u) * bitcast<f32>((k2 + 127) << 23u);
    let uy = bitcast<u32>(y);
    let up = (ax > 0x3f800000u) == (uy < 0x80000000u);
    v = select(v, select(0.0, inf_f32(), up), abs(z) >= 160.0 || ax == 0u || ax == 0x7f800000u);
    let whole = floor(y) == y && (uy & 0x7fffffffu) >= 0x00800000u;
    let odd = whole && floor(0.5 * y) * 2.0 != y;
    let negative = ux > 0x7fffffffu;
    v = select(v, -v, negative && odd);
    v = select(v, nan_f32(), negative && !whole && ax != 0u && ax != 0x7f800000u);
    v = select(v, nan_f32(), is_nan(x) || is_nan(y));
    return select(v, 1.0, (uy << 1u) == 0u || ux == 0x3f800000u);
}
