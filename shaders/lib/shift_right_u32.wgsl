// a >> n with numpy's meaning for n >= 32: 0. The builtin takes n modulo 32.
fn shift_right_u32(a: u32, n: u32) -> u32 {
    return select(0u, a >> (n & 31u), n < 32u);
}
