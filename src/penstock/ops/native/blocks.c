/* Products of few rows with matrices that rest in the blocks of GGUF files, and such matrices dequantised, on a CPU.

   Where bits lie and what they stand for is said in penstock.arch.formats.gguf_blocks: numbers here are made by the
   same operations in the same order, so they are equal bit for bit to the reference.

   A unit of columns of four rows is made numbers once for all rows of x. Sums are by one thread, of as many partial
   sums as a vector has lanes, in the order of columns: they depend neither on the number of threads nor on the other
   rows of x.

   Single numbers, vectors and threads are those of the kernels of few bits. */

#include "dense.c"

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

/* How codes of a type lie, and what they stand for: (code - middle) * scale - least. */
struct shape {
    int unit, run;  /* columns of a unit; words of a run */
    int bits, more; /* of a code in a word, and apart in numbers of sixteen bits */
    int group, middle;
    int minima; /* 1: - least; -1: + least; 0: neither */
    int levels; /* Whether codes are places in a table. */
};

INLINE struct shape shape_of(int type)
{
    static const struct shape shapes[] = {
        [Q4_1] = {128, 16, 4, 0, 32, 0, -1, 0},  [Q5_0] = {128, 16, 4, 1, 32, 16, 0, 0},
        [Q5_1] = {128, 16, 4, 1, 32, 0, -1, 0},  [Q2_K] = {256, 16, 2, 0, 16, 0, 1, 0},
        [Q3_K] = {256, 16, 2, 1, 16, 4, 0, 0},   [Q4_K] = {256, 32, 4, 0, 32, 0, 1, 0},
        [Q5_K] = {256, 32, 4, 1, 32, 0, 1, 0},   [Q6_K] = {256, 16, 4, 2, 16, 32, 0, 0},
        [IQ4_NL] = {128, 16, 4, 0, 32, 0, 0, 1}, [IQ4_XS] = {256, 32, 4, 0, 32, 0, 0, 1},
    };
    return shapes[type];
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

/* A row's codes at a stretch of columns: its runs once, at all their places. */
struct codes {
    words low[32 / LANES], above[32 / LANES]; /* of a run; above: bits apart, or levels of odd places */
    vec table;              /* the sixteen numbers of a group */
};

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

INLINE int stretch_of(struct shape of) { return of.run * (32 / of.bits); }

INLINE const uint8_t *high_of_unit(const struct blocks *m, const uint8_t *line, int64_t at)
{
    return line + m->high_at + at / m->paired * m->high_bytes;
}

/* Read a stretch of a unit, from its column `start` on. high: of its unit, or of the pair of which it is the second. */
INLINE void read_codes(const int type, const uint8_t *codes, const uint8_t *high, int second, int start, struct codes *to)
{
    const struct shape of = shape_of(type);
    high += start * of.bits / 16;
    UNROLL for (int i = 0; i < of.run / LANES; i++) {
        memcpy(&to->low[i], codes + 4 * LANES * i, sizeof to->low[i]);
        if (of.more) {
            halves some;
            memcpy(&some, high + 2 * LANES * i, sizeof some);
            to->above[i] = __builtin_convertvector(some, words) >> 8 * (uint32_t)second;
        }
#if LANES < 16
        for (int part = 0; of.levels && part < LANES / 4; part++) {
            bytes16 some, low, high;
            memcpy(&some, codes + 4 * LANES * i + 16 * part, sizeof some);
            low = levels_of(some & 15), high = levels_of(some >> 4);
            memcpy((uint8_t *)&to->low[i] + 16 * part, &low, sizeof low);
            memcpy((uint8_t *)&to->above[i] + 16 * part, &high, sizeof high);
        }
#endif
    }
}

/* The numbers of vector i of a run at a place, of the stretch from column `start` on. Ask for them in order. */
INLINE vec numbers_at(const int type, struct codes *from, const struct scales *of_unit, int start, const int place,
                      const int i)
{
    const struct shape of = shape_of(type);
    const int column = place * of.run + i * LANES, group = (start + column) / of.group;
    vec numbers;
#if LANES == 16
    if (of.bits == 4 && !of.more) { /* By a table: it is looked up by the lowest four bits of each word. */
        if (column % of.group == 0) {
            __m512i level = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)levels));
            vec values = of.levels ? _mm512_cvtepi32_ps(level) : table_of(INT4);
            from->table = v_mul(values, v_all(of_unit->scale[group]));
            if (of.minima)
                from->table = of.minima > 0 ? v_sub(from->table, v_all(of_unit->least[group]))
                                            : v_add(from->table, v_all(of_unit->least[group]));
        }
        numbers = _mm512_permutexvar_ps((__m512i)from->low[i], from->table);
        from->low[i] >>= 4;
        return numbers;
    }
#endif
    floats some;
    if (of.levels) {
        words *both = place % 2 ? from->above : from->low;
        some = __builtin_convertvector((whole)(both[i] << (24 - place / 2 * 8)) >> 24, floats);
    } else {
        words code = from->low[i] & ((1u << of.bits) - 1);
        if (of.more)
            code |= (from->above[i] & ((1u << of.more) - 1)) << of.bits;
        some = __builtin_convertvector((whole)code, floats) - (float)of.middle;
        from->low[i] >>= of.bits, from->above[i] >>= of.more;
    }
    some = some * of_unit->scale[group];
    if (of.minima)
        some = of.minima > 0 ? some - of_unit->least[group] : some + of_unit->least[group];
    memcpy(&numbers, &some, sizeof numbers);
    return numbers;
}

/* Four pairs of float16: scales, and what is added. */
INLINE void pairs_at(const uint8_t *head, struct scales *of)
{
#if defined(__F16C__) && defined(__AVX2__)
    __m256 both = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)head));
    both = _mm256_permutevar8x32_ps(both, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    _mm_storeu_ps(of->scale, _mm256_castps256_ps128(both));
    _mm_storeu_ps(of->least, _mm256_extractf128_ps(both, 1));
#else
    for (int g = 0; g < 4; g++)
        of->scale[g] = half_at(head + 4 * g), of->least[g] = half_at(head + 4 * g + 2);
#endif
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

/* The scales of a unit of a row, which begins at `line`. */
INLINE void read_scales(const int type, const struct blocks *m, const uint8_t *line, int64_t at, struct scales *of)
{
    const uint8_t *head = line + m->heads_at + at * m->head_bytes;
    switch (type) {
    case Q4_1:
    case Q5_1:
        pairs_at(head, of);
        break;
    case Q5_0:
    case IQ4_NL:
        for (int g = 0; g < 4; g++)
            of->scale[g] = half_at(head + 2 * g);
        break;
    case Q2_K:
        for (int g = 0; g < 16; g++) {
            of->scale[g] = half_at(head + 16) * (float)(head[g] & 15);
            of->least[g] = half_at(head + 18) * (float)(head[g] >> 4);
        }
        break;
    case Q3_K:
        scales_of_q3(head, half_at(head + 12), of->scale);
        break;
    case Q4_K:
    case Q5_K:
        scales_of_q4(head, of);
        break;
    case Q6_K:
        for (int g = 0; g < 16; g++)
            of->scale[g] = (float)(int8_t)head[g] * half_at(head + 16);
        break;
    default:
        for (int g = 0; g < 8; g++) {
            int low = head[4 + g / 2] >> (g % 2 * 4) & 15, two = head[2 + g / 4] >> (g % 4 * 2) & 3;
            of->scale[g] = (float)((low | two << 4) - 32) * half_at(head);
        }
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

#define TALL 4 /* Rows of the matrix at a time: as many sums do not wait for each other, and x is read once for all. */
#define TALLEST 8 /* The same of one row of x, where registers hold as many rows' codes. */
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

/* Rows of the matrix at a time of one row of x. */
INLINE int tall_of(int type)
{
    return LANES == 16 && shape_of(type).run == LANES && !shape_of(type).more && shape_of(type).bits == 4 ? TALLEST : TALL;
}

#define FAR 4096 /* Bytes, at least, that a tile is fetched ahead. */
#define AHEAD 4 /* Units whose scales are read at a time: a number is slow to read while it is being written. */

/* Rows of the matrix, which begin at `lines`, times one row of x: sums acc [tall_of(type)]. Numbers and sums stay in
   registers. The same units of the next tile are fetched. */
INLINE void one_row(const int type, const struct blocks *about, const uint8_t *const *lines, const float *x, vec *acc)
{
    const struct blocks m = *about; /* Stores of vectors may change anything but what has no address. */
    const struct shape of = shape_of(type);
    const int tall = tall_of(type), places = 32 / of.bits, bytes = of.unit * of.bits / 8;
    const int64_t count = block_units(&m), below = (FAR / (tall * m.row_bytes) + 1) * tall * m.row_bytes;
    struct scales scales[AHEAD][TALLEST] __attribute__((aligned(64)));
    vec sums[TALLEST];
    UNROLL for (int w = 0; w < tall; w++)
        sums[w] = v_zero();
    for (int64_t from = 0; from < count; from += AHEAD) {
        const int64_t some = count - from < AHEAD ? count - from : AHEAD;
        const uint8_t *its[TALLEST];
        UNROLL for (int w = 0; w < tall; w++) {
            its[w] = lines[w] + from * bytes;
            __builtin_prefetch(lines[w] + m.heads_at + from * m.head_bytes + below, 0, 2);
        }
        for (int64_t i = 0; i < some; i++)
            UNROLL for (int w = 0; w < tall; w++)
                read_scales(type, &m, lines[w], from + i, &scales[i][w]);
        for (int64_t i = 0; i < some; i++)
            for (int start = 0; start < of.unit; start += stretch_of(of), x += stretch_of(of)) {
                struct codes codes[TALLEST];
                UNROLL for (int w = 0; w < tall; w++) {
                    const uint8_t *high = of.more ? high_of_unit(&m, lines[w], from + i) : 0;
                    read_codes(type, its[w], high, (int)((from + i) % m.paired), start, &codes[w]);
                    for (int line = 0; line < stretch_of(of) * of.bits / 8; line += 64)
                        __builtin_prefetch(its[w] + below + line, 0, 2);
                    its[w] += stretch_of(of) * of.bits / 8;
                }
                UNROLL for (int place = 0; place < places; place++)
                    UNROLL for (int v = 0; v < of.run / LANES; v++) {
                        vec of_x = v_load(x + place * of.run + v * LANES);
                        UNROLL for (int w = 0; w < tall; w++) {
                            vec numbers = numbers_at(type, &codes[w], &scales[i][w], start, place, v);
                            sums[w] = v_fma(numbers, of_x, sums[w]);
                        }
                    }
            }
    }
    UNROLL for (int w = 0; w < tall; w++)
        acc[w] = sums[w];
}

/* The numbers of a unit of `tall` rows: to [tall, 256]. */
INLINE void decode_as(const int type, const struct blocks *m, const uint8_t *const *lines, int tall, int64_t at,
                      float (*to)[256])
{
    const struct shape of = shape_of(type);
    struct scales scales[TALL];
    for (int w = 0; w < tall; w++)
        read_scales(type, m, lines[w], at, &scales[w]);
    for (int w = 0; w < tall; w++)
        for (int start = 0; start < of.unit; start += stretch_of(of)) {
            struct codes codes;
            read_codes(type, lines[w] + at * m->code_bytes + start * of.bits / 8, high_of_unit(m, lines[w], at),
                       (int)(at % m->paired), start, &codes);
            UNROLL for (int place = 0; place < 32 / of.bits; place++)
                UNROLL for (int i = 0; i < of.run / LANES; i++)
                    v_store(to[w] + start + place * of.run + i * LANES,
                            numbers_at(type, &codes, &scales[w], start, place, i));
        }
}

typedef void decode_call(const struct blocks *, const uint8_t *const *, int, int64_t, float (*)[256]);
typedef void one_row_call(const struct blocks *, const uint8_t *const *, const float *, vec *);

#define OF_TYPE(type)                                                                                          \
    static void decode_##type(const struct blocks *m, const uint8_t *const *lines, int tall, int64_t at,       \
                              float (*to)[256])                                                                \
    {                                                                                                          \
        decode_as(type, m, lines, tall, at, to);                                                               \
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

/* TALL rows of the matrix times several rows of x: sums acc [rows, TALL]. */
static void more_rows(const struct blocks *m, const uint8_t *const *lines, const float *x, int64_t rows, vec *acc)
{
    decode_call *decode = types[m->type].decode;
    int64_t count = block_units(m), width = count * m->unit;
    float w[TALL][256] __attribute__((aligned(64)));
    for (int64_t i = 0; i < rows * TALL; i++)
        acc[i] = v_zero();
    for (int64_t at = 0; at < count; at++, x += m->unit) {
        for (int high = 0; high < TALL; high++) {
            const uint8_t *next = lines[high] + TALL * m->row_bytes;
            for (int line = 0; line < m->code_bytes; line += 64)
                __builtin_prefetch(next + at * m->code_bytes + line, 0, 2);
            __builtin_prefetch(next + m->heads_at + at * m->head_bytes, 0, 2);
        }
        decode(m, lines, TALL, at, w);
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
    const int tall = given->rows == 1 ? tall_of(m->type) : TALL;
    vec *acc = aligned_alloc(64, (size_t)((given->rows * tall * sizeof(vec) + 63) / 64 * 64));
    if (!acc) {
        __atomic_store_n(&given->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t row = from; row < end; row += tall) {
            int there = end - row < tall ? (int)(end - row) : tall;
            const uint8_t *lines[TALLEST]; /* Below the part its last row stands in. */
            for (int high = 0; high < tall; high++)
                lines[high] = m->blocks + (row + (high < there ? high : there - 1)) * m->row_bytes;
            if (given->rows == 1)
                types[m->type].one_row(m, lines, given->x, acc);
            else
                more_rows(m, lines, given->x, given->rows, acc);
            for (int64_t r = 0; r < given->rows; r++)
                for (int high = 0; high < there; high++) {
                    int64_t place = r * given->y_stride + row + high;
                    float sum = v_sum(acc[r * tall + high]);
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
    int64_t each = (m->height / (4 * (int64_t)threads) / TALLEST + 1) * TALLEST;
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
                float w[1][256];
                const uint8_t *line = m->blocks + (given->first + row) * m->row_bytes;
                types[m->type].decode(m, &line, 1, at, w);
                int64_t column = at * m->unit - m->skip;
                for (int i = 0; i < m->unit; i++)
                    if (column + i >= 0 && column + i < m->inner)
                        put(given->y_kind, given->y, row * given->y_stride + column + i, w[0][i]);
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
