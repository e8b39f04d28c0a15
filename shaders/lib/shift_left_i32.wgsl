// a << n with numpy's meaning for n < 0 or n >= 32: 0. The builtin takes n modulo 32.
fn shift_left_i32(a: i32, n: i32) -> i32 {
    return select(0, a << (u32(n) & 31u), u32(n) < 32u);
}
