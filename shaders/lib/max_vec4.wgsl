// The largest of the four components; a NaN may be lost.
fn max_vec4(v: vec4<f32>) -> f32 {
    return max(max(v.x, v.y), max(v.z, v.w));
}
