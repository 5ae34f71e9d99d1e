/* Products of few rows with a matrix of few bits, and such a matrix dequantised, on a CPU.

   The codes lie as penstock.arch.formats.codes.packed says: a run is eight words of 32 bits, and the bits of
   word i from bit j * bits on are the code of column 8j + i. So lane i of vectors of eight words has columns
   i, 8 + i, 16 + i and so on, at growing shifts.

   Every number of the result is a sum by one thread, of as many partial sums as a vector has lanes, in the
   order of columns. So it depends neither on the number of threads nor on the other rows of x.

   Compiled for the processor at hand by the machine's compiler; see compiler.py. Nothing here allocates more
   than x in float32 and a few rows of scales. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum kind { INT4, INT8, E2M1, E4M3 };
enum number { FLOAT32, BFLOAT16, FLOAT16, EIGHT, EXPONENT, BYTE };

/* A matrix [height, inner]; few_bits.py has the same structure. */
struct matrix {
    const uint8_t *codes;    /* [height, row_bytes] */
    const void *scale;       /* [ceil(height / down), groups] */
    const uint8_t *zero;     /* [height, groups], or null: middle */
    const float *second;     /* [height], or null */
    const int32_t *order;    /* [inner]: the column of x that a code is multiplied by, or null */
    const int32_t *groups_of; /* [inner]: the group of each code, or null: runs of `group` */
    int64_t height, inner, row_bytes, groups, group, down;
    int32_t kind, scale_kind, divided, grain;
};

typedef void parallel_call(void (*)(void *), void *, unsigned, unsigned);

/* ---- single numbers */

INLINE float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    float small = (float)rest * 0x1p-24f; /* Right below 2^-14. */
    uint32_t wide = rest >= 0x7c00 ? (rest << 13) | 0x7f800000 : (rest << 13) + (112u << 23);
    return of_bits(sign | (rest < 0x400 ? bits_of(small) : wide));
}

INLINE float of_eight(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24, rest = code & 0x7f;
    float small = (float)rest * 0x1p-9f; /* Right below 2^-6. */
    return of_bits(sign | (rest < 8 ? bits_of(small) : (rest << 20) + (120u << 23)));
}

INLINE float of_exponent(uint8_t exponent)
{
    return of_bits(exponent ? (uint32_t)exponent << 23 : 0x00400000);
}

INLINE uint16_t to_bfloat(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_half(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return 0x7e00;
    if (rest >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* The sum's last place is that of the smallest half. */
        return (uint16_t)(sign | (bits_of(of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1)) - (112u << 23)) >> 13);
}

/* ---- vectors: LANES numbers of a row

   raw: the words of a run. terms: what makes codes numbers, of columns that share a scale (grain > 0) or of
   one column each (grain 0). part: numbers LANES * p and on of a run. E4M3 is 2^-8 of what it ought to be
   where EIGHT_SHORT is 256: its codes are read as float16. */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LANES 16
#define UNROLL _Pragma("GCC unroll 16")
#define TILE(rows) ((rows) == 1 ? 8 : 4)
#define EIGHT_SHORT 256.0f
typedef __m512 vec;
typedef __m512i raw;
typedef struct { vec scale, zero; } terms;

INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_load(const float *at) { return _mm512_loadu_ps(at); }
INLINE vec v_all(float value) { return _mm512_set1_ps(value); }
INLINE void v_store(float *at, vec value) { _mm512_storeu_ps(at, value); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_bytes(const uint8_t *at) /* Numbers 0 to 255. */
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

INLINE vec v_get(int kind, const void *from)
{
    if (kind == FLOAT32)
        return _mm512_loadu_ps(from);
    __m256i words = _mm256_loadu_si256(from);
    return kind == FLOAT16 ? _mm512_cvtph_ps(words)
                           : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

INLINE float v_sum(vec value)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE vec table_of(int kind)
{
    return kind == INT4 ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                        : _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
}

INLINE terms terms_of(int kind, int grain, const float *scale, const float *zero)
{
    terms made;
    if (grain == 0) {
        made.scale = v_load(scale), made.zero = kind <= INT8 ? v_load(zero) : v_zero();
        return made;
    }
    made.scale = v_all(*scale), made.zero = kind <= INT8 ? v_all(*zero) : v_zero();
    if (kind == INT4)
        made.scale = _mm512_mul_ps(_mm512_sub_ps(table_of(kind), made.zero), made.scale);
    if (kind == E2M1)
        made.scale = _mm512_mul_ps(table_of(kind), made.scale);
    return made;
}

INLINE __m256i in_order(__m256i words)
{
    const __m256i within = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12,
                                            1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, within),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE raw raw_of(int kind, const uint8_t *run)
{
    __m256i words = _mm256_loadu_si256((const __m256i *)run);
    if (kind != E4M3)
        return _mm512_broadcast_i64x4(words);
    __m512i wide = _mm512_cvtepi8_epi16(in_order(words)); /* The sign twice, for bits 15 and 14. */
    return _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16((short)0xbf80));
}

INLINE vec part(int kind, int grain, raw words, int p, terms its)
{
    if (kind == E4M3) {
        __m256i halves = p ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words);
        return _mm512_mul_ps(_mm512_cvtph_ps(halves), its.scale);
    }
    if (kind == INT8) { /* Byte 2p of each of eight words, and the next. */
        const int bytes[4] = {(int)0x80808000, (int)0x80808004, (int)0x80808008, (int)0x8080800c};
        const __m512i from = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)bytes));
        const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        __m512i codes = _mm512_shuffle_epi8(words, _mm512_add_epi32(from, _mm512_add_epi32(places, _mm512_set1_epi32(2 * p))));
        return _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(codes), its.zero), its.scale);
    }
    const int low = 8 * p, high = low + 4;
    const __m512i shifts = _mm512_setr_epi32(low, low, low, low, low, low, low, low, high, high, high, high,
                                             high, high, high, high);
    __m512i codes = _mm512_srlv_epi32(words, shifts);
    if (grain > 0) /* The table is looked up by the lowest four bits. */
        return _mm512_permutexvar_ps(codes, its.scale);
    vec values = _mm512_permutexvar_ps(codes, table_of(kind));
    return _mm512_mul_ps(kind == INT4 ? _mm512_sub_ps(values, its.zero) : values, its.scale);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
#define UNROLL _Pragma("GCC unroll 16")
#define TILE(rows) ((rows) <= 2 ? 4 : 2)
#define EIGHT_SHORT 256.0f
typedef __m256 vec;
typedef __m256i raw;
typedef struct { vec scale, zero; } terms;

INLINE vec v_zero(void) { return _mm256_setzero_ps(); }
INLINE vec v_load(const float *at) { return _mm256_loadu_ps(at); }
INLINE vec v_all(float value) { return _mm256_set1_ps(value); }
INLINE void v_store(float *at, vec value) { _mm256_storeu_ps(at, value); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec v_bytes(const uint8_t *at) /* Numbers 0 to 255. */
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

INLINE vec v_get(int kind, const void *from)
{
    if (kind == FLOAT32)
        return _mm256_loadu_ps(from);
    __m128i words = _mm_loadu_si128(from);
    return kind == FLOAT16 ? _mm256_cvtph_ps(words)
                           : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

INLINE float v_sum(vec value)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE terms terms_of(int kind, int grain, const float *scale, const float *zero)
{
    terms made;
    made.scale = grain ? v_all(*scale) : v_load(scale);
    made.zero = kind > INT8 ? v_zero() : grain ? v_all(*zero) : v_load(zero);
    if (grain && kind == E2M1)
        made.scale = _mm256_mul_ps(_mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6), made.scale);
    return made;
}

INLINE raw raw_of(int kind, const uint8_t *run)
{
    __m256i words = _mm256_loadu_si256((const __m256i *)run);
    if (kind != E4M3)
        return words;
    const __m256i within = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12,
                                            1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, within),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE vec part(int kind, int grain, raw words, int p, terms its)
{
    if (kind == E4M3) {
        __m128i bytes = p < 2 ? _mm256_castsi256_si128(words) : _mm256_extracti128_si256(words, 1);
        __m128i wide = _mm_cvtepi8_epi16(p & 1 ? _mm_srli_si128(bytes, 8) : bytes);
        __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80));
        return _mm256_mul_ps(_mm256_cvtph_ps(halves), its.scale);
    }
    const int bits = kind == INT8 ? 8 : 4;
    __m256i codes = _mm256_srli_epi32(words, bits * p);
    if (kind == E2M1) { /* The table is looked up by the lowest three bits; the fourth is the sign. */
        __m256i sign = _mm256_and_si256(_mm256_slli_epi32(words, 28 - 4 * p), _mm256_set1_epi32(1u << 31));
        vec table = grain ? its.scale : _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
        vec values = _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
        return grain ? values : _mm256_mul_ps(values, its.scale);
    }
    vec values = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32((1 << bits) - 1)));
    return _mm256_mul_ps(_mm256_sub_ps(values, its.zero), its.scale);
}

#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#define UNROLL _Pragma("GCC unroll 16")
#define TILE(rows) 4
#define EIGHT_SHORT 256.0f
typedef float32x4_t vec;
typedef struct { uint32x4_t low, high; } raw;
typedef struct { vec scale, zero; } terms;

INLINE vec v_zero(void) { return vdupq_n_f32(0); }
INLINE vec v_load(const float *at) { return vld1q_f32(at); }
INLINE vec v_all(float value) { return vdupq_n_f32(value); }
INLINE void v_store(float *at, vec value) { vst1q_f32(at, value); }
INLINE vec v_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
INLINE vec v_mul(vec a, vec b) { return vmulq_f32(a, b); }
INLINE vec v_sub(vec a, vec b) { return vsubq_f32(a, b); }
INLINE vec v_add(vec a, vec b) { return vaddq_f32(a, b); }
INLINE vec v_max(vec a, vec b) { return vmaxq_f32(a, b); }
INLINE vec v_bytes(const uint8_t *at) /* Numbers 0 to 255. */
{
    uint32_t four;
    memcpy(&four, at, sizeof four);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}

INLINE vec v_get(int kind, const void *from)
{
    if (kind == FLOAT32)
        return vld1q_f32(from);
    uint16x4_t words = vld1_u16(from);
    return kind == FLOAT16 ? vcvt_f32_f16(vreinterpret_f16_u16(words))
                           : vreinterpretq_f32_u32(vshll_n_u16(words, 16));
}
INLINE float v_sum(vec value) { return vaddvq_f32(value); }

INLINE terms terms_of(int kind, int grain, const float *scale, const float *zero)
{
    terms made;
    made.scale = grain ? v_all(*scale) : v_load(scale);
    made.zero = kind > INT8 ? v_zero() : grain ? v_all(*zero) : v_load(zero);
    return made;
}

INLINE raw raw_of(int kind, const uint8_t *run)
{
    raw words;
    (void)kind;
    words.low = vreinterpretq_u32_u8(vld1q_u8(run)), words.high = vreinterpretq_u32_u8(vld1q_u8(run + 16));
    return words;
}

INLINE vec part(int kind, int grain, raw words, int p, terms its)
{
    static const uint8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
    const int bits = kind == INT8 || kind == E4M3 ? 8 : 4;
    uint32x4_t half = p & 1 ? words.high : words.low;
    uint32x4_t codes = vandq_u32(vshlq_u32(half, vdupq_n_s32(-(p / 2) * bits)), vdupq_n_u32((1u << bits) - 1));
    vec values;
    (void)grain;
    if (kind == E4M3) {
        uint16x4_t narrow = vmovn_u32(codes);
        uint16x4_t sign = vshl_n_u16(vand_u16(narrow, vdup_n_u16(0x80)), 8);
        uint16x4_t rest = vshl_n_u16(vand_u16(narrow, vdup_n_u16(0x7f)), 7);
        values = vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(sign, rest)));
    } else if (kind == E2M1) { /* Twice the number, as a signed byte on top of a word. */
        uint32x4_t bytes = vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(doubled), vreinterpretq_u8_u32(codes)));
        values = vcvtq_n_f32_s32(vreinterpretq_s32_u32(vshlq_n_u32(bytes, 24)), 25);
    } else {
        values = vsubq_f32(vcvtq_f32_u32(codes), its.zero);
    }
    return vmulq_f32(values, its.scale);
}

#else
#define LANES 8
#define UNROLL
#define TILE(rows) ((rows) <= 2 ? 2 : 1)
#define EIGHT_SHORT 1.0f
typedef struct { float of[LANES]; } vec;
typedef struct { uint32_t of[8]; } raw;
typedef struct { vec scale, zero; } terms;
#define EACH for (int i = 0; i < LANES; i++)

INLINE vec v_all(float value) { vec v; EACH v.of[i] = value; return v; }
INLINE vec v_zero(void) { return v_all(0); }
INLINE vec v_load(const float *at) { vec v; memcpy(&v, at, sizeof v); return v; }
INLINE void v_store(float *at, vec value) { memcpy(at, &value, sizeof value); }
INLINE vec v_fma(vec a, vec b, vec c) { EACH c.of[i] += a.of[i] * b.of[i]; return c; }
INLINE vec v_mul(vec a, vec b) { EACH a.of[i] *= b.of[i]; return a; }
INLINE vec v_sub(vec a, vec b) { EACH a.of[i] -= b.of[i]; return a; }
INLINE vec v_add(vec a, vec b) { EACH a.of[i] += b.of[i]; return a; }
INLINE vec v_max(vec a, vec b) { EACH a.of[i] = a.of[i] > b.of[i] ? a.of[i] : b.of[i]; return a; }
INLINE vec v_bytes(const uint8_t *at) { vec v; EACH v.of[i] = at[i]; return v; } /* Numbers 0 to 255. */

INLINE vec v_get(int kind, const void *from)
{
    vec v;
    const uint16_t *words = from;
    if (kind == FLOAT32)
        memcpy(&v, from, sizeof v);
    else
        EACH v.of[i] = kind == FLOAT16 ? of_half(words[i]) : of_bits((uint32_t)words[i] << 16);
    return v;
}

INLINE float v_sum(vec value)
{
    const float *of = value.of;
    return ((of[0] + of[4]) + (of[2] + of[6])) + ((of[1] + of[5]) + (of[3] + of[7]));
}

INLINE terms terms_of(int kind, int grain, const float *scale, const float *zero)
{
    terms made;
    made.scale = grain ? v_all(*scale) : v_load(scale);
    made.zero = kind > INT8 ? v_zero() : grain ? v_all(*zero) : v_load(zero);
    return made;
}

INLINE raw raw_of(int kind, const uint8_t *run)
{
    raw words;
    (void)kind;
    for (int i = 0; i < 8; i++)
        words.of[i] = run[4 * i] | run[4 * i + 1] << 8 | run[4 * i + 2] << 16 | (uint32_t)run[4 * i + 3] << 24;
    return words;
}

INLINE vec part(int kind, int grain, raw words, int p, terms its)
{
    static const float numbers[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    const int bits = kind == INT8 || kind == E4M3 ? 8 : 4;
    vec values;
    (void)grain;
    EACH {
        uint32_t code = words.of[i] >> (bits * p) & ((1u << bits) - 1);
        float value = kind == E2M1 ? numbers[code] : kind == E4M3 ? of_eight(code) : (float)code - its.zero.of[i];
        values.of[i] = value * its.scale.of[i];
    }
    return values;
}
#endif

/* ---- scales */

static void to_floats(int kind, const void *from, int64_t count, float *to)
{
    int64_t i = 0;
    if (kind == FLOAT32) {
        memcpy(to, from, count * sizeof *to);
    } else if (kind == BFLOAT16) {
        const uint16_t *words = from;
        for (; i < count; i++)
            to[i] = of_bits((uint32_t)words[i] << 16);
    } else if (kind == FLOAT16) {
        const uint16_t *words = from;
#ifdef __F16C__
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(words + i))));
#endif
        for (; i < count; i++)
            to[i] = of_half(words[i]);
    } else if (kind == EIGHT) {
        const uint8_t *bytes = from;
#ifdef __F16C__
        for (; i + 8 <= count; i += 8) {
            __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(bytes + i)));
            __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80));
            _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256)));
        }
#endif
        for (; i < count; i++)
            to[i] = of_eight(bytes[i]);
    } else if (kind == EXPONENT) {
        const uint8_t *bytes = from;
        for (; i < count; i++)
            to[i] = of_exponent(bytes[i]);
    } else {
        const uint8_t *bytes = from;
        for (; i < count; i++)
            to[i] = bytes[i];
    }
}

INLINE int run_of(int kind) { return kind == INT8 || kind == E4M3 ? 32 : 64; }

static int64_t width_of(const struct matrix *m)
{
    int run = run_of(m->kind);
    return (m->inner + run - 1) / run * run;
}

/* Whether products take numbers of groups as they are: one a group that is whole runs or 16 * grain columns.
   Else they take one for every 16 * grain columns or, if grain is 0, for every column. */
INLINE int as_they_are(const struct matrix *m)
{
    int64_t unit = 16 * m->grain;
    return unit && (unit == run_of(m->kind) || (unit == m->group && m->groups * unit >= width_of(m)));
}

/* How many numbers products take of a row's groups. */
static int64_t units_of(const struct matrix *m)
{
    if (as_they_are(m))
        return m->groups;
    return m->grain ? width_of(m) / (16 * m->grain) : width_of(m);
}

static void spread(const struct matrix *m, const float *groups, float *to)
{
    int64_t width = width_of(m), unit = m->grain ? 16 * m->grain : 1, at = 0;
    if (m->groups_of) {
        for (; at < width; at++)
            to[at] = at < m->inner ? groups[m->groups_of[at]] : 0;
        return;
    }
    for (int64_t group = 0, each = m->group / unit; group < m->groups; group++)
        for (int64_t end = at + each; at < end && at < width / unit; at++)
            to[at] = groups[group];
    for (; at < width / unit; at++)
        to[at] = groups[m->groups - 1];
}

/* The scales and zero points of some rows, `units` numbers a row. groups: room for those of a row. */
static void read_terms(const struct matrix *m, int64_t row, int64_t rows, int64_t units, float *groups,
                       float *scale, float *zero)
{
    static const int64_t sizes[] = {4, 2, 2, 1, 1, 1};
    const char *scales = m->scale;
    int64_t size = m->groups * sizes[m->scale_kind];
    if (as_they_are(m) && m->down == 1) {
        to_floats(m->scale_kind, scales + row * size, rows * m->groups, scale);
        if (m->zero)
            to_floats(BYTE, m->zero + row * m->groups, rows * m->groups, zero);
        return;
    }
    for (int64_t w = 0; w < rows; w++) {
        float *to = as_they_are(m) ? scale + w * units : groups;
        to_floats(m->scale_kind, scales + (row + w) / m->down * size, m->groups, to);
        if (to == groups)
            spread(m, groups, scale + w * units);
        if (!m->zero)
            continue;
        to = as_they_are(m) ? zero + w * units : groups;
        to_floats(BYTE, m->zero + (row + w) * m->groups, m->groups, to);
        if (to == groups)
            spread(m, groups, zero + w * units);
    }
}

static void fill_middle(const struct matrix *m, float *zero, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        zero[i] = m->kind == INT4 ? 8 : 128;
}

/* ---- products */

struct product {
    const struct matrix *m;
    const float *x; /* [blocks, width / LANES, rows of a block, LANES] */
    void *y;
    const void *bias;
    int64_t y_stride, rows, each, next;
    int y_kind, adds, failed;
};

#define MOST 4 /* Rows of x in a block. */
/* Rows of the matrix in a tile: codes of eight bits take more registers. */
#define HIGH(kind, rows) ((kind) == INT8 && TILE(rows) > 4 ? 4 : TILE(rows))

INLINE int block_of(int64_t rows) { return rows > 2 ? 4 : (int)rows; }

/* What a tile is made of: rows of the matrix, their terms at the columns that are next, and sums. */
struct state {
    raw words[TILE(1)];
    terms its[TILE(1)];
    vec acc[16];
};

/* LANES columns of a run, and of a block of x at them. The terms of a whole run are there already. */
INLINE void step(int kind, int grain, const int rows, const int p, int64_t run, const float *x,
                 const float *const *scale, const float *const *zero, struct state *s)
{
    const int parts = run_of(kind) / LANES, high = HIGH(kind, rows), shared = grain ? 16 * grain / LANES : 1;
    if (p >= parts)
        return;
    if (shared < parts && p % shared == 0) {
        int64_t at = (run * parts + p) / shared * (grain ? 1 : LANES);
        UNROLL for (int w = 0; w < high; w++)
            s->its[w] = terms_of(kind, grain, scale[w] + at, zero[w] + at);
    }
    vec some[MOST];
    UNROLL for (int r = 0; r < rows; r++)
        some[r] = v_load(x + (p * rows + r) * LANES);
    UNROLL for (int w = 0; w < high; w++) {
        vec values = part(kind, grain, s->words[w], p, s->its[w]);
        UNROLL for (int r = 0; r < rows; r++)
            s->acc[w * rows + r] = v_fma(values, some[r], s->acc[w * rows + r]);
    }
}

/* TILE rows of the matrix times a block of x: sums [TILE, rows]. */
INLINE void tile(int kind, int grain, const int rows, const struct matrix *m, const float *x,
                 const uint8_t *const *codes, const float *const *scale, const float *const *zero, float *sums)
{
    const int high = HIGH(kind, rows), whole = grain && 16 * grain == run_of(kind);
    int64_t runs = width_of(m) / run_of(kind), each = whole && m->groups > 1 ? m->group / run_of(kind) : runs;
    int64_t below = high * m->row_bytes, ahead = below <= 32768 ? below : 1536; /* Into L2. */
    struct state s;
    UNROLL for (int i = 0; i < high * rows; i++)
        s.acc[i] = v_zero();
    for (int64_t first = 0, group = 0; first < runs; first += each, group++) {
        int64_t end = first + each < runs ? first + each : runs;
        if (whole)
            UNROLL for (int w = 0; w < high; w++)
                s.its[w] = terms_of(kind, grain, scale[w] + group, zero[w] + group);
        for (int64_t run = first; run < end; run++) {
            UNROLL for (int w = 0; w < high; w++) {
                s.words[w] = raw_of(kind, codes[w] + 32 * run);
                if (run % 2 == 0) /* A line holds two runs. */
                    __builtin_prefetch(codes[w] + 32 * run + ahead, 0, 2);
            }
#define STEP(p) step(kind, grain, rows, p, run, x, scale, zero, &s);
            STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
            STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
            x += run_of(kind) * rows;
        }
    }
    UNROLL for (int i = 0; i < high * rows; i++)
        sums[i] = v_sum(s.acc[i]);
}

typedef void tile_call(const struct matrix *, const float *, const uint8_t *const *, const float *const *,
                       const float *const *, float *);

#define ONE(kind, grain, rows)                                                                                 \
    static void tile_##kind##_##grain##_##rows(const struct matrix *m, const float *x,                         \
                                               const uint8_t *const *codes, const float *const *scale,         \
                                               const float *const *zero, float *sums)                          \
    {                                                                                                          \
        tile(kind, grain, rows, m, x, codes, scale, zero, sums);                                               \
    }
#define BLOCKS(kind, grain) ONE(kind, grain, 1) ONE(kind, grain, 2) ONE(kind, grain, 4)
#define NAMES(kind, grain)                                                                                     \
    {                                                                                                          \
        tile_##kind##_##grain##_1, tile_##kind##_##grain##_2, tile_##kind##_##grain##_4 \
    }
BLOCKS(INT4, 0) BLOCKS(INT4, 1) BLOCKS(INT4, 2) BLOCKS(INT4, 4)
BLOCKS(E2M1, 0) BLOCKS(E2M1, 1) BLOCKS(E2M1, 2) BLOCKS(E2M1, 4)
BLOCKS(INT8, 0) BLOCKS(INT8, 1) BLOCKS(INT8, 2)
BLOCKS(E4M3, 0) BLOCKS(E4M3, 1) BLOCKS(E4M3, 2)

static tile_call *const tiles[4][4][3] = {
    [INT4] = {NAMES(INT4, 0), NAMES(INT4, 1), NAMES(INT4, 2), NAMES(INT4, 4)},
    [INT8] = {NAMES(INT8, 0), NAMES(INT8, 1), NAMES(INT8, 2)},
    [E2M1] = {NAMES(E2M1, 0), NAMES(E2M1, 1), NAMES(E2M1, 2), NAMES(E2M1, 4)},
    [E4M3] = {NAMES(E4M3, 0), NAMES(E4M3, 1), NAMES(E4M3, 2)},
};

INLINE int place_of(int count) { return count == 4 ? 2 : count - 1; }
INLINE int high_of(int kind, int rows)
{
    return rows == 1 ? HIGH(kind, 1) : rows == 2 ? HIGH(kind, 2) : HIGH(kind, 4);
}

INLINE float get(int kind, const void *from, int64_t at)
{
    if (kind == FLOAT32)
        return ((const float *)from)[at];
    uint16_t word = ((const uint16_t *)from)[at];
    return kind == BFLOAT16 ? of_bits((uint32_t)word << 16) : of_half(word);
}

INLINE void put(int kind, void *to, int64_t at, float value)
{
    if (kind == FLOAT32)
        ((float *)to)[at] = value;
    else
        ((uint16_t *)to)[at] = kind == BFLOAT16 ? to_bfloat(value) : to_half(value);
}

/* Rows of the matrix from `row` on, times a block of x from its row `first` on: from sums to results. */
INLINE void finish_as(int kind, const struct product *given, int64_t row, int count, int64_t first, int rows,
                      const float *sums)
{
    const struct matrix *m = given->m;
    int there = given->rows - first < rows ? (int)(given->rows - first) : rows;
    for (int r = 0; r < there; r++)
        for (int w = 0; w < count; w++) {
            int64_t at = (first + r) * given->y_stride + row + w;
            float sum = sums[w * rows + r];
            if (m->kind == E4M3)
                sum *= EIGHT_SHORT;
            if (m->second)
                sum = m->divided ? sum / m->second[row + w] : sum * m->second[row + w];
            if (given->bias)
                sum += get(kind, given->bias, row + w);
            if (given->adds)
                sum += get(kind, given->y, at);
            put(kind, given->y, at, sum);
        }
}

static void finish(const struct product *given, int64_t row, int count, int64_t first, int rows, const float *sums)
{
    if (given->y_kind == FLOAT32)
        finish_as(FLOAT32, given, row, count, first, rows, sums);
    else if (given->y_kind == BFLOAT16)
        finish_as(BFLOAT16, given, row, count, first, rows, sums);
    else
        finish_as(FLOAT16, given, row, count, first, rows, sums);
}

/* A thread's part: runs of rows of the matrix, until there are none. */
static void work(void *about)
{
    struct product *given = about;
    const struct matrix *m = given->m;
    int64_t width = width_of(m), units = units_of(m);
    int tallest = TILE(1);
    float *room = malloc((size_t)((2 * tallest) * units + m->groups) * sizeof *room);
    if (!room) {
        __atomic_store_n(&given->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    float *groups = room + 2 * tallest * units;
    const float *scale[TILE(1)], *zero[TILE(1)];
    const uint8_t *codes[TILE(1)];
    float sums[TILE(1) * MOST];
    if (m->kind <= INT8 && !m->zero)
        fill_middle(m, room + tallest * units, tallest * units);
    int high = high_of(m->kind, block_of(given->rows)), last = given->rows % MOST, grain = m->grain == 4 ? 3 : m->grain;
    if (last && high_of(m->kind, block_of(last)) > high) /* Taller tiles are a multiple of lower ones. */
        high = high_of(m->kind, block_of(last));
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < m->height ? from + given->each : m->height;
        if (from >= m->height)
            break;
        for (int64_t row = from; row < end; row += high) {
            int there = m->height - row < high ? (int)(m->height - row) : high;
            for (int w = 0; w < high; w++) { /* Below the matrix its last row stands in. */
                int its = w < there ? w : there - 1;
                codes[w] = m->codes + (row + its) * m->row_bytes;
                scale[w] = room + its * units, zero[w] = room + (tallest + its) * units;
            }
            read_terms(m, row, there, units, groups, room, room + tallest * units);
            const float *x = given->x;
            for (int64_t first = 0; first < given->rows; first += MOST) {
                int rows = block_of(given->rows - first), each = high_of(m->kind, rows);
                tile_call *call = tiles[m->kind][grain][place_of(rows)];
                for (int w = 0; w < high; w += each) {
                    call(m, x, codes + w, scale + w, zero + w, sums);
                    if (w < there)
                        finish(given, row + w, there - w < each ? there - w : each, first, rows, sums);
                }
                x += (int64_t)rows * width;
            }
        }
    }
    free(room);
}

static void widen(const struct matrix *m, const void *x, int kind, int64_t stride, int64_t rows, float *to)
{
    int64_t width = width_of(m);
    for (int64_t first = 0; first < rows; first += MOST) {
        int each = block_of(rows - first);
        for (int r = 0; r < each; r++)
            for (int64_t at = 0; at < width; at += LANES) {
                float *lanes = to + (at * each + (int64_t)r * LANES);
                int64_t start = (first + r) * stride;
                if (first + r < rows && !m->order && at + LANES <= m->inner) {
                    if (kind == FLOAT32)
                        memcpy(lanes, (const float *)x + start + at, LANES * sizeof *lanes);
                    else
                        to_floats(kind, (const uint16_t *)x + start + at, LANES, lanes);
                    continue;
                }
                for (int i = 0; i < LANES; i++) {
                    int there = first + r < rows && at + i < m->inner;
                    lanes[i] = there ? get(kind, x, start + (m->order ? m->order[at + i] : at + i)) : 0;
                }
            }
        to += (int64_t)each * width;
    }
}

static void run_on(parallel_call *parallel, int threads, void (*part_of)(void *), void *about)
{
    if (parallel && threads > 1)
        parallel(part_of, about, (unsigned)threads, 0);
    else
        part_of(about);
}

#define LEAST 65536 /* Bytes of codes for which another thread is worth its while. */

/* Rows of x in whole blocks. */
static int64_t padded_of(int64_t rows)
{
    int64_t padded = 0;
    for (int64_t first = 0; first < rows; first += MOST)
        padded += block_of(rows - first);
    return padded;
}

static float *room_for(int64_t numbers)
{
    return aligned_alloc(64, (size_t)((numbers * sizeof(float) + 63) / 64 * 64));
}

/* Rows of the matrix that a thread takes at a time. */
static int64_t each_of(const struct matrix *m, int threads)
{
    int64_t each = LEAST / (m->row_bytes + 1), share = m->height / (4 * (int64_t)threads);
    each = each < share ? each : share;
    return (each / 8 + 1) * 8;
}

/* y [rows, height] = x [rows, inner] @ m.T + bias, all three of one kind of number, rows strided by so many
   numbers. adds: the product is added to what y is. parallel: GOMP_parallel, or null. Returns 0, or 1 if there is no memory. */
int few_bits_product(const struct matrix *m, const void *x, int64_t x_stride, int64_t rows, int kind, void *y,
                     int64_t y_stride, const void *bias, int adds, int threads, parallel_call *parallel)
{
    int64_t padded = padded_of(rows);
    float *wide = room_for(padded * width_of(m));
    if (!wide)
        return 1;
    widen(m, x, kind, x_stride, rows, wide);
    if (m->height * m->row_bytes * padded < 2 * LEAST)
        threads = 1;
    struct product about = {m, wide, y, bias, y_stride, rows, each_of(m, threads), 0, kind, adds, 0};
    run_on(parallel, threads, work, &about);
    free(wide);
    return about.failed;
}

/* One of several products: rows of x with a matrix. */
struct call {
    const struct matrix *m;
    const void *x;
    void *y;
    int64_t rows;
};

struct several {
    struct product *products;
    int count;
};

/* A thread's part of all of them: it begins with the next while others end the one before. */
static void work_on_several(void *about)
{
    struct several *given = about;
    for (int i = 0; i < given->count; i++)
        work(&given->products[i]);
}

/* Several products at once, without bias: x and y of one kind of number, rows strided alike. Returns as few_bits_product. */
int few_bits_products(const struct call *calls, int count, int kind, int64_t x_stride, int64_t y_stride, int threads,
                      parallel_call *parallel)
{
    int64_t numbers = 0, bytes = 0;
    for (int i = 0; i < count; i++) {
        int64_t padded = padded_of(calls[i].rows);
        numbers += padded * width_of(calls[i].m);
        bytes += calls[i].m->height * calls[i].m->row_bytes * padded;
    }
    if (bytes < 2 * LEAST)
        threads = 1;
    struct product *products = malloc((size_t)count * sizeof *products);
    float *wide = room_for(numbers), *next = wide;
    int failed = !products || !wide;
    for (int i = 0; i < count && !failed; i++) {
        const struct call *its = &calls[i];
        struct product one = {its->m, next, its->y, 0, y_stride, its->rows, each_of(its->m, threads), 0, kind, 0, 0};
        products[i] = one;
        widen(its->m, its->x, kind, x_stride, its->rows, next);
        next += padded_of(its->rows) * width_of(its->m);
    }
    if (!failed) {
        struct several about = {products, count};
        run_on(parallel, threads, work_on_several, &about);
        for (int i = 0; i < count; i++)
            failed |= products[i].failed;
    }
    free(products);
    free(wide);
    return failed;
}

/* ---- dequantising */

struct whole {
    const struct matrix *m;
    void *y;
    int64_t first, height, y_stride, each, next;
    int y_kind, failed;
};

INLINE void decode_run(int kind, int grain, const struct matrix *m, const uint8_t *codes, int64_t run,
                       const float *scale, const float *zero, float *to)
{
    const int parts = run_of(kind) / LANES, shared = grain ? 16 * grain / LANES : 1;
    raw words = raw_of(kind, codes + 32 * run);
    terms its = {v_zero(), v_zero()};
    UNROLL for (int p = 0; p < parts; p++) {
        if (p % shared == 0) {
            int64_t at = (run * parts + p) / shared * (grain ? 1 : LANES);
            if (shared == parts)
                at = m->groups > 1 ? run * run_of(kind) / m->group : 0;
            its = terms_of(kind, grain, scale + at, zero + at);
        }
        v_store(to + p * LANES, part(kind, grain, words, p, its));
    }
}

static void decode(const struct matrix *m, const uint8_t *codes, int64_t run, const float *scale,
                   const float *zero, float *to)
{
#define CASE(kind, grain) decode_run(kind, grain, m, codes, run, scale, zero, to)
#define FOUR(kind)                                                                                             \
    switch (m->grain) {                                                                                        \
    case 4: CASE(kind, 4); break;                                                                              \
    case 2: CASE(kind, 2); break;                                                                              \
    case 1: CASE(kind, 1); break;                                                                              \
    default: CASE(kind, 0);                                                                                    \
    }
#define TWO(kind)                                                                                              \
    switch (m->grain) {                                                                                        \
    case 2: CASE(kind, 2); break;                                                                              \
    case 1: CASE(kind, 1); break;                                                                              \
    default: CASE(kind, 0);                                                                                    \
    }
    switch (m->kind) {
    case INT4: FOUR(INT4) break;
    case E2M1: FOUR(E2M1) break;
    case INT8: TWO(INT8) break;
    default: TWO(E4M3)
    }
}

static void dequantise_rows(void *about)
{
    struct whole *given = about;
    const struct matrix *m = given->m;
    int64_t units = units_of(m);
    int run = run_of(m->kind);
    float *room = malloc((size_t)(2 * units + m->groups) * sizeof *room), some[64];
    if (!room) {
        __atomic_store_n(&given->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    float *scale = room, *zero = room + units;
    if (m->kind <= INT8 && !m->zero)
        fill_middle(m, zero, units);
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t at = from; at < end; at++) {
            int64_t row = given->first + at;
            read_terms(m, row, 1, units, room + 2 * units, scale, zero);
            if (m->second)
                for (int64_t i = 0; i < units; i++)
                    scale[i] = m->divided ? scale[i] / m->second[row] : scale[i] * m->second[row];
            for (int64_t column = 0; column < m->inner; column += run) {
                int many = (int)(m->inner - column < run ? m->inner - column : run);
                decode(m, m->codes + row * m->row_bytes, column / run, scale, zero, some);
                if (m->kind == E4M3 && EIGHT_SHORT != 1.0f)
                    for (int i = 0; i < many; i++)
                        some[i] *= EIGHT_SHORT;
                int64_t start = at * given->y_stride + column;
                if (m->order)
                    for (int i = 0; i < many; i++)
                        put(given->y_kind, given->y, at * given->y_stride + m->order[column + i], some[i]);
                else if (given->y_kind == FLOAT32)
                    memcpy((float *)given->y + start, some, many * sizeof *some);
                else if (given->y_kind == BFLOAT16)
                    for (int i = 0; i < many; i++)
                        put(BFLOAT16, given->y, start + i, some[i]);
                else
                    for (int i = 0; i < many; i++)
                        put(FLOAT16, given->y, start + i, some[i]);
            }
        }
    }
    free(room);
}

/* y [height, inner]: rows of m from `first` on, rounded once to the kind of y. Returns as few_bits_product. */
int few_bits_dequantise(const struct matrix *m, int64_t first, int64_t height, int kind, void *y,
                        int64_t y_stride, int threads, parallel_call *parallel)
{
    int64_t each = LEAST / (m->row_bytes + 1) / 4 + 1;
    struct whole about = {m, y, first, height, y_stride, each, 0, kind, 0};
    run_on(parallel, height * m->row_bytes < LEAST ? 1 : threads, dequantise_rows, &about);
    return about.failed;
}

int few_bits_lanes(void) { return LANES; }
