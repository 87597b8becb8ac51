/* f16 to f32, written past the caches: what nobody reads soon must not push out what is read. */
#include "npu/session.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

static void stream(const uint16_t *from, float *to, int64_t n) {
    int64_t i = 0;
    for (; i < n && ((uintptr_t)(to + i) & 31); i++) to[i] = _cvtsh_ss(from[i]);
    for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++) to[i] = _cvtsh_ss(from[i]);
    _mm_sfence();
}

StreamFn convert_stream_avx2(void) { return stream; }
#else
StreamFn convert_stream_avx2(void) { return NULL; }
#endif
