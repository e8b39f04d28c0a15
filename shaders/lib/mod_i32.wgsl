// numpy's a % b: the sign of the divisor; x % 0 = 0. The builtin takes the sign of the dividend.
fn mod_i32(a: i32, b: i32) -> i32 {
    let d = select(b, 1, b == 0 || b == -1);
    let r = a - (a / d) * d;
    return r + select(0, d, r != 0 && (r ^ d) < 0);
}
