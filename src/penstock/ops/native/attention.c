/* Attention of rows over paged KV, on a CPU: each row is one query token, and reads its keys where they lie.

   A row's query heads that share a head of keys are computed together, so that keys and values are read once.
   Keys are taken a tile at a time, in the order of positions, and folded into a state by online softmax
   (Milakov and Gimelshein 2018, arXiv 1805.02867). Sums are float32, by one thread for each row and head of
   keys: they depend neither on the number of threads nor on the other rows.

   What lies behind a row's end is never read. Single numbers, vectors and threads are those of the kernels of few
   bits. */

#include "pointwise.c"

#define WIDEST 256 /* Numbers of a head, at most. */
#define SHARING 16 /* Query heads that share a head of keys, at most. */
#define TILE_KEYS 32 /* Keys whose scores are held at a time. */
#define FEW (1 << 17) /* Products of two numbers for which another thread is not worth its while. */

/* attention.py has the same structure. Strides are in numbers; those of q, k and v within a head are 1. */
struct rows {
    const void *q;          /* [rows, heads, dim] */
    const void *k, *v;      /* [blocks, block_size, kv_heads, dim] */
    void *out;              /* [rows, heads, dim], contiguous */
    float *lse;             /* [rows, heads], contiguous, or null */
    const int32_t *table;   /* [rows, columns]; without columns that of all rows */
    const int32_t *lengths; /* [rows] */
    int64_t rows, kv_heads, group, dim, columns, block_size, window; /* window: keys that are seen, or 0: all */
    int64_t q_row, q_head, k_block, k_token, k_head, v_block, v_token, v_head;
    float scale;
    int32_t kind, out_kind; /* of q, k and v; of out */
    const uint64_t *bits;   /* [rows], or null; a row of a tree sees the keys before `begin`, and those of the next 64
                               of which it has a bit; its length then says where its window ends */
    int64_t begin;
};

struct rows_work {
    const struct rows *rows;
    int64_t next;
};

/* A head's numbers from number `at` on, as float32. */
INLINE void head_of(int kind, const void *from, int64_t at, int dim, float *to)
{
    if (kind == BFLOAT16)
        for (int i = 0; i < dim; i++)
            to[i] = of_bits((uint32_t)((const uint16_t *)from)[at + i] << 16);
    else
        to_floats(kind, (const char *)from + at * (kind == FLOAT32 ? 4 : 2), dim, to);
}

/* Attend with the query heads of a row that share a head of keys. `kind`, `group` and `dim` may be constants. */
INLINE void attend_row(const struct rows *a, int64_t row, int64_t head, const int kind, const int group,
                       const int dim)
{
    float q[SHARING * WIDEST], acc[SHARING * WIDEST], wide[WIDEST], p[SHARING][TILE_KEYS];
    float most[SHARING], total[SHARING];
    int64_t length = a->lengths[row];
    int64_t start = a->window && length > a->window ? length - a->window : 0;
    uint64_t own = a->bits ? a->bits[row] : 0;
    int64_t stop = a->bits ? a->begin : length; /* Of keys one after the other. */
    const int32_t *table = a->table + row * a->columns;
    for (int g = 0; g < group; g++) {
        head_of(kind, a->q, row * a->q_row + (head * group + g) * a->q_head, dim, q + g * dim);
        for (int i = 0; i < dim; i++)
            q[g * dim + i] *= a->scale, acc[g * dim + i] = 0;
        most[g] = -__builtin_inff(), total[g] = 0;
    }
    for (;;) {
        if (start >= stop) {
            if (!own)
                break;
            int first = __builtin_ctzll(own), run = ~(own >> first) ? __builtin_ctzll(~(own >> first)) : 64;
            start = a->begin + first, stop = start + run;
            own = first + run < 64 ? own >> (first + run) << (first + run) : 0;
        }
        int64_t offset = start % a->block_size, block = table[start / a->block_size];
        int64_t there = a->block_size - offset < stop - start ? a->block_size - offset : stop - start;
        int count = there < TILE_KEYS ? (int)there : TILE_KEYS;
        int64_t k = block * a->k_block + offset * a->k_token + head * a->k_head;
        int64_t v = block * a->v_block + offset * a->v_token + head * a->v_head;
        for (int t = 0; t < count; t++, k += a->k_token) {
            head_of(kind, a->k, k, dim, wide);
            for (int g = 0; g < group; g++) {
                vec sum = v_zero();
                for (int i = 0; i < dim; i += LANES)
                    sum = v_fma(v_load(q + g * dim + i), v_load(wide + i), sum);
                p[g][t] = v_sum(sum);
            }
        }
        for (int g = 0; g < group; g++) {
            float largest = most[g], sum = 0;
            for (int t = 0; t < count; t++)
                largest = p[g][t] > largest ? p[g][t] : largest;
            for (int t = 0; t < count; t++)
                p[g][t] -= largest;
            for (int t = 0; t < count; t++)
                p[g][t] = exp_of(p[g][t]);
            for (int t = 0; t < count; t++)
                sum += p[g][t];
            float less = total[g] == 0 ? 1 : exp_of(most[g] - largest); /* The first tile has no state before it. */
            for (int i = 0; i < dim; i++)
                acc[g * dim + i] *= less;
            total[g] = total[g] * less + sum, most[g] = largest;
        }
        for (int t = 0; t < count; t++, v += a->v_token) {
            head_of(kind, a->v, v, dim, wide);
            for (int g = 0; g < group; g++)
                for (int i = 0; i < dim; i += LANES)
                    v_store(acc + g * dim + i, v_fma(v_all(p[g][t]), v_load(wide + i), v_load(acc + g * dim + i)));
        }
        start += count;
    }
    for (int g = 0; g < group; g++) {
        int64_t at = (row * a->kv_heads + head) * group + g;
        for (int i = 0; i < dim; i++)
            put(a->out_kind, a->out, at * dim + i, length > 0 ? acc[g * dim + i] / total[g] : 0);
        if (a->lse)
            a->lse[at] = length > 0 ? most[g] + __builtin_logf(total[g]) : -__builtin_inff();
    }
}

/* A thread's part: rows and heads of keys, until there are none. */
static void attend_some(void *about)
{
    struct rows_work *given = about;
    const struct rows *a = given->rows;
    for (;;) {
        int64_t at = __atomic_fetch_add(&given->next, 1, __ATOMIC_RELAXED);
        if (at >= a->rows * a->kv_heads)
            break;
        int64_t row = at / a->kv_heads, head = at % a->kv_heads;
        if (a->kind == BFLOAT16 && a->dim == 64)
            attend_row(a, row, head, BFLOAT16, (int)a->group, 64);
        else if (a->kind == BFLOAT16 && a->dim == 128)
            attend_row(a, row, head, BFLOAT16, (int)a->group, 128);
        else
            attend_row(a, row, head, a->kind, (int)a->group, (int)a->dim);
    }
}

/* out, lse = attention of rows to the keys in their blocks. parallel: GOMP_parallel, or null. */
void attend_rows(const struct rows *a, int threads, parallel_call *parallel)
{
    struct rows_work about = {a, 0};
    int64_t keys = 0;
    for (int64_t row = 0; row < a->rows; row++)
        keys += a->lengths[row];
    int few = keys * a->kv_heads * a->group * a->dim < FEW;
    run_on(parallel, few ? 1 : threads, attend_some, &about);
}
