// A u32 whose order is that of x, with -0 equal to 0, so that equal numbers keep the order of their places; a NaN comes first.
fn ascending_key_f32(x: f32) -> u32 {
    let b = bitcast<u32>(x);
    let key = select(b | 0x80000000u, ~b, b > 0x80000000u);
    return select(key, 0u, is_nan(x));
}
