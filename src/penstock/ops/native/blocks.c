/* Products of few rows with matrices that rest in the blocks of GGUF files, and such matrices dequantised, on a CPU.

   Where bits lie and what they stand for is said in penstock.arch.formats.gguf_blocks: numbers here are made by the
   same operations in the same order, so they are equal bit for bit to the reference.

   A unit of columns of four rows is made numbers once for all rows of x. Sums are by one thread, of as many partial
   sums as a vector has lanes, in the order of columns: they depend neither on the number of threads nor on the other
   rows of x.

   Single numbers, vectors and threads are those of the kernels of few bits. */

#include "few_bits.c"

enum block { Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS };

/* A matrix [height, inner], of whole units; blocks.py has the same structure. */
struct blocks {
    const uint8_t *blocks;              /* [height, row_bytes] */
    int64_t height, inner, row_bytes, high_at, heads_at; /* where high bits and heads begin in a row */
    int32_t type, unit, skip, code_bytes, head_bytes; /* skip: columns of a row that are not the matrix's */
    int32_t high_bytes, paired;         /* high bits of as many units */
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

/* Sixteen words, and as many numbers: compilers unroll loops as short as these and leave vectors alone. */
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES)));

/* The scale and the minimum of each group of a unit. */
struct scales {
    float scale[16], least[16];
};

#if LANES == 16
/* Codes of four bits, by a table of the sixteen numbers of a group; `values` are those of codes before the scale. */
INLINE void put_fours(const uint8_t *codes, const int unit, const int run, const int group, vec values,
                      const struct scales *of, float *to)
{
    UNROLL for (int at = 0; at < unit / 8; at += 16) {
        __m512i low = _mm512_loadu_si512(codes + 4 * at); /* The lowest four bits of each word say which. */
        UNROLL for (int place = 0; place < 8; place++) {
            int column = at / run * run * 8 + place * run + at % run, g = column / group;
            vec numbers = v_sub(v_mul(values, v_all(of->scale[g])), v_all(of->least[g]));
            v_store(to + column, _mm512_permutexvar_ps(low, numbers));
            low = _mm512_srli_epi32(low, 4);
        }
    }
}
#endif

/* The numbers of a unit: (code - middle) * scale - least. Runs are of `run` words; words have codes of `bits` bits,
   and `more` bits apart, from bit `first` on of numbers of sixteen. */
INLINE void put_codes(const uint8_t *codes, const uint8_t *high, const int unit, const int run, const int bits,
                      const int more, int first, const int group, float middle, const struct scales *of, float *to)
{
    const int places = 32 / bits;
#if LANES == 16
    if (bits == 4 && !more) {
        put_fours(codes, unit, run, group, v_sub(table_of(INT4), v_all(middle)), of, to);
        return;
    }
#endif
    UNROLL for (int at = 0; at < unit / places; at += LANES) {
        words low, above = {0};
        memcpy(&low, codes + 4 * at, sizeof low);
        if (more) {
            halves some;
            memcpy(&some, high + 2 * at, sizeof some);
            above = __builtin_convertvector(some, words) >> (uint32_t)first;
        }
        UNROLL for (int place = 0; place < places; place++) {
            words code = low & ((1u << bits) - 1);
            if (more)
                code |= (above & ((1u << more) - 1)) << bits;
            int column = at / run * run * places + place * run + at % run;
            floats some = __builtin_convertvector((whole)code, floats) - middle;
            some = some * of->scale[column / group] - of->least[column / group];
            memcpy(to + column, &some, sizeof some);
            low >>= bits, above >>= more;
        }
    }
}

static const int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* The levels of sixteen codes of four bits, one a byte. */
INLINE bytes16 levels_of(bytes16 codes)
{
    bytes16 some;
#if defined(__SSSE3__) && defined(__F16C__)
    some = (bytes16)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)levels), (__m128i)codes);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    some = (bytes16)vqtbl1q_s8(vld1q_s8(levels), (uint8x16_t)codes);
#else
    for (int i = 0; i < 16; i++)
        some[i] = (uint8_t)levels[codes[i]];
#endif
    return some;
}

INLINE void put_levels(const uint8_t *codes, const int unit, const int run, const struct scales *of, float *to)
{
#if LANES == 16
    __m512i numbers = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)levels));
    put_fours(codes, unit, run, 32, _mm512_cvtepi32_ps(numbers), of, to);
    return;
#endif
    UNROLL for (int at = 0; at < unit / 8; at += LANES) {
        words both[2]; /* Levels of even places, and of odd ones. */
        for (int part = 0; part < LANES / 4; part++) {
            bytes16 some, low, high;
            memcpy(&some, codes + 4 * at + 16 * part, sizeof some);
            low = levels_of(some & 15), high = levels_of(some >> 4);
            memcpy((uint8_t *)&both[0] + 16 * part, &low, sizeof low);
            memcpy((uint8_t *)&both[1] + 16 * part, &high, sizeof high);
        }
        UNROLL for (int place = 0; place < 8; place++) {
            int column = at / run * run * 8 + place * run + at % run;
            whole level = (whole)(both[place % 2] << (24 - place / 2 * 8)) >> 24;
            floats some = __builtin_convertvector(level, floats) * of->scale[column / 32];
            memcpy(to + column, &some, sizeof some);
        }
    }
}

/* The scales and minima of a unit of 256 columns of Q4_K and Q5_K, in six bits each. */
INLINE void scales_of_q4(const uint8_t *head, struct scales *of)
{
    uint32_t words[3];
    float both[16];
    memcpy(words, head + 4, sizeof words);
    uint32_t six[4] = { /* Bytes stay where they are: their order in a word is the machine's. */
        words[0] & 0x3f3f3f3f, (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030),
        words[1] & 0x3f3f3f3f, (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030),
    };
    for (int i = 0; i < 16; i += LANES)
        v_store(both + i, v_bytes((const uint8_t *)six + i));
    for (int g = 0; g < 8; g++)
        of->scale[g] = both[g] * half_at(head), of->least[g] = both[8 + g] * half_at(head + 2);
}

/* The scales of a unit of 256 columns of Q3_K: (six bits - 32) * d. */
INLINE void scales_of_q3(const uint8_t *head, float d, float *scale)
{
    uint32_t words[3];
    memcpy(words, head, sizeof words);
    uint32_t six[4];
    for (int i = 0; i < 4; i++)
        six[i] = (words[i % 2] >> i / 2 * 4 & 0x0f0f0f0f) | (words[2] >> 2 * i & 0x03030303) << 4;
    for (int i = 0; i < 16; i += LANES)
        v_store(scale + i, v_mul(v_sub(v_bytes((const uint8_t *)six + i), v_all(32)), v_all(d)));
}

/* The numbers of a unit of a row, which begins at `line`. */
INLINE void decode_as(const int type, const struct blocks *m, const uint8_t *line, int64_t at, float *to)
{
    const uint8_t *codes = line + at * m->code_bytes, *head = line + m->heads_at + at * m->head_bytes;
    const uint8_t *high = line + m->high_at + at / m->paired * m->high_bytes;
    const int first = (int)(at % m->paired) * 8;
    struct scales of = {{0}, {0}};
    switch (type) {
    case Q4_1:
    case Q5_1:
        for (int g = 0; g < 4; g++)
            of.scale[g] = half_at(head + 4 * g), of.least[g] = -half_at(head + 4 * g + 2);
        if (type == Q4_1)
            put_codes(codes, high, 128, 16, 4, 0, 0, 32, 0, &of, to);
        else
            put_codes(codes, high, 128, 16, 4, 1, first, 32, 0, &of, to);
        break;
    case Q5_0:
    case IQ4_NL:
        for (int g = 0; g < 4; g++)
            of.scale[g] = half_at(head + 2 * g);
        if (type == Q5_0)
            put_codes(codes, high, 128, 16, 4, 1, first, 32, 16, &of, to);
        else
            put_levels(codes, 128, 16, &of, to);
        break;
    case Q2_K:
        for (int g = 0; g < 16; g++) {
            of.scale[g] = half_at(head + 16) * (float)(head[g] & 15);
            of.least[g] = half_at(head + 18) * (float)(head[g] >> 4);
        }
        put_codes(codes, high, 256, 16, 2, 0, 0, 16, 0, &of, to);
        break;
    case Q3_K:
        scales_of_q3(head, half_at(head + 12), of.scale);
        put_codes(codes, high, 256, 16, 2, 1, 0, 16, 4, &of, to);
        break;
    case Q4_K:
        scales_of_q4(head, &of);
        put_codes(codes, high, 256, 32, 4, 0, 0, 32, 0, &of, to);
        break;
    case Q5_K:
        scales_of_q4(head, &of);
        put_codes(codes, high, 256, 32, 4, 1, first, 32, 0, &of, to);
        break;
    case Q6_K:
        for (int g = 0; g < 16; g++)
            of.scale[g] = (float)(int8_t)head[g] * half_at(head + 16);
        put_codes(codes, high, 256, 16, 4, 2, 0, 16, 32, &of, to);
        break;
    default:
        for (int g = 0; g < 8; g++) {
            int low = head[4 + g / 2] >> (g % 2 * 4) & 15, two = head[2 + g / 4] >> (g % 4 * 2) & 3;
            of.scale[g] = (float)((low | two << 4) - 32) * half_at(head);
        }
        put_levels(codes, 256, 32, &of, to);
    }
}

/* Columns of a unit. */
INLINE int unit_of(int type) { return type == Q4_1 || type == Q5_0 || type == Q5_1 || type == IQ4_NL ? 128 : 256; }

INLINE int64_t block_units(const struct blocks *m) { return (m->skip + m->inner + m->unit - 1) / m->unit; }

struct block_work {
    const struct blocks *m;
    const float *x;
    void *y;
    const void *bias;
    int64_t first, height, rows, y_stride, each, next;
    int y_kind, adds, failed;
};

#define TALL 4 /* Rows of the matrix at a time: as many sums do not wait for each other, and x is read once for all. */
#define AT_ONCE (LANES == 16 ? 4 : 2) /* Rows of x: as registers hold sums for. */

/* A unit of TALL rows of the matrix, [TALL, 256], times rows of x, [rows, width]: added to acc [rows, TALL]. */
INLINE void add_products(const float (*w)[256], const int values, const float *x, int64_t width, const int rows, vec *acc)
{
    vec sums[4 * TALL];
    UNROLL for (int i = 0; i < rows * TALL; i++)
        sums[i] = acc[i];
    for (int i = 0; i < values; i += LANES) {
        vec of_w[TALL];
        UNROLL for (int high = 0; high < TALL; high++)
            of_w[high] = v_load(w[high] + i);
        UNROLL for (int r = 0; r < rows; r++) {
            vec of_x = v_load(x + r * width + i);
            UNROLL for (int high = 0; high < TALL; high++)
                sums[r * TALL + high] = v_fma(of_w[high], of_x, sums[r * TALL + high]);
        }
    }
    UNROLL for (int i = 0; i < rows * TALL; i++)
        acc[i] = sums[i];
}

/* Fetch the same unit of the next tile. */
INLINE void fetch_unit(const struct blocks *m, const uint8_t *line, int64_t at)
{
    const uint8_t *next = line + TALL * m->row_bytes;
    for (int first = 0; first < m->code_bytes; first += 64)
        __builtin_prefetch(next + at * m->code_bytes + first, 0, 2);
    __builtin_prefetch(next + m->heads_at + at * m->head_bytes, 0, 2);
}

/* TALL rows of the matrix, which begin at `lines`, times one row of x: sums acc [TALL], which stay in registers. */
INLINE void one_row(const int type, const struct blocks *about, const uint8_t *const *lines, const float *x, vec *acc)
{
    const struct blocks m = *about; /* Stores of vectors may change anything but what has no address. */
    const int values = unit_of(type);
    int64_t count = block_units(&m);
    float w[TALL][256] __attribute__((aligned(64)));
    const uint8_t *its[TALL];
    vec sums[TALL];
    UNROLL for (int high = 0; high < TALL; high++)
        its[high] = lines[high], sums[high] = v_zero();
    for (int64_t at = 0; at < count; at++) {
        UNROLL for (int high = 0; high < TALL; high++) {
            fetch_unit(&m, its[high], at);
            decode_as(type, &m, its[high], at, w[high]);
        }
        add_products(w, values, x + at * values, 0, 1, sums);
    }
    UNROLL for (int high = 0; high < TALL; high++)
        acc[high] = sums[high];
}

typedef void decode_call(const struct blocks *, const uint8_t *, int64_t, float *);
typedef void one_row_call(const struct blocks *, const uint8_t *const *, const float *, vec *);

#define OF_TYPE(type)                                                                                          \
    static void decode_##type(const struct blocks *m, const uint8_t *line, int64_t at, float *to)              \
    {                                                                                                          \
        decode_as(type, m, line, at, to);                                                                      \
    }                                                                                                          \
    static void one_row_##type(const struct blocks *m, const uint8_t *const *lines, const float *x, vec *acc)  \
    {                                                                                                          \
        one_row(type, m, lines, x, acc);                                                                       \
    }
OF_TYPE(Q4_1) OF_TYPE(Q5_0) OF_TYPE(Q5_1) OF_TYPE(Q2_K) OF_TYPE(Q3_K)
OF_TYPE(Q4_K) OF_TYPE(Q5_K) OF_TYPE(Q6_K) OF_TYPE(IQ4_NL) OF_TYPE(IQ4_XS)

#define BY_TYPE(type) [type] = {decode_##type, one_row_##type}
static const struct {
    decode_call *decode;
    one_row_call *one_row;
} types[] = {BY_TYPE(Q4_1), BY_TYPE(Q5_0), BY_TYPE(Q5_1), BY_TYPE(Q2_K), BY_TYPE(Q3_K),
             BY_TYPE(Q4_K), BY_TYPE(Q5_K), BY_TYPE(Q6_K), BY_TYPE(IQ4_NL), BY_TYPE(IQ4_XS)};

/* The same with several rows of x: sums acc [rows, TALL]. */
static void more_rows(const struct blocks *m, const uint8_t *const *lines, const float *x, int64_t rows, vec *acc)
{
    decode_call *decode = types[m->type].decode;
    int64_t count = block_units(m), width = count * m->unit;
    float w[TALL][256] __attribute__((aligned(64)));
    for (int64_t i = 0; i < rows * TALL; i++)
        acc[i] = v_zero();
    for (int64_t at = 0; at < count; at++, x += m->unit) {
        for (int high = 0; high < TALL; high++) {
            fetch_unit(m, lines[high], at);
            decode(m, lines[high], at, w[high]);
        }
        int64_t r = 0;
        for (; r + AT_ONCE <= rows; r += AT_ONCE)
            add_products(w, m->unit, x + r * width, width, AT_ONCE, acc + r * TALL);
        for (; r < rows; r++)
            add_products(w, m->unit, x + r * width, width, 1, acc + r * TALL);
    }
}

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
            const uint8_t *lines[TALL]; /* Below the part its last row stands in. */
            for (int high = 0; high < TALL; high++)
                lines[high] = m->blocks + (row + (high < there ? high : there - 1)) * m->row_bytes;
            if (given->rows == 1)
                types[m->type].one_row(m, lines, given->x, acc);
            else
                more_rows(m, lines, given->x, given->rows, acc);
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
    int64_t width = block_units(m) * m->unit;
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
    int64_t count = block_units(m);
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t row = from; row < end; row++)
            for (int64_t at = 0; at < count; at++) {
                float w[256];
                types[m->type].decode(m, m->blocks + (given->first + row) * m->row_bytes, at, w);
                int64_t column = at * m->unit - m->skip;
                for (int i = 0; i < m->unit; i++)
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
