// x = r + n pi/2, |r| <= pi/4 and a little, as (r, n), n modulo 4 for a large x. Up to 12000 pi/2 is taken off in four parts (n
// times each of the first three is exact), beyond that in integers: right for every finite x.
fn trig_reduce_f32(x: f32) -> vec2<f32> {
    if (abs(x) > 12000.0) {
        let t = trig_reduce_large_f32(x);
        return select(t, -t, x < 0.0);
    }
    let n = floor(x * 0.636619772 + 0.5);
    let r = (((x - n * 1.5703125) - n * 0.0004837512969970703) - n * 7.549533620476723e-8) - n * 2.5633440682570896e-12;
    return vec2<f32>(r, n);
}
