/* Norms, gates, and heads rotated and written to pages: what a decoder computes between its products, of few rows on
   a CPU. Numbers are rounded where the plain torch of penstock.ops.norm, activation and project rounds them.

   A row is computed by one thread, and depends on no other. Nothing here waits for threads. */

#include "blocks.c"

#include <math.h>

INLINE float rounded(int kind, float value)
{
    if (kind == FLOAT32)
        return value;
    return kind == BFLOAT16 ? of_bits((uint32_t)to_bfloat(value) << 16) : of_half(to_half(value));
}

/* e to the power of x, within two units in the last place; 0 and infinity are replaced by what is nearest them. After
   Cephes (Moshier 1992), expf. */
INLINE float exp_of(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 0x1.8p23f, whole = shifted - 0x1.8p23f;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    sum = sum * r * r + r + 1;
    return sum * of_bits((bits_of(shifted) - bits_of(0x1.8p23f) + 127) << 23);
}

/* x [size] normalised, times the weight. */
INLINE void norm_as(int kind, const void *x, const void *weight, float eps, int64_t size, void *y)
{
    float sums[LANES] = {0}, all = 0;
    int64_t i = 0, bytes = kind == FLOAT32 ? 4 : 2;
    vec squares = v_zero();
    for (; i + LANES <= size; i += LANES) {
        vec some = v_get(kind, (const char *)x + i * bytes);
        squares = v_fma(some, some, squares);
    }
    v_store(sums, squares);
    for (int lane = 0; i < size; i++, lane++)
        sums[lane] += get(kind, x, i) * get(kind, x, i);
    for (int lane = 0; lane < LANES; lane++)
        all += sums[lane];
    float scale = 1 / sqrtf(all / (float)size + eps);
    for (i = 0; i < size; i++)
        put(kind, y, i, rounded(kind, get(kind, x, i) * scale) * get(kind, weight, i));
}

INLINE void norm_rows_as(int kind, const void *x, void *residual, const void *weight, float eps, int64_t rows,
                         int64_t size, void *y)
{
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * size * (kind == FLOAT32 ? 4 : 2);
        const void *of = (const char *)x + at;
        if (residual) {
            void *onto = (char *)residual + at;
            for (int64_t i = 0; i < size; i++)
                put(kind, onto, i, get(kind, onto, i) + get(kind, of, i));
            of = onto;
        }
        norm_as(kind, of, weight, eps, size, (char *)y + at);
    }
}

#define BY_KIND(kind, call, ...)                                                                               \
    do {                                                                                                       \
        if ((kind) == FLOAT32)                                                                                 \
            call(FLOAT32, __VA_ARGS__);                                                                        \
        else if ((kind) == BFLOAT16)                                                                           \
            call(BFLOAT16, __VA_ARGS__);                                                                       \
        else                                                                                                   \
            call(FLOAT16, __VA_ARGS__);                                                                        \
    } while (0)

/* y [rows, size] = the root mean square norm of x; residual: x is added to it, and the sum is normalised. */
void pointwise_norm(int kind, const void *x, void *residual, const void *weight, float eps, int64_t rows,
                    int64_t size, void *y)
{
    BY_KIND(kind, norm_rows_as, x, residual, weight, eps, rows, size, y);
}

INLINE void gate_as(int kind, const void *both, int64_t rows, int64_t inner, void *y)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < inner; i++) {
            float gate = get(kind, both, 2 * row * inner + i);
            float by = rounded(kind, gate / (1 + exp_of(-gate)));
            put(kind, y, row * inner + i, by * get(kind, both, (2 * row + 1) * inner + i));
        }
}

/* y [rows, inner] = silu(gate) * up of both [rows, 2, inner]. */
void pointwise_gate(int kind, const void *both, int64_t rows, int64_t inner, void *y)
{
    BY_KIND(kind, gate_as, both, rows, inner, y);
}

/* Pages of keys and values: strides are numbers, of both. */
struct pages {
    void *k, *v;
    int64_t block_size, of_block, of_token, of_head;
};

INLINE int64_t place_in(const struct pages *p, int64_t block, int64_t token, int64_t head)
{
    return block * p->of_block + token * p->of_token + head * p->of_head;
}

INLINE void rotate_as(int kind, void *head, const float *cos, const float *sin, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        float first = get(kind, head, i), second = get(kind, head, half + i);
        put(kind, head, i, first * cos[i] - second * sin[i]);
        put(kind, head, half + i, second * cos[i] + first * sin[i]);
    }
}

INLINE void project_as(int kind, void *qkv, const float *cos, const float *sin, const void *q_norm,
                       const void *k_norm, float eps, const int64_t *slots, const struct pages *pages,
                       int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t turned)
{
    int64_t bytes = kind == FLOAT32 ? 4 : 2, half = turned / 2;
    for (int64_t token = 0; token < tokens; token++) {
        char *its = (char *)qkv + token * (heads + 2 * kv_heads) * dim * bytes, *k = its + heads * dim * bytes;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            const void *weight = head < heads ? q_norm : k_norm;
            if (weight)
                norm_as(kind, its + head * dim * bytes, weight, eps, dim, its + head * dim * bytes);
            rotate_as(kind, its + head * dim * bytes, cos + token * half, sin + token * half, half);
        }
        if (slots[token] < 0)
            continue;
        int64_t block = slots[token] / pages->block_size, offset = slots[token] % pages->block_size;
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t to = place_in(pages, block, offset, head) * bytes, from = head * dim * bytes;
            memcpy((char *)pages->k + to, k + from, dim * bytes);
            memcpy((char *)pages->v + to, k + kv_heads * dim * bytes + from, dim * bytes);
        }
    }
}

/* qkv [tokens, heads + 2 * kv_heads, dim]: heads of queries and keys are normalised if there are weights, and the
   first `turned` dimensions of each rotated, in place; keys and values are also written to slots of pages, but for
   negative slots. */
void pointwise_project(int kind, void *qkv, const float *cos, const float *sin, const void *q_norm,
                       const void *k_norm, float eps, const int64_t *slots, void *k, void *v, int64_t block_size,
                       int64_t of_block, int64_t of_token, int64_t of_head, int64_t tokens, int64_t heads,
                       int64_t kv_heads, int64_t dim, int64_t turned)
{
    struct pages pages = {k, v, block_size, of_block, of_token, of_head};
    BY_KIND(kind, project_as, qkv, cos, sin, q_norm, k_norm, eps, slots, &pages, tokens, heads, kv_heads, dim,
            turned);
}
