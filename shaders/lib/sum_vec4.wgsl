// The sum of the four components, in pairs.
fn sum_vec4(v: vec4<f32>) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}
