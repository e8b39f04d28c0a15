// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011): four random words from a counter and a key. Ten rounds of two products; the key
// grows by two constants after each.
fn philox_4x32(counter: vec4<u32>, key: vec2<u32>) -> vec4<u32> {
    var c = counter;
    var k = key;
    for (var round = 0; round < 10; round++) {
        let a = vec2(mul_hi_u32(0xd2511f53u, c.x), 0xd2511f53u * c.x);
        let b = vec2(mul_hi_u32(0xcd9e8d57u, c.z), 0xcd9e8d57u * c.z);
        c = vec4(b.x ^ c.y ^ k.x, b.y, a.x ^ c.w ^ k.y, a.y);
        k += vec2(0x9e3779b9u, 0xbb67ae85u);
    }
    return c;
}
