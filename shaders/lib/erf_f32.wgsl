// erf(x) = x P(x^2) / Q(x^2) for |x| <= 3.93, degrees 4 and 5, minimax of the relative error (3.1e-7); +-1 beyond.
// No such builtin. 1 - erf(x) cancels for a large x: use the complement's own function there.
fn erf_f32(x: f32) -> f32 {
    let z = x * x;
    let p = (((0.000310164323 * z + 0.00871434994) * z + 0.0679862052) * z + 0.317588538) * z + 1.12837887;
    let q = ((((1.80391053e-5 * z + 0.00219605607) * z + 0.0250418894) * z + 0.165222481) * z + 0.614780009) * z + 1.0;
    let y = select(clamp(x * (p / q), -1.0, 1.0), sign(x), abs(x) > 3.93);
    return select(y, x, is_nan(x));
}
