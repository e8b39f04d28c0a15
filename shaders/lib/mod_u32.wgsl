// a % b with x % 0 = 0, as in numpy.
fn mod_u32(a: u32, b: u32) -> u32 {
    return a % max(b, 1u);
}
