/* Feed-forwards of many experts for few rows each, on a CPU: where experts rest in host memory, reading them is what
   takes time, so threads share the bytes of all experts evenly, and not the experts.

   Activations in bfloat16 are multiplied by the dot products of dots.c where it has them for a matrix; else the tiles of
   few_bits.c multiply, or the same for dense ones.

   A number of the result is a sum by one thread, in an order that depends on the matrix's width alone: not on the
   number of threads, nor on other rows or experts. */

#include "dots.c"

#include "pool.c"

#define SHARE 131072 /* Bytes that a thread takes at a time, at most. */

/* (up + shift) * gate * sigmoid(alpha * gate), of clipped gate and up. */
struct activation {
    float alpha, shift, limit;
};

/* An expert, and its rows of x: experts.py has the same structure. */
struct expert {
    const struct matrix *in, *out; /* [2 * inner, hidden], gates first; [hidden, inner] */
    const void *in_bias, *out_bias; /* Numbers of x's kind, or null. */
    int64_t rows, first;            /* Its rows are those from `first` on. */
};

/* Rows in the next block, of so many that are left: of those that both products of an expert take. */
INLINE int rows_of(const struct expert *e, int kind, int64_t rows)
{
    if (rows <= 2)
        return (int)rows;
    return rows <= 4 || !dots(e->in, kind) || !dots(e->out, kind) ? 4 : WIDE;
}

/* A number of row r of a block in float32. */
INLINE void place(void *block, int rows, int r, int64_t column, float value)
{
    ((float *)block)[(column / LANES * rows + r) * LANES + column % LANES] = value;
}

/* ---- tiles of dense matrices in float32 */

/* High rows of a dense matrix times a block of x: sums [high, rows]. */
INLINE void dense_tile(int kind, const int rows, const struct matrix *m, const float *x, const uint8_t *const *codes,
                       int64_t ahead, float *sums)
{
    const int high = rows == 4 ? 2 : 4, bytes = 2 * LANES;
    vec acc[16];
    UNROLL for (int i = 0; i < high * rows; i++)
        acc[i] = v_zero();
    for (int64_t at = 0; at < m->inner / LANES; at++) {
        UNROLL for (int w = 0; w < high; w++) {
            vec values = v_get(kind, codes[w] + at * bytes);
            if (at * bytes % 64 == 0)
                __builtin_prefetch(codes[w] + at * bytes + ahead, 0, 2);
            UNROLL for (int r = 0; r < rows; r++)
                acc[w * rows + r] = v_fma(values, v_load(x + (at * rows + r) * LANES), acc[w * rows + r]);
        }
    }
    UNROLL for (int i = 0; i < high * rows; i++)
        sums[i] = v_sum(acc[i]);
}

static void dense_rows(const struct matrix *m, int rows, const float *x, const uint8_t *const *codes, int64_t ahead,
                       float *sums)
{
    int high = rows == 4 ? 2 : 4;
#define DENSE_OF(kind)                                                                                         \
    for (int w = 0; w < STRIP; w += high) {                                                                     \
        if (rows == 1)                                                                                         \
            dense_tile(kind, 1, m, x, codes + w, ahead, sums + w);                                             \
        else if (rows == 2)                                                                                    \
            dense_tile(kind, 2, m, x, codes + w, ahead, sums + 2 * w);                                         \
        else                                                                                                   \
            dense_tile(kind, 4, m, x, codes + w, ahead, sums + 4 * w);                                         \
    }
    if (m->scale_kind == BFLOAT16) {
        DENSE_OF(BFLOAT16)
    } else {
        DENSE_OF(FLOAT16)
    }
}

/* ---- rows of a matrix times all rows of an expert */

static int64_t room_of(const struct matrix *m)
{
    return m->kind == DENSE ? 0 : 2 * STRIP * units_of(m) + m->groups + STRIP / 2 * (width_in(m) / 32 + 31);
}

#if DOTS
/* Exponents of scales that are powers of two, as numbers_of has need of them: 2^-126 stands in for 2^-127. */
static void take_exponents(const struct matrix *m, struct strip *s, int64_t first, int count, int w)
{
    int64_t columns = width_in(m) / 32, each = m->groups == 1 ? columns : m->group / 32, room = (columns + 31) / 32 * 32;
    uint8_t some[32];
    for (int i = 0; i < HALF; i++)
        s->less[w + i] = s->less_room + (w + (i < count ? i : count - 1)) * room;
    for (int i = 0; i < count; i++) {
        const uint8_t *from = (const uint8_t *)m->scale + (first + i) * m->groups;
        for (int64_t at = 0; at < columns; at += 32) {
            __m256i bytes;
            if (each == 1) {
                int64_t left = m->groups - at;
                bytes = _mm256_maskz_loadu_epi8(left >= 32 ? ~0u : (1u << (left > 0 ? left : 0)) - 1, from + at);
            } else {
                for (int k = 0; k < 32; k++)
                    some[k] = (at + k) / each < m->groups ? from[(at + k) / each] : 0;
                bytes = _mm256_loadu_si256((const __m256i *)some);
            }
            __m512i wide = _mm512_cvtepu8_epi16(_mm256_max_epu8(bytes, _mm256_set1_epi8(1)));
            wide = _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(252), wide), 7);
            _mm512_storeu_si512(s->less_room + (w + i) * room + at, wide);
        }
    }
}
#endif

/* Have the scales of rows brought near that are next: they lie apart from codes, and are read before these. */
INLINE void expect_terms(const struct matrix *m, int64_t first)
{
    int64_t size = m->groups * (m->scale_kind == FLOAT32 ? 4 : m->scale_kind <= FLOAT16 ? 2 : 1);
    const char *scale = (const char *)m->scale + first / m->down * size;
    for (int64_t at = 0; at < HALF * size; at += 64)
        __builtin_prefetch(scale + at, 0, 3);
    for (int64_t at = 0; m->zero && at < HALF * m->groups; at += 64)
        __builtin_prefetch(m->zero + first * m->groups + at, 0, 3);
}

/* Rows `first` and on, `count` of them, in places `w` and on of HALF; the last stands in for what is beyond. */
static void take_rows(const struct matrix *m, int dot, struct strip *s, int64_t first, int count, int w)
{
    int64_t units = s->units;
    for (int i = 0; i < HALF; i++)
        s->codes[w + i] = m->codes + (first + (i < count ? i : count - 1)) * m->row_bytes;
    if (m->kind == DENSE)
        return;
#if DOTS
    if (dot && m->kind == E2M1) {
        take_exponents(m, s, first, count, w);
        return;
    }
#endif
    (void)dot;
    float *scale = s->room + w * units, *zero = s->room + (STRIP + w) * units;
    read_terms(m, first, count, units, s->groups, scale, zero);
    for (int i = 0; i < HALF; i++) {
        int its = i < count ? i : count - 1;
        s->scale[w + i] = scale + its * units, s->zero[w + i] = zero + its * units;
    }
}

/* A block of x with the rows of a strip: sums [STRIP, rows]. */
static void multiply_strip(const struct matrix *m, int dot, const struct strip *s, int rows, const void *x,
                           int64_t ahead, float *sums)
{
#if DOTS
    if (dot) {
        dot_tiles[m->kind][rows == 8 ? 3 : place_of(rows)](m, x, s, ahead, sums);
        return;
    }
#endif
    (void)dot;
    if (m->kind == DENSE) {
        dense_rows(m, rows, x, s->codes, ahead, sums);
        return;
    }
    int high = high_of(m->kind, rows), grain = m->grain == 4 ? 3 : m->grain;
    for (int w = 0; w < STRIP; w += high)
        tiles[m->kind][grain][place_of(rows)](m, x, s->codes + w, s->scale + w, s->zero + w, sums + w * rows);
    if (m->kind == E4M3)
        for (int i = 0; i < STRIP * rows; i++)
            sums[i] *= EIGHT_SHORT;
}

/* ---- the call */

struct mixture {
    const struct expert *experts;
    int64_t count, inner, hidden, x_stride, y_stride;
    const void *x;
    void *y;
    const int32_t *tokens; /* Of each row the row of x, or null: as they are. */
    struct activation by;
    int32_t kind, failed;
    char **wide, **gated; /* Of each expert: its rows of x, and of gate times up, as products take them. */
    int64_t each[2], shares[2]; /* Rows of matrices that are taken at a time; of how many times an expert is done. */
    int64_t next[3], done[3];
};

/* Bytes of a row of x, or of gate times up, as products with a matrix take them. */
INLINE int64_t row_bytes(const struct matrix *m, int kind) { return width_in(m) * (dots(m, kind) ? 2 : 4); }

static int64_t padded_rows(const struct expert *e, int kind)
{
    int64_t padded = 0;
    for (int64_t first = 0; first < e->rows; first += rows_of(e, kind, e->rows - first))
        padded += rows_of(e, kind, e->rows - first);
    return padded;
}

/* An expert's rows of x, as its first product takes them, and zeros where no gate times up comes. */
static void arrange(const struct mixture *given, int64_t number)
{
    const struct expert *e = given->experts + number;
    int kind = given->kind, dot = dots(e->in, kind);
    char *to = given->wide[number];
    memset(given->gated[number], 0, padded_rows(e, kind) * row_bytes(e->out, kind));
    for (int64_t first = 0; first < e->rows;) {
        int rows = rows_of(e, kind, e->rows - first);
        memset(to, 0, rows * row_bytes(e->in, kind));
        for (int r = 0; r < rows && first + r < e->rows; r++) {
            int64_t row = e->first + first + r;
            const uint16_t *from = (const uint16_t *)given->x + (given->tokens ? given->tokens[row] : row) * given->x_stride;
#if DOTS
            if (dot) {
                arrange_row(e->in->kind, from, e->in->inner, rows, (uint16_t *)to + r * 32);
                continue;
            }
#endif
            (void)dot;
            int64_t at = 0;
            for (; at + LANES <= e->in->inner; at += LANES)
                v_store((float *)to + (at / LANES * rows + r) * LANES, v_get(kind, from + at));
            for (; at < e->in->inner; at++)
                place(to, rows, r, at, get(kind, from, at));
        }
        to += rows * row_bytes(e->in, kind);
        first += rows;
    }
}

/* Sums of rows of a matrix from `row` on, [count, rows], in full: with the second scale, and the bias. */
static void complete(const struct matrix *m, int kind, const void *bias, int64_t row, int count, int rows, float *sums)
{
    if (!bias && !m->second)
        return;
    for (int w = 0; w < count; w++)
        for (int r = 0; r < rows; r++) {
            float *sum = sums + w * rows + r;
            if (m->second)
                *sum = m->divided ? *sum / m->second[row + w] : *sum * m->second[row + w];
            if (bias)
                *sum += get(kind, bias, row + w);
        }
}

/* gate [count]: replaced by the activation of gate and up. */
static void activate(const struct activation *by, int count, float *gate, const float *up)
{
    float alpha = -by->alpha, shift = by->shift, limit = by->limit;
    for (int i = 0; i < count; i++) {
        float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i];
        u = u < -limit ? -limit : u;
        gate[i] = (u + shift) * (g / (1 + exp_of(alpha * g)));
    }
}

/* Numbers of 16 bits of sums, a multiple of 16 of them. */
static void round_all(int kind, int count, const float *sums, uint16_t *to)
{
#if DOTS
    if (kind == BFLOAT16) {
        for (int i = 0; i < count; i += 16)
            _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(v_load(sums + i)));
        return;
    }
#endif
    for (int i = 0; i < count; i++)
        put(kind, to, i, sums[i]);
}

/* What comes of a strip's sums [STRIP, rows], of which `there` rows are an expert's from `row` on: gate times up of inner
   columns `first` and on, a multiple of HALF, or numbers of the result. */
static void put_strip(const struct mixture *given, const struct expert *e, int phase, int64_t first, int count, int64_t row,
                      int rows, int there, float *sums, char *gated)
{
    int kind = given->kind;
    uint16_t made[STRIP * WIDE];
    if (phase) {
        complete(e->out, kind, e->out_bias, first, count, rows, sums);
        round_all(kind, STRIP * rows, sums, made);
        for (int r = 0; r < there; r++) {
            uint16_t *to = (uint16_t *)given->y + (e->first + row + r) * given->y_stride + first;
            for (int i = 0; i < count; i++)
                to[i] = made[i * rows + r];
        }
        return;
    }
    complete(e->in, kind, e->in_bias, first, count, rows, sums);
    complete(e->in, kind, e->in_bias, given->inner + first, count, rows, sums + HALF * rows);
    activate(&given->by, HALF * rows, sums, sums + HALF * rows);
    round_all(kind, STRIP * rows, sums, made);
    int dot = dots(e->out, kind), apart = e->out->kind == DENSE ? 1 : e->out->kind == E4M3 ? 4 : 2;
    int64_t lane = dot ? lane_of(e->out->kind, first) : 0; /* Columns of HALF lie as far apart as those of a word. */
    for (int r = 0; r < there; r++)
        for (int i = 0; i < count; i++)
            if (dot)
                ((uint16_t *)gated)[(lane / 32 * rows + r) * 32 + lane % 32 + i * apart] = made[i * rows + r];
            else
                place(gated, rows, r, first + i, get(kind, made, i * rows + r));
}

/* Some rows of an expert's matrix: all that comes of them. */
static void take_share(const struct mixture *given, int64_t number, int phase, int64_t from, int64_t end, struct strip *s)
{
    const struct expert *e = given->experts + number;
    const struct matrix *m = phase ? e->out : e->in;
    int dot = dots(m, given->kind), tall = phase ? STRIP : HALF;
    int64_t ahead = tall * m->row_bytes;
    float sums[STRIP * WIDE];
    s->units = m->kind == DENSE ? 0 : units_of(m);
    s->groups = s->room + 2 * STRIP * s->units;
    s->less_room = (uint16_t *)(s->groups + m->groups);
    if (m->kind <= INT8 && !m->zero)
        fill_middle(m, s->room + STRIP * s->units, STRIP * s->units);
    for (int64_t first = from; first < end; first += tall) {
        int count = (int)(end - first < tall ? end - first : tall);
        if (m->kind != DENSE) {
            expect_terms(m, first + tall);
            expect_terms(m, phase ? first + tall + HALF : given->inner + first + tall);
        }
        if (phase) {
            take_rows(m, dot, s, first, count < HALF ? count : HALF, 0);
            int more = count > HALF;
            take_rows(m, dot, s, more ? first + HALF : first, more ? count - HALF : 1, HALF);
        } else {
            take_rows(m, dot, s, first, count, 0);
            take_rows(m, dot, s, given->inner + first, count, HALF);
        }
        const char *x = phase ? given->gated[number] : given->wide[number];
        char *gated = given->gated[number];
        for (int64_t row = 0; row < e->rows;) {
            int rows = rows_of(e, given->kind, e->rows - row);
            multiply_strip(m, dot, s, rows, x, ahead, sums);
            int there = (int)(e->rows - row < rows ? e->rows - row : rows);
            put_strip(given, e, phase, first, count, row, rows, there, sums, gated);
            x += rows * row_bytes(m, given->kind);
            gated += rows * row_bytes(e->out, given->kind);
            row += rows;
        }
    }
}

/* Wait until all of a phase is done: what the next one reads has been written. */
static void await_phase(struct mixture *given, int phase, int64_t all)
{
    for (int looks = 0; __atomic_load_n(&given->done[phase], __ATOMIC_ACQUIRE) < all; looks++)
        pause_between(looks);
}

/* A thread's part: experts whose rows are arranged, shares of gates and ups, then shares of downs. */
static void work_on_mixture(void *about)
{
    struct mixture *given = about;
    int64_t most = 0;
    for (int64_t i = 0; i < given->count; i++) {
        int64_t in = room_of(given->experts[i].in), out = room_of(given->experts[i].out);
        in = in > out ? in : out;
        most = most > in ? most : in;
    }
    struct strip s = {.room = room_for(most + 64)};
    if (!s.room)
        __atomic_store_n(&given->failed, 1, __ATOMIC_RELAXED);
    for (int phase = 0; phase < 3; phase++) {
        int64_t shares = phase ? given->shares[phase - 1] : 1, all = given->count * shares;
        for (;;) {
            int64_t at = __atomic_fetch_add(&given->next[phase], 1, __ATOMIC_RELAXED);
            if (at >= all)
                break;
            int64_t number = at / shares, height = phase == 2 ? given->hidden : given->inner;
            int64_t each = phase ? given->each[phase - 1] : 0, from = at % shares * each;
            if (phase == 0)
                arrange(given, number);
            else if (s.room)
                take_share(given, number, phase - 1, from, from + each < height ? from + each : height, &s);
            __atomic_add_fetch(&given->done[phase], 1, __ATOMIC_RELEASE);
        }
        if (phase < 2)
            await_phase(given, phase, all);
    }
    free(s.room);
}

/* Rows of a matrix that a thread takes at a time: whole strips, few enough for threads to end together. */
static int64_t share_of(int64_t height, int64_t row, int64_t count, int threads)
{
    int64_t bytes = height * row * count / (threads * (int64_t)16);
    bytes = bytes < SHARE ? bytes : SHARE;
    return (bytes / row / STRIP + 1) * STRIP;
}

/* y [rows, hidden] = each expert's feed-forward of its rows of x [tokens, hidden], all of one kind of number of 16 bits,
   rows strided by so many numbers. tokens: of each row of y the row of x, or null: the same. Matrices of all experts have the same
   heights and widths. Returns 0, or 1 if there is no memory. */
int experts_feed_forward(const struct expert *experts, int64_t count, int kind, const void *x, int64_t x_stride,
                         const int32_t *tokens, void *y, int64_t y_stride, const struct activation *by, struct pool *pool)
{
    struct mixture about = {experts, count, experts->out->inner, experts->out->height, x_stride, y_stride, x, y, tokens, *by,
                            kind, 0, 0, 0, {0}, {0}, {0}, {0}};
    int64_t bytes = 0, at = 0;
    for (int64_t i = 0; i < count; i++)
        bytes += padded_rows(&experts[i], kind) * (row_bytes(experts[i].in, kind) + row_bytes(experts[i].out, kind));
    char *room = (char *)room_for(bytes / (int64_t)sizeof(float));
    char **places = malloc((size_t)(2 * count) * sizeof *places);
    if (!room || !places) {
        free(room), free(places);
        return 1;
    }
    about.wide = places, about.gated = places + count;
    for (int64_t i = 0; i < count; i++) {
        int64_t padded = padded_rows(&experts[i], kind);
        about.wide[i] = room + at, at += padded * row_bytes(experts[i].in, kind);
        about.gated[i] = room + at, at += padded * row_bytes(experts[i].out, kind);
    }
    int threads = pool->workers + 1;
    about.each[0] = share_of(about.inner, 2 * experts->in->row_bytes, count, threads);
    about.each[1] = share_of(about.hidden, experts->out->row_bytes, count, threads);
    about.shares[0] = (about.inner + about.each[0] - 1) / about.each[0];
    about.shares[1] = (about.hidden + about.each[1] - 1) / about.each[1];
    pool_run(pool, work_on_mixture, &about);
    free(room), free(places);
    return about.failed;
}

/* Whether an expert's matrix is multiplied by dot products, for activations of this kind. */
int experts_by_dots(const struct matrix *m, int kind) { return dots(m, kind); }
