/* A single row of float32 times a dense matrix.

   Each number of the result is a sum by one thread, of as many partial sums as four vectors have lanes, in the order of
   columns. So it does not depend on the number of threads. Threads take runs of rows as they come: one that has to wait
   for its core holds up little. */

#include "few_bits.c"

#define ROW_BYTES 65536 /* Of weights that a thread takes at a time, and for which another is worth its while. */

struct dense_row {
    const float *weight, *x; /* [height, inner], rows `stride` apart; [inner] */
    float *y;                /* [height] */
    int64_t height, inner, stride, each, next;
};

static float dense_dot(const float *w, const float *x, int64_t inner)
{
    float sums[LANES] = {0}, all = 0;
    vec a = v_zero(), b = v_zero(), c = v_zero(), d = v_zero();
    int64_t i = 0;
    for (; i + 4 * LANES <= inner; i += 4 * LANES) {
        a = v_fma(v_load(w + i), v_load(x + i), a);
        b = v_fma(v_load(w + i + LANES), v_load(x + i + LANES), b);
        c = v_fma(v_load(w + i + 2 * LANES), v_load(x + i + 2 * LANES), c);
        d = v_fma(v_load(w + i + 3 * LANES), v_load(x + i + 3 * LANES), d);
    }
    for (; i + LANES <= inner; i += LANES)
        a = v_fma(v_load(w + i), v_load(x + i), a);
    v_store(sums, v_add(v_add(a, b), v_add(c, d)));
    for (int lane = 0; i < inner; i++, lane++)
        sums[lane] += w[i] * x[i];
    for (int lane = 0; lane < LANES; lane++)
        all += sums[lane];
    return all;
}

static void dense_part(void *about)
{
    struct dense_row *given = about;
    for (;;) {
        int64_t from = __atomic_fetch_add(&given->next, given->each, __ATOMIC_RELAXED);
        int64_t end = from + given->each < given->height ? from + given->each : given->height;
        if (from >= given->height)
            break;
        for (int64_t row = from; row < end; row++)
            given->y[row] = dense_dot(given->weight + row * given->stride, given->x, given->inner);
    }
}

/* y [height] = weight [height, inner] @ x [inner]; rows of the weight `stride` numbers apart. parallel: GOMP_parallel,
   or null. */
void dense_row(const float *weight, int64_t height, int64_t inner, int64_t stride, const float *x, float *y, int threads,
               parallel_call *parallel)
{
    int64_t bytes = inner * (int64_t)sizeof(float), each = ROW_BYTES / (bytes + 1) + 1;
    struct dense_row about = {weight, x, y, height, inner, stride, each, 0};
    run_on(parallel, height * bytes < 2 * ROW_BYTES ? 1 : threads, dense_part, &about);
}
