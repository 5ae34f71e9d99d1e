/* Products of few rows with matrices that rest in the blocks of GGUF files, and such matrices dequantised, on a CPU.

   Where bits lie and what they stand for is said in penstock.arch.formats.gguf_blocks: numbers here are made by the
   same operations in the same order, so they are equal bit for bit to the reference.

   A unit of columns is made numbers once for a few rows of x. Sums are by one thread, of as many partial sums as a vector
   has lanes, in the order of columns: they depend neither on the number of threads nor on the other rows of x.

   It takes single numbers, vectors and threads from the kernels of few bits. */

#include "few_bits.c"

enum block { Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS };

/* A matrix [height, inner], of whole units; blocks.py has the same structure. */
struct blocks {
    const uint8_t *blocks;              /* [height, row_bytes] */
    int64_t height, inner, row_bytes, high_at, heads_at; /* where high bits and heads begin in a row */
    int32_t type, unit, skip, code_bytes, head_bytes; /* skip: columns of a row that are not the matrix's */
    int32_t high_bytes, paired;         /* high bits of as many units */
};

INLINE float half_at(const uint8_t *at) { return of_half((uint16_t)(at[0] | at[1] << 8)); }

/* Sixteen words, and as many numbers: compilers unroll loops as short as these and leave vectors alone. */
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint16_t halves16 __attribute__((vector_size(32)));
typedef uint32_t words16 __attribute__((vector_size(64)));
typedef int32_t whole16 __attribute__((vector_size(64)));
typedef float floats16 __attribute__((vector_size(64)));

/* The scale and the minimum of each group of a unit. */
struct scales {
    float scale[16], least[16];
};

/* The numbers of a unit: (code - middle) * scale - least. Runs are of `words` words; words have codes of `bits` bits,
   and `more` bits apart, from bit `first` on of numbers of sixteen. */
INLINE void put_codes(const uint8_t *codes, const uint8_t *high, int unit, int words, int bits, int more, int first,
                      int group, float middle, const struct scales *of, float *to)
{
    const int places = 32 / bits;
    for (int at = 0; at < unit / places; at += 16) {
        words16 low, above = {0};
        memcpy(&low, codes + 4 * at, sizeof low);
        if (more) {
            halves16 some;
            memcpy(&some, high + 2 * at, sizeof some);
            above = __builtin_convertvector(some, words16) >> (uint32_t)first;
        }
        for (int place = 0; place < places; place++) {
            words16 code = low & ((1u << bits) - 1);
            if (more)
                code |= (above & ((1u << more) - 1)) << bits;
            int column = at / words * words * places + place * words + at % words;
            floats16 some = __builtin_convertvector((whole16)code, floats16) - middle;
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

INLINE void put_levels(const uint8_t *codes, int unit, int words, const struct scales *of, float *to)
{
    for (int at = 0; at < unit / 8; at += 16) {
        words16 both[2]; /* Levels of even places, and of odd ones. */
        for (int part = 0; part < 4; part++) {
            bytes16 some, low, high;
            memcpy(&some, codes + 4 * at + 16 * part, sizeof some);
            low = levels_of(some & 15), high = levels_of(some >> 4);
            memcpy((uint8_t *)&both[0] + 16 * part, &low, sizeof low);
            memcpy((uint8_t *)&both[1] + 16 * part, &high, sizeof high);
        }
        for (int place = 0; place < 8; place++) {
            int column = at / words * words * 8 + place * words + at % words;
            whole16 level = (whole16)(both[place % 2] << (24 - place / 2 * 8)) >> 24;
            floats16 some = __builtin_convertvector(level, floats16) * of->scale[column / 32];
            memcpy(to + column, &some, sizeof some);
        }
    }
}

/* The scales and minima of a unit of 256 columns of Q4_K and Q5_K, in six bits each. */
INLINE void six_bits(const uint8_t *head, struct scales *of)
{
    const uint8_t *s = head + 4;
    float d = half_at(head), m = half_at(head + 2);
    for (int g = 0; g < 4; g++) {
        of->scale[g] = (float)(s[g] & 63) * d, of->least[g] = (float)(s[g + 4] & 63) * m;
        of->scale[g + 4] = (float)((s[g + 8] & 15) | (s[g] >> 2 & 48)) * d;
        of->least[g + 4] = (float)(s[g + 8] >> 4 | (s[g + 4] >> 2 & 48)) * m;
    }
}

/* The numbers of a unit of a row. */
static void decode_unit(const struct blocks *m, int64_t row, int64_t at, float *to)
{
    const uint8_t *line = m->blocks + row * m->row_bytes;
    const uint8_t *codes = line + at * m->code_bytes, *head = line + m->heads_at + at * m->head_bytes;
    const uint8_t *high = line + m->high_at + at / m->paired * m->high_bytes;
    const int first = (int)(at % m->paired) * 8;
    struct scales of = {{0}, {0}};
    switch (m->type) {
    case Q4_1:
    case Q5_1:
        for (int g = 0; g < 4; g++)
            of.scale[g] = half_at(head + 4 * g), of.least[g] = -half_at(head + 4 * g + 2);
        if (m->type == Q4_1)
            put_codes(codes, high, 128, 16, 4, 0, 0, 32, 0, &of, to);
        else
            put_codes(codes, high, 128, 16, 4, 1, first, 32, 0, &of, to);
        break;
    case Q5_0:
    case IQ4_NL:
        for (int g = 0; g < 4; g++)
            of.scale[g] = half_at(head + 2 * g);
        if (m->type == Q5_0)
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
        for (int g = 0; g < 16; g++) {
            int low = head[g % 8] >> (g / 8 * 4) & 15, two = head[8 + g % 4] >> (g / 4 * 2) & 3;
            of.scale[g] = (float)((low | two << 4) - 32) * half_at(head + 12);
        }
        put_codes(codes, high, 256, 16, 2, 1, 0, 16, 4, &of, to);
        break;
    case Q4_K:
        six_bits(head, &of);
        put_codes(codes, high, 256, 32, 4, 0, 0, 32, 0, &of, to);
        break;
    case Q5_K:
        six_bits(head, &of);
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

INLINE int64_t block_units(const struct blocks *m) { return (m->skip + m->inner + m->unit - 1) / m->unit; }

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
    int64_t count = block_units(m), width = count * m->unit;
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
                decode_unit(m, row, at, w);
                const float *x = given->x + at * m->unit;
                int64_t r = 0;
                for (; r + 4 <= given->rows; r += 4)
                    add_products(w, m->unit, x + r * width, width, 4, acc + r);
                for (; r < given->rows; r++)
                    add_products(w, m->unit, x + r * width, width, 1, acc + r);
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
    int64_t width = block_units(m) * m->unit;
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
    int64_t count = block_units(m);
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t row = from; row < end; row++)
            for (int64_t at = 0; at < count; at++) {
                float w[256];
                decode_unit(m, given->first + row, at, w);
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
