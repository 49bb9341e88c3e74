// SHA-256 (FIPS 180-4) of one message, by the processor's instructions where it has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pdconn {

constexpr std::size_t DIGEST_NBYTES = 32;

namespace sha256 {

constexpr std::size_t BLOCK_NBYTES = 64;

constexpr std::uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

alignas(16) constexpr std::uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

inline std::uint32_t rotated(std::uint32_t word, int by) { return word >> by | word << (32 - by); }

inline std::uint32_t big_endian(const std::uint8_t *at) {
    return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
}

// Adds blocks of 64 bytes to the state.
inline void compress_portably(std::uint32_t state[8], const std::uint8_t *data, std::size_t blocks) {
    std::uint32_t w[64];
    for (; blocks; blocks--, data += BLOCK_NBYTES) {
        for (int t = 0; t < 16; t++) w[t] = big_endian(data + 4 * t);
        for (int t = 16; t < 64; t++) {
            const std::uint32_t a = w[t - 15], b = w[t - 2];
            w[t] = w[t - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[t - 7] +
                   (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
        }
        std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 64; t++) {
            const std::uint32_t one = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +
                                      ((e & f) ^ (~e & g)) + ROUND[t] + w[t];
            const std::uint32_t two = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) +
                                      ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if defined(__x86_64__)

// The same by Intel's SHA extensions, which want the state as (A, B, E, F) and (C, D, G, H).
__attribute__((target("sha,sse4.1,ssse3"))) inline void compress_by_processor(
    std::uint32_t state[8], const std::uint8_t *data, std::size_t blocks) {
    const __m128i swapped = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    auto *at = reinterpret_cast<__m128i *>(state);
    __m128i dcba = _mm_loadu_si128(at), hgfe = _mm_loadu_si128(at + 1);
    dcba = _mm_shuffle_epi32(dcba, 0xb1);
    hgfe = _mm_shuffle_epi32(hgfe, 0x1b);
    __m128i abef = _mm_alignr_epi8(dcba, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, dcba, 0xf0);
    for (; blocks; blocks--, data += BLOCK_NBYTES) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int row = 0; row < 16; row++) {  // four rounds each
            __m128i &now = w[row & 3];
            if (row < 4) {
                const auto *from = reinterpret_cast<const __m128i *>(data) + row;
                now = _mm_shuffle_epi8(_mm_loadu_si128(from), swapped);
            } else {  // w[t-16] and w[t-15], w[t-7], then w[t-2]
                const __m128i before = w[(row + 3) & 3];
                const __m128i sevens = _mm_alignr_epi8(before, w[(row + 2) & 3], 4);
                now = _mm_sha256msg1_epu32(now, w[(row + 1) & 3]);
                now = _mm_sha256msg2_epu32(_mm_add_epi32(now, sevens), before);
            }
            const auto *round = reinterpret_cast<const __m128i *>(ROUND) + row;
            __m128i keyed = _mm_add_epi32(now, _mm_load_si128(round));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
            keyed = _mm_shuffle_epi32(keyed, 0x0e);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, keyed);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(at, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(at + 1, _mm_alignr_epi8(dchg, feba, 8));
}

inline bool has_instructions() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    const bool has_sse = (c >> 9 & 1) && (c >> 19 & 1);  // SSSE3 and SSE4.1
    return has_sse && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

#else

inline void compress_by_processor(std::uint32_t *, const std::uint8_t *, std::size_t) {}
inline bool has_instructions() { return false; }

#endif

}  // namespace sha256

// `by_processor`: sha256::has_instructions(), or false.
inline void digest_of(const std::uint8_t *message, std::size_t nbytes, std::uint8_t *digest,
                      bool by_processor) {
    using namespace sha256;
    const auto compress = by_processor ? compress_by_processor : compress_portably;
    alignas(16) std::uint32_t state[8];
    std::memcpy(state, INITIAL, sizeof state);
    const std::size_t whole = nbytes / BLOCK_NBYTES, rest = nbytes % BLOCK_NBYTES;
    compress(state, message, whole);
    // The rest, a bit, and the length in bits at the end of a block.
    std::uint8_t last[2 * BLOCK_NBYTES] = {};
    std::memcpy(last, message + whole * BLOCK_NBYTES, rest);
    last[rest] = 0x80;
    const std::size_t blocks = rest < BLOCK_NBYTES - 8 ? 1 : 2;
    const std::uint64_t bits = std::uint64_t{nbytes} * 8;
    for (int i = 0; i < 8; i++)
        last[blocks * BLOCK_NBYTES - 1 - i] = static_cast<std::uint8_t>(bits >> 8 * i);
    compress(state, last, blocks);
    for (int i = 0; i < 8; i++)
        for (int byte = 0; byte < 4; byte++)
            digest[4 * i + byte] = static_cast<std::uint8_t>(state[i] >> (24 - 8 * byte));
}

}  // namespace pdconn
