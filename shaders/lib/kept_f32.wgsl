// x, hidden from the shader compiler. Compilers assume that floats are finite: they make 0 of `x * 0.0` and of `x - x`, and y of
// `(x + y) - x`, also where the result is NaN. unknown_zero is the z coordinate of the workgroup: it is 0 in every launch, but no
// compiler knows that. So x at two places is two values to the compiler.
fn kept_f32(x: f32, place: u32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) | (unknown_zero << place));
}
