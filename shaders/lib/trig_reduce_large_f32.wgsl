// |x| = (n + t) pi/2, |t| <= 1/2, as (t pi/2, n modulo 4), for a finite |x| >= 2^10: Payne and Hanek in integers. The mantissa
// times the 96 bits of 2 / pi that matter, taken modulo 2^96: two bits of quadrant, then the fraction.
fn trig_reduce_large_f32(x: f32) -> vec2<f32> {
    let b = bitcast<u32>(x) & 0x7fffffffu;
    let m = ((b & 0x007fffffu) | 0x00800000u) << 8u;
    let start = (b >> 23u) - 128u;
    let word = start >> 5u;
    let s = start & 31u;
    let one = word == 1u;
    let two = word == 2u;
    let three = word == 3u;
    let t0 = select(select(select(0x00000000u, 0xa2f9836eu, one), 0x4e441529u, two), 0xfc2757d1u, three);
    let t1 = select(select(select(0xa2f9836eu, 0x4e441529u, one), 0xfc2757d1u, two), 0xf534ddc0u, three);
    let t2 = select(select(select(0x4e441529u, 0xfc2757d1u, one), 0xf534ddc0u, two), 0xdb629599u, three);
    let t3 = select(select(select(0xfc2757d1u, 0xf534ddc0u, one), 0xdb629599u, two), 0x3c439041u, three);
    let w2 = (t0 << s) | ((t1 >> 1u) >> (31u - s));
    let w1 = (t1 << s) | ((t2 >> 1u) >> (31u - s));
    let w0 = (t2 << s) | ((t3 >> 1u) >> (31u - s));
    let p1a = mul_hi_u32(m, w0);
    let p1 = p1a + m * w1;
    let p2 = m * w2 + mul_hi_u32(m, w1) + select(0u, 1u, p1 < p1a);
    let n = (p2 + 0x20000000u) >> 30u;
    var hi = (p2 << 2u) | (p1 >> 30u);
    var lo = p1 << 2u;
    let below = hi > 0x7fffffffu;
    if (below) {
        hi = ~hi + select(0u, 1u, lo == 0u);
        lo = ~lo + 1u;
    }
    let turn = f32(hi) * 2.32830644e-10 + f32(lo) * 5.42101086e-20;
    return vec2<f32>(1.57079633 * select(turn, -turn, below), f32(n));
}
