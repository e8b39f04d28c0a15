// tanh(x) = x P(x^2) / Q(x^2) for |x| <= 9.02, both of degree 4, minimax of the relative error (3.5e-8); +-1 beyond.
// The builtin loses all relative accuracy near 0 and is NaN for a large x on some systems.
fn tanh_f32(x: f32) -> f32 {
    let z = x * x;
    let p = (((1.33189459e-8 * z + 2.05834931e-5) * z + 0.00349403522) * z + 0.133797169) * z + 1.0;
    let q = (((7.76202228e-7 * z + 0.000328309339) * z + 0.0258710738) * z + 0.467130333) * z + 1.0;
    let y = select(clamp(x * (p / q), -1.0, 1.0), sign(x), abs(x) > 9.02);
    return select(y, x, is_nan(x));
}
