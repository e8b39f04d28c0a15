// The upper 32 bits of the 64-bit product a * b, from 16-bit halves. No such builtin.
fn mul_hi_u32(a: u32, b: u32) -> u32 {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let mid = ah * bl + ((al * bl) >> 16u);
    let low = al * bh + (mid & 0xffffu);
    return ah * bh + (mid >> 16u) + (low >> 16u);
}
