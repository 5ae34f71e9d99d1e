/* Products of few rows with matrices that rest in the blocks of GGUF files, and such matrices dequantised, on a CPU.

   What bytes of a block stand for is said in penstock.arch.formats.gguf_blocks: numbers here are made by the same
   operations in the same order, so they are equal bit for bit to the reference.

   A block is made numbers once for a few rows of x. Sums are by one thread, of as many partial sums as a vector
   has lanes, in the order of columns: they depend neither on the number of threads nor on the other rows of x.

   It takes single numbers, vectors and threads from the kernels of few bits. */

#include "few_bits.c"

enum block { Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS };

/* A matrix [height, inner], of whole blocks; blocks.py has the same structure. */
struct blocks {
    const uint8_t *blocks;              /* [height, row_bytes] */
    int64_t height, inner, row_bytes;
    int32_t type, values, size, skip;   /* skip: columns of a row's first block that are not the matrix's */
};

INLINE float half_at(const uint8_t *at) { return of_half((uint16_t)(at[0] | at[1] << 8)); }

/* Sixteen bytes, and as many numbers: compilers unroll loops as short as these and leave vectors alone. */
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t signed16 __attribute__((vector_size(16)));
typedef float floats16 __attribute__((vector_size(64)));

INLINE bytes16 load16(const uint8_t *at)
{
    bytes16 some;
    memcpy(&some, at, sizeof some);
    return some;
}

/* to = codes * scale - least, of `count` codes. */
INLINE void put_codes(const uint8_t *codes, int count, float scale, float least, float *to)
{
    for (int i = 0; i < count; i += 16) {
        floats16 some = __builtin_convertvector(load16(codes + i), floats16) * scale - least;
        memcpy(to + i, &some, sizeof some);
    }
}

INLINE void put_signed(const uint8_t *codes, int count, float middle, float scale, float *to)
{
    for (int i = 0; i < count; i += 16) {
        floats16 some = (__builtin_convertvector(load16(codes + i), floats16) - middle) * scale;
        memcpy(to + i, &some, sizeof some);
    }
}

/* The low halves of `count` bytes, then the high ones. */
INLINE void halves(const uint8_t *bytes, int count, uint8_t *codes)
{
    for (int i = 0; i < count; i += 16) {
        bytes16 both = load16(bytes + i), low = both & 15, high = both >> 4;
        memcpy(codes + i, &low, sizeof low), memcpy(codes + count + i, &high, sizeof high);
    }
}

/* Bits `shift` and on: of each of `count` bytes the lowest `bits` are those of the first `count` codes, and so on. */
INLINE void add_high(const uint8_t *bytes, int count, int bits, int shift, uint8_t *codes)
{
    for (int place = 0; place < 8 / bits; place++)
        for (int i = 0; i < count; i += 16) {
            bytes16 high = (load16(bytes + i) >> (uint8_t)(place * bits) & (uint8_t)((1 << bits) - 1)) << (uint8_t)shift;
            high |= load16(codes + place * count + i);
            memcpy(codes + place * count + i, &high, sizeof high);
        }
}

/* Bit 4 of 32 codes: one bit of four bytes for each. */
INLINE void add_fifth(const uint8_t *bytes, uint8_t *codes)
{
    const bytes16 bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    for (int i = 0; i < 2; i++) {
        uint64_t spread[2] = {bytes[2 * i] * 0x0101010101010101u, bytes[2 * i + 1] * 0x0101010101010101u};
        bytes16 some;
        memcpy(&some, spread, sizeof some);
        some = load16(codes + 16 * i) | ((bytes16)((some & bits) != 0) & 16);
        memcpy(codes + 16 * i, &some, sizeof some);
    }
}

static const int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

INLINE signed16 levels_of(bytes16 codes)
{
    signed16 some;
#if defined(__SSSE3__) && defined(__F16C__)
    some = (signed16)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)levels), (__m128i)codes);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    some = (signed16)vqtbl1q_s8(vld1q_s8(levels), (uint8x16_t)codes);
#else
    for (int i = 0; i < 16; i++)
        some[i] = levels[codes[i]];
#endif
    return some;
}

INLINE void put_levels(const uint8_t *bytes, float scale, float *to)
{
    bytes16 both = load16(bytes);
    floats16 low = __builtin_convertvector(levels_of(both & 15), floats16) * scale;
    floats16 high = __builtin_convertvector(levels_of(both >> 4), floats16) * scale;
    memcpy(to, &low, sizeof low), memcpy(to + 16, &high, sizeof high);
}

/* The scale and the minimum of group g of eight, in six bits each. */
INLINE void six_bits(const uint8_t *s, int g, int *scale, int *least)
{
    if (g < 4)
        *scale = s[g] & 63, *least = s[g + 4] & 63;
    else
        *scale = (s[g + 4] & 15) | (s[g - 4] >> 2 & 48), *least = s[g + 4] >> 4 | (s[g] >> 2 & 48);
}

INLINE void put_grouped(const uint8_t *b, const uint8_t *codes, float *to)
{
    float d = half_at(b), m = half_at(b + 2);
    for (int g = 0; g < 8; g++) {
        int scale, least;
        six_bits(b + 4, g, &scale, &least);
        put_codes(codes + 32 * g, 32, scale * d, least * m, to + 32 * g);
    }
}

static void decode_block(int type, const uint8_t *b, float *to)
{
    uint8_t codes[256];
    switch (type) {
    case Q4_1:
        halves(b + 4, 16, codes);
        put_codes(codes, 32, half_at(b), -half_at(b + 2), to);
        break;
    case Q5_0:
        halves(b + 6, 16, codes);
        add_fifth(b + 2, codes);
        put_signed(codes, 32, 16, half_at(b), to);
        break;
    case Q5_1:
        halves(b + 8, 16, codes);
        add_fifth(b + 4, codes);
        put_codes(codes, 32, half_at(b), -half_at(b + 2), to);
        break;
    case Q2_K:
        memset(codes, 0, sizeof codes);
        for (int h = 0; h < 2; h++)
            add_high(b + 16 + 32 * h, 32, 2, 0, codes + 128 * h);
        for (int g = 0; g < 16; g++)
            put_codes(codes + 16 * g, 16, half_at(b + 80) * (b[g] & 15), half_at(b + 82) * (b[g] >> 4), to + 16 * g);
        break;
    case Q3_K:
        memset(codes, 0, sizeof codes);
        for (int h = 0; h < 2; h++)
            add_high(b + 32 + 32 * h, 32, 2, 0, codes + 128 * h);
        add_high(b, 32, 1, 2, codes);
        for (int g = 0; g < 16; g++) {
            int low = g < 8 ? b[96 + g] & 15 : b[96 + g - 8] >> 4, high = b[104 + g % 4] >> (g / 4 * 2) & 3;
            put_signed(codes + 16 * g, 16, 4, (float)((low | high << 4) - 32) * half_at(b + 108), to + 16 * g);
        }
        break;
    case Q4_K:
        for (int p = 0; p < 4; p++)
            halves(b + 16 + 32 * p, 32, codes + 64 * p);
        put_grouped(b, codes, to);
        break;
    case Q5_K:
        for (int p = 0; p < 4; p++)
            halves(b + 48 + 32 * p, 32, codes + 64 * p);
        add_high(b + 16, 32, 1, 4, codes);
        put_grouped(b, codes, to);
        break;
    case Q6_K:
        for (int h = 0; h < 2; h++) {
            halves(b + 64 * h, 64, codes + 128 * h);
            add_high(b + 128 + 32 * h, 32, 2, 4, codes + 128 * h);
        }
        for (int g = 0; g < 16; g++)
            put_signed(codes + 16 * g, 16, 32, (float)(int8_t)b[192 + g] * half_at(b + 208), to + 16 * g);
        break;
    case IQ4_NL:
        put_levels(b + 2, half_at(b), to);
        break;
    default:
        for (int g = 0; g < 8; g++) {
            int low = b[4 + g / 2] >> (g % 2 * 4) & 15, high = b[2 + g / 4] >> (g % 4 * 2) & 3;
            put_levels(b + 8 + 16 * g, (float)((low | high << 4) - 32) * half_at(b), to + 32 * g);
        }
    }
}

INLINE int64_t blocks_of(const struct blocks *m) { return (m->skip + m->inner + m->values - 1) / m->values; }

struct block_work {
    const struct blocks *m;
    const float *x;
    void *y;
    const void *bias;
    int64_t first, height, rows, y_stride, each, next;
    int y_kind, adds, failed;
};

/* Sums of one row of the matrix with four rows of x or fewer, [rows, width] as `widen_blocks` makes them. */
INLINE void add_products(const float *w, int values, const float *x, int64_t width, const int rows, vec *acc)
{
    for (int i = 0; i < values; i += LANES) {
        vec of_w = v_load(w + i);
        for (int r = 0; r < rows; r++)
            acc[r] = v_fma(of_w, v_load(x + r * width + i), acc[r]);
    }
}

static void multiply_rows(void *about)
{
    struct block_work *given = about;
    const struct blocks *m = given->m;
    int64_t count = blocks_of(m), width = count * m->values;
    vec *acc = aligned_alloc(64, (size_t)((given->rows * sizeof(vec) + 63) / 64 * 64));
    if (!acc) {
        __atomic_store_n(&given->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t row = from; row < end; row++) {
            float w[256];
            for (int64_t r = 0; r < given->rows; r++)
                acc[r] = v_zero();
            for (int64_t at = 0; at < count; at++) {
                decode_block(m->type, m->blocks + row * m->row_bytes + at * m->size, w);
                const float *x = given->x + at * m->values;
                int64_t r = 0;
                for (; r + 4 <= given->rows; r += 4)
                    add_products(w, m->values, x + r * width, width, 4, acc + r);
                for (; r < given->rows; r++)
                    add_products(w, m->values, x + r * width, width, 1, acc + r);
            }
            for (int64_t r = 0; r < given->rows; r++) {
                int64_t place = r * given->y_stride + row;
                float sum = v_sum(acc[r]);
                if (given->bias)
                    sum += get(given->y_kind, given->bias, row);
                if (given->adds)
                    sum += get(given->y_kind, given->y, place);
                put(given->y_kind, given->y, place, sum);
            }
        }
    }
    free(acc);
}

/* y [rows, height] = x [rows, inner] @ m.T + bias, as few_bits_product has it. */
int blocks_product(const struct blocks *m, const void *x, int64_t x_stride, int64_t rows, int kind, void *y,
                   int64_t y_stride, const void *bias, int adds, int threads, parallel_call *parallel)
{
    int64_t width = blocks_of(m) * m->values;
    float *wide = aligned_alloc(64, (size_t)((rows * width * sizeof(float) + 63) / 64 * 64));
    if (!wide)
        return 1;
    memset(wide, 0, (size_t)(rows * width) * sizeof *wide);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < m->inner; i++)
            wide[r * width + m->skip + i] = get(kind, x, r * x_stride + i);
    int64_t share = m->height / (4 * (int64_t)threads), each = LEAST / (4 * m->row_bytes) + 1;
    each = each < share ? each : share + 1;
    struct block_work about = {m, wide, y, bias, 0, m->height, rows, y_stride, each, 0, kind, adds, 0};
    run_on(parallel, m->height * m->row_bytes < LEAST ? 1 : threads, multiply_rows, &about);
    free(wide);
    return about.failed;
}

static void dequantise_block_rows(void *about)
{
    struct block_work *given = about;
    const struct blocks *m = given->m;
    int64_t count = blocks_of(m);
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t row = from; row < end; row++)
            for (int64_t at = 0; at < count; at++) {
                float w[256];
                decode_block(m->type, m->blocks + (given->first + row) * m->row_bytes + at * m->size, w);
                int64_t column = at * m->values - m->skip;
                for (int i = 0; i < m->values; i++)
                    if (column + i >= 0 && column + i < m->inner)
                        put(given->y_kind, given->y, row * given->y_stride + column + i, w[i]);
            }
    }
}

/* y [height, inner]: rows of m from `first` on, as few_bits_dequantise has it. */
int blocks_dequantise(const struct blocks *m, int64_t first, int64_t height, int kind, void *y, int64_t y_stride,
                      int threads, parallel_call *parallel)
{
    int64_t each = LEAST / (4 * m->row_bytes) + 1;
    struct block_work about = {m, 0, y, 0, first, height, 0, y_stride, each, 0, kind, 0, 0};
    run_on(parallel, height * m->row_bytes < LEAST ? 1 : threads, dequantise_block_rows, &about);
    return about.failed;
}
