/* Attention of single queries to keys and values where they rest, in pages, on a CPU.

   Scores, softmax and sums are float32; only the result is rounded. What a query gets is computed by one thread, in
   the order of keys: it depends neither on the number of threads nor on other queries. */

#include "pointwise.c"

struct rows {
    const void *q;          /* [count, heads, dim], strided by q_stride and dim */
    struct pages pages;
    const int32_t *table;   /* [count, table_stride] */
    const int32_t *lengths; /* [count] */
    void *out;              /* [count, heads, dim] */
    int64_t count, q_stride, table_stride, heads, kv_heads, dim, window, next;
    float scale;
    int kind, failed;
};

#define QUERIES 4 /* Queries that read a key head at a time. */
#define WIDE (64 / LANES) /* Vectors of a head's dimensions that are summed at a time. */

/* Scores of `some` queries [some, dim] with all keys from `first` on: [some, room]. */
INLINE void score(int kind, const int some, const struct rows *r, const int32_t *blocks, int64_t head,
                  int64_t first, int64_t keys, const float *q, float *scores, int64_t room)
{
    int64_t bytes = kind == FLOAT32 ? 4 : 2, dim = r->dim, size = r->pages.block_size;
    for (int64_t at = 0; at < keys; at++) {
        int64_t key = first + at;
        const char *k = (const char *)r->pages.k + place_in(&r->pages, blocks[key / size], key % size, head) * bytes;
        vec sums[QUERIES];
        UNROLL for (int i = 0; i < some; i++)
            sums[i] = v_zero();
        for (int64_t d = 0; d < dim; d += LANES) {
            vec of_k = v_get(kind, k + d * bytes);
            UNROLL for (int i = 0; i < some; i++)
                sums[i] = v_fma(of_k, v_load(q + i * dim + d), sums[i]);
        }
        UNROLL for (int i = 0; i < some; i++)
            scores[i * room + at] = v_sum(sums[i]) * r->scale;
    }
}

/* Scores [keys] become weights; returns what they are to be divided by. */
INLINE float soften(float *scores, int64_t keys)
{
    float most = scores[0], lanes[LANES], sum = 0;
    int64_t at = 0;
    vec top = v_all(most), sums = v_zero();
    for (; at + LANES <= keys; at += LANES)
        top = v_max(top, v_load(scores + at));
    v_store(lanes, top);
    for (int i = 0; i < LANES; i++)
        most = lanes[i] > most ? lanes[i] : most;
    for (; at < keys; at++)
        most = scores[at] > most ? scores[at] : most;
    for (at = 0; at < keys; at++)
        scores[at] = exp_of(scores[at] - most);
    for (at = 0; at + LANES <= keys; at += LANES)
        sums = v_fma(v_load(scores + at), v_all(1), sums);
    sum = v_sum(sums);
    for (; at < keys; at++)
        sum += scores[at];
    return sum;
}

/* Values weighed by `some` rows of weights: out [some, dim]. */
INLINE void weigh(int kind, const int some, const struct rows *r, const int32_t *blocks, int64_t head,
                  int64_t first, int64_t keys, const float *weights, int64_t room, float *out)
{
    int64_t bytes = kind == FLOAT32 ? 4 : 2, dim = r->dim, size = r->pages.block_size;
    for (int64_t d = 0; d < dim; d += 64) {
        vec sums[QUERIES * WIDE];
        UNROLL for (int i = 0; i < some * WIDE; i++)
            sums[i] = v_zero();
        for (int64_t at = 0; at < keys; at++) {
            int64_t key = first + at;
            const char *v = (const char *)r->pages.v
                            + (place_in(&r->pages, blocks[key / size], key % size, head) + d) * bytes;
            vec of_v[WIDE];
            UNROLL for (int part = 0; part < WIDE; part++)
                of_v[part] = v_get(kind, v + part * LANES * bytes);
            UNROLL for (int i = 0; i < some; i++)
                UNROLL for (int part = 0; part < WIDE; part++)
                    sums[i * WIDE + part] = v_fma(v_all(weights[i * room + at]), of_v[part], sums[i * WIDE + part]);
        }
        UNROLL for (int i = 0; i < some; i++)
            UNROLL for (int part = 0; part < WIDE; part++)
                v_store(out + i * dim + d + part * LANES, sums[i * WIDE + part]);
    }
}

/* `some` queries of a row that read one key head, from its query head `from` on. */
INLINE void attend_as(int kind, const int some, const struct rows *r, int64_t row, int64_t head, int64_t from,
                      float *room)
{
    int64_t length = r->lengths[row], first = r->window && length > r->window ? length - r->window : 0;
    int64_t keys = length - first, dim = r->dim;
    const int32_t *blocks = r->table + row * r->table_stride;
    float *q = room, *out = q + QUERIES * dim, *scores = out + QUERIES * dim;
    for (int i = 0; i < some; i++)
        for (int64_t d = 0; d < dim; d++)
            q[i * dim + d] = get(kind, r->q, row * r->q_stride + (from + i) * dim + d);
    score(kind, some, r, blocks, head, first, keys, q, scores, keys);
    float sums[QUERIES];
    for (int i = 0; i < some; i++)
        sums[i] = keys ? soften(scores + i * keys, keys) : 1;
    weigh(kind, some, r, blocks, head, first, keys, scores, keys, out);
    for (int i = 0; i < some; i++)
        for (int64_t d = 0; d < dim; d++)
            put(kind, r->out, (row * r->heads + from + i) * dim + d, out[i * dim + d] / sums[i]);
}

/* A thread's part: key heads of rows, until there are none. */
static void attend_heads(void *about)
{
    struct rows *r = about;
    int64_t group = r->heads / r->kv_heads;
    for (;;) {
        int64_t task = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED);
        if (task >= r->count * r->kv_heads)
            return;
        int64_t row = task / r->kv_heads, head = task % r->kv_heads;
        float *room = malloc((size_t)(QUERIES * (2 * r->dim + r->lengths[row])) * sizeof *room);
        if (!room) {
            __atomic_store_n(&r->failed, 1, __ATOMIC_RELAXED);
            return;
        }
        for (int64_t from = 0; from < group; from += QUERIES)
            switch (group - from) {
            case 1: BY_KIND(r->kind, attend_as, 1, r, row, head, head * group + from, room); break;
            case 2: BY_KIND(r->kind, attend_as, 2, r, row, head, head * group + from, room); break;
            case 3: BY_KIND(r->kind, attend_as, 3, r, row, head, head * group + from, room); break;
            default: BY_KIND(r->kind, attend_as, 4, r, row, head, head * group + from, room);
            }
        free(room);
    }
}

/* out [count, heads, dim]: each row's queries attend to as many keys as its length says, or the last `window` of
   them. q and out are of the kind of the pages, dim a multiple of 64. Returns 0, or 1 if there is no memory. */
int attention_of_rows(int kind, const void *q, int64_t q_stride, void *k, void *v, int64_t block_size,
                      int64_t of_block, int64_t of_token, int64_t of_head, const int32_t *table,
                      int64_t table_stride, const int32_t *lengths, int64_t count, int64_t heads, int64_t kv_heads,
                      int64_t dim, float scale, int64_t window, void *out, int threads, parallel_call *parallel)
{
    struct rows rows = {q, {k, v, block_size, of_block, of_token, of_head}, table, lengths, out, count, q_stride,
                        table_stride, heads, kv_heads, dim, window, 0, scale, kind, 0};
    int64_t work = 0;
    for (int64_t row = 0; row < count; row++)
        work += heads * dim * (window && lengths[row] > window ? window : lengths[row]);
    run_on(parallel, work < LEAST ? 1 : threads, attend_heads, &rows);
    return rows.failed;
}
