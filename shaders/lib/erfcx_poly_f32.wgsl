// e^(z^2) erfc(z) for 0 <= z <= 10.4: a polynomial of degree 9 without constant term in q = 1 / (1 + 0.4 z), minimax of the
// relative error (6.4e-8).
fn erfcx_poly_f32(z: f32) -> f32 {
    let q = 1.0 / (1.0 + 0.4 * z);
    var p = 0.0416135974;
    p = p * q - 0.142085299;
    p = p * q + 0.0876645297;
    p = p * q + 0.0837245136;
    p = p * q + 0.0827088803;
    p = p * q + 0.19212544;
    p = p * q + 0.202214494;
    p = p * q + 0.226396948;
    p = p * q + 0.225636959;
    return p * q;
}
