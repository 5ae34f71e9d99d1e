/* Products of few rows with matrices that rest in the blocks of GGUF files, and such matrices dequantised, on a CPU.

   What bytes of a block stand for is said in penstock.arch.formats.gguf_blocks: numbers here are made by the same
   operations in the same order, so they are equal bit for bit to the reference.

   A block is made numbers once for a few rows of x. Sums are by one thread, of as many partial sums as a vector
   has lanes, in the order of columns: they depend neither on the number of threads nor on the other rows of x.

   Single numbers, vectors and threads are those of the kernels of few bits. */

#include "few_bits.c"

enum block { Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS };

/* A matrix [height, inner], of whole blocks; blocks.py has the same structure. */
struct blocks {
    const uint8_t *blocks;              /* [height, row_bytes] */
    int64_t height, inner, row_bytes;
    int32_t type, values, size, skip;   /* skip: columns of a row's first block that are not the matrix's */
};

INLINE float half_at(const uint8_t *at)
{
    uint16_t half = (uint16_t)(at[0] | at[1] << 8);
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    return of_half(half);
#endif
}

/* Sixteen bytes: compilers unroll loops as short as these and leave vectors alone. */
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t signed16 __attribute__((vector_size(16)));

INLINE bytes16 load16(const uint8_t *at)
{
    bytes16 some;
    memcpy(&some, at, sizeof some);
    return some;
}

/* to = codes * scale - least, of `count` codes. */
INLINE void put_codes(const uint8_t *codes, int count, float scale, float least, float *to)
{
    for (int i = 0; i < count; i += LANES)
        v_store(to + i, v_sub(v_mul(v_bytes(codes + i), v_all(scale)), v_all(least)));
}

/* to = (codes - middle) * scale. */
INLINE void put_signed(const uint8_t *codes, int count, float middle, float scale, float *to)
{
    for (int i = 0; i < count; i += LANES)
        v_store(to + i, v_mul(v_sub(v_bytes(codes + i), v_all(middle)), v_all(scale)));
}

/* All sixteen numbers of a code, code * scale - least. */
#if LANES == 16
typedef vec numbers;
INLINE numbers numbers_of(const float *scale, const float *least)
{
    return v_sub(v_mul(table_of(INT4), v_all(*scale)), v_all(*least));
}
#else
typedef struct { float scale, least; } numbers;
INLINE numbers numbers_of(const float *scale, const float *least)
{
    numbers made = {*scale, *least};
    return made;
}
#endif

/* Sixteen bytes: the numbers of their low halves, and of their high ones. */
INLINE void put_halves(const uint8_t *bytes, numbers of_low, numbers of_high, float *low, float *high)
{
#if LANES == 16 /* The lowest four bits say which. */
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
    v_store(low, _mm512_permutexvar_ps(codes, of_low));
    v_store(high, _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), of_high));
#else
    bytes16 both = load16(bytes), codes = both & 15;
    put_codes((const uint8_t *)&codes, 16, of_low.scale, of_low.least, low);
    codes = both >> 4;
    put_codes((const uint8_t *)&codes, 16, of_high.scale, of_high.least, high);
#endif
}

/* Two numbers of 16 bits, the second one negative. */
INLINE void two_halves(const uint8_t *at, float *to)
{
#ifdef __F16C__
    __m128 both = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)at)); /* Blocks are longer than eight bytes. */
    _mm_storeu_ps(to, _mm_xor_ps(both, _mm_setr_ps(0, -0.0f, 0, 0)));
#else
    to[0] = half_at(at), to[1] = -half_at(at + 2);
#endif
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
    bytes16 both = load16(bytes), above[2]; /* Levels are from -127 on: 128 more makes them bytes. */
    above[0] = (bytes16)levels_of(both & 15) ^ 128, above[1] = (bytes16)levels_of(both >> 4) ^ 128;
    put_signed((const uint8_t *)above, 32, 128, scale, to);
}

/* The scales, and what is taken away, of eight groups: of six bits each, times two numbers. */
INLINE void read_groups(const uint8_t *b, float *scale, float *least)
{
    uint32_t words[3], six[4]; /* Bytes stay where they are: their order in a word is the machine's. */
    float of_least[16], of_scale[16];
    memcpy(words, b + 4, sizeof words);
    six[0] = words[0] & 0x3f3f3f3f, six[2] = words[1] & 0x3f3f3f3f;
    six[1] = (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030);
    six[3] = (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030);
    for (int i = 0; i < 16; i += LANES) {
        vec some = v_bytes((const uint8_t *)six + i);
        v_store(of_scale + i, v_mul(some, v_all(half_at(b))));
        v_store(of_least + i, v_mul(some, v_all(half_at(b + 2))));
    }
    memcpy(scale, of_scale, 8 * sizeof *scale), memcpy(least, of_least + 8, 8 * sizeof *least);
}

INLINE void decode_as(int type, const uint8_t *b, float *to)
{
    uint8_t codes[256];
    float scale[8], least[8];
    switch (type) {
    case Q4_1: {
        float two[4];
        two_halves(b, two);
        numbers both = numbers_of(two, two + 1);
        put_halves(b + 4, both, both, to, to + 16);
        break;
    }
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
        read_groups(b, scale, least);
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < 32; i += 16)
                put_halves(b + 16 + 32 * p + i, numbers_of(scale + 2 * p, least + 2 * p),
                           numbers_of(scale + 2 * p + 1, least + 2 * p + 1), to + 64 * p + i, to + 64 * p + 32 + i);
        break;
    case Q5_K:
        for (int p = 0; p < 4; p++)
            halves(b + 48 + 32 * p, 32, codes + 64 * p);
        add_high(b + 16, 32, 1, 4, codes);
        read_groups(b, scale, least);
        for (int g = 0; g < 8; g++)
            put_codes(codes + 32 * g, 32, scale[g], least[g], to + 32 * g);
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

INLINE int values_of(int type)
{
    return type == Q4_1 || type == Q5_0 || type == Q5_1 || type == IQ4_NL ? 32 : 256;
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

#define TALL 4 /* Rows of the matrix at a time: as many sums do not wait for each other, and x is read once for all. */

/* A block of each of TALL rows of the matrix, [TALL, 256], times rows of x, [rows, width]: added to acc [rows, TALL]. */
INLINE void add_products(const float (*w)[256], const int values, const float *x, int64_t width, const int rows, vec *acc)
{
    for (int i = 0; i < values; i += LANES)
        UNROLL for (int r = 0; r < rows; r++) {
            vec of_x = v_load(x + r * width + i);
            UNROLL for (int high = 0; high < TALL; high++)
                acc[r * TALL + high] = v_fma(v_load(w[high] + i), of_x, acc[r * TALL + high]);
        }
}

INLINE void decode_tile(const int type, const uint8_t *const *blocks, int64_t size, int64_t at, float (*w)[256])
{
    UNROLL for (int high = 0; high < TALL; high++) {
        const uint8_t *b = blocks[high] + at * size;
        __builtin_prefetch(b + 6144, 0, 2); /* Memory is that far away; the rows that are next lie there. */
        decode_as(type, b, w[high]);
    }
}

/* TALL rows of the matrix times all rows of x: sums acc [rows, TALL]. */
INLINE void block_tile(const int type, const struct blocks *m, const uint8_t *const *blocks, const float *x,
                       int64_t rows, vec *acc)
{
    const int values = values_of(type);
    int64_t count = blocks_of(m), width = count * values;
    float w[TALL][256] __attribute__((aligned(64)));
    if (rows == 1) { /* Sums stay in registers. */
        vec sums[TALL];
        const uint8_t *its[TALL];
        int64_t size = m->size;
        UNROLL for (int high = 0; high < TALL; high++)
            sums[high] = v_zero(), its[high] = blocks[high];
        for (int64_t at = 0; at < count; at++) {
            decode_tile(type, its, size, at, w);
            add_products(w, values, x + at * values, width, 1, sums);
        }
        UNROLL for (int high = 0; high < TALL; high++)
            acc[high] = sums[high];
        return;
    }
    for (int64_t i = 0; i < rows * TALL; i++)
        acc[i] = v_zero();
    for (int64_t at = 0; at < count; at++) {
        decode_tile(type, blocks, m->size, at, w);
        const float *its = x + at * values;
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2)
            add_products(w, values, its + r * width, width, 2, acc + r * TALL);
        if (r < rows)
            add_products(w, values, its + r * width, width, 1, acc + r * TALL);
    }
}

typedef void block_tile_call(const struct blocks *, const uint8_t *const *, const float *, int64_t, vec *);

#define OF_TYPE(type)                                                                                          \
    static void decode_##type(const uint8_t *b, float *to) { decode_as(type, b, to); }                          \
    static void block_tile_##type(const struct blocks *m, const uint8_t *const *blocks, const float *x,        \
                                  int64_t rows, vec *acc)                                                      \
    {                                                                                                          \
        block_tile(type, m, blocks, x, rows, acc);                                                             \
    }
OF_TYPE(Q4_1) OF_TYPE(Q5_0) OF_TYPE(Q5_1) OF_TYPE(Q2_K) OF_TYPE(Q3_K)
OF_TYPE(Q4_K) OF_TYPE(Q5_K) OF_TYPE(Q6_K) OF_TYPE(IQ4_NL) OF_TYPE(IQ4_XS)

#define EACH_TYPE(name)                                                                                        \
    {                                                                                                          \
        name(Q4_1), name(Q5_0), name(Q5_1), name(Q2_K), name(Q3_K), name(Q4_K), name(Q5_K), name(Q6_K),        \
            name(IQ4_NL), name(IQ4_XS)                                                                         \
    }
#define TILE_OF(type) [type] = block_tile_##type
#define DECODE_OF(type) [type] = decode_##type
static block_tile_call *const block_tiles[] = EACH_TYPE(TILE_OF);
static void (*const decoders[])(const uint8_t *, float *) = EACH_TYPE(DECODE_OF);

static void multiply_rows(void *about)
{
    struct block_work *given = about;
    const struct blocks *m = given->m;
    vec *acc = aligned_alloc(64, (size_t)((given->rows * TALL * sizeof(vec) + 63) / 64 * 64));
    if (!acc) {
        __atomic_store_n(&given->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t row = from; row < end; row += TALL) {
            int there = end - row < TALL ? (int)(end - row) : TALL;
            const uint8_t *blocks[TALL]; /* Below the part its last row stands in. */
            for (int high = 0; high < TALL; high++)
                blocks[high] = m->blocks + (row + (high < there ? high : there - 1)) * m->row_bytes;
            block_tiles[m->type](m, blocks, given->x, given->rows, acc);
            for (int64_t r = 0; r < given->rows; r++)
                for (int high = 0; high < there; high++) {
                    int64_t place = r * given->y_stride + row + high;
                    float sum = v_sum(acc[r * TALL + high]);
                    if (given->bias)
                        sum += get(given->y_kind, given->bias, row + high);
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
    /* Long parts: what a thread fetches ahead is its own, but at a part's beginning. */
    int64_t each = (m->height / (4 * (int64_t)threads) / TALL + 1) * TALL;
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
                decoders[m->type](m->blocks + (given->first + row) * m->row_bytes + at * m->size, w);
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
