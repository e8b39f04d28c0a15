// numpy's a // b: rounds towards minus infinity; x // 0 = 0 and -2^31 // -1 = -2^31 as in numpy. The builtin truncates.
fn floor_div_i32(a: i32, b: i32) -> i32 {
    let wrap = b == -1 && a == -2147483647 - 1;
    let d = select(b, 1, b == 0 || wrap);
    let q = a / d;
    let r = a - q * d;
    let floored = q - select(0, 1, r != 0 && (r ^ d) < 0);
    return select(floored, 0, b == 0);
}
