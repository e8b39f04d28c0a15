// a / b for any b. The builtin may go through 1 / b, which is subnormal and flushed for |b| > 2^126: 0 where the quotient is not.
// Both operands are scaled by 1/4 there, exactly. A divisor known to stay below 8e37 needs the builtin only.
fn div_f32(a: f32, b: f32) -> f32 {
    let s = select(1.0, 0.25, abs(b) > 4.0e37);
    return (a * s) / (b * s);
}
