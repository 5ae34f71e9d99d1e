/* A service: a thread that computes experts where they rest, for a device that asks by flags in memory which both see.

   Why this is safe. The device writes rows and lists, then the number of what it asks for, `asked`, behind a fence; the
   service reads that (acquire) before the rest. It writes outputs, then the same number as `done` (release), which the
   device waits for before it reads them, and before it writes anything again. So at any time one side alone has the
   box: the service from `asked` to `done`, the device from `done` to `asked`. Numbers go up by one, wrap around, and
   are compared for equality only. The service takes no number from the box on trust: what would lead out of experts or
   of rows is not computed, and `failed` says so before `done` does.

   This is the file that is compiled; see compiler.py. */

#include "experts.c"
#include "gumbel.c"

#include <time.h>

#define IDLE 100000 /* Looks before the service sleeps between two of them: some 40 ms, longer than a step pauses. */
#define AWAKE 20000 /* Looks of the pool's workers before they sleep: some 8 ms, longer than a layer takes. */
#define MOST_AT_ONCE 16 /* Tokens of a step, at most. */

/* What the experts of a layer have in common: service.py has the same structures. */
struct resting {
    struct matrix in, out; /* Of the first expert; those of another lie as much further on as it does. */
    const char *in_bias, *out_bias;
    struct activation by;
};

/* What device and service have together. */
struct box {
    const int32_t *asked;
    int32_t *done;
    int64_t *spent;      /* Nanoseconds that the answer took. */
    const int32_t *list; /* Layer, experts, rows, tokens; then of each expert its number and its rows; then of each
                            row its token. There is room for `most` experts, and for `rows` rows. */
    const void *x;       /* [tokens, hidden] */
    void *y;             /* [rows, hidden] */
};

struct service {
    struct box box;
    const struct resting *layers;
    int64_t layer_count, experts, size, most, rows, hidden;
    int64_t (*took)[2]; /* Of each class of tokens and each number of experts: how often, and nanoseconds in all. */
    int32_t *failed;    /* 1: no memory; 2: what was asked for is not there. */
    int32_t kind, threads, stop;
    struct pool *pool;
    pthread_t id;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* The class of so many tokens: 1, 2, up to 4, 8, 16. */
static int class_of(int tokens)
{
    int class = 0;
    while (1 << class < tokens)
        class++;
    return class;
}

static void shift(struct matrix *m, int64_t by)
{
    m->codes += by;
    m->scale = (const char *)m->scale + (m->scale ? by : 0);
    m->zero += m->zero ? by : 0;
    m->second = m->second ? (const float *)((const char *)m->second + by) : 0;
    m->groups_of = m->groups_of ? (const int32_t *)((const char *)m->groups_of + by) : 0;
}

/* Compute what is asked for. Returns as `failed` has it. */
static int serve_once(struct service *s)
{
    const int32_t *list = s->box.list, *ids = list + 4, *counts = ids + s->most, *tokens = counts + s->most;
    int64_t layer = list[0], count = list[1], rows = list[2], first = 0;
    if (layer < 0 || layer >= s->layer_count || count < 1 || count > s->most || rows > s->rows || list[3] < 1 ||
        list[3] > MOST_AT_ONCE)
        return 2;
    const struct resting *like = &s->layers[layer];
    struct matrix matrices[2 * count];
    struct expert experts[count];
    for (int64_t i = 0; i < count; i++) {
        int64_t by = ids[i] * s->size;
        if (ids[i] < 0 || ids[i] >= s->experts || counts[i] < 1 || counts[i] > MOST_AT_ONCE || first + counts[i] > rows)
            return 2;
        matrices[2 * i] = like->in, matrices[2 * i + 1] = like->out;
        shift(&matrices[2 * i], by), shift(&matrices[2 * i + 1], by);
        experts[i] = (struct expert){&matrices[2 * i], &matrices[2 * i + 1], like->in_bias ? like->in_bias + by : 0,
                                     like->out_bias ? like->out_bias + by : 0, counts[i], first};
        first += counts[i];
    }
    for (int64_t i = 0; i < first; i++)
        if (tokens[i] < 0 || tokens[i] >= list[3])
            return 2;
    return experts_feed_forward(experts, count, s->kind, s->box.x, s->hidden, tokens, s->box.y, s->hidden, &like->by,
                                s->pool);
}

static void *serve(void *about)
{
    struct service *s = about;
    int32_t seen = *s->box.done;
    for (int looks = 0; !__atomic_load_n(&s->stop, __ATOMIC_RELAXED);) {
        int32_t asked = __atomic_load_n(s->box.asked, __ATOMIC_ACQUIRE);
        if (asked == seen) {
            if (looks < IDLE)
                pause_between(looks++);
            else /* for about two seconds often, then seldom */
                nanosleep(&(struct timespec){0, looks < IDLE + 40000 ? looks++, 50000 : 1000000}, 0);
            continue;
        }
        int64_t begun = now_ns();
        int failed = serve_once(s);
        if (failed)
            __atomic_store_n(s->failed, failed, __ATOMIC_RELAXED);
        else {
            int64_t *took = s->took[class_of(s->box.list[3]) * (s->most + 1) + s->box.list[1]];
            *s->box.spent = now_ns() - begun;
            took[0]++, took[1] += *s->box.spent;
        }
        seen = asked, looks = 0;
        __atomic_store_n(s->box.done, seen, __ATOMIC_RELEASE);
    }
    return 0;
}

/* End the service, behind what it is at. Nothing is computed any more. */
void service_close(struct service *s)
{
    __atomic_store_n(&s->stop, 1, __ATOMIC_RELAXED);
    pthread_join(s->id, 0);
    pool_close(s->pool);
    free(s);
}

/* Begin to serve, with so many threads in all; null if that is not possible. What `given` points to must stay. */
struct service *service_open(const struct service *given)
{
    struct service *s = malloc(sizeof *s);
    if (!s)
        return 0;
    *s = *given, s->stop = 0;
    if (!(s->pool = pool_open(s->threads, 1))) {
        free(s);
        return 0;
    }
    s->pool->patience = AWAKE;
    if (pthread_create(&s->id, 0, serve, s)) {
        pool_close(s->pool);
        free(s);
        return 0;
    }
    return s;
}
