/* Feed-forwards of many experts for few rows each, on a CPU: where experts rest in host memory, reading them is what
   takes time, so threads share the bytes of all experts evenly, and not the experts.

   Activations in bfloat16 are multiplied by the tiles or dot products of dots.c where it has them for a matrix; else the
   tiles of few_bits.c multiply, or the same for dense ones.

   A number of the result is a sum by one thread, in an order that depends on the matrix's width and format alone: not on
   the number of threads, nor on other rows or experts. But a pool that may use tiles has another order for experts of
   TILES_FROM rows and more.

   Why this is safe. Threads take shares in one order: gates and ups of each expert, then downs of each. What a share
   needs is from before it: rows of x, which threads arrange before they take a share, and all gates of its expert. A
   thread has a share that it works on, or waits in, and takes one more that lies behind. So the first share that is not
   done is always one that is worked on, and waits for nothing. Counts go up when something has been written (release),
   and are looked at (acquire) before it is read. */

#include "dots.c"

#include "pool.c"

#define TILES_FROM 3 /* Rows of an expert from which tiles are faster than dot products. */
#define SHARE 524288 /* Bytes that a thread takes at a time at most, about. Processors read past the end of each. */

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

/* How an expert's rows are multiplied with one of its matrices, by a pool that has tiles or has none. */
INLINE int way_of(const struct expert *e, const struct matrix *m, int kind, int tiles)
{
    if (!dots(m, kind))
        return BY_FLOATS;
    return tiles && e->rows >= TILES_FROM ? BY_TILES : BY_DOTS;
}

/* Rows in the next block, of so many that are left: of those that both products of an expert take. */
INLINE int rows_of(const struct expert *e, int kind, int tiles, int64_t rows)
{
    int in = way_of(e, e->in, kind, tiles), out = way_of(e, e->out, kind, tiles);
    if (rows <= 2)
        return (int)rows;
    if (rows <= 4 || in == BY_FLOATS || out == BY_FLOATS)
        return 4;
    return rows <= 8 || in == BY_DOTS ? 8 : WIDE;
}

/* A number of row r of a block in float32. */
INLINE void place(void *block, int rows, int r, int64_t column, float value)
{
    ((float *)block)[(column / LANES * rows + r) * LANES + column % LANES] = value;
}

/* ---- tiles of dense matrices in float32 */

/* High rows of a dense matrix times a block of x: sums [high, rows]. */
INLINE void dense_tile(int kind, const int rows, const struct matrix *m, const float *x, const struct strip *s,
                       int first_row, float *sums)
{
    const int high = rows == 4 ? 2 : 4, bytes = 2 * LANES;
    vec acc[16];
    UNROLL for (int i = 0; i < high * rows; i++)
        acc[i] = v_zero();
    for (int64_t at = 0; at < m->inner / LANES; at++) {
        UNROLL for (int w = 0; w < high; w++) {
            vec values = v_get(kind, s->codes[first_row + w] + at * bytes);
            if (at * bytes % 64 == 0)
                fetch(s, first_row / HALF, first_row % HALF * m->row_bytes + high * at * bytes + 64 * w, 64);
            UNROLL for (int r = 0; r < rows; r++)
                acc[w * rows + r] = v_fma(values, v_load(x + (at * rows + r) * LANES), acc[w * rows + r]);
        }
    }
    UNROLL for (int i = 0; i < high * rows; i++)
        sums[i] = v_sum(acc[i]);
}

static void dense_rows(const struct matrix *m, int rows, const float *x, const struct strip *s, float *sums)
{
    int high = rows == 4 ? 2 : 4;
#define DENSE_OF(kind)                                                                                         \
    for (int w = 0; w < STRIP; w += high) {                                                                     \
        if (rows == 1)                                                                                         \
            dense_tile(kind, 1, m, x, s, w, sums + w);                                             \
        else if (rows == 2)                                                                                    \
            dense_tile(kind, 2, m, x, s, w, sums + 2 * w);                                         \
        else                                                                                                   \
            dense_tile(kind, 4, m, x, s, w, sums + 4 * w);                                         \
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
static void take_rows(const struct matrix *m, int way, struct strip *s, int64_t first, int count, int w)
{
    int64_t units = s->units;
    for (int i = 0; i < HALF; i++)
        s->codes[w + i] = m->codes + (first + (i < count ? i : count - 1)) * m->row_bytes;
    if (m->kind == DENSE)
        return;
#if DOTS
    if (way && m->kind == E2M1) {
        take_exponents(m, s, first, count, w);
        return;
    }
#endif
    (void)way;
    float *scale = s->room + w * units, *zero = s->room + (STRIP + w) * units;
    read_terms(m, first, count, units, s->groups, scale, zero);
    for (int i = 0; i < HALF; i++) {
        int its = i < count ? i : count - 1;
        s->scale[w + i] = scale + its * units, s->zero[w + i] = zero + its * units;
    }
}

/* A block of x with the rows of a strip: sums [STRIP, rows]. */
static void multiply_strip(const struct matrix *m, int way, const struct strip *s, int rows, const void *x, float *sums)
{
#if TILES
    if (way == BY_TILES) {
        tile_strips[m->kind](rows, m, x, s, sums);
        return;
    }
#endif
#if DOTS
    if (way == BY_DOTS) {
        dot_tiles[m->kind][rows == 8 ? 3 : place_of(rows)](m, x, s, sums);
        return;
    }
#endif
    (void)way;
    if (m->kind == DENSE) {
        dense_rows(m, rows, x, s, sums);
        return;
    }
    int high = high_of(m->kind, rows), grain = m->grain == 4 ? 3 : m->grain;
    for (int w = 0; w < STRIP; w += high)
        tiles[m->kind][grain][place_of(rows)](m, x, s->codes + w, s->scale + w, s->zero + w, sums + w * rows);
    if (m->kind == E4M3)
        for (int i = 0; i < STRIP * rows; i++)
            sums[i] *= EIGHT_SHORT;
}

/* Have tiles in the shapes of products with so many rows of x. */
INLINE void shape_for(int rows, struct strip *s)
{
#if TILES
    if (s->shaped != rows)
        shape_tiles(rows);
#endif
    s->shaped = rows;
}

/* Let a thread's tiles be given up. */
INLINE void end_shapes(const struct strip *s)
{
#if TILES
    if (s->shaped)
        tile_release();
#endif
    (void)s;
}

/* ---- the call */

/* What has been done of an expert. */
struct progress {
    struct counter arranged, gated; /* Whether its rows of x are, and how many strips of its gates and ups. */
};

struct mixture {
    const struct expert *experts;
    int64_t count, inner, hidden, x_stride, y_stride;
    const void *x;
    void *y;
    const int32_t *tokens; /* Of each row the row of x, or null: as they are. */
    struct activation by;
    int32_t kind, threads, tiles;
    char **wide, **gated; /* Of each expert: its rows of x, and of gate times up, as products take them. */
    float *rooms;         /* What threads work in, `room` numbers each. */
    int64_t room;
    int64_t strips[2], most[2]; /* Of an expert's gates and ups, or its downs; and how many a thread takes at a time. */
    struct progress *progress;
    struct counter begun, arranging, next; /* Threads, experts and strips that have been taken. */
};

/* Strips `first` to `end` of an expert's gates and ups (phase 0) or downs (1). */
struct share {
    int64_t number, first, end;
    int phase;
};

/* Bytes of a row of x, or of gate times up, as products with a matrix take them. */
INLINE int64_t row_bytes(const struct matrix *m, int kind) { return width_in(m) * (dots(m, kind) ? 2 : 4); }

static int64_t padded_rows(const struct expert *e, int kind, int tiles)
{
    int64_t padded = 0;
    for (int64_t first = 0; first < e->rows; first += rows_of(e, kind, tiles, e->rows - first))
        padded += rows_of(e, kind, tiles, e->rows - first);
    return padded;
}

/* An expert's rows of x, as its first product takes them, and zeros where no gate times up comes. */
static void arrange(const struct mixture *given, int64_t number)
{
    const struct expert *e = given->experts + number;
    int kind = given->kind, tiles = given->tiles, way = way_of(e, e->in, kind, tiles);
    char *to = given->wide[number];
    memset(given->gated[number], 0, padded_rows(e, kind, tiles) * row_bytes(e->out, kind));
    for (int64_t first = 0; first < e->rows;) {
        int rows = rows_of(e, kind, tiles, e->rows - first);
        memset(to, 0, rows * row_bytes(e->in, kind));
        for (int r = 0; r < rows && first + r < e->rows; r++) {
            int64_t row = e->first + first + r;
            const uint16_t *from = given->x;
            from += (given->tokens ? given->tokens[row] : row) * given->x_stride;
#if DOTS
            if (way) {
                arrange_row(way, e->in->kind, from, e->in->inner, rows, r, (uint16_t *)to);
                continue;
            }
#endif
            (void)way;
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
    int way = way_of(e, e->out, kind, given->tiles), apart = e->out->kind == DENSE ? 1 : e->out->kind == E4M3 ? 4 : 2;
    int64_t lane = way ? lane_of(e->out->kind, first) : 0; /* Columns of HALF lie as far apart as those of a word. */
    for (int r = 0; r < there; r++)
        for (int i = 0; i < count; i++)
            if (way)
                ((uint16_t *)gated)[place_of_lane(way, lane + i * apart, rows, r)] = made[i * rows + r];
            else
                place(gated, rows, r, first + i, get(kind, made, i * rows + r));
}

INLINE const struct matrix *matrix_of(const struct mixture *given, const struct share *its)
{
    const struct expert *e = &given->experts[its->number];
    return its->phase ? e->out : e->in;
}

/* The first row of half of a strip. */
INLINE int64_t row_of(const struct mixture *given, const struct share *its, int64_t strip, int half)
{
    return its->phase ? strip * STRIP + half * HALF : half * given->inner + strip * HALF;
}

/* Take the next strips; 0 if there are none. They are as many as leave enough for all threads to end together: before the
   last, and before others need them. */
static int take_share(struct mixture *given, struct share *its)
{
    int64_t gates = given->strips[0] * given->count, all = gates + given->strips[1] * given->count;
    int64_t at = __atomic_load_n(&given->next.of, __ATOMIC_RELAXED), size;
    do {
        if (at >= all)
            return 0;
        its->phase = at >= gates;
        int64_t of = given->strips[its->phase], within = its->phase ? at - gates : at, most = given->most[its->phase];
        its->number = within / of, its->first = within % of;
        size = (all - at - (its->phase ? 0 : given->strips[1])) / (2 * given->threads) + 1;
        size = size < most ? size : most;
        size = size < of - its->first ? size : of - its->first;
        its->end = its->first + size;
    } while (!__atomic_compare_exchange_n(&given->next.of, &at, at + size, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return 1;
}

/* Have a strip fetched while the one before it is multiplied. */
INLINE void expect(const struct mixture *given, const struct share *its, int64_t strip, struct strip *s)
{
    const struct matrix *m = matrix_of(given, its);
    for (int half = 0; half < 2; half++) {
        int64_t row = row_of(given, its, strip, half);
        s->next[half] = m->codes + row * m->row_bytes;
        if (m->kind != DENSE)
            expect_terms(m, row);
    }
}

/* Multiply a share's strips with all rows of its expert: all that comes of them. then: the share behind it, or null. */
static void multiply_share(struct mixture *given, const struct share *its, const struct share *then, struct strip *s)
{
    const struct expert *e = &given->experts[its->number];
    const struct matrix *m = matrix_of(given, its);
    int phase = its->phase, way = way_of(e, m, given->kind, given->tiles), tall = phase ? STRIP : HALF;
    int64_t height = phase ? given->hidden : given->inner;
    float sums[STRIP * WIDE];
    s->units = m->kind == DENSE ? 0 : units_of(m);
    s->groups = s->room + 2 * STRIP * s->units;
    s->less_room = (uint16_t *)(s->groups + m->groups);
    if (m->kind <= INT8 && !m->zero)
        fill_middle(m, s->room + STRIP * s->units, STRIP * s->units);
    for (int64_t strip = its->first; strip < its->end; strip++) {
        int64_t first = strip * tall;
        int count = (int)(height - first < tall ? height - first : tall);
        if (strip + 1 < its->end)
            expect(given, its, strip + 1, s);
        else if (then)
            expect(given, then, then->first, s);
        if (phase) {
            int more = count > HALF;
            take_rows(m, way, s, first, more ? HALF : count, 0);
            take_rows(m, way, s, more ? first + HALF : first, more ? count - HALF : 1, HALF);
        } else {
            take_rows(m, way, s, first, count, 0);
            take_rows(m, way, s, given->inner + first, count, HALF);
        }
        const char *x = phase ? given->gated[its->number] : given->wide[its->number];
        char *gated = given->gated[its->number];
        for (int64_t row = 0; row < e->rows;) {
            int rows = rows_of(e, given->kind, given->tiles, e->rows - row);
            if (way == BY_TILES)
                shape_for(rows, s);
            multiply_strip(m, way, s, rows, x, sums);
            int there = (int)(e->rows - row < rows ? e->rows - row : rows);
            put_strip(given, e, phase, first, count, row, rows, there, sums, gated);
            x += rows * row_bytes(m, given->kind);
            gated += rows * row_bytes(e->out, given->kind);
            row += rows;
        }
    }
}

/* Wait until a count is there. Meanwhile a share's first strips, which it takes some time to read, are fetched. */
static void await_count(const struct counter *counter, int64_t count, const struct mixture *given, const struct share *its,
                        struct strip *s)
{
    int64_t strip = its->first, row_bytes = matrix_of(given, its)->row_bytes;
    for (int looks = 0; __atomic_load_n(&counter->of, __ATOMIC_ACQUIRE) < count; looks++) {
        if (strip < its->end) {
            expect(given, its, strip++, s);
            fetch(s, 0, 0, HALF * row_bytes);
            fetch(s, 1, 0, HALF * row_bytes);
        } else
            pause_between(looks);
    }
}

/* A thread's part: experts whose rows are arranged, then strips of gates, ups and downs. */
static void work_on_mixture(void *about)
{
    struct mixture *given = about;
    int64_t me = __atomic_fetch_add(&given->begun.of, 1, __ATOMIC_RELAXED), number;
    struct strip s = {.room = given->rooms + me * given->room};
    while ((number = __atomic_fetch_add(&given->arranging.of, 1, __ATOMIC_RELAXED)) < given->count) {
        arrange(given, number);
        __atomic_store_n(&given->progress[number].arranged.of, 1, __ATOMIC_RELEASE);
    }
    struct share its, then;
    for (int there = take_share(given, &its); there; its = then) {
        struct progress *done = &given->progress[its.number];
        if (its.phase)
            await_count(&done->gated, given->strips[0], given, &its, &s);
        else
            await_count(&done->arranged, 1, given, &its, &s);
        there = take_share(given, &then);
        multiply_share(given, &its, there ? &then : 0, &s);
        if (!its.phase)
            __atomic_add_fetch(&done->gated.of, its.end - its.first, __ATOMIC_RELEASE);
    }
    end_shapes(&s);
}

/* Strips that a thread takes at a time at most, of so many bytes. */
static int64_t most_of(int64_t bytes) { return SHARE / bytes + 1; }

/* y [rows, hidden] = each expert's feed-forward of its rows of x [tokens, hidden], all of one kind of number of 16 bits,
   rows strided by so many numbers. tokens: of each row of y the row of x, or null: the same. Matrices of all experts
   have the same heights and widths. Returns 0, or 1 if there is no memory. */
int experts_feed_forward(const struct expert *experts, int64_t count, int kind, const void *x, int64_t x_stride,
                         const int32_t *tokens, void *y, int64_t y_stride, const struct activation *by, struct pool *pool)
{
    struct mixture about = {
        .experts = experts, .count = count, .inner = experts->out->inner, .hidden = experts->out->height, .x = x,
        .x_stride = x_stride, .y = y, .y_stride = y_stride, .tokens = tokens, .by = *by, .kind = kind,
        .threads = pool->workers + 1, .tiles = pool->tiles};
    int64_t bytes = 0, most = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t in = room_of(experts[i].in), out = room_of(experts[i].out);
        most = in > most ? in : most, most = out > most ? out : most;
        bytes += padded_rows(&experts[i], kind, pool->tiles) * (row_bytes(experts[i].in, kind) + row_bytes(experts[i].out, kind));
    }
    about.room = (most + 64 + 15) / 16 * 16;
    int64_t counts = count * (int64_t)sizeof(struct progress), rooms = about.threads * about.room * (int64_t)sizeof(float);
    int64_t places = (2 * count * (int64_t)sizeof(char *) + 63) / 64 * 64;
    char *room = pool_room(pool, (size_t)(counts + places + rooms + bytes));
    if (!room)
        return 1;
    about.progress = memset(room, 0, counts), room += counts;
    about.wide = (char **)room, about.gated = about.wide + count, room += places;
    about.rooms = (float *)room, room += rooms;
    for (int64_t i = 0; i < count; i++) {
        int64_t padded = padded_rows(&experts[i], kind, pool->tiles);
        about.wide[i] = room, room += padded * row_bytes(experts[i].in, kind);
        about.gated[i] = room, room += padded * row_bytes(experts[i].out, kind);
    }
    about.strips[0] = (about.inner + HALF - 1) / HALF, about.strips[1] = (about.hidden + STRIP - 1) / STRIP;
    about.most[0] = most_of(STRIP * experts->in->row_bytes), about.most[1] = most_of(STRIP * experts->out->row_bytes);
    pool_run(pool, work_on_mixture, &about);
    return 0;
}

/* Whether a matrix is multiplied by dot products of bfloat16, or tiles of them, for activations of this kind. */
int experts_by_dots(const struct matrix *m, int kind) { return dots(m, kind); }

/* Whether a pool multiplies experts of many rows by tiles. */
int experts_by_tiles(const struct pool *pool) { return pool->tiles; }
