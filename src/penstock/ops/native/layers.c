/* Halves of a decoder's layer for few rows on a CPU, in one call each: norm, products, and what is between them. The
   numbers are those of the calls one by one. */

#include "attention.c"

/* A run of rows of a projection, which is a matrix of few bits or of GGUF's blocks; layers.py has the same structures. */
struct some_rows {
    const void *matrix; /* struct matrix, or struct blocks. */
    int64_t first, in_blocks;
};

struct projection {
    const struct some_rows *runs;
    const void *bias; /* [height], or null */
    int64_t count, height;
};

struct half {
    const void *norm, *q_norm, *k_norm;
    struct projection in, out;
    int64_t size, heads, kv_heads, dim, turned, window;
    float eps, head_eps, scale;
    int32_t kind;
};

static int multiply(const struct projection *p, int kind, const void *x, int64_t size, int64_t rows, void *y,
                    int threads, parallel_call *parallel)
{
    int64_t bytes = kind == FLOAT32 ? 4 : 2, failed = 0;
    for (int64_t i = 0; i < p->count; i++) {
        const struct some_rows *run = p->runs + i;
        const void *bias = p->bias ? (const char *)p->bias + run->first * bytes : 0;
        void *to = (char *)y + run->first * bytes;
        failed |= run->in_blocks
            ? blocks_product(run->matrix, x, size, rows, kind, to, p->height, bias, 0, threads, parallel)
            : few_bits_product(run->matrix, x, size, rows, kind, to, p->height, bias, 0, threads, parallel);
    }
    return failed != 0;
}

/* The feed-forward: part [rows, size], or null, is added to residual; its norm passes gate and up, the gate, and down,
   into out [rows, size], which may be part. Returns 0, or 1 if there is no memory. */
int layer_feed_forward(const struct half *h, const void *part, void *residual, int64_t rows, void *out, int threads,
                       parallel_call *parallel)
{
    int64_t inner = h->in.height / 2;
    float *room = room_for(rows * (h->size + 3 * inner)); /* Enough for any kind. */
    if (!room)
        return 1;
    void *normed = room, *both = room + rows * h->size, *gated = room + rows * (h->size + 2 * inner);
    pointwise_norm(h->kind, part ? part : residual, part ? residual : 0, h->norm, h->eps, rows, h->size, normed);
    int failed = multiply(&h->in, h->kind, normed, h->size, rows, both, threads, parallel);
    pointwise_gate(h->kind, both, rows, inner, gated);
    failed |= multiply(&h->out, h->kind, gated, inner, rows, out, threads, parallel);
    free(room);
    return failed;
}

/* Attention of rows to pages, as the feed-forward is computed: from part to out. */
int layer_attention(const struct half *h, const void *part, void *residual, int64_t rows, void *out,
                    const float *cos, const float *sin, const int64_t *slots, const int32_t *table,
                    int64_t table_stride, const int32_t *lengths, void *k, void *v, int64_t block_size,
                    int64_t of_block, int64_t of_token, int64_t of_head, int threads, parallel_call *parallel)
{
    int64_t seen = h->heads * h->dim, wide = h->in.height;
    float *room = room_for(rows * (h->size + wide + seen));
    if (!room)
        return 1;
    void *normed = room, *qkv = room + rows * h->size, *attended = room + rows * (h->size + wide);
    pointwise_norm(h->kind, part ? part : residual, part ? residual : 0, h->norm, h->eps, rows, h->size, normed);
    int failed = multiply(&h->in, h->kind, normed, h->size, rows, qkv, threads, parallel);
    pointwise_project(h->kind, qkv, cos, sin, h->q_norm, h->k_norm, h->head_eps, slots, k, v, block_size, of_block,
                      of_token, of_head, rows, h->heads, h->kv_heads, h->dim, h->turned);
    struct rows queries = {qkv, k, v, attended, 0, table, lengths, rows, h->kv_heads, h->heads / h->kv_heads, h->dim,
                           table_stride, block_size, h->window, wide, h->dim, of_block, of_token, of_head, of_block,
                           of_token, of_head, h->scale, h->kind, h->kind};
    attend_rows(&queries, threads, parallel);
    failed |= multiply(&h->out, h->kind, attended, seen, rows, out, threads, parallel);
    free(room);
    return failed;
}

/* A layer, and its pages. */
struct layer {
    const struct half *attention, *feed_forward;
    void *k, *v;
};

/* All layers, one after the other: x [rows, size] is the residual, and part [rows, size] gets what is still to be added
   to it. The pages of all have the same strides. Returns 0, or 1 if there is no memory. */
int layers_pass(const struct layer *layers, int64_t count, void *x, int64_t rows, void *part, const float *cos,
                const float *sin, const int64_t *slots, const int32_t *table, int64_t table_stride,
                const int32_t *lengths, int64_t block_size, int64_t of_block, int64_t of_token, int64_t of_head,
                int threads, parallel_call *parallel)
{
    int failed = 0;
    for (int64_t i = 0; i < count && !failed; i++) {
        const struct layer *its = layers + i;
        failed = layer_attention(its->attention, i ? part : 0, x, rows, part, cos, sin, slots, table, table_stride,
                                 lengths, its->k, its->v, block_size, of_block, of_token, of_head, threads, parallel);
        failed |= layer_feed_forward(its->feed_forward, part, x, rows, part, threads, parallel);
    }
    return failed;
}
