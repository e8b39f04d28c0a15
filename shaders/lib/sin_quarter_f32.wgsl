// sin(r + n pi/2) for |r| <= pi/4 and a whole n: minimax polynomials, relative error 4e-9 (sine) and 8e-8 (cosine).
fn sin_quarter_f32(r: f32, n: f32) -> f32 {
    let z = r * r;
    let s = r + r * (z * ((-0.000195078828 * z + 0.00833210628) * z - 0.166666538));
    let c = 1.0 + z * ((-0.00136477093 * z + 0.0416610241) * z - 0.5);
    let k = bitcast<u32>(n + 12582912.0);
    let y = select(s, c, (k & 1u) == 1u);
    return select(y, -y, (k & 2u) == 2u);
}
