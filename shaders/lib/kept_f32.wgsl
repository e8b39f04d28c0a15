// x, hidden from the shader compiler, which takes floats for finite: it makes 0 of `x * 0.0` and of `x - x`, and y of `(x + y) - x`,
// also where that is NaN. unknown_zero is a coordinate of the workgroup, which is 0 in every launch, and no compiler knows: x at
// two places is two values to it.
fn kept_f32(x: f32, place: u32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) | (unknown_zero << place));
}
