// a >> n (arithmetic) with numpy's meaning for n < 0 or n >= 32: 0, or -1 for a negative a. The builtin takes n modulo 32.
fn shift_right_i32(a: i32, n: i32) -> i32 {
    return a >> min(u32(n), 31u);
}
