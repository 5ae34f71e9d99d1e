/* A copier: a thread that has a copy engine bring experts from host memory to a device, as kernels of the device ask
   for them by flags in memory which both see. A copy engine is some 7 % faster than kernels that read through the link.

   The device writes which experts of a layer come to which places, part by part, and then the number of the last part
   that may come, `asked`. The thread queues the copies of each part on one stream, and behind them a write of the
   part's number to the device's memory, `came`, for which the device waits.

   Why this is safe. The device fences between a list and `asked`, and the thread reads `asked` first (acquire). A list
   is written again only by the layer that is decided next: behind the wait for the last part of this one, whose number
   is queued when the list has been read. Copies of one stream end in its order, so `came` is behind the bytes that it
   is said of. A place gets bytes only after it was asked for, so the device says when it may be written to. Experts in
   host memory do not change. Numbers go up by one, wrap around, and are compared by their difference. The thread takes
   no number on trust: what would lead out of experts or places is not copied, `failed` says so, and `over` ends all
   waiting. */

#define HEAD 2 /* Numbers of a list before ends and experts. */

typedef int enter_fn(void *context);
typedef int copy_fn(uint64_t to, uint64_t from, size_t bytes, void *stream);
typedef int write_fn(void *stream, uint64_t at, uint32_t value, unsigned flags);

struct copier {
    const int32_t *asked; /* The last part that may come. */
    const int32_t *list;  /* The part before the layer's first, and its parts; then, of each part, how many experts come
                             up to its end; then, of each expert, itself and its place. There is room for `most` parts
                             and experts. */
    int32_t *over;        /* Nobody waits any more. */
    int32_t *failed;      /* 1: a copy was refused; 2: what was asked for is not there. */
    uint64_t came, host, base;
    int64_t experts, places, size, most;
    enter_fn *enter; /* cuCtxSetCurrent, cuMemcpyHtoDAsync and cuStreamWriteValue32, or null. */
    copy_fn *copy;
    write_fn *write;
    void *context, *stream;
    /* What this thread alone has. */
    int32_t stop;
    uint32_t seen;
    pthread_t id;
};

/* Where device and host are the same memory. */
static int enter_here(void *context)
{
    (void)context;
    return 0;
}

static int copy_here(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    (void)stream;
    memcpy((void *)to, (const void *)from, bytes);
    return 0;
}

static int write_here(void *stream, uint64_t at, uint32_t value, unsigned flags)
{
    (void)stream, (void)flags;
    __atomic_store_n((uint32_t *)at, value, __ATOMIC_RELEASE);
    return 0;
}

/* Queue the part with this number. Returns as `failed` has it. */
static int bring(struct copier *c, uint32_t number)
{
    const int32_t *ends = c->list + HEAD, *pairs = ends + c->most;
    int64_t part = (int64_t)(number - (uint32_t)c->list[0]) - 1, parts = c->list[1];
    if (part < 0 || part >= parts || parts > c->most)
        return 2;
    int64_t first = part ? ends[part - 1] : 0, end = ends[part];
    if (first < 0 || end < first || end > c->most)
        return 2;
    for (int64_t i = first; i < end; i++) {
        int64_t expert = pairs[2 * i], place = pairs[2 * i + 1];
        if (expert < 0 || expert >= c->experts || place < 0 || place >= c->places)
            return 2;
        if (c->copy(c->base + place * c->size, c->host + expert * c->size, c->size, c->stream))
            return 1;
    }
    return c->write(c->stream, c->came, number, 0) ? 1 : 0;
}

static void *bring_all(void *about)
{
    struct copier *c = about;
    int failed = c->enter(c->context) ? 1 : 0;
    for (int looks = 0; !failed && !__atomic_load_n(&c->stop, __ATOMIC_ACQUIRE);) {
        if ((uint32_t)__atomic_load_n(c->asked, __ATOMIC_ACQUIRE) != c->seen)
            failed = bring(c, ++c->seen), looks = 0;
        else if (looks < IDLE)
            pause_between(looks++);
        else /* for about two seconds often, then seldom */
            nanosleep(&(struct timespec){0, looks < IDLE + 40000 ? looks++, 50000 : 1000000}, 0);
    }
    if (failed) {
        __atomic_store_n(c->failed, failed, __ATOMIC_RELAXED);
        __atomic_store_n(c->over, 1, __ATOMIC_RELEASE);
    }
    return 0;
}

/* End the thread, behind what it is at. */
void copier_close(struct copier *c)
{
    __atomic_store_n(&c->stop, 1, __ATOMIC_RELEASE);
    pthread_join(c->id, 0);
    free(c);
}

/* Begin; null if that is not possible. What `given` points to must stay. */
struct copier *copier_open(const struct copier *given)
{
    struct copier *c = malloc(sizeof *c);
    if (!c)
        return 0;
    *c = *given;
    if (!c->copy)
        c->enter = enter_here, c->copy = copy_here, c->write = write_here;
    c->stop = 0, c->seen = (uint32_t)*c->asked;
    if (pthread_create(&c->id, 0, bring_all, c)) {
        free(c);
        return 0;
    }
    return c;
}
