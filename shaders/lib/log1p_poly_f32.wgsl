// log(1 + f) for -0.2935 <= f <= 0.4147: f - f^2/2 + f^3 P(f), P of degree 6, minimax of the relative error (3.6e-8).
fn log1p_poly_f32(f: f32) -> f32 {
    var p = 0.0826201439;
    p = p * f - 0.141542971;
    p = p * f + 0.150063381;
    p = p * f - 0.165941149;
    p = p * f + 0.199567273;
    p = p * f - 0.250007808;
    p = p * f + 0.333340496;
    let z = f * f;
    return f + z * (f * p - 0.5);
}
