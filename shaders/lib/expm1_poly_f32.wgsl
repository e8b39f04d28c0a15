// e^r - 1 for |r| <= 0.3475: r + r^2 P(r), P of degree 4, minimax of the relative error (1.4e-8).
fn expm1_poly_f32(r: f32) -> f32 {
    var p = 0.00138378772;
    p = p * r + 0.00836731866;
    p = p * r + 0.0416677408;
    p = p * r + 0.166665375;
    p = p * r + 0.49999997;
    return r + r * r * p;
}
