/* Dot products of bfloat16 with matrices of few bits and dense ones, where the processor has them (AVX-512 BF16): twice
   as many terms an instruction as in float32.

   Every code is decoded to its exact number in bfloat16. Scales that are powers of two change its exponent; others
   multiply the sum of a group. So weights are exact, and sums are float32; numbers below 2^-126 count as 0. */

#include "tiles.c"

enum { DENSE = E4M3 + 1 }; /* A kind of matrix beside few_bits.c's: numbers of `scale_kind`. */
#define HALF 8
#define STRIP (2 * HALF) /* Rows of a matrix that are multiplied at a time: gates and ups, or any. */
#define WIDE 16          /* Rows of x in a block, at most. */
#define PANEL 512        /* Columns after which other rows of a strip have their turn: so x stays in the L1. */

/* ---- how numbers of x lie

   In vectors of as many columns as one instruction multiplies. A block of rows has a vector of each row, then
   the next vector of each. For tiles, it has two columns of each row, then the next two of each. */

INLINE int dots(const struct matrix *m, int kind)
{
    if (!DOTS || kind != BFLOAT16 || m->groups_of || m->order)
        return 0;
    switch (m->kind) {
    case INT4: return m->grain == 4;
    case E2M1: return m->grain >= 2 && m->scale_kind == EXPONENT && !m->second;
    case E4M3: return m->grain == 2;
    case DENSE: return m->scale_kind == BFLOAT16;
    default: return 0;
    }
}

INLINE int columns_of(int kind) { return kind == INT4 || kind == E2M1 ? 64 : 32; }

INLINE int64_t width_in(const struct matrix *m)
{
    int run = columns_of(m->kind);
    return (m->inner + run - 1) / run * run;
}

/* Where the number of a column lies among those of one row, in vectors of 32. */
INLINE int64_t lane_of(int kind, int64_t column)
{
    int k = (int)(column % columns_of(kind)), i = k % 8, n = k / 8;
    if (kind == DENSE)
        return column;
    if (kind == E4M3)
        return column - k + 4 * i + n;
    return column - k + n % 4 / 2 * 32 + n % 2 * 16 + 2 * i + n / 4;
}

/* How rows are multiplied with a matrix. */
enum way { BY_FLOATS, BY_DOTS, BY_TILES };

/* Where that number of row r lies in a block of so many rows. */
INLINE int64_t place_of_lane(int way, int64_t lane, int rows, int r)
{
    return way == BY_TILES ? (lane / 2 * rows + r) * 2 + lane % 2 : (lane / 32 * rows + r) * 32 + lane % 32;
}

/* What a thread has of STRIP rows of a matrix. */
struct strip {
    const uint8_t *codes[STRIP];
    const uint8_t *next[2]; /* Each half of the strip that comes next: it is fetched while this one is multiplied. */
    const float *scale[STRIP], *zero[STRIP];
    const uint16_t *less[STRIP]; /* Of 32 columns each, what is subtracted from E2M1's numbers. */
    float *room, *groups;
    uint16_t *less_room;
    int64_t units;
    int shaped; /* For how many rows of x tiles are. */
};

/* Have what is next fetched from `at` on, so many bytes, of a half of the strip that comes next. Bytes are asked for in
   the order in which they lie: processors then read ahead of that, and have more under way than they can be asked for.
   level: of caches, 3 for the nearest. */
INLINE void fetch_into(const int level, const struct strip *s, int half, int64_t at, const int64_t bytes)
{
    for (int64_t line = 0; line < bytes; line += 64)
        if (level == 3)
            __builtin_prefetch(s->next[half] + at + line, 0, 3);
        else
            __builtin_prefetch(s->next[half] + at + line, 0, 2);
}

INLINE void fetch(const struct strip *s, int half, int64_t at, const int64_t bytes) { fetch_into(2, s, half, at, bytes); }

/* ---- tiles of dot products */

#if DOTS
typedef struct { __m512i part[2]; } decoded;

/* Tables are looked up by five bits: one of sixteen numbers is there twice, for whatever the fifth bit is. */
INLINE __m512i numbers_of(int kind)
{
    /* E2M1 with exponents 125 too large, both zeros as 0; E4M3's numbers below 2^-6. */
    static const uint16_t four[16] = {0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
                                      0, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40};
    static const uint16_t eight[16] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(kind == E2M1 ? four : eight)));
}

/* The numbers of INT4 less a zero point. */
INLINE __m512i numbers_less(float zero)
{
    static const uint16_t whole[32] = {0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0,
                                       0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040,
                                       0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150,
                                       0x4160, 0x4170}; /* -16 to 15 */
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(whole + 16 - (int)zero)));
}

/* A run in bfloat16. less: of E2M1, by what exponents of each 32 columns are less than in the table. */
INLINE decoded decode_dots(int kind, const uint8_t *codes, int64_t run, __m512i table, const uint16_t *less)
{
    decoded made;
    if (kind == DENSE) {
        made.part[0] = _mm512_loadu_si512(codes + 64 * run);
        return made;
    }
    __m256i some = _mm256_loadu_si256((const __m256i *)(codes + 32 * run));
    if (kind == E4M3) {
        __m512i wide = _mm512_cvtepi8_epi16(some);
        __m512i rest = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x7f0));
        rest = _mm512_add_epi16(rest, _mm512_set1_epi16(0x3c00));
        rest = _mm512_mask_permutexvar_epi16(rest, _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78)), wide, table);
        made.part[0] = _mm512_ternarylogic_epi32(wide, _mm512_set1_epi16((short)0x8000), rest, 0xea);
        return made;
    }
    __m512i words = _mm512_broadcast_i64x4(some), scale = words;
    if (kind == E2M1) {
        int32_t two;
        memcpy(&two, less + 2 * run, sizeof two);
        scale = _mm512_set1_epi32(two);
    }
    UNROLL for (int v = 0; v < 2; v++) {
        const __m512i by = _mm512_inserti64x4(_mm512_set1_epi16((short)(8 * v)), _mm256_set1_epi16((short)(8 * v + 4)), 1);
        made.part[v] = _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, by), table);
        if (kind == E2M1) /* A zero stays one. */
            made.part[v] = _mm512_subs_epu16(made.part[v], scale);
    }
    return made;
}

INLINE __m512 fold_halves(__m512 a, __m512 b) /* Sums of lanes of a and b that are 8 apart, those of a first. */
{
    return v_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

INLINE __m512 fold_quarters(__m512 a, __m512 b) /* The same within each half of both. */
{
    return v_add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* The sum of each of sixteen vectors. */
INLINE __m512 sum_each(const __m512 *of)
{
    __m512 four[4];
    UNROLL for (int i = 0; i < 4; i++)
        four[i] = fold_quarters(fold_halves(of[4 * i], of[4 * i + 1]), fold_halves(of[4 * i + 2], of[4 * i + 3]));
    /* Each has four numbers of four sums. */
    __m512 low = v_add(_mm512_unpacklo_ps(four[0], four[1]), _mm512_unpackhi_ps(four[0], four[1]));
    __m512 high = v_add(_mm512_unpacklo_ps(four[2], four[3]), _mm512_unpackhi_ps(four[2], four[3]));
    __m512 all = v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(low), _mm512_castps_pd(high))),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(low), _mm512_castps_pd(high))));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, all);
}

/* Rows of a strip that one row of x is multiplied with at a time: as many sums as hide each other's latency, but not
   more, since processors read ahead best where rows are read to their end before the next. */
INLINE int pair_of(int kind) { return kind == DENSE ? 1 : kind == E2M1 ? 4 : 2; }

/* Runs after which sums are multiplied by a scale: those of a group, but not more than PANEL columns. */
INLINE int64_t runs_at_once(int kind, const struct matrix *m, int64_t runs)
{
    int64_t most = PANEL / columns_of(kind), group = m->groups > 1 ? m->group / columns_of(kind) : runs;
    return kind == E2M1 || kind == DENSE ? runs : group < most || group % most ? group : most;
}

INLINE void dot_rows(int kind, const struct matrix *m, const uint16_t *x, const struct strip *s, int first_row,
                     __m512 *all)
{
    const int pair = pair_of(kind), parts = columns_of(kind) / 32, bytes = kind == DENSE ? 64 : 32;
    const int after = kind == INT4 || kind == E4M3, line = 64 / bytes;
    int64_t runs = width_in(m) / columns_of(kind), each = runs_at_once(kind, m, runs);
    int64_t group_runs = m->groups > 1 ? m->group / columns_of(kind) : runs;
    const uint8_t *codes[4];
    const uint16_t *less[4];
    __m512i table[4];
    UNROLL for (int w = 0; w < pair; w++) {
        codes[w] = s->codes[first_row + w], less[w] = s->less[first_row + w], all[w] = _mm512_setzero_ps();
        table[w] = kind == INT4 ? numbers_less(8) : numbers_of(kind);
    }
    for (int64_t first = 0; first < runs; first += each) {
        int64_t end = first + each < runs ? first + each : runs, group = after ? first / group_runs : 0;
        __m512 acc[4];
        UNROLL for (int w = 0; w < pair; w++) {
            acc[w] = _mm512_setzero_ps();
            if (kind == INT4 && m->zero)
                table[w] = numbers_less(s->zero[first_row + w][group]);
        }
#define RUN(run)                                                                                               \
    UNROLL for (int w = 0; w < pair; w++) {                                                                    \
        decoded numbers = decode_dots(kind, codes[w], run, table[w], less[w]);                                 \
        UNROLL for (int p = 0; p < parts; p++)                                                                 \
            acc[w] = _mm512_dpbf16_ps(acc[w], (__m512bh)numbers.part[p],                                       \
                                      (__m512bh)_mm512_loadu_si512(x + ((run) * parts + p) * 32));             \
    }
        int64_t run = first;
        for (; run + line <= end; run += line) {
            int64_t at = first_row % HALF * m->row_bytes + pair * bytes * run;
            if (columns_of(kind) == 64) /* The nearest cache has room for two strips. */
                fetch_into(3, s, first_row / HALF, at, 64 * pair);
            else
                fetch(s, first_row / HALF, at, 64 * pair);
            UNROLL for (int i = 0; i < line; i++)
                RUN(run + i)
        }
        for (; run < end; run++)
            RUN(run)
        UNROLL for (int w = 0; w < pair; w++)
            all[w] = after ? v_fma(acc[w], v_all(s->scale[first_row + w][group]), all[w]) : acc[w];
    }
}

/* A strip times a block of x: sums [STRIP, rows]. Each number is added up in the order of dot_rows. */
INLINE void dot_tile(int kind, const int rows, const struct matrix *m, const uint16_t *x, const struct strip *s,
                     float *sums)
{
    const int parts = columns_of(kind) / 32, after = kind == INT4 || kind == E4M3, bytes = kind == DENSE ? 64 : 32;
    const int together = rows == 8 ? 2 : 4; /* Rows of the matrix, with as many sums as there are registers. */
    int64_t runs = width_in(m) / columns_of(kind), each = after ? runs_at_once(kind, m, runs) : PANEL / columns_of(kind);
    int64_t group_runs = m->groups > 1 ? m->group / columns_of(kind) : runs;
    const __m512i base = numbers_of(kind);
    __m512 all[STRIP * 8];
    for (int i = 0; i < STRIP * rows; i++)
        all[i] = _mm512_setzero_ps();
    for (int w = 0; w < STRIP && rows == 1; w += pair_of(kind))
        dot_rows(kind, m, x, s, w, all + w);
    for (int64_t first = 0; first < runs && rows > 1; first += each) {
        int64_t end = first + each < runs ? first + each : runs, group = after ? first / group_runs : 0;
        for (int w0 = 0; w0 < STRIP; w0 += together) {
            __m512 acc[16];
            __m512i table[4];
            const uint8_t *its[4];
            const uint16_t *at = x + first * parts * rows * 32, *less[4];
            UNROLL for (int i = 0; i < together * rows; i++)
                acc[i] = after ? _mm512_setzero_ps() : all[w0 * rows + i];
            UNROLL for (int w = 0; w < together; w++) {
                its[w] = s->codes[w0 + w], less[w] = s->less[w0 + w];
                table[w] = kind == INT4 ? numbers_less(s->zero[w0 + w][group]) : base;
            }
            for (int64_t run = first; run < end; run++, at += parts * rows * 32) {
                decoded numbers[4];
                UNROLL for (int w = 0; w < together; w++)
                    numbers[w] = decode_dots(kind, its[w], run, table[w], less[w]);
                fetch(s, w0 / HALF, (HALF * first + w0 % HALF * (end - first) + together * (run - first)) * bytes,
                      together * bytes);
                UNROLL for (int p = 0; p < parts; p++)
                    UNROLL for (int r = 0; r < rows; r++) {
                        __m512bh some = (__m512bh)_mm512_loadu_si512(at + (p * rows + r) * 32);
                        UNROLL for (int w = 0; w < together; w++)
                            acc[w * rows + r] = _mm512_dpbf16_ps(acc[w * rows + r], (__m512bh)numbers[w].part[p], some);
                    }
            }
            UNROLL for (int w = 0; w < together; w++)
                UNROLL for (int r = 0; r < rows; r++) {
                    __m512 sum = acc[w * rows + r], *to = &all[(w0 + w) * rows + r];
                    *to = after ? v_fma(sum, v_all(s->scale[w0 + w][group]), *to) : sum;
                }
        }
    }
    for (int i = 0; i < STRIP * rows; i += 16)
        _mm512_storeu_ps(sums + i, sum_each(all + i));
}

typedef void dot_call(const struct matrix *, const uint16_t *, const struct strip *, float *);
#define DOT(kind, rows)                                                                                        \
    static void dot_##kind##_##rows(const struct matrix *m, const uint16_t *x, const struct strip *s, float *sums) \
    {                                                                                                          \
        dot_tile(kind, rows, m, x, s, sums);                                                                   \
    }
#define DOT_ROWS(kind) DOT(kind, 1) DOT(kind, 2) DOT(kind, 4) DOT(kind, 8)
#define DOT_NAMES(kind) {dot_##kind##_1, dot_##kind##_2, dot_##kind##_4, dot_##kind##_8}
DOT_ROWS(INT4) DOT_ROWS(E2M1) DOT_ROWS(E4M3) DOT_ROWS(DENSE)
static dot_call *const dot_tiles[5][4] = {[INT4] = DOT_NAMES(INT4), [E2M1] = DOT_NAMES(E2M1), [E4M3] = DOT_NAMES(E4M3),
                                          [DENSE] = DOT_NAMES(DENSE)};

/* Numbers of a vector of row r, at its place in a block. */
INLINE void place_vector(int way, __m512i numbers, int rows, int r, uint16_t *to)
{
    if (way == BY_DOTS) {
        _mm512_storeu_si512(to + 32 * r, numbers);
        return;
    }
    const __m512i pairs = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_i32scatter_epi32(to + 2 * r, _mm512_mullo_epi32(pairs, _mm512_set1_epi32(rows)), numbers, 4);
}

/* Row r of a block of so many: of each run 32 numbers and another 32, in the order of its first or second vector. */
static void arrange_row(int way, int kind, const uint16_t *from, int64_t inner, int rows, int r, uint16_t *to)
{
    uint16_t places[2][32], some[64];
    int run = columns_of(kind);
    for (int k = 0; k < run; k++)
        places[lane_of(kind, k) / 32][lane_of(kind, k) % 32] = (uint16_t)k;
    const __m512i first = _mm512_loadu_si512(places[0]), second = run == 64 ? _mm512_loadu_si512(places[1]) : first;
    for (int64_t at = 0; at < inner; at += run, to += run * rows) {
        const uint16_t *its = from + at;
        if (at + run > inner) {
            memset(some, 0, sizeof some);
            memcpy(some, its, (inner - at) * sizeof *its);
            its = some;
        }
        __m512i low = _mm512_loadu_si512(its), high = run == 64 ? _mm512_loadu_si512(its + 32) : low;
        place_vector(way, _mm512_permutex2var_epi16(low, first, high), rows, r, to);
        if (run == 64)
            place_vector(way, _mm512_permutex2var_epi16(low, second, high), rows, r, to + 32 * rows);
    }
}

#if TILES
/* ---- tiles */

#define SOME 4 /* Vectors of each row of a strip that are decoded at a time: twice as many are a quarter of the L1. */

/* `count` runs of a strip from `first` on, all of one group, as tiles of [STRIP, 32]. */
INLINE void decode_tiles(int kind, const struct strip *s, int64_t first, const int count, int64_t group, uint16_t *to)
{
    const int parts = columns_of(kind) / 32, bytes = kind == DENSE ? 64 : 32;
    const __m512i base = numbers_of(kind);
    fetch(s, 0, HALF * first * bytes, HALF * count * bytes);
    fetch(s, 1, HALF * first * bytes, HALF * count * bytes);
    UNROLL for (int w = 0; w < STRIP; w++) {
        __m512i table = kind == INT4 ? numbers_less(s->zero[w][group]) : base;
        UNROLL for (int run = 0; run < count; run++) {
            decoded made = decode_dots(kind, s->codes[w], first + run, table, s->less[w]);
            UNROLL for (int p = 0; p < parts; p++)
                _mm512_store_si512(to + ((run * parts + p) * STRIP + w) * 32, made.part[p]);
        }
    }
}

/* The same of any few runs. */
INLINE void decode_some(int kind, const struct strip *s, int64_t first, int64_t end, int64_t group, uint16_t *to)
{
    const int most = SOME * 32 / columns_of(kind);
    if (end - first == most)
        decode_tiles(kind, s, first, most, group, to);
    else
        for (; first < end; first++, to += STRIP * columns_of(kind))
            decode_tiles(kind, s, first, 1, group, to);
}

/* The sums of both tiles [STRIP, rows], times the scales of a group if there are such, are added to `all`. */
INLINE void end_group(const struct strip *s, int scaled, int64_t group, int rows, float *all)
{
    _Alignas(64) float found[2][STRIP * WIDE], scales[STRIP];
    tile_store(SUMS, found[0], 4 * rows);
    tile_store(SUMS + 1, found[1], 4 * rows);
    tile_zero(SUMS);
    tile_zero(SUMS + 1);
    for (int w = 0; w < STRIP && scaled; w++)
        scales[w] = s->scale[w][group];
    __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    row = _mm512_srlv_epi32(row, _mm512_set1_epi32(__builtin_ctz(rows)));
    __m512 its = scaled ? v_load(scales) : v_all(1);
    for (int i = 0; i < rows; i++) {
        __m512 sum = v_add(v_load(found[0] + 16 * i), v_load(found[1] + 16 * i)), *to = (__m512 *)(all + 16 * i);
        *to = v_fma(sum, _mm512_permutexvar_ps(row, its), *to);
        row = _mm512_add_epi32(row, _mm512_set1_epi32(16 / rows));
    }
}

/* A strip times a block of x, of 1, 2, 4, 8 or 16 rows: sums [STRIP, rows]. What is multiplied was decoded one step before:
   tiles are loaded once it has left the processor's queue of stores. */
INLINE void tile_strip(int kind, int rows, const struct matrix *m, const uint16_t *x, const struct strip *s, float *sums)
{
    const int parts = columns_of(kind) / 32, scaled = kind == INT4 || kind == E4M3;
    int64_t runs = width_in(m) / columns_of(kind), group = scaled && m->groups > 1 ? m->group / columns_of(kind) : runs;
    int64_t each = group < runs && group % (SOME / parts) ? 1 : SOME / parts;
    _Alignas(64) uint16_t made[2][SOME * STRIP * 32];
    _Alignas(64) float all[STRIP * WIDE];
    memset(all, 0, STRIP * rows * sizeof *all);
    tile_zero(SUMS);
    tile_zero(SUMS + 1);
    decode_some(kind, s, 0, each < runs ? each : runs, 0, made[0]);
    for (int64_t first = 0, step = 0; first < runs; first += each, step++) {
        int64_t end = first + each < runs ? first + each : runs;
        decode_some(kind, s, end, end + each < runs ? end + each : runs, end / group, made[(step + 1) % 2]);
        const uint16_t *of = made[step % 2];
        for (int64_t vector = first * parts; vector < end * parts; vector++, of += STRIP * 32, x += rows * 32) {
            if (vector % 2 == 0) {
                tile_load(OF, of, 64);
                tile_load(BY, x, 4 * rows);
                tile_multiply(SUMS, OF, BY);
            } else {
                tile_load(OF + 1, of, 64);
                tile_load(BY + 1, x, 4 * rows);
                tile_multiply(SUMS + 1, OF + 1, BY + 1);
            }
        }
        if (end == runs || end % group == 0)
            end_group(s, scaled, first / group, rows, all);
    }
    memcpy(sums, all, STRIP * rows * sizeof *all);
}

#define TILE_STRIP(kind)                                                                                       \
    static void tile_##kind(int rows, const struct matrix *m, const uint16_t *x, const struct strip *s,        \
                            float *sums)                                                                       \
    {                                                                                                          \
        tile_strip(kind, rows, m, x, s, sums);                                                                 \
    }
typedef void tile_strip_call(int, const struct matrix *, const uint16_t *, const struct strip *, float *);
TILE_STRIP(INT4) TILE_STRIP(E2M1) TILE_STRIP(E4M3) TILE_STRIP(DENSE)
static tile_strip_call *const tile_strips[5] = {[INT4] = tile_INT4, [E2M1] = tile_E2M1, [E4M3] = tile_E4M3,
                                                [DENSE] = tile_DENSE};

/* Let tiles have the shapes of products with so many rows of x. */
static void shape_tiles(int rows)
{
    struct shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 6; tile++)
        shapes.rows[tile] = 16, shapes.bytes[tile] = (uint16_t)(tile / 2 * 2 == OF ? 64 : 4 * rows);
    tile_shapes(&shapes);
}
#endif
#endif
